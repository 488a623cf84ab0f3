"""Places for boots: more at once than the processors can do make each of them late, and none of them early."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from typing import Final, Self

PER_PROCESSOR: Final = 2
"""One reads its files while another one computes."""
HOLD_S: Final = 2.0
"""A boot that takes longer, because it waits for somebody or has much to do, goes on without a place: it holds up nobody for more."""


class Places:
    """First come, first served. Owner: the event loop."""

    def __init__(self, count: int, *, hold_s: float = HOLD_S) -> None:
        self._free = asyncio.Semaphore(count)
        self._hold_s = hold_s

    @classmethod
    def for_processors(cls) -> Self:
        """As many as suit those that this process may use."""
        return cls(PER_PROCESSOR * len(os.sched_getaffinity(0)))

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[float]:
        """A place while the context lasts, or for `hold_s`; for how long it was waited for, in ms."""
        began = time.perf_counter()
        await self._free.acquire()
        with contextlib.ExitStack() as place:  # closed by whoever is first
            place.callback(self._free.release)
            timer = asyncio.get_running_loop().call_later(self._hold_s, place.close)
            place.callback(timer.cancel)
            yield (time.perf_counter() - began) * 1000
