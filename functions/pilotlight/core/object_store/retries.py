"""Asking again: what may pass is tried some times more, after pauses that grow and are drawn at
random.

Full jitter: each pause is uniform between 0 and a bound that doubles, so that callers who failed
together do not return together. The time that an attempt took is part of its pause: who was silent
for 30 s has been waited for. Source: Brooker, "Exponential Backoff And Jitter", AWS Architecture
Blog, 2015."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pilotlight.core.backoff import delay_s
from pilotlight.core.object_store.errors import ObjectStoreUnavailable

T = TypeVar("T")
Pause = Callable[[float], Awaitable[None]]
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 20.0
"""With 5 attempts the pauses add up to 7.5 s at most: a storm of 503 passes, and a start that
cannot succeed is told soon."""


async def retry_unavailable(
    work: Callable[[], Awaitable[T]],
    *,
    attempts: int,
    longest_pause_s: float = LONGEST_PAUSE_S,
    pause: Pause = asyncio.sleep,
) -> T:
    """The result of `work`, tried up to `attempts` times while it raises ObjectStoreUnavailable;
    the last one is raised."""
    for attempt in range(attempts - 1):
        began = time.monotonic()
        try:
            return await work()
        except ObjectStoreUnavailable:
            longest_s = min(LONGEST_PAUSE_S, longest_pause_s)
            drawn_s = delay_s(attempt, first_s=FIRST_PAUSE_S, max_s=longest_s)
            left = drawn_s - (time.monotonic() - began)
            if left > 0:
                await pause(left)
    return await work()
