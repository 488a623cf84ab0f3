"""Single flight: concurrent requests for the same key share one execution."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pilotlight.core.threads import wait_finished
from weight_cache.fetch.read_scheduler import PriorityOf, highest_priority
from weight_cache.types import ReadPriority

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Flight(Generic[T]):
    task: asyncio.Task[T] = field(init=False)
    passengers: list[PriorityOf] = field(default_factory=list)

    def lane(self) -> ReadPriority:
        """The highest priority of its waiters."""
        return highest_priority(priority_of() for priority_of in self.passengers)


class SingleFlight(Generic[T]):
    """Work in progress by key. Owner: one event loop; `_flying` changes between awaits only.

    The work is cancelled when its last waiter is cancelled. It has the priority of its most urgent
    waiter; `on_change` is called when that may have changed."""

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self._flying: dict[str, _Flight[T]] = {}
        self._on_change = on_change

    def __len__(self) -> int:
        return len(self._flying)

    async def join(
        self,
        key: str,
        work: Callable[[PriorityOf], Coroutine[Any, Any, T]],
        *,
        priority_of: PriorityOf = lambda: ReadPriority.START,
    ) -> T:
        """The result of `work` for `key`, started or joined. All waiters receive its exception.

        `work` receives a function that returns its current priority; `priority_of` returns the
        priority of this waiter.
        """
        while (flight := self._flying.get(key)) is not None and not flight.passengers:
            # abandoned: wait until it has ended, so that two do not use the same files
            await asyncio.wait([flight.task])
            # the done callback of a finished task runs in the next loop iteration
            await asyncio.sleep(0)
        if flight is None:
            flight = self._flying[key] = _Flight()
            flight.task = asyncio.create_task(work(flight.lane), name=f"flight {key[:16]}")
            flight.task.add_done_callback(lambda task: self._land(key, task))
        flight.passengers.append(priority_of)
        self._on_change()
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.passengers.remove(priority_of)
            if not flight.passengers and not flight.task.done():
                flight.task.cancel()
                await wait_finished([flight.task])
            self._on_change()

    def _land(self, key: str, task: asyncio.Task[T]) -> None:
        del self._flying[key]
        if not task.cancelled():
            task.exception()  # mark as retrieved: waiters raise it, if there are any
