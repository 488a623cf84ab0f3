"""Retries of transient errors, with exponential back-off and full jitter.

Each pause is uniform between 0 and a bound that doubles, so that callers that failed together do
not retry together. The duration of the attempt counts towards its pause: an attempt that waited
30 s needs no further pause. Source: Brooker, "Exponential Backoff And Jitter", AWS Architecture
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
"""With 5 attempts the pauses add up to at most 7.5 s: enough for a burst of 503, and a start that
cannot succeed fails soon."""


async def retry_unavailable(
    work: Callable[[], Awaitable[T]],
    *,
    attempts: int,
    longest_pause_s: float = LONGEST_PAUSE_S,
    pause: Pause = asyncio.sleep,
) -> T:
    """Return the result of `work`, tried up to `attempts` times while it raises
    ObjectStoreUnavailable; raise the last one."""
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
