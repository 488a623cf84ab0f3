"""A circuit breaker: calls are kept from what fails, and a probe now and then finds out whether it
works again.

    CLOSED ── too many of the last 10 s failed ──► OPEN ── its pause is over ──► HALF_OPEN ── the probe was answered ──► CLOSED
                                                    ▲                              │
                                                    └── the probe failed: a pause twice as long ◄──┘

(M. Nygard, "Release It!", 2007, ch. 5.) Pure: `now` is an argument, in seconds of any monotonic
clock."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass

WINDOW_S = 10
"""Calls that ended longer ago say nothing of now."""
MAX_DOUBLINGS = 5
"""The pause doubles this often at most: 32 times the first one."""
JITTER = 0.2
"""Share of a pause that is drawn at random, so that the breakers of several activators do not probe
in step."""


class State(enum.StrEnum):
    """Where a breaker is."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Outcome(enum.Enum):
    """How an attempt ended, as far as blame goes.

    ANSWERED: the worker answered. RAISED: it answered that user code failed: the function's own
    word, no reason to keep calls from a revision, but a reason to leave *one* instance of which
    only it says so. FAILED: crashed, cut off, or out of its execution clock. NEITHER: the caller
    left, or the worker was busy: nothing was learnt."""

    ANSWERED = enum.auto()
    RAISED = enum.auto()
    FAILED = enum.auto()
    NEITHER = enum.auto()


ANSWERED = Outcome.ANSWERED
"""By a name of its own for the hot path: looking a member up on its enum takes as long as five
attributes (Python 3.11)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerTerms:
    """When a breaker opens and for how long.

    Attributes:
        error_ratio: failed share from which on it opens.
        min_calls: calls in the window below which nothing is concluded.
        open_s: the first pause.
    """

    error_ratio: float = 0.5
    min_calls: int = 20
    open_s: float = 5.0


class Window:
    """How many of the calls of the last WINDOW_S seconds failed, to the second. A quiet one costs
    nothing."""

    __slots__ = ("_calls", "_failed", "_second")

    def __init__(self) -> None:
        self._second = -WINDOW_S
        self._calls = [0] * WINDOW_S
        self._failed = [0] * WINDOW_S

    def __repr__(self) -> str:
        return f"<Window {sum(self._failed)} of {sum(self._calls)} failed>"

    def add(self, now: float, *, failed: bool) -> None:
        """One more has ended."""
        self._turn(now)
        slot = self._second % WINDOW_S
        self._calls[slot] += 1
        self._failed[slot] += failed

    def counts(self, now: float) -> tuple[int, int]:
        """(calls, failed)."""
        self._turn(now)
        return sum(self._calls), sum(self._failed)

    def clear(self) -> None:
        """Begin anew."""
        self._calls = [0] * WINDOW_S
        self._failed = [0] * WINDOW_S

    def _turn(self, now: float) -> None:
        second = int(now)
        if second <= self._second:
            return  # the same second, or a clock that jumped back: nothing is forgotten for it
        for passed in range(max(self._second + 1, second - WINDOW_S + 1), second + 1):
            self._calls[passed % WINDOW_S] = self._failed[passed % WINDOW_S] = 0
        self._second = second


class Breaker:
    """See the module. Owner: the event loop; every method is synchronous.

    Attributes:
        error_ratio: failed share of the calls that made it open last.
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
        """Whether one more call may go; asking changes nothing."""
        if self.state is State.CLOSED:
            return True
        return not self._is_probing if self.state is State.HALF_OPEN else now >= self._until

    def go(self, now: float) -> None:
        """One that was admitted goes: it is the probe, unless the breaker is closed."""
        if self.state is State.OPEN and now >= self._until:
            self.state = State.HALF_OPEN
        self._is_probing = self.state is State.HALF_OPEN

    def ended(self, ending: Outcome, now: float) -> None:
        """A call ended. Whatever was under way when the breaker opened tells nothing new while it
        is open."""
        if self.state is State.HALF_OPEN:
            self._probed(ending, now)
        elif self.state is State.CLOSED and ending is not Outcome.NEITHER:
            self._window.add(now, failed=ending is Outcome.FAILED)
            if ending is Outcome.FAILED:
                self._look(now)

    def _probed(self, ending: Outcome, now: float) -> None:
        self._is_probing = False
        if ending is Outcome.FAILED:
            self._doublings = min(self._doublings + 1, MAX_DOUBLINGS)
            self._open(now)
        elif ending is not Outcome.NEITHER:
            self.state, self._doublings = State.CLOSED, 0
            self._window.clear()

    def _look(self, now: float) -> None:
        calls, failed = self._window.counts(now)
        if calls >= self._terms.min_calls and failed >= calls * self._terms.error_ratio:
            self.error_ratio = failed / calls
            self._open(now)

    def _open(self, now: float) -> None:
        pause_s = self._terms.open_s * 2**self._doublings
        self._until = now + pause_s * (1 + JITTER * self._rng.random())
        self.state = State.OPEN

    def retry_after_s(self, now: float) -> float:
        """Seconds until it is worth while to come again; at least one, because then a probe may
        still be out."""
        return max(1.0, self._until - now)

    def is_quiet(self, now: float) -> bool:
        """Whether there is nothing to watch: closed, and nothing failed of late."""
        return self.state is State.CLOSED and not self._window.counts(now)[1]
