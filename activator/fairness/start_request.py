"""A start that requests admission: its tenant, its size, whether it is still needed, and how it
waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from activator.fairness.fair_queue import FairQueue
from activator.fairness.queue_priority import QueuePriority
from activator.routing.route_table import CallTarget
from pilotlight import errors


class StartCancelled(Exception):
    """Raised when a waiting start is no longer needed, or when no call waits for a start that would
    have to wait."""


class StartRequest:
    """One start on its way to the node. Owner: the task that starts it.

    Attributes:
        id: the instance's id.
        rank: priority of the calls that wait for it; tenant and weight of the function's owner.
        is_needed: called whenever it would continue to wait, or be admitted after waiting.
        since: when it began to wait, in the clock's seconds.
        obstacle: why it waits now, the error for its callers at their deadline; None while it does
            not.
        is_first: instances were released for it, so no other start gets their place.
        is_cancelled: it is no longer needed, `on_cancel` was called, and its task is about to
            end."""

    __slots__ = (
        "future",
        "id",
        "is_cancelled",
        "is_first",
        "is_needed",
        "obstacle",
        "on_cancel",
        "rank",
        "since",
        "target",
    )

    def __init__(
        self,
        id: str,
        target: CallTarget,
        *,
        rank: QueuePriority,
        is_needed: Callable[[], bool],
        on_cancel: Callable[[], None],
        since: float,
    ) -> None:
        self.id = id
        self.target = target
        self.rank = rank
        self.is_needed = is_needed
        self.since = since
        self.obstacle: errors.PilotlightError | None = None
        self.is_first = False
        self.is_cancelled = False
        self.on_cancel = on_cancel
        self.future: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"<StartRequest {self.id} {self.target!r}{' held up' if self.obstacle else ''}>"

    @property
    def tenant(self) -> str:
        """Tenant of the function's owner."""
        return self.target.tenant

    @property
    def memory_bytes(self) -> int:
        """Memory of one instance."""
        return self.target.launch.memory_bytes

    @property
    def gpus(self) -> int:
        """GPUs of one instance."""
        return self.target.footprint.gpu_count if self.target.footprint.gpu else 0

    @property
    def is_waiting(self) -> bool:
        """False once it was admitted or cancelled."""
        return self.future is not None and not self.future.done()

    def admit(self) -> None:
        """Admit the start."""
        if self.is_waiting and self.future is not None:
            self.future.set_result(None)

    def cancel(self) -> None:
        """Cancel the start, because it is no longer needed."""
        if self.is_waiting and self.future is not None:
            self.is_cancelled = True
            self.on_cancel()
            self.future.set_exception(StartCancelled())

    async def wait_in(
        self,
        line: FairQueue[StartRequest],
        rank: QueuePriority,
        *,
        cost: float,
        on_queued: Callable[[], None],
        is_first: bool = False,
    ) -> None:
        """Wait in a queue until admitted. `on_queued`: called once it is in the queue. Raises
        StartCancelled."""
        self.future = asyncio.get_running_loop().create_future()
        place = line.push(self, rank, cost=cost, is_first=is_first)
        try:
            on_queued()
            await self.future
        finally:
            line.remove(place)
            self.obstacle = None
            self.is_first = False


def cancel_unneeded(line: FairQueue[StartRequest]) -> None:
    """Cancel the starts that are no longer needed, the newest first."""
    for request in reversed(list(line)):
        if request.is_waiting and not request.is_needed():
            request.cancel()
