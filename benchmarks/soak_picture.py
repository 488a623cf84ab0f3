"""Draws the samples of a soak run: memory, descriptors, files and the time of a usage report, with
the kills as vertical lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from benchmarks.harness import percentile
from benchmarks.soak_samples import MODULES, Sample

LEFT, RIGHT, TOP, WIDTH, HEIGHT, GAP = 72, 24, 64, 720, 120, 56
COLOURS = ("a", "b", "c", "d")
CUT = 98
"""A panel ends above this percentile of its values: what is higher is cut, and said to be."""
ROUND = (1, 1.5, 2, 3, 4, 5, 6, 8, 10)
"""Tops of panels, times a power of ten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A named line; a sample without a value is a gap."""

    name: str
    value: Callable[[Sample], float | None]


def _of(name: str, quantity: str, scale: float) -> Line:
    def value(sample: Sample) -> float | None:
        process = sample.processes.get(name)
        return None if process is None else getattr(process, quantity) / scale

    return Line(name=name, value=value)


PANELS: tuple[tuple[str, tuple[Line, ...]], ...] = (
    ("Anonymous memory, MiB", tuple(_of(n, "anonymous_kib", 1024) for n in MODULES.values())),
    ("Open descriptors", tuple(_of(n, "descriptors", 1) for n in MODULES.values())),
    (
        "Files below the home, MiB",
        (Line(name="all", value=lambda s: sum(s.disk_bytes.values()) / 2**20),),
    ),
    ("Usage report, ms", (Line(name="report", value=lambda s: s.ledger_ms),)),
)


def drawn(
    samples: Sequence[Sample],
    kills: Sequence[tuple[float, str]],
    *,
    machine: Mapping[str, Any],
) -> str:
    """The picture as SVG. Raises ValueError without samples."""
    if not samples:
        raise ValueError("no samples: there is nothing to draw")
    end_s = samples[-1].at_s
    height = TOP + len(PANELS) * (HEIGHT + GAP)
    parts = [
        HEAD % (LEFT + WIDTH + RIGHT, height, len(kills)),
        (
            f'<text class="title" x="{LEFT}" y="24">{samples[-1].calls:,} calls in '
            f"{end_s / 60:.0f} minutes, {len(kills)} processes killed</text>"
        ),
        (
            f'<text class="text" x="{LEFT}" y="42">{escape(str(machine["cpu"]))}, '
            f"{machine['cores']} cores, {str(machine['time'])[:10]}</text>"
        ),
    ]
    for i, (title, lines) in enumerate(PANELS):
        parts += _panel(title, lines, samples, kills, top=TOP + i * (HEIGHT + GAP), end_s=end_s)
    return "\n".join([*parts, "</svg>", ""])


def _panel(
    title: str,
    lines: Sequence[Line],
    samples: Sequence[Sample],
    kills: Sequence[tuple[float, str]],
    *,
    top: int,
    end_s: float,
) -> list[str]:
    values = [v for line in lines for s in samples if (v := line.value(s)) is not None]
    top_value = _round_top(percentile(values, CUT) if values else 0.0)
    bottom = top + 20 + HEIGHT - 20

    def place(at_s: float, value: float) -> str:
        x = LEFT + WIDTH * at_s / end_s
        return f"{x:.1f} {bottom - (HEIGHT - 20) * min(1.0, value / top_value):.1f}"

    cut = sum(value > top_value for value in values)
    said = f"{title} ({cut} higher values are cut)" if cut else title
    parts = [f'<text class="name" x="{LEFT}" y="{top + 8}">{said}</text>']
    for share in (0.0, 0.5, 1.0):
        y = bottom - (HEIGHT - 20) * share
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{LEFT + WIDTH}"/>')
        parts.append(
            f'<text class="text" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">'
            f"{top_value * share:,.0f}</text>"
        )
    for at_s, _ in kills:
        x = LEFT + WIDTH * at_s / end_s
        parts.append(f'<path class="kill" d="M{x:.1f} {top + 20}V{bottom}"/>')
    for minutes in range(0, int(end_s // 60) + 1, max(1, int(end_s // 60) // 9)):
        x = LEFT + WIDTH * minutes * 60 / end_s
        parts.append(
            f'<text class="text" x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">'
            f"{minutes} min</text>"
        )
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        path, pen = [], "M"
        for sample in samples:
            value = line.value(sample)
            if value is None:
                pen = "M"
                continue
            path.append(pen + place(sample.at_s, value))
            pen = "L"
        parts.append(f'<path class="line {colour}" d="{"".join(path)}"/>')
        if len(lines) > 1:
            x = LEFT + WIDTH - 110 * (len(lines) - number)
            parts.append(f'<path class="line {colour}" d="M{x} {top + 4}h18"/>')
            parts.append(f'<text class="text" x="{x + 24}" y="{top + 8}">{line.name}</text>')
    return parts


def _round_top(value: float) -> float:
    """The smallest round number that is not below `value`."""
    power = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(step * power for step in ROUND if step * power >= value)


HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" role="img" aria-labelledby="t d"
     font-family="system-ui, sans-serif" font-size="12">
  <title id="t">A long run under mixed load</title>
  <desc id="d">Memory, open descriptors, files and the time of a usage report over the run; %d vertical lines are killed processes.</desc>
  <style>
    .grid { stroke: #d0d7de; stroke-width: 1 } .text { fill: #59636e } .name { fill: #1f2328; font-weight: 600 }
    .title { fill: #1f2328; font-size: 14px; font-weight: 600 } .kill { stroke: #d1242f; stroke-width: 1; opacity: .35 }
    .line { fill: none; stroke-width: 1.8 } .a { stroke: #3b7dd8 } .b { stroke: #bc6c00 } .c { stroke: #1a7f37 } .d { stroke: #8250df }
    @media (prefers-color-scheme: dark) {
      .grid { stroke: #30363d } .text { fill: #9da7b1 } .name, .title { fill: #f0f6fc }
      .a { stroke: #4c8fe8 } .b { stroke: #f0a63a } .c { stroke: #3fb950 } .d { stroke: #a371f7 }
    }
  </style>"""
