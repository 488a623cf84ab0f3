"""The execution clocks of running calls, behind one timer: most calls end long before theirs, and a
timer each would cost more."""

from __future__ import annotations

import asyncio
import math
from typing import Protocol


class TimedCall(Protocol):
    """What can run out of time."""

    expires_at: float

    def expire(self) -> None:
        """Its time is up."""


class ExecutionDeadlines:
    """Owned by the event loop: no lock. The timer is armed for the earliest deadline there was; it
    may fire early and then looks again."""

    def __init__(self) -> None:
        self._watched: set[TimedCall] = set()
        self._armed_for = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<ExecutionDeadlines watching={len(self._watched)}>"

    def watch(self, timed: TimedCall, *, seconds: float) -> None:
        """Expire it after that time, unless it is forgotten before."""
        loop = asyncio.get_running_loop()
        timed.expires_at = loop.time() + seconds
        self._watched.add(timed)
        if timed.expires_at < self._armed_for:
            self._arm(timed.expires_at)

    def forget(self, timed: TimedCall) -> None:
        """It has ended."""
        self._watched.discard(timed)

    def _arm(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed_for = at
        self._timer = asyncio.get_running_loop().call_at(at, self._sweep)

    def _sweep(self) -> None:
        self._timer, self._armed_for = None, math.inf
        now = asyncio.get_running_loop().time()
        for timed in [t for t in self._watched if t.expires_at <= now]:
            self._watched.discard(timed)
            timed.expire()
        if self._watched:
            self._arm(min(t.expires_at for t in self._watched))
