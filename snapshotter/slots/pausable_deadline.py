"""Deadline and permit of a start strategy, paused while the start waits for data on its way to the
node."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Self

from snapshotter.slots.boot_limiter import NO_SHARE, FairSemaphore
from snapshotter.types import TenantShare


class YieldableSlot:
    """A semaphore permit that can be released temporarily; `share`: whose turn it uses. Owner: one
    task."""

    def __init__(self, gate: FairSemaphore, share: TenantShare = NO_SHARE) -> None:
        self._gate = gate
        self._share = share
        self._held = False

    async def __aenter__(self) -> Self:
        await self._enter()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._exit()

    @contextlib.asynccontextmanager
    async def yielded(self) -> AsyncIterator[None]:
        """Release the permit within the context. If the body raises, it is not acquired again."""
        self._exit()
        yield
        await self._enter()

    async def _enter(self) -> None:
        await self._gate.acquire(self._share)
        self._held = True

    def _exit(self) -> None:
        if self._held:
            self._held = False
            self._gate.release()


class PausableDeadline:
    """Bounds of the current start strategy: a deadline, a permit, both, or neither. Owner: the
    start's task."""

    def __init__(self) -> None:
        self._limit: asyncio.Timeout | None = None
        self._turn: YieldableSlot | None = None

    @contextlib.contextmanager
    def bounded_by(
        self, limit: asyncio.Timeout | None = None, turn: YieldableSlot | None = None
    ) -> Iterator[None]:
        """Apply these bounds as well, while the context lasts."""
        before = self._limit, self._turn
        self._limit, self._turn = limit or self._limit, turn or self._turn
        try:
            yield
        finally:
            self._limit, self._turn = before

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Pause the deadline and release the permit, while the context lasts."""
        async with contextlib.AsyncExitStack() as stack:
            if self._limit is not None and not self._limit.expired():
                stack.enter_context(_paused(self._limit))
            if self._turn is not None:
                await stack.enter_async_context(self._turn.yielded())
            yield


@contextlib.contextmanager
def _paused(limit: asyncio.Timeout) -> Iterator[None]:
    loop, until = asyncio.get_running_loop(), limit.when()
    left_s = None if until is None else until - loop.time()
    limit.reschedule(None)
    try:
        yield
    finally:
        limit.reschedule(None if left_s is None else loop.time() + left_s)
