"""Single flight: one piece of work for however many ask for it at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Flight(Generic[T]):
    task: asyncio.Task[T]
    passengers: int = 0


class Flights(Generic[T]):
    """Work in progress by key. Owner: one event loop; `_flying` changes between awaits only.

    The work ends with its last passenger: when everyone who waits is cancelled, it is too.
    """

    def __init__(self) -> None:
        self._flying: dict[str, _Flight[T]] = {}

    def __len__(self) -> int:
        return len(self._flying)

    async def join(self, key: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of `work` for `key`, begun here or already under way. Its exception reaches everyone."""
        while (flight := self._flying.get(key)) is not None and not flight.passengers:
            await asyncio.wait([flight.task])  # everyone left it; its successor must not meet it on the disk
            await asyncio.sleep(0)  # one that has ended already lands only when the loop has had its turn
        if flight is None:
            flight = self._flying[key] = _Flight(task=asyncio.create_task(work(), name=f"flight {key[:16]}"))
            flight.task.add_done_callback(lambda task: self._land(key, task))
        flight.passengers += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.passengers -= 1
            if not flight.passengers and not flight.task.done():
                flight.task.cancel()
                await asyncio.wait([flight.task])

    def _land(self, key: str, task: asyncio.Task[T]) -> None:
        del self._flying[key]
        if not task.cancelled():
            task.exception()  # passengers raise it; with none left there is nobody to tell
