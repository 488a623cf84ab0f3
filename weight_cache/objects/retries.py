"""Asking again: what may pass is tried some times more, after pauses that grow and are drawn at random.

Full jitter: each pause is uniform between 0 and a bound that doubles, so that callers who failed together do not return together.
Source: Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from weight_cache.errors import ObjectStoreUnavailable

T = TypeVar("T")
Pause = Callable[[float], Awaitable[None]]
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 20.0
"""With 5 attempts the pauses add up to 7.5 s at most: a storm of 503 passes, and a start that cannot succeed is told soon."""


async def insistent(work: Callable[[], Awaitable[T]], *, attempts: int, pause: Pause = asyncio.sleep) -> T:
    """The result of `work`, tried up to `attempts` times while it raises ObjectStoreUnavailable; the last one is raised."""
    for attempt in range(attempts - 1):
        try:
            return await work()
        except ObjectStoreUnavailable:
            await pause(random.uniform(0, min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**attempt)))
    return await work()
