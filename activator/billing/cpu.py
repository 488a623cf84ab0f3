"""The CPU time that one instance uses while no call runs on it: its start, its pauses, commands
beside it, its end.

The counter is read where the first call begins and GRACE_S after the last one has ended, so a pause
shorter than that counts as part of the calls around it, and calls that follow each other closely
cost no reading at all. The grace is there because the kernel counts late
(`snapshotter.cpu_counter`): without it the end of a call would be charged twice, as the call's time
and as the pause's.

What cannot be read is not charged. A reading that fails is made up by the next one, because the
counter only grows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

GRACE_S = 0.01
"""One tick of a kernel with 100 ticks a second, the slowest there are."""


class Counter(Protocol):
    """What counts an instance's CPU time (`snapshotter.cpu_counter.CpuCounter`)."""

    def read_ns(self) -> int | None:
        """CPU time so far; None = it cannot be read."""
        ...

    def close(self) -> None:
        """It is not read any more."""
        ...


class Timer(Protocol):
    """A timer that can be stopped (`asyncio.TimerHandle`)."""

    def cancel(self) -> None:
        """Stop it."""
        ...


Later = Callable[[float, Callable[[], None]], Timer]
"""Calls a function after some seconds."""


def _in_loop(seconds: float, function: Callable[[], None]) -> Timer:
    return asyncio.get_running_loop().call_later(seconds, function)


class PauseCpuMeter:
    """See the module. Owner: the instance's account; every method is synchronous, so no lock is
    needed."""

    __slots__ = (
        "_busy",
        "_clock",
        "_counter",
        "_ended_at",
        "_later",
        "_mark",
        "_timer",
        "_used_ns",
    )

    def __init__(
        self,
        counter: Counter,
        *,
        from_ns: int | None,
        later: Later = _in_loop,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`from_ns`: the reading from which on CPU time counts; None = as it is now (the instance
        was there before its meter)."""
        self._counter = counter
        self._later = later
        self._clock = clock
        self._mark = counter.read_ns() if from_ns is None else from_ns
        self._used_ns = 0
        self._busy = False
        self._ended_at = 0.0
        self._timer: Timer | None = None

    def __repr__(self) -> str:
        return (
            f"<PauseCpuMeter {self._counter!r} "
            f"{'in a call' if self._mark is None else 'in a pause'}, "
            f"{self._used_ns / 1e9:.3f} s kept>"
        )

    def calls_begin(self) -> None:
        """The first call begins."""
        self._busy = True
        if self._mark is not None:
            self._count(self._counter.read_ns())
            self._mark = None

    def calls_ended(self) -> None:
        """The last call has ended."""
        self._busy = False
        self._ended_at = self._clock()
        if self._timer is None and self._mark is None:
            self._timer = self._later(GRACE_S, self._on_timer)

    def take(self) -> int:
        """Nanoseconds since the last time, up to now."""
        if self._mark is not None:
            self._count(self._counter.read_ns())
        used, self._used_ns = self._used_ns, 0
        return used

    def end(self, last_ns: int | None) -> int:
        """The instance is gone; `last_ns`: where its counter stood then, None = nobody knows. What
        is left to charge."""
        if self._mark is not None:
            self._count(last_ns)
        self._mark = None
        self._busy = True  # nothing is read any more
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._counter.close()
        used, self._used_ns = self._used_ns, 0
        return used

    def _count(self, reading: int | None) -> None:
        if reading is not None and self._mark is not None and reading > self._mark:
            self._used_ns += reading - self._mark
            self._mark = reading

    def _on_timer(self) -> None:
        self._timer = None
        if self._busy:
            return
        rest_s = self._ended_at + GRACE_S - self._clock()
        if rest_s > 0:
            self._timer = self._later(rest_s, self._on_timer)
        else:
            self._mark = self._counter.read_ns()
