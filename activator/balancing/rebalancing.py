"""Selects the instance that an activator yields to others that were refused a start. Pure
functions.

An idle instance is yielded to a member below its fair share at once, and to other requesters after
IDLE_SURPLUS_S. A busy one is yielded only to a member below its fair share, if this activator is
above its own; where there are fewer instances than members, they take turns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from activator.balancing.instance import Instance
from activator.coordination.state import InstanceDemand, fair_share
from activator.routing.call_target import CallTarget

IDLE_SURPLUS_S = 1.0
"""Seconds without a call after which an instance is spare, although its scaledown_window has not
ended."""
TURN_S = 2.0
"""Seconds that the others wait for a turn: long compared with a FORK start, short compared with a
caller's timeout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceRequest:
    """Demand of other members for a revision, and the needs of this activator.

    Attributes:
        want: members that were refused.
        starved_s: how long some member has been below its fair share without getting more.
        members: live activators.
        min_instances: instances that this activator keeps warm.
        max_instances: limit of all activators together.
        waiting: calls that wait here.
    """

    want: InstanceDemand
    starved_s: float
    members: int
    min_instances: int
    max_instances: int
    waiting: int


def pick_instance_to_yield(
    live: Sequence[Instance], claim: RebalanceRequest, now: float
) -> Instance | None:
    """Return the instance to drain, or None to keep all."""
    if not live:
        return None
    least = min(live, key=lambda instance: (instance.in_flight, instance.idle_since))
    if least.in_flight or claim.waiting:
        return least if claim.want.starving and _must_share(len(live), claim) else None
    if claim.want.starving:
        return least
    return (
        least
        if now - least.idle_since >= IDLE_SURPLUS_S and len(live) > claim.min_instances
        else None
    )


def _must_share(held: int, claim: RebalanceRequest) -> bool:
    if claim.max_instances < claim.members:
        return claim.starved_s >= TURN_S
    return held > fair_share(claim.max_instances, claim.members)


class Donor(Protocol):
    """The part of a throttler that yields instances."""

    target: CallTarget

    @property
    def min_instances(self) -> int:
        """Number of instances that it keeps warm."""

    @property
    def waiting(self) -> int:
        """Number of calls without a slot."""

    @property
    def is_yielding(self) -> bool:
        """Whether an instance is draining or being stopped."""

    def live(self) -> Iterable[Instance]:
        """Return the instances that take calls."""


class RebalanceState:
    """Tracks how long other activators have lacked instances of a revision, and chooses the one to
    yield. Owner: a Throttler."""

    __slots__ = ("_starved_since",)

    def __init__(self) -> None:
        self._starved_since: float | None = None

    def __repr__(self) -> str:
        return f"<RebalanceState starved since {self._starved_since}>"

    def choose(
        self,
        donor: Donor,
        want: InstanceDemand | None,
        members: int,
        now: float,
        *,
        most: int | None = None,
    ) -> Instance | None:
        """Return the instance to drain for others that `want` one (None: no demand). Yielding one
        resets their starvation time.

        `most`: current limit of instances of the revision; None = max_instances.
        """
        if want is None or not want.starving:
            self._starved_since = None
        elif self._starved_since is None:
            self._starved_since = now
        if want is None or donor.is_yielding:
            return None
        claim = RebalanceRequest(
            want=want,
            starved_s=now - self._starved_since if self._starved_since is not None else 0.0,
            members=members,
            min_instances=donor.min_instances,
            max_instances=_least(donor.target.spec.scaling.max_instances, most),
            waiting=donor.waiting,
        )
        victim = pick_instance_to_yield(list(donor.live()), claim, now)
        if victim is not None:
            self._starved_since = None
        return victim


def _least(max_instances: int, most: int | None) -> int:
    return max_instances if most is None else min(max_instances, most)
