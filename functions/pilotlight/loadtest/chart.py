"""Draws a report as an SVG chart: the cumulative distribution of each metric over a logarithmic
axis of milliseconds. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 840, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 64, 56
COLOURS = {"latency": "#2563eb", "ttft": "#d97706", "itl": "#059669", "late": "#9ca3af"}
TITLES = {
    "latency": "to the last byte",
    "ttft": "to the first token",
    "itl": "between tokens",
    "late": "sent late",
}
_SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)


def draw_chart(report: Mapping[str, Any], *, title: str) -> str:
    """Draw the chart and return the SVG text."""
    curves = {
        name: rows for name, rows in report["histograms_ms"].items() if name in COLOURS and rows
    }
    low, high = _decades(curves.values())
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'font-family="system-ui, sans-serif" font-size="13">'
        ),
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        (
            f'<text x="{LEFT}" y="26" font-size="16" font-weight="600" '
            f'fill="#111827">{escape(title)}</text>'
        ),
        f'<text x="{LEFT}" y="46" fill="#4b5563">{escape(_subtitle(report))}</text>',
        *_grid(low, high),
        *(_curve(name, rows, low, high) for name, rows in curves.items()),
        *_legend(report, curves),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _decades(curves: Any) -> tuple[int, int]:
    ends = [end for rows in curves for end, _ in rows] or [1.0, 10.0]
    low = math.floor(math.log10(max(min(ends), 0.1)))
    return low, max(low + 1, math.ceil(math.log10(max(ends)) - 1e-9))


def _x(ms: float, low: int, high: int) -> float:
    share = (math.log10(max(ms, 10.0**low)) - low) / (high - low)
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _subtitle(report: Mapping[str, Any]) -> str:
    offered, bad = report.get("offered_per_s"), report["requests"] - report["good"]
    parts = [
        f"{report['requests']} requests",
        f"{offered:g}/s offered" if offered else "",
        f"{report['good_per_s']:.1f}/s good",
    ]
    parts += [f"{bad} failed" if bad else "none failed"]
    parts += [f"{report['tokens_out_per_s']:.0f} tokens/s out"] if report["tokens_out"] else []
    return " · ".join(part for part in parts if part)


def _grid(low: int, high: int) -> list[str]:
    lines = []
    for share in _SHARES:
        y = _y(share)
        lines.append(
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#e5e7eb"/>'
        )
        lines.append(
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" '
            f'fill="#6b7280">{share * 100:.0f} %</text>'
        )
    for decade in range(low, high + 1):
        x, ms = _x(10.0**decade, low, high), 10.0**decade
        label = f"{ms / 1000:g} s" if ms >= 1000 else f"{ms:g} ms"
        lines.append(
            f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#e5e7eb"/>'
        )
        lines.append(
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle" '
            f'fill="#6b7280">{label}</text>'
        )
    return lines


def _curve(name: str, rows: Sequence[Sequence[float]], low: int, high: int) -> str:
    total, seen = sum(count for _, count in rows), 0.0
    points = [f"{_x(rows[0][0], low, high):.1f},{_y(0):.1f}"]
    for end, count in rows:
        seen += count
        points.append(f"{_x(end, low, high):.1f},{_y(seen / total):.1f}")
    dash = ' stroke-dasharray="4 4"' if name == "late" else ""
    return (
        f'<polyline fill="none" stroke="{COLOURS[name]}" stroke-width="2"{dash} '
        f'points="{" ".join(points)}"/>'
    )


def _legend(report: Mapping[str, Any], curves: Mapping[str, Any]) -> list[str]:
    lines, x = [], float(LEFT)
    for name in curves:
        row = report["ms"][name]
        text = f"{TITLES[name]}: p50 {row['p50']:.3g} ms, p99 {row['p99']:.3g} ms"
        lines.append(
            f'<rect x="{x:.0f}" y="{HEIGHT - 22}" width="12" height="4" fill="{COLOURS[name]}"/>'
        )
        lines.append(
            f'<text x="{x + 16:.0f}" y="{HEIGHT - 15}" font-size="11" '
            f'fill="#374151">{escape(text)}</text>'
        )
        x += 26 + 5.6 * len(text)
    return lines
