"""Which memory of a process has not been brought in yet, and where in the image it lies. Standard
library only; no I/O."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator


class MissingPages:
    """Ranges of addresses in ascending order, each with the position of its first byte in the
    image. Addresses, lengths and positions are whole pages, in bytes. Owner: the page server's
    loop."""

    def __init__(self, ranges: Iterable[tuple[int, int, int]] = ()) -> None:
        """`ranges`: (start, end, position), ascending and disjoint. Raises ValueError otherwise."""
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._positions: list[int] = []
        for start, end, position in ranges:
            if start >= end or (self._ends and start < self._ends[-1]):
                raise ValueError(f"the range at {start:#x} is empty or not in ascending order")
            self._starts.append(start)
            self._ends.append(end)
            self._positions.append(position)

    def __repr__(self) -> str:
        missing = sum(self._ends) - sum(self._starts)
        return f"<MissingPages {missing} bytes in {len(self._starts)} ranges>"

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        return iter(zip(self._starts, self._ends, self._positions, strict=True))

    def copy(self) -> MissingPages:
        """The same ranges, independent of this object. The process waits in fork(2) meanwhile."""
        copied = MissingPages()
        copied._starts, copied._ends = self._starts.copy(), self._ends.copy()
        copied._positions = self._positions.copy()
        return copied

    def first_within(self, start: int, end: int) -> tuple[int, int, int] | None:
        """The first missing part of [start, end): its start, end and position; None if nothing of
        it is missing."""
        i = bisect.bisect_right(self._ends, start)
        if start >= end or i == len(self._starts) or self._starts[i] >= end:
            return None
        at = max(start, self._starts[i])
        return at, min(end, self._ends[i]), self._positions[i] + at - self._starts[i]

    def within(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """The missing parts of [start, end)."""
        while (found := self.first_within(start, end)) is not None:
            yield found
            start = found[1]

    def first(self) -> tuple[int, int, int] | None:
        """The first range; None if nothing is missing."""
        if not self._starts:
            return None
        return self._starts[0], self._ends[0], self._positions[0]

    def remove(self, start: int, end: int) -> None:
        """[start, end) is not missing any longer."""
        self._cut(start, end)

    def move(self, source: int, target: int, length: int) -> None:
        """The process has moved `length` bytes at `source` to `target` (mremap(2)), replacing what
        was there."""
        moved = self._cut(source, source + length)
        self._cut(target, target + length)
        at = bisect.bisect_left(self._starts, target)
        self._starts[at:at] = [start + target - source for start, _, _ in moved]
        self._ends[at:at] = [end + target - source for _, end, _ in moved]
        self._positions[at:at] = [position for _, _, position in moved]

    def _cut(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """Remove [start, end); returns the removed ranges."""
        low = bisect.bisect_right(self._ends, start)
        high = bisect.bisect_left(self._starts, end)
        kept, cut = [], []
        for i in range(low, high):
            first, last, position = self._starts[i], self._ends[i], self._positions[i]
            if first < start:
                kept.append((first, start, position))
            inside = max(first, start)
            cut.append((inside, min(last, end), position + inside - first))
            if last > end:
                kept.append((end, last, position + end - first))
        self._starts[low:high] = [k[0] for k in kept]
        self._ends[low:high] = [k[1] for k in kept]
        self._positions[low:high] = [k[2] for k in kept]
        return cut
