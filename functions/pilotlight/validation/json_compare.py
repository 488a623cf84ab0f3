"""Differences of two JSON documents, by path. Pure, and without recursion."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, Final, NamedTuple

TOLERANCE: Final = 1e-6
"""Relative tolerance within which numbers are equal."""
IGNORED: Final = object()
"""Put in place of a value of either document, it equals any value, and a missing one."""
_ABSENT: Final = object()
_SCALARS: Final = frozenset({str, int, float, bool, type(None)})

Keys = tuple[str | int, ...]
"""A path: names of members and positions of items."""
_Place = tuple["_Place", str | int] | None
"""A path as its parent and the last key: however deep values are, one takes constant memory."""
_Pair = tuple[_Place, Any, Any]
"""Two values at one path."""


class Change(enum.StrEnum):
    """How a document differs from another at a path: it has another value, lacks a member or item,
    or has one more."""

    CHANGED = "changed"
    MISSING = "missing"
    ADDED = "added"


class Difference(NamedTuple):
    """A difference. `old` is None where the value was added, `new` where it is missing."""

    path: Keys
    change: Change
    old: Any
    new: Any


def differences(old: Any, new: Any, *, tolerance: float = TOLERANCE) -> Iterator[Difference]:
    """Yield how `new` differs from `old`, in the order of `old`. Items of lists are compared by
    their positions; numbers are equal within the relative tolerance, and two NaN are."""
    ahead: list[_Pair] = [(None, old, new)]
    while ahead:
        place, one, other = ahead.pop()
        if one is IGNORED or other is IGNORED:
            continue
        if one is _ABSENT:
            yield Difference(_keys(place), Change.ADDED, None, other)
        elif other is _ABSENT:
            yield Difference(_keys(place), Change.MISSING, one, None)
        elif isinstance(one, dict) and isinstance(other, dict):
            ahead += reversed(_members(place, one, other, tolerance))
        elif isinstance(one, list) and isinstance(other, list):
            ahead += reversed(_items(place, one, other, tolerance))
        elif not _is_alike(one, other, tolerance):
            yield Difference(_keys(place), Change.CHANGED, one, other)


def _keys(place: _Place) -> Keys:
    found: list[str | int] = []
    while place is not None:
        place, key = place
        found.append(key)
    return tuple(reversed(found))


def _members(
    place: _Place, one: dict[str, Any], other: dict[str, Any], tolerance: float
) -> list[_Pair]:
    """The members that may differ: most are the same scalar, of the same type."""
    found: list[_Pair] = [
        ((place, key), value, counterpart)
        for key, value in one.items()
        if type(value) is not type(counterpart := other.get(key, _ABSENT))
        or type(value) not in _SCALARS
        or (value != counterpart and not _is_alike(value, counterpart, tolerance))
    ]
    if len(other) > len(one) or any(counterpart is _ABSENT for _, _, counterpart in found):
        found += [((place, key), _ABSENT, value) for key, value in other.items() if key not in one]
    return found


def _items(place: _Place, one: list[Any], other: list[Any], tolerance: float) -> list[_Pair]:
    """The items that may differ."""
    return [
        ((place, index), value, counterpart)
        for index, (value, counterpart) in enumerate(zip_longest(one, other, fillvalue=_ABSENT))
        if type(value) is not type(counterpart)
        or type(value) not in _SCALARS
        or (value != counterpart and not _is_alike(value, counterpart, tolerance))
    ]


def _is_alike(one: Any, other: Any, tolerance: float) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if not (isinstance(one, int | float) and isinstance(other, int | float)):
        return type(one) is type(other) and bool(one == other)
    if one == other:
        return True
    try:
        is_close = math.isclose(one, other, rel_tol=tolerance)
        return is_close or (math.isnan(one) and math.isnan(other))
    except OverflowError:  # an integer beyond the doubles
        return False
