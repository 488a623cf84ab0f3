"""Decides when a batch is released, and why. Pure: `now` and all times are seconds of one clock.

It is evaluated only while a lane is free: while bodies compute, gathering costs nothing.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from pilotlight.spec.policies import BatchPolicy
from pilotlight.worker.batching.latency_model import LatencyFit

SAFETY = 1.25
"""Factor on a batch's expected duration when checking members' deadlines."""
SAFETY_S = 0.002
"""Time added to it for sending the response."""
SLACK_S = 0.0005
"""A batch due within this time is released: the event loop's timers have a resolution of
milliseconds."""


class ReleaseReason(enum.StrEnum):
    """Why a batch was released.

    FULL: it has `max_batch_size` calls. WAITED: its first call has waited for `wait_ms`. ENOUGH:
    waiting longer does not pay. ALONE: the same for a single call, which no other call joined.
    DEADLINE: a member would otherwise exceed its deadline. IDLE: no other call can arrive, since
    waiting calls use all slots of the instance. DRAINED: the instance is draining. RETRIED: a call
    by itself after its batch had failed."""

    FULL = "full"
    WAITED = "waited"
    ENOUGH = "enough"
    ALONE = "alone"
    DEADLINE = "deadline"
    IDLE = "idle"
    DRAINED = "drained"
    RETRIED = "retried"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchState:
    """Current state of a gathering batch.

    Attributes:
        size: number of calls, 1 or more.
        oldest_at: when its first call arrived.
        held_s: how long since then it could have run.
        silent_since: since when it could have run and no call arrived.
        deadline_at: the earliest deadline of its members; infinite without any.
        cost: expected cost of such batches; None = unknown.
        patience_s: how long such a silence pays.
        can_grow: whether the instance has a slot for another call.
        is_draining: whether the instance accepts no more calls.
    """

    size: int
    oldest_at: float
    silent_since: float
    held_s: float = 0.0
    deadline_at: float = math.inf
    cost: LatencyFit | None = None
    patience_s: float = 0.0
    can_grow: bool = True
    is_draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseDecision:
    """Whether a batch is released. `reason`: why it is released now; None = it waits, at most until
    the next evaluation at `look_again_at`."""

    reason: ReleaseReason | None
    look_again_at: float = math.inf


def decide_release(now: float, seen: BatchState, policy: BatchPolicy) -> ReleaseDecision:
    """Decide whether the batch is released at `now`."""
    if seen.size >= policy.max_batch_size:
        return ReleaseDecision(reason=ReleaseReason.FULL)
    if seen.is_draining:
        return ReleaseDecision(reason=ReleaseReason.DRAINED)
    if not seen.can_grow:
        return ReleaseDecision(reason=ReleaseReason.IDLE)
    at, reason = min(_ends(now, seen, policy), key=lambda end: end[0])
    return (
        ReleaseDecision(reason=reason)
        if now + SLACK_S >= at
        else ReleaseDecision(reason=None, look_again_at=at)
    )


def _ends(now: float, seen: BatchState, policy: BatchPolicy) -> list[tuple[float, ReleaseReason]]:
    """(time, reason) of each possible end of the wait; of equal times the first counts."""
    needed_s = SAFETY_S + (0.0 if seen.cost is None else SAFETY * seen.cost.seconds(seen.size))
    deadline, wait_s = (seen.deadline_at - needed_s, ReleaseReason.DEADLINE), policy.wait_ms / 1000
    if not policy.adaptive or seen.cost is None:
        return [deadline, (seen.oldest_at + wait_s, ReleaseReason.WAITED)]
    enough = (
        seen.silent_since + seen.patience_s,
        ReleaseReason.ALONE if seen.size == 1 else ReleaseReason.ENOUGH,
    )
    return [deadline, (now + wait_s - seen.held_s, ReleaseReason.WAITED), enough]
