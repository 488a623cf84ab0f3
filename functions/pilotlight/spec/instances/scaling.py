"""How many instances a function has, and how long idle ones are kept."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pilotlight.errors import InvalidInput
from pilotlight.spec.policies import MAX_SCHEDULES, ScalingSchedule, require_in_range

FIXED_WINDOW_S = 60.0
"""Idle time before an instance is removed, where a function says none and nothing predicts its
pauses."""
AUTO_WINDOW_S = 3600.0
"""`scaledown_window="auto"`: an instance that is idle for this long is removed in any case."""
WAITING_COST = 10.0
"""`scaledown_window="auto"`: default cost of a second of a waiting caller, in idle seconds of an
instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Number and lifetime of instances.

    Attributes:
        max_inputs: hard limit of concurrent calls on one instance.
        target_inputs: calls per instance that the autoscaler aims at; None means max_inputs.
        min_instances, max_instances: bounds of the number of instances.
        buffer_instances: spare instances while active: a number, or a share of the busy ones such
            as "15%".
        schedules: windows of time with a larger minimum.
        scaledown_window_s: idle time before an instance is removed, including the last one. With a
            `waiting_cost`, the maximum of that time. None = nothing was said: a deploy sets
            the platform's default (`settled`).
        waiting_cost: if set, the idle time is derived from the intervals between calls
            (`scaledown_window="auto"`): how many idle seconds of an instance one second of a
            waiting caller is worth. None = a fixed time.
        keep_asleep_s: how long an idle instance sleeps before it is removed, to be woken by the
            next call (WAKE); 0 = not at all.
        max_queued: calls that may wait for an instance; further ones get status 429.
        latency_objective_s: a call that waits longer triggers a scale-up; None = off."""

    max_inputs: int = 1
    target_inputs: int | None = None
    min_instances: int = 0
    max_instances: int = 8
    schedules: tuple[ScalingSchedule, ...] = ()
    buffer_instances: int | str = 0
    scaledown_window_s: float | None = None
    waiting_cost: float | None = None
    keep_asleep_s: float = 0.0
    max_queued: int = 1000
    latency_objective_s: float | None = None

    def __post_init__(self) -> None:
        require_in_range("max_inputs", self.max_inputs, 1, 10_000)
        if self.target_inputs is not None:
            require_in_range("target_inputs", self.target_inputs, 1, self.max_inputs)
        require_in_range("min_instances", self.min_instances, 0, 1000)
        require_in_range("max_instances", self.max_instances, max(1, self.min_instances), 1000)
        if len(self.schedules) > MAX_SCHEDULES:
            raise InvalidInput(
                f"scaling_schedule: {len(self.schedules)} entries, at most {MAX_SCHEDULES}",
                parameter="scaling_schedule",
            )
        for one in self.schedules:
            require_in_range("min_instances", one.min_instances, 1, self.max_instances)
        require_in_range("scaledown_window_s", self.window_s, 0, 86_400)
        if self.waiting_cost is not None:
            require_in_range("waiting_cost", self.waiting_cost, 0, 10_000)
        require_in_range("keep_asleep_s", self.keep_asleep_s, 0, 7 * 86_400)
        require_in_range("max_queued", self.max_queued, 0, 1_000_000)
        buffer_count(self.buffer_instances, busy=1)

    @property
    def window_s(self) -> float:
        """`scaledown_window_s`; FIXED_WINDOW_S where nothing was said."""
        return FIXED_WINDOW_S if self.scaledown_window_s is None else self.scaledown_window_s

    def settled(self, *, predicts: bool) -> Scaling:
        """With a window where nothing was said. `predicts`: whether the fleet's autoscaler can keep
        instances by the pauses between calls."""
        if self.scaledown_window_s is not None:
            return self
        if self.waiting_cost is None and not predicts:
            return replace(self, scaledown_window_s=FIXED_WINDOW_S)
        cost = WAITING_COST if self.waiting_cost is None else self.waiting_cost
        return replace(self, scaledown_window_s=AUTO_WINDOW_S, waiting_cost=cost)


def buffer_count(buffer: int | str, *, busy: int) -> int:
    """Return the number of spare instances for `busy` busy ones: a number, or a share such as "15%"
    rounded up. Raises InvalidInput."""
    if isinstance(buffer, int) and not isinstance(buffer, bool):
        require_in_range("buffer_instances", buffer, 0, 1000)
        return buffer
    text = str(buffer)
    try:
        percent = float(text.removesuffix("%"))
    except ValueError:
        percent = -1.0
    if not text.endswith("%") or not 0 <= percent <= 1000:
        raise InvalidInput(
            f"buffer_instances = {buffer!r}: must be a number, or a share from 0% to 1000% such as "
            f"'15%'"
        )
    return -int(-busy * percent // 100)
