"""The autoscaler's state of one revision: its windows, its decider's state, and the last
decision."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from functools import cached_property

from activator.autoscaler.decider import decide, initial_state
from activator.autoscaler.idle_histogram import IdleHistogram, IdleHistograms
from activator.autoscaler.kpa import PANIC_WINDOW_PERCENT, panic_window_s
from activator.autoscaler.observation import RevisionObservation
from activator.autoscaler.scaling_decision import DeciderSpec, DeciderState, ScaleDecision
from activator.autoscaler.windows import TimeWindow
from activator.balancing.instance import slots_of
from activator.balancing.throttler import Throttler

log = logging.getLogger(__name__)


class RevisionScaler:
    """One revision's throttler with its windows and the decider's state, which the autoscaler's
    task makes when it first needs them: a call from zero does not wait for that. Owner: the
    AutoscalerLoop. `pauses`: the recorded pauses of functions, which outlive it."""

    def __init__(self, name: str, throttler: Throttler, now: float, pauses: IdleHistograms) -> None:
        self.name = name
        self.throttler = throttler
        self._pauses = pauses
        self._made_at = self.recorded_at = now
        self.adopted = 0
        """Ready instances from before this activator started, known before the first decision."""
        self.concurrency = 0.0
        self.decision: ScaleDecision | None = None

    @cached_property
    def spec(self) -> DeciderSpec:
        """What the decider reads of the function's spec."""
        return DeciderSpec.of(
            self.throttler.target.spec, slots=slots_of(self.throttler.target.spec)
        )

    @cached_property
    def stable(self) -> TimeWindow:
        """Load in the stable window."""
        return TimeWindow(self.spec.kpa.stable_window_s)

    @cached_property
    def panic(self) -> TimeWindow:
        """Load in the panic window."""
        return TimeWindow(panic_window_s(self.spec.kpa.stable_window_s, PANIC_WINDOW_PERCENT))

    @cached_property
    def state(self) -> DeciderState:
        """The state of the decider."""
        return initial_state(self._made_at, spec=self.spec, ready=self.adopted)

    @cached_property
    def gaps(self) -> IdleHistogram:
        """The recorded pauses of its function."""
        return self._pauses.get_or_create(self.name)

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
            kept=self._kept_by_histogram(now, len(live)),
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

    def _kept_by_histogram(self, now: float, ready: int) -> int | None:
        terms, start_s = self.spec.keep, self.throttler.expected_start_s()
        if terms is None or start_s is None:
            return None
        return self.gaps.kept(
            now, instances=ready, start_s=start_s, terms=terms, is_crowded=self.throttler.is_crowded
        )
