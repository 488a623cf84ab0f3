"""Which instance an activator gives up for others that were refused a start: a pure choice.

An idle instance goes to a member below its fair share at once, and to one that merely wants more
after IDLE_SURPLUS_S. A busy one goes only to a member below its fair share, if this activator is
above its own; where there are fewer instances than members, they take turns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from activator.balancing.instance import Instance
from activator.coordination.state import InstanceDemand, fair_share
from activator.routing.call_target import CallTarget

IDLE_SURPLUS_S = 1.0
"""Time without a call after which an instance is spare, though its scaledown_window is not over."""
TURN_S = 2.0
"""How long the others wait for a turn: long against a FORK, short against a caller's patience."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceRequest:
    """What others want of a revision, and what this activator needs of it.

    Attributes:
        want: members that were refused.
        starved_s: for how long some member has been below its fair share without getting more.
        members: living activators.
        min_instances: what this activator keeps warm.
        max_instances: bound of all activators together.
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
    """The instance to drain, or None to keep them all."""
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
    """The throttler of a revision, as far as it is asked for instances."""

    target: CallTarget

    @property
    def min_instances(self) -> int:
        """How many it keeps warm."""
        ...

    @property
    def waiting(self) -> int:
        """Calls without a slot."""
        ...

    @property
    def is_making_room(self) -> bool:
        """Whether an instance is on its way out."""
        ...

    def live(self) -> Iterable[Instance]:
        """Instances that take calls."""
        ...


class RebalanceState:
    """For how long the other activators have lacked instances of a revision, and which one they are
    given. Owner: a Throttler."""

    __slots__ = ("_starved_since",)

    def __init__(self) -> None:
        self._starved_since: float | None = None

    def __repr__(self) -> str:
        return f"<RebalanceState starved since {self._starved_since}>"

    def choose(
        self,
        giver: Donor,
        want: InstanceDemand | None,
        members: int,
        now: float,
        *,
        most: int | None = None,
    ) -> Instance | None:
        """The instance to drain for others that `want` one (None: they want nothing). A gift ends
        their time of want.

        `most`: instances that there can be of it now; None = as many as it may have.
        """
        if want is None or not want.starving:
            self._starved_since = None
        elif self._starved_since is None:
            self._starved_since = now
        if want is None or giver.is_making_room:
            return None
        claim = RebalanceRequest(
            want=want,
            starved_s=now - self._starved_since if self._starved_since is not None else 0.0,
            members=members,
            min_instances=giver.min_instances,
            max_instances=_least(giver.target.spec.scaling.max_instances, most),
            waiting=giver.waiting,
        )
        victim = pick_instance_to_yield(list(giver.live()), claim, now)
        if victim is not None:
            self._starved_since = None
        return victim


def _least(max_instances: int, most: int | None) -> int:
    return max_instances if most is None else min(max_instances, most)
