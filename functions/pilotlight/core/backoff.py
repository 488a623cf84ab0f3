"""Pauses between retries: they grow exponentially up to a limit and are randomized, so that clients
that failed together do not retry together.

Source: Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

JITTER = 0.5
"""Largest share by which `Backoff` shortens a pause ("equal jitter" in the source)."""
_MAX_EXPONENT = 1023
"""2.0 to the power of a larger number overflows a float."""


def delay_s(
    failures: int,
    *,
    first_s: float,
    max_s: float,
    factor: float = 2.0,
    jitter: float = 1.0,
    draw: Callable[[], float] = random.random,
) -> float:
    """Return the seconds to wait after `failures` failures (0 = the first one).

    `jitter`: the pause is shortened by a random share of up to this; 1 is "full jitter". `draw`
    returns a random number in [0, 1)."""
    try:
        whole_s = min(max_s, first_s * factor ** min(failures, _MAX_EXPONENT))
    except OverflowError:
        whole_s = max_s
    return whole_s * (1 - jitter * draw())


class Backoff:
    """The pauses of one retry loop. Owner: the task that retries."""

    def __init__(self, *, first_s: float, max_s: float) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self.failures = 0

    def __repr__(self) -> str:
        return f"<Backoff after {self.failures} failures>"

    def next_s(self) -> float:
        """Count a failure and return the seconds to wait after it."""
        wait_s = delay_s(self.failures, first_s=self._first_s, max_s=self._max_s, jitter=JITTER)
        self.failures += 1
        return wait_s

    async def pause(self) -> None:
        """Count a failure and wait after it."""
        await asyncio.sleep(self.next_s())

    def reset(self) -> None:
        """Start again with the first pause, after a success."""
        self.failures = 0
