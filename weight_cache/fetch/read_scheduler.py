"""Schedules reads by priority: waiting callers, then prefetches, then scrubbing.

A *turn* is one range read in progress: it takes memory, the origin's bandwidth and a core for
hashing, so their number is limited. A waiting START goes first. PREFETCH may use all turns while no
START is active, otherwise its share, so it neither starves nor delays others for long. SCRUB uses
one turn at a time, only when no other read is waiting or running.

A read's priority is evaluated at each grant, not once: a prefetch that a caller joins becomes
urgent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass

from weight_cache.types import ReadPriority

PriorityOf = Callable[[], ReadPriority]
"""Returns the current priority of a read."""

_RANK = {lane: rank for rank, lane in enumerate(ReadPriority)}


def highest_priority(lanes: Iterable[ReadPriority]) -> ReadPriority:
    """The highest priority in `lanes`; SCRUB if empty."""
    return min(lanes, key=_RANK.__getitem__, default=ReadPriority.SCRUB)


@dataclass(slots=True, eq=False)
class _QueuedRead:
    priority_of: PriorityOf
    admitted: asyncio.Future[None]


class ReadScheduler:
    """Grants turns. Owner: one event loop; state changes between awaits only."""

    def __init__(self, reads_at_once: int, prefetch_share: float) -> None:
        self.reads_at_once = reads_at_once
        self._prefetch_share = max(1, int(reads_at_once * prefetch_share))
        self._waiting: list[_QueuedRead] = []
        self._running: list[_QueuedRead] = []

    def __repr__(self) -> str:
        lanes = [f"{lane}={self.running(lane)}+{self.waiting(lane)}" for lane in ReadPriority]
        return f"<ReadScheduler {len(self._running)}/{self.reads_at_once} {' '.join(lanes)}>"

    def running(self, lane: ReadPriority) -> int:
        """Number of running reads of that priority."""
        return sum(ticket.priority_of() is lane for ticket in self._running)

    def waiting(self, lane: ReadPriority) -> int:
        """Number of waiting reads of that priority."""
        return sum(ticket.priority_of() is lane for ticket in self._waiting)

    @contextlib.asynccontextmanager
    async def turn(self, priority_of: PriorityOf) -> AsyncIterator[None]:
        """Wait for a turn and hold it. First come, first served within a priority."""
        ticket = _QueuedRead(priority_of, asyncio.get_running_loop().create_future())
        self._waiting.append(ticket)
        self.review()
        try:
            await ticket.admitted
            yield
        finally:
            (self._running if ticket in self._running else self._waiting).remove(ticket)
            self.review()

    def review(self) -> None:
        """Grant available turns; call when a priority may have changed."""
        while (ticket := self._next()) is not None:
            self._waiting.remove(ticket)
            self._running.append(ticket)
            # if done, its owner was cancelled and will release the turn
            if not ticket.admitted.done():
                ticket.admitted.set_result(None)

    def _next(self) -> _QueuedRead | None:
        if len(self._running) >= self.reads_at_once:
            return None
        first: dict[ReadPriority, _QueuedRead] = {}
        for ticket in self._waiting:
            lane = ticket.priority_of()
            if lane is ReadPriority.START:
                return ticket
            first.setdefault(lane, ticket)
        is_calm = not self.running(ReadPriority.START)
        if ReadPriority.PREFETCH in first and (
            is_calm or self.running(ReadPriority.PREFETCH) < self._prefetch_share
        ):
            return first[ReadPriority.PREFETCH]
        if ReadPriority.SCRUB in first and not self._running and ReadPriority.PREFETCH not in first:
            return first[ReadPriority.SCRUB]
        return None
