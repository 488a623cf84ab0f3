"""Health tracking of a revision and its instances, which exists only while there are failures.

Tracking begins with the first failure and ends after ten seconds without one, so a revision that
never fails has no cost."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from activator.balancing.instance import Instance
from activator.resilience.breaker import WINDOW_S, Breaker, BreakerTerms, Outcome, State, Window
from activator.resilience.outliers import (
    OutcomeCounts,
    TimedRevision,
    is_outlier,
    may_eject,
    slowest,
)
from activator.routing.call_target import CallTarget
from pilotlight import errors

CHECK_S = 10.0
"""Interval at which instances are compared by the latency of their calls."""
SLOW_CHECKS = 2
"""An instance that is much slower in this many consecutive checks is ejected."""
MAX_PAST = 16
"""Ended instances that are still tracked: a crashing revision has many."""
BAD = frozenset({Outcome.FAILED, Outcome.RAISED})
"""Outcomes that count against an instance."""


class RevisionHealth:
    """The breaker of a revision, and recent outcomes of its instances. Owner: its Throttler."""

    __slots__ = ("_ejections", "_instances", "_quiet_from", "breaker")

    def __init__(self, terms: BreakerTerms) -> None:
        self.breaker = Breaker(terms)
        self._instances: dict[str, Window] = {}
        self._ejections: list[float] = []
        self._quiet_from = 0.0

    def __repr__(self) -> str:
        return (
            f"<Health {self.breaker!r} {len(self._instances)} instances, "
            f"{len(self._ejections)} ejected>"
        )

    def record_outcome(self, instance_id: str, ending: Outcome, now: float) -> None:
        """Record the outcome of a call; `instance_id`: "" where it reached none, because no
        instance started."""
        self.breaker.record_outcome(ending, now)
        if ending is Outcome.NEITHER:
            return
        is_bad = ending in BAD
        if is_bad:
            self._quiet_from = now + WINDOW_S
        if instance_id:
            window = self._instances.get(instance_id)
            if window is None:
                window = self._instances[instance_id] = Window()
            window.add(now, failed=is_bad)

    def require_admission(self, target: CallTarget, now: float) -> None:
        """Admit a call that must wait for a slot, as the probe where one is due. Raises
        CircuitOpen."""
        breaker = self.breaker
        if not breaker.admits(now):
            ratio = breaker.error_ratio
            raise errors.CircuitOpen(
                f"{target.app}/{target.function} failed {ratio:.0%} of its recent calls: calls are "
                f"refused except for occasional probes",
                retry_after_s=breaker.retry_after_s(now),
                revision=target.revision,
                error_ratio=round(ratio, 3),
            )
        breaker.record_start(now)

    def is_over(self, now: float) -> bool:
        """Return whether tracking can end: the breaker is closed, and there was no recent
        failure."""
        return now >= self._quiet_from and self.breaker.state is State.CLOSED

    def should_eject(self, instance_id: str, live: Collection[str], now: float) -> bool:
        """Return whether this instance is an outlier among those that take calls, and may be
        ejected; then it is counted as ejected."""
        self._ejections = [at for at in self._ejections if now - at < WINDOW_S]
        if len(self._instances) > 2 * len(live) + MAX_PAST:
            self._instances = {
                instance: window for instance, window in self._instances.items() if instance in live
            }
        if instance_id not in live or not may_eject(live=len(live), ejected=len(self._ejections)):
            return False
        mine = self._tally((instance_id,), now)
        if not is_outlier(
            mine, self._tally((other for other in live if other != instance_id), now)
        ):
            return False
        self._ejections.append(now)
        return True

    def _tally(self, instances: Iterable[str], now: float) -> OutcomeCounts:
        counts = [
            self._instances[instance].counts(now)
            for instance in instances
            if instance in self._instances
        ]
        return OutcomeCounts(sum(calls for calls, _ in counts), sum(failed for _, failed in counts))


def record_outcome(
    health: RevisionHealth | None,
    terms: BreakerTerms,
    instance_id: str,
    ending: Outcome,
    now: float,
) -> RevisionHealth | None:
    """Return the health of a revision after one of its calls ended; None while there are no
    failures."""
    if health is None:
        if ending not in BAD:
            return None
        health = RevisionHealth(terms)
    health.record_outcome(instance_id, ending, now)
    return None if ending is Outcome.ANSWERED and health.is_over(now) else health


def is_function_fault(error: BaseException) -> bool:
    """Return whether a call without a slot failed because of the revision: not for lack of
    capacity, and not because its caller disconnected."""
    if isinstance(error, errors.DeadlineExceeded):
        return error.detail.get("clock") == "startup"
    return isinstance(error, errors.StartFailed)


class LatencyOutliers:
    """Compares instances by the latency of their calls, each CHECK_S. Owner: a Throttler."""

    __slots__ = ("_checked_at", "_marks", "_slow")

    def __init__(self, now: float) -> None:
        self._checked_at = now
        self._marks: dict[str, tuple[int, float]] = {}
        self._slow: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<Pace {len(self._marks)} instances, slow {self._slow}>"

    def find_slow_instance(self, instances: Collection[Instance], now: float) -> Instance | None:
        """Return the instance that has been much slower than the others in SLOW_CHECKS checks; None
        otherwise."""
        if now - self._checked_at < CHECK_S:
            return None
        self._checked_at = now
        before, self._marks = (
            self._marks,
            {one.id: (one.calls, one.held_s + one.in_flight * now) for one in instances},
        )
        worst = slowest(
            [
                _since(before.get(instance, (0, 0.0)), instance, mark)
                for instance, mark in self._marks.items()
            ]
        )
        if worst is None:
            self._slow.clear()
            return None
        self._slow = {worst: self._slow.get(worst, 0) + 1}
        if self._slow[worst] < SLOW_CHECKS or not may_eject(live=len(instances), ejected=0):
            return None
        self._slow.clear()
        return next(one for one in instances if one.id == worst)


def _since(before: tuple[int, float], instance: str, mark: tuple[int, float]) -> TimedRevision:
    return TimedRevision(instance, mark[0] - before[0], mark[1] - before[1])
