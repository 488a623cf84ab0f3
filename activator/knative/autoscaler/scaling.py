"""How many pods one revision should have, from the reports of all activators.

Uses the platform's own `decide` on the aggregated observation. Claimed pods are released only by
their activators, so only unclaimed pods are idle; starting pods count as capacity as long as calls
wait for them. The scale is never below what activators have claimed and wait for, and does not
shrink while reports are missing.

Instances in promoted pods count as pods as long as an activator has them, those that a start waits
for as starting ones, and no own pod is made in place of either. An activator whose load lasts asks
for pods that replace them (`warm.handover`): these come in addition, and the promoted ones go when
they serve. An own pod that was made stays meanwhile: it is on its way to take over."""

from __future__ import annotations

from dataclasses import dataclass, replace

from activator.autoscaler.decider import decide, initial_state
from activator.autoscaler.kpa import (
    ACTIVATION_BUFFER_S,
    PANIC_WINDOW_PERCENT,
    clamp,
    panic_window_s,
)
from activator.autoscaler.observation import RevisionObservation
from activator.autoscaler.scaling_decision import DeciderSpec, DeciderState
from activator.autoscaler.windows import TimeWindow
from activator.balancing.instance import slots_of
from activator.knative.autoscaler.load_aggregation import RevisionLoad
from activator.knative.autoscaler.podautoscalers import Scalable
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.instances.scaling import Scaling

FREE_S = 1e9
"""Idle time of an unclaimed pod: its last owner released it after the function's window."""
NO_BOUND = 1000
GIVEN_UP_S = 60.0
"""Pause before a revision that did not start within its deadline is tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RevisionStatus:
    """Current state: pods requested by the Deployment, pods that Kubernetes reports ready, and
    whether one waits for room."""

    replicas: int
    ready: int
    is_crowded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """`wanted`: desired number of pods; `why`: the decider's signal, or `asked`, `held_on`,
    `timed_out`, `initial`."""

    wanted: int
    why: str
    has_timed_out: bool = False


def spec_of(scalable: Scalable, spec: FunctionSpec | None) -> DeciderSpec:
    """Settings from the function's spec; if it is unknown (its route has not arrived yet), from the
    PodAutoscaler."""
    most = scalable.max_scale or NO_BOUND
    if spec is None:
        scaling = Scaling(
            max_inputs=max(1, scalable.concurrency), max_instances=max(1, most, scalable.min_scale)
        )
        own = DeciderSpec.from_scaling(scaling)
    else:
        own = DeciderSpec.of(spec, slots=slots_of(spec))
    core = replace(
        own.kpa, reachable=scalable.reachable, scale_down_delay_s=scalable.scale_down_delay_s
    )
    return replace(own, kpa=core, min_instances=scalable.min_scale, max_instances=most)


class RevisionScale:
    """One revision's windows and decider state. Owner: the leader during its term; `now`: its
    monotonic clock."""

    def __init__(self, spec: DeciderSpec, now: float, *, ready: int) -> None:
        self.spec = spec
        self._stable = TimeWindow(spec.kpa.stable_window_s)
        self._panic = TimeWindow(panic_window_s(spec.kpa.stable_window_s, PANIC_WINDOW_PERCENT))
        self._state: DeciderState = initial_state(now, spec=spec, ready=ready)
        self._activating_since: float | None = None
        self._given_up_at: float | None = None
        self.decision: Decision | None = None

    def __repr__(self) -> str:
        return f"<RevisionScale {self.decision}>"

    def respec(self, spec: DeciderSpec) -> None:
        """Change the settings; the windows are kept."""
        self.spec = spec

    def record(self, now: float, concurrency: float | None) -> None:
        """Record one second's load; None = unknown."""
        if concurrency is not None:
            self._stable.record(now, concurrency)
            self._panic.record(now, concurrency)

    def decide(
        self,
        now: float,
        scalable: Scalable,
        merged: RevisionLoad,
        status: RevisionStatus,
        *,
        may_shrink: bool,
    ) -> Decision:
        """Decide the desired number of pods."""
        decision = self._bounded(
            scalable, self._wanted(now, scalable, merged, status, may_shrink=may_shrink)
        )
        decision = self._within_deadline(
            now, scalable, decision, serves=bool(status.ready or merged.held)
        )
        self.decision = decision
        return decision

    def _wanted(
        self,
        now: float,
        scalable: Scalable,
        merged: RevisionLoad,
        status: RevisionStatus,
        *,
        may_shrink: bool,
    ) -> Decision:
        observed = self._observed(now, merged, status)
        answer, self._state = decide(now, observed, self.spec, self._state)
        replacing = min(status.replicas, answer.desired) if merged.promoted else 0
        wanted, why = max(replacing, answer.desired - merged.bridging, 0), answer.signal
        if merged.floor > wanted:
            wanted, why = merged.floor, "asked"
        is_heard = merged.concurrency is not None and answer.valid
        if wanted < status.replicas and not (is_heard and may_shrink):
            wanted, why = status.replicas, "held_on"
        return Decision(wanted=wanted, why=why)

    def _observed(
        self, now: float, merged: RevisionLoad, status: RevisionStatus
    ) -> RevisionObservation:
        held, bridging = len(merged.held), len(merged.promoted)
        own = min(status.replicas, max(status.ready, held))
        ready = own + bridging
        busy = sum(1 for calls in (*merged.held.values(), *merged.promoted.values()) if calls)
        free = max(0, own - held)
        is_heard = merged.concurrency is not None
        return RevisionObservation(
            stable=self._stable.average(now)
            if is_heard and not self._stable.is_empty(now)
            else None,
            panic=self._panic.average(now) if is_heard and not self._panic.is_empty(now) else None,
            ready=ready,
            starting=min(status.replicas - own, max(0, merged.floor - own)) + merged.promised,
            in_flight=merged.in_flight,
            waiting=merged.waiting,
            idle_s=(*(FREE_S for _ in range(free)), *(0.0 for _ in range(ready - free - busy))),
            oldest_wait_s=merged.oldest_wait_s,
            start_s=merged.start_s,
            call_s=merged.call_s,
            is_crowded=status.is_crowded,
        )

    def _bounded(self, scalable: Scalable, decision: Decision) -> Decision:
        floor = scalable.floor
        wanted = clamp(decision.wanted, minimum=floor, maximum=scalable.max_scale)
        if wanted == decision.wanted:
            return decision
        why = "max" if wanted < decision.wanted else "min" if scalable.is_initialised else "initial"
        return Decision(wanted=wanted, why=why)

    def _within_deadline(
        self, now: float, scalable: Scalable, decision: Decision, *, serves: bool
    ) -> Decision:
        """Give a revision up for a while when no pod becomes ready: its pods may hold GPUs that
        others need. `serves`: Kubernetes reports a ready pod, or an activator has claimed one,
        which may happen earlier."""
        if serves or not (decision.wanted or self._given_up_at is not None):
            self._activating_since = self._given_up_at = None
            return decision
        if self._given_up_at is not None and now - self._given_up_at >= GIVEN_UP_S:
            self._activating_since = self._given_up_at = None
        if self._activating_since is None:
            self._activating_since = now
        if (
            self._given_up_at is None
            and now - self._activating_since > scalable.progress_deadline_s + ACTIVATION_BUFFER_S
        ):
            self._given_up_at = now
        if self._given_up_at is not None:
            return Decision(wanted=0, why="timed_out", has_timed_out=True)
        return decision
