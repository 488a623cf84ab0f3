"""The execution deadlines of running calls, behind one timer: most calls end long before their
deadline, and one timer per call would cost more."""

from __future__ import annotations

import asyncio
import math
from typing import Protocol


class TimedCall(Protocol):
    """A call with a deadline."""

    expires_at: float

    def expire(self) -> None:
        """Stop the call: its deadline has passed."""


class ExecutionDeadlines:
    """Deadlines of running calls. Owned by the event loop: no lock. The timer is armed for the
    earliest deadline so far; it may fire early, and is then armed again."""

    def __init__(self) -> None:
        self._watched: set[TimedCall] = set()
        self._armed_for = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<ExecutionDeadlines watching={len(self._watched)}>"

    def watch(self, timed: TimedCall, *, seconds: float) -> None:
        """Expire the call after `seconds`, unless it is forgotten before."""
        loop = asyncio.get_running_loop()
        timed.expires_at = loop.time() + seconds
        self._watched.add(timed)
        if timed.expires_at < self._armed_for:
            self._arm(timed.expires_at)

    def forget(self, timed: TimedCall) -> None:
        """Remove a call that has ended."""
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
