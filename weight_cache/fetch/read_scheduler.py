"""Whose turn it is to read: a caller who waits before what nobody waits for yet, and that before
checking what is here.

A *turn* is one range on its way: it takes memory, the origin's bandwidth and a core to hash it, so
there are only so many at once. A waiting START goes first. PREFETCH has all the turns while no
START is about, else its share, so that it neither starves nor holds anybody up for long. SCRUB has
one turn at a time, when nobody else wants any.

A ticket's lane is asked for whenever a turn is given away, not once: a fetch that a caller joins is
urgent from then on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass

from weight_cache.types import ReadPriority

PriorityOf = Callable[[], ReadPriority]
"""Says now in which lane something is."""

_RANK = {lane: rank for rank, lane in enumerate(ReadPriority)}


def highest_priority(lanes: Iterable[ReadPriority]) -> ReadPriority:
    """The most urgent of `lanes`; SCRUB when there are none."""
    return min(lanes, key=_RANK.__getitem__, default=ReadPriority.SCRUB)


@dataclass(slots=True, eq=False)
class _QueuedRead:
    priority_of: PriorityOf
    admitted: asyncio.Future[None]


class ReadScheduler:
    """Gives turns away. Owner: one event loop; what changes, changes between awaits."""

    def __init__(self, reads_at_once: int, prefetch_share: float) -> None:
        self.reads_at_once = reads_at_once
        self._prefetch_share = max(1, int(reads_at_once * prefetch_share))
        self._waiting: list[_QueuedRead] = []
        self._running: list[_QueuedRead] = []

    def __repr__(self) -> str:
        lanes = [f"{lane}={self.running(lane)}+{self.waiting(lane)}" for lane in ReadPriority]
        return f"<ReadScheduler {len(self._running)}/{self.reads_at_once} {' '.join(lanes)}>"

    def running(self, lane: ReadPriority) -> int:
        """How many turns of that lane are under way."""
        return sum(ticket.priority_of() is lane for ticket in self._running)

    def waiting(self, lane: ReadPriority) -> int:
        """How many wait for a turn in that lane."""
        return sum(ticket.priority_of() is lane for ticket in self._waiting)

    @contextlib.asynccontextmanager
    async def turn(self, priority_of: PriorityOf) -> AsyncIterator[None]:
        """Wait for a turn and hold it. Within a lane, who came first goes first."""
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
        """Give away what can be given away; to be called when a lane may have changed."""
        while (ticket := self._next()) is not None:
            self._waiting.remove(ticket)
            self._running.append(ticket)
            # else its owner was cancelled, and is about to give the turn back
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
