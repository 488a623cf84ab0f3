"""The circuit breaker of a node: decides whether starts are requested from its agent.

Calls wait for an agent that is briefly unavailable (replaced or restarting). An agent that is
unavailable for longer than AWAY_S, or that fails starts for reasons other than the revision, gets
only occasional probes, and calls that need a start fail at once. A revision that does not start
and a full node do not count against the node."""

from __future__ import annotations

import time
from collections.abc import Callable

from activator.resilience.breaker import Breaker, BreakerTerms, Outcome
from pilotlight import errors
from snapshotter import errors as agent_errors

AWAY_S = 10.0
"""Seconds that calls wait for an agent that does not answer: a restart takes one or two."""
PROBE_S = 1.0
"""Seconds between probes of an unavailable agent: a refused connection costs nothing."""


class NodeBreaker:
    """The breaker of one node. Owner: its fleet."""

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
        """Check before a start. Raises CircuitOpen while starts on the node are suspended."""
        now = self._clock()
        if self._away_since is not None and now - self._away_since >= AWAY_S:
            if now < self._probe_at:
                away_s = now - self._away_since
                raise errors.CircuitOpen(
                    f"the node agent has not answered for {away_s:.0f} s: no instance can be "
                    f"started",
                    retry_after_s=2,
                )
            self._probe_at = now + PROBE_S
        if not self._breaker.admits(now):
            ratio = self._breaker.error_ratio
            raise errors.CircuitOpen(
                f"the node agent failed {ratio:.0%} of recent starts: starts are suspended except "
                f"for occasional probes",
                retry_after_s=self._breaker.retry_after_s(now),
                error_ratio=round(ratio, 3),
            )
        self._breaker.record_start(now)

    def started(self) -> None:
        """An instance started."""
        self._away_since = None
        self._breaker.record_outcome(Outcome.ANSWERED, self._clock())

    def failed(self, error: BaseException) -> None:
        """A start failed with `error`."""
        now = self._clock()
        if isinstance(error, agent_errors.AgentUnavailable):
            if self._away_since is None:
                self._away_since = now
            self._breaker.record_outcome(Outcome.NEITHER, now)
            return
        if isinstance(error, agent_errors.SnapshotterError):
            self._away_since = None
        self._breaker.record_outcome(_blame(error), now)


def _blame(error: BaseException) -> Outcome:
    """Return the outcome for the node: specific error classes concern the revision or mean that the
    node is full; the base class means that the agent failed."""
    if type(error) is agent_errors.SnapshotterError:
        return Outcome.FAILED
    return Outcome.ANSWERED if isinstance(error, agent_errors.SnapshotterError) else Outcome.NEITHER
