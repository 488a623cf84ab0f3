"""Coordinates for inline SVG: bars, shares, and the phases of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pilotlight.controller.analytics.environment_usage import START_KINDS
from pilotlight.protocol import UsageRecord

BAR_HEIGHT = 22
THINNEST = 1.5
"""Minimum size, so that small values remain visible next to large ones."""
PHASES = ("queue", "start", "exec")


def bars(values: Sequence[float]) -> list[tuple[int, float, float, float]]:
    """Return (index, top, height, value) of each bar, scaled to the highest."""
    highest = max(values, default=0) or 1
    heights = [max(THINNEST, BAR_HEIGHT * value / highest) if value else 0.0 for value in values]
    return [
        (index, BAR_HEIGHT - h, h, value)
        for index, (h, value) in enumerate(zip(heights, values, strict=True))
    ]


def shares(
    parts: Mapping[str, float], width: float = 96.0, order: Sequence[str] = START_KINDS
) -> list[tuple[str, float, float, float]]:
    """Return (name, left, width, value) of the segments of one stacked bar, in `order`."""
    total, left, out = sum(parts.values()), 0.0, []
    for name in order:
        if value := parts.get(name, 0):
            part = width * value / total
            out.append((name, left, part, value))
            left += part
    return out


def waterfall(
    record: UsageRecord, *, scale_ms: float, width: float = 160.0
) -> list[tuple[str, float, float, int]]:
    """Return (phase, left, width, ms) of one attempt's consecutive phases; the full width
    represents `scale_ms`."""
    scale, left, out = width / max(1.0, scale_ms), 0.0, []
    for phase, ms in zip(PHASES, (record.queued_ms, record.start_ms, record.exec_ms), strict=True):
        if ms:
            part = min(max(THINNEST, ms * scale), width - left)
            out.append((phase, left, part, ms))
            left += part
    return out


def total_ms(record: UsageRecord) -> int:
    """Return the time from the request's arrival to its last byte."""
    return record.queued_ms + record.start_ms + record.exec_ms
