"""Whether starts are asked of a node at all: its breaker. Pure but for what it raises.

An agent that is away for a moment (it is replaced, it restarts) is waited for: calls keep their
place. Away for longer than AWAY_S, or failing starts for reasons that are no revision's own, it is
asked by a probe now and then, and calls that need a start are told at once. A revision that does
not start, and a node that is full, say nothing against the node."""

from __future__ import annotations

import time
from collections.abc import Callable

from activator.resilience.breaker import Breaker, BreakerTerms, Outcome
from pilotlight import errors
from snapshotter import errors as agent_errors

AWAY_S = 10.0
"""Calls wait so long for an agent that does not answer: a restart takes one or two."""
PROBE_S = 1.0
"""One that is away is asked so often: a refused connection costs nothing."""


class NodeBreaker:
    """One node's. Owner: its fleet."""

    def __init__(
        self,
        terms: BreakerTerms | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._breaker = Breaker(terms or BreakerTerms())
        self._clock = clock
        self._away_since: float | None = None
        self._probe_at = 0.0

    def __repr__(self) -> str:
        return f"<NodeBreaker {self._breaker!r}{' away' if self._away_since is not None else ''}>"

    def check(self) -> None:
        """Before a start. Raises CircuitOpen while the node is left alone."""
        now = self._clock()
        if self._away_since is not None and now - self._away_since >= AWAY_S:
            if now < self._probe_at:
                away_s = now - self._away_since
                raise errors.CircuitOpen(
                    f"the node agent has not answered for {away_s:.0f} s: nothing can be started",
                    retry_after_s=2,
                )
            self._probe_at = now + PROBE_S
        if not self._breaker.admits(now):
            ratio = self._breaker.error_ratio
            raise errors.CircuitOpen(
                f"the node agent failed {ratio:.0%} of the starts of late: it is tried again now "
                f"and then",
                retry_after_s=self._breaker.retry_after_s(now),
                error_ratio=round(ratio, 3),
            )
        self._breaker.go(now)

    def started(self) -> None:
        """An instance came up."""
        self._away_since = None
        self._breaker.ended(Outcome.ANSWERED, self._clock())

    def failed(self, error: BaseException) -> None:
        """None came up."""
        now = self._clock()
        if isinstance(error, agent_errors.AgentUnavailable):
            if self._away_since is None:
                self._away_since = now
            self._breaker.ended(Outcome.NEITHER, now)
            return
        if isinstance(error, agent_errors.SnapshotterError):
            self._away_since = None
        self._breaker.ended(_blame(error), now)


def _blame(error: BaseException) -> Outcome:
    """Errors of a kind of their own are the revision's, or mean that there is no room; those
    without one are the agent's."""
    if type(error) is agent_errors.SnapshotterError:
        return Outcome.FAILED
    return Outcome.ANSWERED if isinstance(error, agent_errors.SnapshotterError) else Outcome.NEITHER
