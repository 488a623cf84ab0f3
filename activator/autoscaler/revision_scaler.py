"""The autoscaler's state of one revision: its windows, its decider's state, and the last
decision."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from activator.autoscaler.decider import (
    DeciderSpec,
    DeciderState,
    ScaleDecision,
    decide,
    initial_state,
)
from activator.autoscaler.idle_histogram import IdleHistogram
from activator.autoscaler.kpa import panic_window_s
from activator.autoscaler.observation import RevisionObservation
from activator.autoscaler.windows import TimeWindow
from activator.balancing.instance import slots_of
from activator.balancing.throttler import Throttler

log = logging.getLogger(__name__)

PANIC_WINDOW_PERCENT = 10.0


class RevisionScaler:
    """One revision's throttler with its windows and the decider's state. Owner: the AutoscalerLoop.
    `gaps`: the recorded pauses of its function, which outlive it."""

    __slots__ = (
        "concurrency",
        "decision",
        "gaps",
        "name",
        "panic",
        "recorded_at",
        "spec",
        "stable",
        "state",
        "throttler",
    )

    def __init__(
        self, name: str, throttler: Throttler, now: float, gaps: IdleHistogram | None = None
    ) -> None:
        self.name = name
        self.gaps = gaps or IdleHistogram()
        self.throttler = throttler
        self.spec = DeciderSpec.of(throttler.target.spec, slots=slots_of(throttler.target.spec))
        self.stable = TimeWindow(self.spec.kpa.stable_window_s)
        self.panic = TimeWindow(panic_window_s(self.spec.kpa.stable_window_s, PANIC_WINDOW_PERCENT))
        self.state: DeciderState = initial_state(
            now, spec=self.spec, ready=len(throttler.instances)
        )
        self.recorded_at = now
        self.concurrency = 0.0
        self.decision: ScaleDecision | None = None

    def __repr__(self) -> str:
        return f"<RevisionScaler {self.throttler!r} last {self.decision}>"

    @property
    def is_shadow(self) -> bool:
        """Whether it receives mirrored calls."""
        return self.throttler.target.is_shadow

    def measure(self, now: float) -> float:
        """Average concurrent calls since the last call of this method."""
        self.concurrency = self.throttler.load.consume_average(now, now - self.recorded_at)
        self.recorded_at = now
        return self.concurrency

    def record(self, now: float, concurrency: float) -> None:
        """Record a load in both windows."""
        self.stable.record(now, concurrency)
        self.panic.record(now, concurrency)
        if self.spec.keep is not None:
            slots = self.throttler.slots_each
            self.gaps.record(
                now,
                min(
                    len(list(self.throttler.live())),
                    math.ceil(self.throttler.load.consume_peak() / slots),
                ),
            )

    def decide(self, now: float, occupancy: float | None = None) -> ScaleDecision:
        """Decide how many instances there should be now. `occupancy`: of its batches, None = there
        were none."""
        throttler = self.throttler
        live = list(throttler.live())
        observed = RevisionObservation(
            stable=None if self.stable.is_empty(now) else self.stable.average(now),
            panic=None if self.panic.is_empty(now) else self.panic.average(now),
            ready=len(live),
            starting=throttler.starting,
            in_flight=throttler.in_flight,
            waiting=throttler.waiting,
            idle_s=tuple(now - i.idle_since for i in live if not i.in_flight),
            oldest_wait_s=throttler.oldest_wait_s(now) or 0.0,
            start_s=throttler.expected_start_s(),
            call_s=throttler.call_s(now),
            engine=throttler.engine_load(now),
            occupancy=occupancy,
            kept=self._kept(now, len(live)),
            is_crowded=throttler.is_crowded,
        )
        spec = self.spec
        # min_instances changes when a budget is spent, activators share it, or a rollout keeps the
        # revision for a rollback
        if spec.min_instances != throttler.min_instances:
            spec = replace(spec, min_instances=throttler.min_instances)
        decision, self.state = decide(now, observed, spec, self.state)
        if self.decision is None or decision.desired != self.decision.desired:
            log.info(
                "scale app=%s function=%s revision=%s decision=%s",
                throttler.target.app,
                throttler.target.function,
                throttler.target.revision,
                decision,
            )
        self.decision = decision
        throttler.set_desired_instances(decision.wanted)
        return decision

    def _kept(self, now: float, ready: int) -> int | None:
        terms, start_s = self.spec.keep, self.throttler.expected_start_s()
        if terms is None or start_s is None:
            return None
        return self.gaps.kept(
            now, instances=ready, start_s=start_s, terms=terms, is_crowded=self.throttler.is_crowded
        )
