"""A value that is created once, on first use, and shared by all callers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class AsyncOnce(Generic[T]):
    """Creates a value on first use. Cancelling a caller does not cancel the creation; after a
    failure the next caller tries again.

    Owner: the event loop. Attribute `value`: None until it is created.
    """

    def __init__(self, make: Callable[[], Awaitable[T]]) -> None:
        self._make = make
        self._making: asyncio.Future[T] | None = None
        self.value: T | None = None

    async def get(self) -> T:
        """Return the value. Raises what its creation raises."""
        if self.value is not None:
            return self.value
        if self._making is None:
            self._making = asyncio.ensure_future(self._make())
            self._making.add_done_callback(self._done)
        return await asyncio.shield(self._making)

    def _done(self, making: asyncio.Future[T]) -> None:
        self._making = None
        if not making.cancelled() and making.exception() is None:
            self.value = making.result()
