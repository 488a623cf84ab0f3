"""Retries of requests to servers, with exponential back-off and jitter.

Source: Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015 ("full jitter").
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from pilotlight.core.backoff import delay_s
from weight_cache.errors import SourceInvalid

T = TypeVar("T")
ATTEMPTS = 5
TIMEOUT_S = 30.0
"""An attempt fails after this long without data."""
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
"""Also the limit of a server's Retry-After: a user waits at a terminal."""


class TransientSourceError(SourceInvalid):
    """Raised when a retry may succeed. `retry_after_s`: requested by the server, or None."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def retry_transient(
    work: Callable[[], T], *, attempts: int = ATTEMPTS, pause: Callable[[float], None] = time.sleep
) -> T:
    """Return the result of `work`, tried up to `attempts` times while it raises
    TransientSourceError; raise the last one."""
    for attempt in range(attempts - 1):
        try:
            return work()
        except TransientSourceError as e:
            drawn_s = delay_s(attempt, first_s=_FIRST_PAUSE_S, max_s=_LONGEST_PAUSE_S)
            pause(min(_LONGEST_PAUSE_S, max(drawn_s, e.retry_after_s or 0)))
    return work()
