"""When a batch that could run is released, and why. Pure: `now` and all times are seconds of one
clock.

It is asked only while there is a free lane: as long as bodies compute, batches gather for nothing.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from pilotlight.spec.policies import BatchPolicy
from pilotlight.worker.batching.latency_model import LatencyFit

SAFETY = 1.25
"""A batch is taken to need so much more than expected where a member's deadline is at stake."""
SAFETY_S = 0.002
"""And so much more for its way back."""
SLACK_S = 0.0005
"""What is due within this is due: the event loop's timers go by milliseconds."""


class ReleaseReason(enum.StrEnum):
    """Why a batch was released.

    FULL: it has `max_batch_size` calls. WAITED: its first call was kept waiting for `wait_ms`.
    ENOUGH: waiting longer does not pay. ALONE: the same for a single call, of which no other came
    that could share its batch. DEADLINE: a member would come too late otherwise. IDLE: nothing else
    can come, all slots of the instance are taken by calls that wait. DRAINED: the instance is on
    its way out. RETRIED: a call by itself after its batch had failed."""

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
    """A batch that gathers, as it is now.

    Attributes:
        size: calls in it, 1 or more.
        oldest_at: when its first one came. `held_s`: for how long of that it could have run.
        silent_since: since when it could have run and nobody came.
        deadline_at: the earliest of its members' ends; infinite without any.
        cost: of such batches; None = unknown.
        patience_s: how long such a silence pays.
        can_grow: whether the instance has a slot for another call.
        is_draining: the instance takes no more calls.
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
    """`reason`: why it is released now; None = it waits, and time alone changes that at
    `look_again_at`."""

    reason: ReleaseReason | None
    look_again_at: float = math.inf


def decide_release(now: float, seen: BatchState, policy: BatchPolicy) -> ReleaseDecision:
    """Whether the batch is released at `now`."""
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
    """(when, why) its waiting ends; of those at the same time the first counts."""
    needed_s = SAFETY_S + (0.0 if seen.cost is None else SAFETY * seen.cost.seconds(seen.size))
    deadline, wait_s = (seen.deadline_at - needed_s, ReleaseReason.DEADLINE), policy.wait_ms / 1000
    if not policy.adaptive or seen.cost is None:
        return [deadline, (seen.oldest_at + wait_s, ReleaseReason.WAITED)]
    enough = (
        seen.silent_since + seen.patience_s,
        ReleaseReason.ALONE if seen.size == 1 else ReleaseReason.ENOUGH,
    )
    return [deadline, (now + wait_s - seen.held_s, ReleaseReason.WAITED), enough]
