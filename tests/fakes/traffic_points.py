"""Where a unit is in a function's traffic, and whose that point is."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from pilotlight.spec.traffic import Segment, hash_unit, point_from_hash


def unit_point(salt: str, unit: str | bytes) -> float:
    """The point of a unit in [0, 100), always the same for the same salt."""
    return point_from_hash(hash_unit(salt, unit))


def revision_at(segments: Sequence[Segment], point: float) -> str:
    """The revision of a point. Segments are in order and without gaps."""
    return segments[bisect_right([segment.end for segment in segments], point)].revision
