"""The play as a drawing: who answered, when, and what failed. Plain SVG, readable on light and
dark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 960, 420
LEFT, TOP, RIGHT, BOTTOM = 56, 150, 24, 40
SLICE_S = 1.0
COLOURS = ("#4C78A8", "#54A24B", "#F58518", "#B279A2")
FAILED = "#D62728"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One call: when it was answered (seconds since the epoch), by which revision, and whether
    well."""

    at: float
    revision: str
    is_good: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that the platform was told, or did."""

    at: float
    text: str


def draw(answers: Sequence[Answer], events: Sequence[Event]) -> str:
    """Shares of the calls by revision over time, failures in red, and the events above. Raises
    ValueError without answers."""
    if not answers:
        raise ValueError("no call was answered: there is nothing to draw")
    begin = min([answer.at for answer in answers] + [event.at for event in events])
    seconds = max(answer.at for answer in answers) - begin
    revisions = sorted(
        {answer.revision for answer in answers if answer.revision},
        key=lambda name: int(name[1:].partition("-")[0]),
    )
    parts = [
        _head(),
        *_areas(answers, revisions, begin, seconds),
        *_axes(seconds),
        *_legend(revisions),
    ]
    return "\n".join([*parts, *_events(events, begin, seconds), "</svg>\n"])


def _head() -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="12">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
    )


def _x(at_s: float, seconds: float) -> float:
    return LEFT + at_s / max(seconds, 1e-9) * (WIDTH - LEFT - RIGHT)


def _y(share: float) -> float:
    return TOP + (1 - share) * (HEIGHT - TOP - BOTTOM)


def _areas(
    answers: Sequence[Answer], revisions: Sequence[str], begin: float, seconds: float
) -> list[str]:
    slices: dict[int, list[Answer]] = {}
    for answer in answers:
        slices.setdefault(int((answer.at - begin) / SLICE_S), []).append(answer)
    parts: list[str] = []
    for number, found in sorted(slices.items()):
        left, right = (
            _x(number * SLICE_S, seconds),
            _x(min(seconds, (number + 1) * SLICE_S), seconds),
        )
        floor = 0.0
        for revision, colour in zip(revisions, COLOURS, strict=False):
            share = sum(answer.revision == revision for answer in found) / len(found)
            parts.append(_bar(left, right, floor, floor + share, colour))
            floor += share
        failed = sum(not answer.is_good for answer in found) / len(found)
        parts.append(_bar(left, right, 0.0, failed, FAILED))
    return parts


def _bar(left: float, right: float, low: float, high: float, colour: str) -> str:
    if high <= low:
        return ""
    return (
        f'<rect x="{left:.1f}" y="{_y(high):.1f}" width="{max(0.0, right - left) + 0.3:.1f}" '
        f'height="{_y(low) - _y(high):.1f}" '
        f'fill="{colour}"/>'
    )


def _axes(seconds: float) -> list[str]:
    shares = [
        f'<text x="{LEFT - 8}" y="{_y(share) + 4:.1f}" text-anchor="end" '
        f'fill="#444">{share * 100:.0f} %</text>'
        for share in (0, 0.25, 0.5, 0.75, 1)
    ]
    times = [
        f'<text x="{_x(at_s, seconds):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle" '
        f'fill="#444">{at_s} s</text>'
        for at_s in range(0, int(seconds) + 1, 10)
    ]
    return shares + times


def _legend(revisions: Sequence[str]) -> list[str]:
    entries = [*zip(revisions, COLOURS, strict=False), ("failed", FAILED)]
    parts = []
    for number, (name, colour) in enumerate(entries):
        x = LEFT + number * 130
        parts.append(
            f'<rect x="{x}" y="14" width="12" height="12" fill="{colour}"/><text x="{x + 18}" '
            f'y="24" fill="#222">{name}</text>'
        )
    return parts


def _events(events: Sequence[Event], begin: float, seconds: float) -> list[str]:
    parts = []
    for number, event in enumerate(events):
        x, y = _x(event.at - begin, seconds), 48 + number % 6 * 16
        anchor = "end" if x > WIDTH * 0.7 else "start"
        parts.append(
            f'<line x1="{x:.1f}" y1="{y + 4}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#333" '
            f'stroke-width="0.7" stroke-dasharray="3 3"/>'
        )
        parts.append(
            f'<text x="{x + (-4 if anchor == "end" else 4):.1f}" y="{y}" text-anchor="{anchor}" '
            f'fill="#222">{escape(event.text)}</text>'
        )
    return parts
