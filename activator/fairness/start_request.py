"""A start that wants to go through: whose it is, what it takes, whether anybody still needs it, and
how it waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from activator.fairness.fair_queue import FairQueue
from activator.fairness.queue_priority import QueuePriority
from activator.routing.route_table import CallTarget
from pilotlight import errors


class StartCancelled(Exception):
    """Raised when a start that had to wait is not needed any more, or was none that calls wait
    for."""


class StartRequest:
    """One start on its way to the node. Owner: the task that starts it.

    Attributes:
        id: the instance's. rank: priority of the calls that wait for it; tenant and weight of the
        function's owner. is_needed: asked whenever it would go on waiting, or go through after it
        waited. since: when it began to wait, in the clock's seconds. obstacle: why it waits now, as
        its callers will be told at their deadline; None while it does not. is_first: instances were
        asked to go for it, so nobody else gets their place. is_given_up: nobody needs it any more,
        and its task is about to find out; `on_given_up` was told.
    """

    __slots__ = (
        "future",
        "id",
        "is_first",
        "is_given_up",
        "is_needed",
        "obstacle",
        "on_given_up",
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
        on_given_up: Callable[[], None],
        since: float,
    ) -> None:
        self.id = id
        self.target = target
        self.rank = rank
        self.is_needed = is_needed
        self.since = since
        self.obstacle: errors.PilotlightError | None = None
        self.is_first = False
        self.is_given_up = False
        self.on_given_up = on_given_up
        self.future: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"<Ask {self.id} {self.target!r}{' held up' if self.obstacle else ''}>"

    @property
    def tenant(self) -> str:
        """The function's owner."""
        return self.target.tenant

    @property
    def memory_bytes(self) -> int:
        """Of one instance."""
        return self.target.launch.memory_bytes

    @property
    def gpus(self) -> int:
        """Of one instance."""
        return self.target.footprint.gpu_count if self.target.footprint.gpu else 0

    @property
    def is_waiting(self) -> bool:
        """False once it went through, or was abandoned in this very moment."""
        return self.future is not None and not self.future.done()

    def go_on(self) -> None:
        """Let it through."""
        if self.is_waiting and self.future is not None:
            self.future.set_result(None)

    def give_up(self) -> None:
        """Nobody needs it any more."""
        if self.is_waiting and self.future is not None:
            self.is_given_up = True
            self.on_given_up()
            self.future.set_exception(StartCancelled())

    async def wait_in(
        self,
        line: FairQueue[StartRequest],
        rank: QueuePriority,
        *,
        cost: float,
        look: Callable[[], None],
        is_first: bool = False,
    ) -> None:
        """Wait in a line until it is let through. `look`: what hands out, called once it stands
        there. Raises StartCancelled."""
        self.future = asyncio.get_running_loop().create_future()
        place = line.push(self, rank, cost=cost, is_first=is_first)
        try:
            look()
            await self.future
        finally:
            line.remove(place)
            self.obstacle = None
            self.is_first = False


def cancel_unneeded(line: FairQueue[StartRequest]) -> None:
    """Those that nobody needs leave, the newest first."""
    for ask in reversed(list(line)):
        if ask.is_waiting and not ask.is_needed():
            ask.give_up()
