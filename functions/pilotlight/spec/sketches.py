"""Sketches of one feature's values: bounded counts, which merge, and from which two distributions
are compared.

Numbers are counted in cells. A cell is an interval of the binary tree over all doubles: the sign,
exponent and mantissa of a double, read as one integer, are in the order of the numbers, and a cell
(level, key) has those that share all but the last `level` bits (as in a q-digest: Shrivastava and
others, "Medians and beyond", 2004). Cells never overlap. While there are few distinct values each
has its own; beyond MAX_CELLS the smallest neighbours are joined, so that a cell has a few percent
of the values or is one value. Counts per cell are exact: two sketches are compared over the cells
that both can be counted in (`common_cells`), whatever their sizes are."""

from __future__ import annotations

import bisect
import math
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Final, Self

MAX_CELLS: Final = 128
MAX_CATEGORIES: Final = 64
MAX_CATEGORY_CHARS: Final = 64
OTHER: Final = ""
"""Category of texts that are too long, or beyond MAX_CATEGORIES the rarest."""
_BITS: Final = 64

Cell = tuple[int, int]
"""(level, key)."""


@dataclass(slots=True, kw_only=True)
class Sketch:
    """Counts of one feature's values.

    Attributes:
        cells: numbers, by cell.
        categories: texts and booleans.
        missing: rows in which the value is missing or null, or neither number, text nor boolean.
        outside: rows outside the declared range (`add`).
        low, high: the smallest and the greatest number; None without numbers.
    """

    cells: dict[Cell, int] = field(default_factory=dict)
    categories: Counter[str] = field(default_factory=Counter)
    missing: int = 0
    outside: int = 0
    low: float | None = None
    high: float | None = None

    @property
    def present(self) -> int:
        """Rows with a value."""
        return sum(self.cells.values()) + self.categories.total()

    @property
    def rows(self) -> int:
        """All rows."""
        return self.present + self.missing

    @property
    def is_numeric(self) -> bool:
        """Whether the values are numbers only."""
        return bool(self.cells) and not self.categories

    @classmethod
    def of(
        cls, values: Iterable[Any], *, low: float | None = None, high: float | None = None
    ) -> Self:
        """Count values. `low`, `high`: the declared range of numbers."""
        made = cls()
        numbers: list[float] = []
        for value in values:
            if isinstance(value, bool):
                made.categories["true" if value else "false"] += 1
            elif isinstance(value, int | float) and math.isfinite(number := _double(value)):
                numbers.append(number)
                made.outside += (low is not None and number < low) or (
                    high is not None and number > high
                )
            elif isinstance(value, str):
                made.categories[value if len(value) <= MAX_CATEGORY_CHARS else OTHER] += 1
            else:
                made.missing += 1
        if numbers:
            made.low, made.high = min(numbers), max(numbers)
        made.cells = _bounded(Counter((0, _ordered(number)) for number in numbers))
        made.categories = _most_frequent(made.categories)
        return made

    def merged(self, other: Sketch) -> Sketch:
        """Return the sketch of the values of both."""
        sums: Counter[Cell] = Counter()
        for cell, (ours, theirs) in common_cells(self, other).items():
            sums[cell] = ours + theirs
        lows = [one for one in (self.low, other.low) if one is not None]
        highs = [one for one in (self.high, other.high) if one is not None]
        return Sketch(
            cells=_bounded(sums),
            categories=_most_frequent(self.categories + other.categories),
            missing=self.missing + other.missing,
            outside=self.outside + other.outside,
            low=min(lows, default=None),
            high=max(highs, default=None),
        )

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "cells": [[level, key, count] for (level, key), count in sorted(self.cells.items())],
            "categories": dict(self.categories),
            "missing": self.missing,
            "outside": self.outside,
            "low": self.low,
            "high": self.high,
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`. Raises ValueError for anything else."""
        try:
            cells = {_cell(level, key): _count(count) for level, key, count in body["cells"]}
            categories = {str(name): _count(n) for name, n in body["categories"].items()}
            if len(cells) > MAX_CELLS or len(categories) > MAX_CATEGORIES + 1:
                raise ValueError("too many cells or categories")
            if any(len(name) > MAX_CATEGORY_CHARS for name in categories):
                raise ValueError("a category is too long")
            "".join(categories).encode()  # or UnicodeEncodeError, which is a ValueError
            return cls(
                cells=_disjoint(cells),
                categories=Counter(categories),
                missing=_count(body["missing"], least=0),
                outside=_count(body["outside"], least=0),
                low=_bound(body["low"]),
                high=_bound(body["high"]),
            )
        except (KeyError, TypeError, AttributeError, OverflowError) as e:
            raise ValueError(f"not a sketch: {e!r}") from e


def common_cells(one: Sketch, other: Sketch) -> dict[Cell, tuple[int, int]]:
    """Return the finest cells in which the numbers of both can be counted, in ascending order, with
    both counts."""
    coarse: list[Cell] = []
    for cell in sorted({*one.cells, *other.cells}, key=lambda cell: (_first(cell), -cell[0])):
        if not coarse or _first(cell) > _last(coarse[-1]):
            coarse.append(cell)
    counts: dict[Cell, tuple[int, int]] = {}
    ours, theirs = _count_in_cells(one, coarse), _count_in_cells(other, coarse)
    for cell in coarse:
        counts[cell] = (ours[cell], theirs[cell])
    return counts


def cell_bounds(cell: Cell) -> tuple[float, float]:
    """Return the smallest and the greatest number of a cell."""
    return _number(_first(cell)), _number(_last(cell))


def _count_in_cells(sketch: Sketch, coarse: Sequence[Cell]) -> Counter[Cell]:
    """Count a sketch in cells that contain its own."""
    counts: Counter[Cell] = Counter()
    at = 0
    for cell, count in sorted(sketch.cells.items(), key=lambda item: _first(item[0])):
        while _last(coarse[at]) < _first(cell):
            at += 1
        counts[coarse[at]] += count
    return counts


def _bounded(cells: Mapping[Cell, int]) -> dict[Cell, int]:
    """Join cells until there are at most MAX_CELLS."""
    most = max(1, sum(cells.values()) // MAX_CELLS)
    ordered = sorted(cells.items(), key=lambda item: _first(item[0]))
    while len(ordered) > MAX_CELLS:
        most *= 2
        ordered = list(_Joining(ordered, most))
    return dict(ordered)


class _Joining:
    """Iterates over cells of which some are joined, those with at most `most` values."""

    def __init__(self, ordered: Sequence[tuple[Cell, int]], most: int) -> None:
        self._ordered = ordered
        self._most = most
        self._firsts = [_first(cell) for cell, _ in ordered]
        self._sums = [0, *accumulate(count for _, count in ordered)]

    def __iter__(self) -> Iterator[tuple[Cell, int]]:
        end = len(self._ordered)
        middle = bisect.bisect_left(self._firsts, 0)  # cells of both signs have no common one
        if middle:
            yield from self._below((_BITS, -1), 0, middle)
        if middle < end:
            yield from self._below((_BITS, 0), middle, end)

    def _below(self, cell: Cell, begin: int, end: int) -> Iterator[tuple[Cell, int]]:
        """Yield the cells from `begin` to `end`, all of which are in `cell`."""
        if end - begin == 1:
            yield self._ordered[begin]
            return
        total = self._sums[end] - self._sums[begin]
        if total <= self._most:
            yield cell, total
            return
        level, key = cell[0] - 1, cell[1] * 2
        middle = bisect.bisect_left(self._firsts, (key + 1) << level, begin, end)
        if begin < middle:
            yield from self._below((level, key), begin, middle)
        if middle < end:
            yield from self._below((level, key + 1), middle, end)


def _most_frequent(categories: Counter[str]) -> Counter[str]:
    """Count the rarest as OTHER, beyond MAX_CATEGORIES."""
    if len(categories) <= MAX_CATEGORIES:
        return categories
    ordered = sorted(categories.items(), key=lambda item: (-item[1], item[0]))
    kept = Counter(dict([one for one in ordered if one[0] != OTHER][:MAX_CATEGORIES]))
    kept[OTHER] += categories.total() - kept.total()
    return kept


def _ordered(number: float) -> int:
    """Return an integer in the order of the numbers; 0.0 and -0.0 are 0."""
    (bits,) = struct.unpack(">q", struct.pack(">d", number))
    return int(bits) if bits >= 0 else -(int(bits) & 0x7FFF_FFFF_FFFF_FFFF)


def _number(ordered: int) -> float:
    """The reverse of `_ordered`; infinite beyond the doubles."""
    magnitude = abs(ordered)
    if magnitude >= 0x7FF0_0000_0000_0000:
        return math.copysign(math.inf, ordered)
    (number,) = struct.unpack(">d", struct.pack(">q", magnitude))
    return math.copysign(float(number), ordered)


def _first(cell: Cell) -> int:
    return cell[1] << cell[0]


def _last(cell: Cell) -> int:
    return ((cell[1] + 1) << cell[0]) - 1


def _double(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of JSON
        return math.inf


def _disjoint(cells: dict[Cell, int]) -> dict[Cell, int]:
    ordered = sorted(cells, key=_first)
    if any(_last(one) >= _first(other) for one, other in pairwise(ordered)):
        raise ValueError("cells overlap")
    return cells


def _cell(level: object, key: object) -> Cell:
    if type(level) is not int or type(key) is not int or not 0 <= level <= _BITS:
        raise ValueError("not a cell")
    if abs(key) >> max(0, _BITS - level):
        raise ValueError("a cell beyond the doubles")
    return level, key


def _count(count: object, *, least: int = 1) -> int:
    if type(count) is not int or not least <= count < 2**53:
        raise ValueError("not a count")
    return count


def _bound(value: Any) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError("not a number")
    return float(value)
