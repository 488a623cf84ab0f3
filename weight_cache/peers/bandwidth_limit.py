"""So many bytes a second and no more: a bucket that is filled steadily."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

_BURST_S = 0.1
"""What may go at once after a silence."""


class BandwidthLimiter:
    """A bound on all uploads together. Owner: one event loop; `bytes_per_s` 0: no bound.

    Debts are allowed: who takes waits until what was taken before is paid, so that turns come in
    the order of asking."""

    def __init__(
        self,
        bytes_per_s: int,
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._free_at = 0.0

    async def take(self, size_bytes: int) -> None:
        """Return when `size_bytes` may go."""
        if not self._bytes_per_s:
            return
        now = self._clock()
        self._free_at = max(self._free_at, now - _BURST_S) + size_bytes / self._bytes_per_s
        if (wait := self._free_at - now) > 0:
            await self._sleep(wait)
