"""Asking a server again: what may pass is tried some times more, after pauses that grow and are
drawn at random.

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
"""Silence of a server after which an attempt has failed."""
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
"""Also of what a server may wish for with Retry-After: somebody waits at a terminal."""


class TransientSourceError(SourceInvalid):
    """Raised when asking again may help. `retry_after_s`: the server's wish, None where it has
    none."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def retry_transient(
    work: Callable[[], T], *, attempts: int = ATTEMPTS, pause: Callable[[float], None] = time.sleep
) -> T:
    """The result of `work`, tried up to `attempts` times while it raises Passing; the last one is
    raised."""
    for attempt in range(attempts - 1):
        try:
            return work()
        except TransientSourceError as e:
            drawn_s = delay_s(attempt, first_s=_FIRST_PAUSE_S, max_s=_LONGEST_PAUSE_S)
            pause(min(_LONGEST_PAUSE_S, max(drawn_s, e.retry_after_s or 0)))
    return work()
