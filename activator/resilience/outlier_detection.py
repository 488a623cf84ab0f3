"""What speaks against a revision and its instances. It exists only while something does: where all
is well there is none.

Watching begins with the first failure and ends once ten seconds passed without one, so a revision
that never fails pays for none of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from activator.balancing.instance import Instance
from activator.resilience.breaker import WINDOW_S, Breaker, BreakerTerms, Outcome, State, Window
from activator.resilience.outliers import Tally, Timed, is_outlier, may_eject, slowest
from activator.routing.call_target import CallTarget
from pilotlight import errors

LOOK_S = 10.0
"""How often instances are compared by the time that their calls take."""
SLOW_LOOKS = 2
"""One that is much slower this often in a row is left."""
MAX_PAST = 16
"""Instances that are gone and still remembered: a revision that crashes has many."""
BAD = frozenset({Outcome.FAILED, Outcome.RAISED})
"""What speaks against an instance."""


class RevisionHealth:
    """The breaker of a revision, and what its instances did of late. Owner: its Throttler."""

    __slots__ = ("_ejections", "_instances", "_quiet_from", "breaker")

    def __init__(self, terms: BreakerTerms) -> None:
        self.breaker = Breaker(terms)
        self._instances: dict[str, Window] = {}
        self._ejections: list[float] = []
        self._quiet_from = 0.0

    def __repr__(self) -> str:
        return f"<Health {self.breaker!r} {len(self._ejections)} ejected>"

    def ended(self, instance_id: str, ending: Outcome, now: float) -> None:
        """A call ended; `instance_id`: "" where it never got to one, because no instance came
        up."""
        self.breaker.ended(ending, now)
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

    def let_wait(self, target: CallTarget, now: float) -> None:
        """A call that found no free slot waits, as the probe where one is due. Raises
        CircuitOpen."""
        breaker = self.breaker
        if not breaker.admits(now):
            ratio = breaker.error_ratio
            raise errors.CircuitOpen(
                f"{target.app}/{target.function} failed {ratio:.0%} of its calls of late: it is "
                f"tried again now and then",
                retry_after_s=breaker.retry_after_s(now),
                revision=target.revision,
                error_ratio=round(ratio, 3),
            )
        breaker.go(now)

    def is_over(self, now: float) -> bool:
        """Whether nothing speaks against anything any more."""
        return now >= self._quiet_from and self.breaker.state is State.CLOSED

    def should_eject(self, instance_id: str, live: Collection[str], now: float) -> bool:
        """Whether this instance is an outlier among those that take calls, and may be left; then it
        counts as left."""
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

    def _tally(self, instances: Iterable[str], now: float) -> Tally:
        counts = [
            self._instances[instance].counts(now)
            for instance in instances
            if instance in self._instances
        ]
        return Tally(sum(calls for calls, _ in counts), sum(failed for _, failed in counts))


def noted(
    health: RevisionHealth | None,
    terms: BreakerTerms,
    instance_id: str,
    ending: Outcome,
    now: float,
) -> RevisionHealth | None:
    """What is to be kept of a revision after one of its calls ended: None while all is well."""
    if health is None:
        if ending not in BAD:
            return None
        health = RevisionHealth(terms)
    health.ended(instance_id, ending, now)
    return None if ending is Outcome.ANSWERED and health.is_over(now) else health


def is_its_own(error: BaseException) -> bool:
    """Whether a call that got no slot failed by the revision's own fault: not for want of room, and
    not because its caller left."""
    if isinstance(error, errors.DeadlineExceeded):
        return error.detail.get("clock") == "startup"
    return isinstance(error, errors.StartFailed)


class LatencyOutliers:
    """Compares instances by the time that their calls take, each LOOK_S. Owner: a Throttler."""

    __slots__ = ("_looked_at", "_marks", "_slow")

    def __init__(self, now: float) -> None:
        self._looked_at = now
        self._marks: dict[str, tuple[int, float]] = {}
        self._slow: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<Pace {len(self._marks)} instances, slow {self._slow}>"

    def look(self, instances: Collection[Instance], now: float) -> Instance | None:
        """The instance that has been much slower than the others for a while; None mostly."""
        if now - self._looked_at < LOOK_S:
            return None
        self._looked_at = now
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
        if self._slow[worst] < SLOW_LOOKS or not may_eject(live=len(instances), ejected=0):
            return None
        self._slow.clear()
        return next(one for one in instances if one.id == worst)


def _since(before: tuple[int, float], instance: str, mark: tuple[int, float]) -> Timed:
    return Timed(instance, mark[0] - before[0], mark[1] - before[1])
