"""Which instance an activator gives up for others that were refused a start: a pure choice.

An idle instance goes to a member below its fair share at once, and to one that merely wants more after IDLE_SURPLUS_S. A busy one goes
only to a member below its fair share, if this activator is above its own; where there are fewer instances than members, they take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from activator.instances import Instance
from activator.shared.state import Want, fair_share

IDLE_SURPLUS_S = 1.0
"""Time without a call after which an instance is spare, though its scaledown_window is not over."""
TURN_S = 2.0
"""How long the others wait for a turn: long against a FORK, short against a caller's patience."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What others want of a revision, and what this activator needs of it.

    Attributes:
        want: members that were refused.
        starved_s: for how long some member has been below its fair share without getting more.
        members: living activators.
        min_instances: what this activator keeps warm.
        max_instances: bound of all activators together.
        waiting: calls that wait here.
    """

    want: Want
    starved_s: float
    members: int
    min_instances: int
    max_instances: int
    waiting: int


def surplus(live: Sequence[Instance], claim: Claim, now: float) -> Instance | None:
    """The instance to drain, or None to keep them all."""
    if not live:
        return None
    least = min(live, key=lambda instance: (instance.in_flight, instance.idle_since))
    if least.in_flight or claim.waiting:
        return least if claim.want.starving and _must_share(len(live), claim) else None
    if claim.want.starving:
        return least
    return least if now - least.idle_since >= IDLE_SURPLUS_S and len(live) > claim.min_instances else None


def _must_share(held: int, claim: Claim) -> bool:
    if claim.max_instances < claim.members:
        return claim.starved_s >= TURN_S
    return held > fair_share(claim.max_instances, claim.members)
