"""Bandwidth limit: a token bucket."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

_BURST_S = 0.1
"""Burst after an idle period."""


class BandwidthLimiter:
    """Limits all uploads together. Owner: one event loop; `bytes_per_s` 0: no limit.

    The balance may be negative: each caller waits for the previous ones, so that turns come in the
    order of the requests."""

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
        """Return when `size_bytes` may be sent."""
        if not self._bytes_per_s:
            return
        now = self._clock()
        self._free_at = max(self._free_at, now - _BURST_S) + size_bytes / self._bytes_per_s
        if (wait := self._free_at - now) > 0:
            await self._sleep(wait)
