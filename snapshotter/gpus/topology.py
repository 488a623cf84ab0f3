"""Choice of GPUs of one model for a request: connected ones, so that large connected groups stay
free.

A pure decision over NVLink connections and NUMA nodes, for a set of free GPUs given as a bit mask:
small numbers, so that the answer for each mask is computed once. In this order, a choice
1. has as few pairs without NVLink as possible,
2. spans as few NUMA nodes as possible,
3. leaves the largest connected groups: of NUMA nodes, then of NVLink (best fit).

A *connected group* is a set of GPUs that NVLink connects, directly or through others, or of one
NUMA node."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from itertools import combinations

from snapshotter.gpus.inventory import NodeGpu

_MOST_COMPARED = 1000
"""All choices are compared up to 12 GPUs of one model; of 16 there are 12,870 choices of 8, which
would take half a second."""


class Topology:
    """Connections among the GPUs of one model. Immutable; choices are cached."""

    def __init__(self, gpus: Sequence[NodeGpu]) -> None:
        """`gpus`: bit i of a mask is `gpus[i]`."""
        places = {gpu.uuid: n for n, gpu in enumerate(gpus)}
        self._count = len(gpus)
        self._links = [
            sum(1 << places[other] for other in gpu.links if other in places) for gpu in gpus
        ]
        numa_nodes = sorted({gpu.numa_node for gpu in gpus if gpu.numa_node >= 0})
        self._numa = [
            sum(1 << n for n, gpu in enumerate(gpus) if gpu.numa_node == node)
            for node in numa_nodes
        ]
        self.choose = functools.cache(self._choose)
        self.largest_group = functools.cache(self._largest_group)

    def __repr__(self) -> str:
        return f"<Topology of {self._count} GPUs, {len(self._numa)} NUMA nodes>"

    def _choose(self, free: int, count: int) -> int:
        """The GPUs for a request of `count`, as a mask within `free`, which has at least so
        many."""
        places = list(_bits(free))
        if math.comb(len(places), count) <= _MOST_COMPARED:
            candidates = [sum(1 << n for n in chosen) for chosen in combinations(places, count)]
        else:
            candidates = [self._grown(free, 1 << first, count) for first in places]
        return min(candidates, key=lambda chosen: self._rank(free, chosen))

    def _grown(self, free: int, chosen: int, count: int) -> int:
        """`chosen` and, one at a time, the GPUs that fit it best."""
        while chosen.bit_count() < count:
            chosen = min(
                (chosen | 1 << n for n in _bits(free & ~chosen)),
                key=lambda grown: self._rank(free, grown),
            )
        return chosen

    def _largest_group(self, free: int) -> int:
        """Size of the largest connected group of free GPUs."""
        groups = [*self._linked_groups(free), *(free & node for node in self._numa)]
        return max((group.bit_count() for group in groups), default=0)

    def _rank(self, free: int, chosen: int) -> tuple[object, ...]:
        rest = free & ~chosen
        return (
            self._unlinked_pairs(chosen),
            self._numa_span(chosen),
            [-size for size in self._sizes(rest & node for node in self._numa)],
            [-size for size in self._sizes(self._linked_groups(rest))],
            chosen,
        )

    def _unlinked_pairs(self, chosen: int) -> int:
        places = list(_bits(chosen))
        return sum(1 for a, b in combinations(places, 2) if not self._links[a] >> b & 1)

    def _numa_span(self, chosen: int) -> int:
        known = [node & chosen for node in self._numa if node & chosen]
        elsewhere = chosen & ~functools.reduce(int.__or__, known, 0)
        return len(known) + elsewhere.bit_count()

    def _linked_groups(self, free: int) -> Iterator[int]:
        while free:
            group = newest = free & -free
            while newest:
                reached = 0
                for n in _bits(newest):
                    reached |= self._links[n]
                newest = reached & free & ~group
                group |= newest
            yield group
            free &= ~group

    @staticmethod
    def _sizes(groups: Iterator[int]) -> list[int]:
        return sorted((group.bit_count() for group in groups), reverse=True)


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
