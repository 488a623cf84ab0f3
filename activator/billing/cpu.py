"""Measures the CPU time that one instance uses outside calls: its start, its pauses, commands run
in it, its end.

The counter is read when the first call begins and GRACE_S after the last one has ended. So a
shorter pause counts as part of the calls around it, and calls in close succession cost no reading.
The grace period is needed because the kernel updates the counter late
(`snapshotter.linux.cpu_counter`): without it the end of a call would be charged twice, as call and
as pause.

Time that cannot be read is not charged. The next reading makes up for a failed one, because the
counter only grows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

GRACE_S = 0.01
"""One tick of a kernel with 100 ticks a second, the slowest in use."""


class Counter(Protocol):
    """Counter of an instance's CPU time (`snapshotter.linux.cpu_counter.CpuCounter`)."""

    def read_ns(self) -> int | None:
        """CPU time so far; None = unreadable."""

    def close(self) -> None:
        """Release the counter."""


class Timer(Protocol):
    """A cancellable timer (`asyncio.TimerHandle`)."""

    def cancel(self) -> None:
        """Cancel the timer."""


Later = Callable[[float, Callable[[], None]], Timer]
"""Calls a function after some seconds."""


def _in_loop(seconds: float, function: Callable[[], None]) -> Timer:
    return asyncio.get_running_loop().call_later(seconds, function)


class PauseCpuMeter:
    """Meters CPU time in the pauses between calls. Owner: the instance's account; every method is
    synchronous, so no lock is needed."""

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
        """`from_ns`: the reading from which CPU time counts; None = the current one (the instance
        existed before its meter)."""
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
        """Handle the begin of the first call."""
        self._busy = True
        if self._mark is not None:
            self._count(self._counter.read_ns())
            self._mark = None

    def calls_ended(self) -> None:
        """Handle the end of the last call."""
        self._busy = False
        self._ended_at = self._clock()
        if self._timer is None and self._mark is None:
            self._timer = self._later(GRACE_S, self._on_timer)

    def consume(self) -> int:
        """Return the nanoseconds since the previous call of this method, and reset them."""
        if self._mark is not None:
            self._count(self._counter.read_ns())
        used, self._used_ns = self._used_ns, 0
        return used

    def end(self, last_ns: int | None) -> int:
        """Stop metering and return the nanoseconds left to charge. `last_ns`: last reading of the
        ended instance; None = unknown."""
        if self._mark is not None:
            self._count(last_ns)
        self._mark = None
        self._busy = True  # no more readings
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
