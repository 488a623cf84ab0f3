"""A circuit breaker: stops calls to a failing target, and probes it from time to time.

    CLOSED ── too many of the last 10 s failed ──► OPEN
    OPEN ── its pause has ended ──► HALF_OPEN (one probe)
    HALF_OPEN ── the probe succeeded ──► CLOSED
    HALF_OPEN ── the probe failed ──► OPEN, with a pause twice as long

(M. Nygard, "Release It!", 2007, ch. 5.) Pure: `now` is an argument, in seconds of any monotonic
clock."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass

WINDOW_S = 10
"""Calls that ended longer ago do not count."""
MAX_DOUBLINGS = 5
"""Most doublings of the pause: up to 32 times the first one."""
JITTER = 0.2
"""Random share of a pause, so that the breakers of several activators do not probe at the same
time."""


class State(enum.StrEnum):
    """State of a breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Outcome(enum.Enum):
    """How an attempt ended, for breakers and outlier detection.

    ANSWERED: the worker answered. RAISED: it answered that user code failed, which does not open
    the breaker of a revision, but makes an instance an outlier if only that one does. FAILED:
    crashed, interrupted, or over its execution clock. NEITHER: the caller disconnected, or the
    worker was busy: it counts for nothing."""

    ANSWERED = enum.auto()
    RAISED = enum.auto()
    FAILED = enum.auto()
    NEITHER = enum.auto()


ANSWERED = Outcome.ANSWERED
"""Module constant for the hot path: an enum member lookup takes as long as five attribute lookups
(Python 3.11)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerTerms:
    """When a breaker opens and for how long.

    Attributes:
        error_ratio: failed share at which it opens.
        min_calls: calls in the window below which it stays closed.
        open_s: the first pause.
    """

    error_ratio: float = 0.5
    min_calls: int = 20
    open_s: float = 5.0


class Window:
    """Counts calls and failures of the last WINDOW_S seconds, by second. Costs nothing without
    calls."""

    __slots__ = ("_calls", "_failed", "_second")

    def __init__(self) -> None:
        self._second = -WINDOW_S
        self._calls = [0] * WINDOW_S
        self._failed = [0] * WINDOW_S

    def __repr__(self) -> str:
        return f"<Window {sum(self._failed)} of {sum(self._calls)} failed>"

    def add(self, now: float, *, failed: bool) -> None:
        """Count one ended call."""
        self._turn(now)
        slot = self._second % WINDOW_S
        self._calls[slot] += 1
        self._failed[slot] += failed

    def counts(self, now: float) -> tuple[int, int]:
        """Return (calls, failed)."""
        self._turn(now)
        return sum(self._calls), sum(self._failed)

    def clear(self) -> None:
        """Reset all counts."""
        self._calls = [0] * WINDOW_S
        self._failed = [0] * WINDOW_S

    def _turn(self, now: float) -> None:
        second = int(now)
        if second <= self._second:
            return  # the same second, or a clock that jumped back: keep all counts
        for passed in range(max(self._second + 1, second - WINDOW_S + 1), second + 1):
            self._calls[passed % WINDOW_S] = self._failed[passed % WINDOW_S] = 0
        self._second = second


class Breaker:
    """A circuit breaker. Owner: the event loop; every method is synchronous.

    Attributes:
        error_ratio: failed share of the calls that opened it last.
    """

    __slots__ = (
        "_doublings",
        "_is_probing",
        "_rng",
        "_terms",
        "_until",
        "_window",
        "error_ratio",
        "state",
    )

    def __init__(self, terms: BreakerTerms, *, rng: random.Random | None = None) -> None:
        self._terms = terms
        self._rng = rng or random.Random()
        self._window = Window()
        self._until = 0.0
        self._doublings = 0
        self._is_probing = False
        self.state = State.CLOSED
        self.error_ratio = 0.0

    def __repr__(self) -> str:
        return f"<Breaker {self.state} {self._window!r}>"

    def admits(self, now: float) -> bool:
        """Return whether one more call may start; changes no state."""
        if self.state is State.CLOSED:
            return True
        return not self._is_probing if self.state is State.HALF_OPEN else now >= self._until

    def record_start(self, now: float) -> None:
        """An admitted call starts: it is the probe, unless the breaker is closed."""
        if self.state is State.OPEN and now >= self._until:
            self.state = State.HALF_OPEN
        self._is_probing = self.state is State.HALF_OPEN

    def record_outcome(self, ending: Outcome, now: float) -> None:
        """Record the outcome of a call. Calls in flight when the breaker opened are ignored while
        it is open."""
        if self.state is State.HALF_OPEN:
            self._probed(ending, now)
        elif self.state is State.CLOSED and ending is not Outcome.NEITHER:
            self._window.add(now, failed=ending is Outcome.FAILED)
            if ending is Outcome.FAILED:
                self._open_if_failing(now)

    def _probed(self, ending: Outcome, now: float) -> None:
        self._is_probing = False
        if ending is Outcome.FAILED:
            self._doublings = min(self._doublings + 1, MAX_DOUBLINGS)
            self._open(now)
        elif ending is not Outcome.NEITHER:
            self.state, self._doublings = State.CLOSED, 0
            self._window.clear()

    def _open_if_failing(self, now: float) -> None:
        calls, failed = self._window.counts(now)
        if calls >= self._terms.min_calls and failed >= calls * self._terms.error_ratio:
            self.error_ratio = failed / calls
            self._open(now)

    def _open(self, now: float) -> None:
        pause_s = self._terms.open_s * 2**self._doublings
        self._until = now + pause_s * (1 + JITTER * self._rng.random())
        self.state = State.OPEN

    def retry_after_s(self, now: float) -> float:
        """Return the seconds until a retry makes sense; at least one, because a probe may still be
        running."""
        return max(1.0, self._until - now)
