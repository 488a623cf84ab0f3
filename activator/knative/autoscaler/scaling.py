"""How many pods one revision should have, from what all activators say of it.

The platform's own `decide`, on the merged observation: pods that activators have claimed are theirs
to give back, so only pods that nobody has are idle; starting pods count as capacity as long as
somebody waits for them. Below what activators have and wait for it never goes, and where not all
are heard it does not shrink at all."""

from __future__ import annotations

from dataclasses import dataclass, replace

from activator.autoscaler.bounds import ACTIVATION_BUFFER_S, clamp
from activator.autoscaler.decider import DeciderSpec, DeciderState, decide, initial_state
from activator.autoscaler.observation import Observed
from activator.autoscaler.revision_scaler import PANIC_WINDOW_PERCENT
from activator.autoscaler.target import panic_window_s
from activator.autoscaler.windows import TimeWindow
from activator.balancing.instance import slots_of
from activator.knative.autoscaler.load_aggregation import RevisionLoad
from activator.knative.autoscaler.podautoscalers import Scalable
from pilotlight.spec import FunctionSpec, Scaling

FREE_S = 1e9
"""How long a pod that nobody has counts as idle: whoever gave it back had its function's window
pass before."""
NO_BOUND = 1000
GIVEN_UP_S = 60.0
"""Before a revision that did not come up within its deadline is tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What there is: pods asked for by the Deployment, pods that Kubernetes calls ready, and
    whether one waits for room."""

    replicas: int
    ready: int
    is_crowded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """`wanted`: pods from now on; `why`: the decider's signal, or `asked`, `held_on`, `timed_out`,
    `initial`."""

    wanted: int
    why: str
    has_timed_out: bool = False


def spec_of(scalable: Scalable, spec: FunctionSpec | None) -> DeciderSpec:
    """By the function's own words; where they are not known (a route that has not come yet), by the
    PodAutoscaler's."""
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
    """One revision's windows, and what its decider remembers. Owner: the leader, while it leads;
    `now`: its monotonic clock."""

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
        """It was told anew: what the windows hold is kept."""
        self.spec = spec

    def record(self, now: float, concurrency: float | None) -> None:
        """A second's load; None where it is not known."""
        if concurrency is not None:
            self._stable.record(now, concurrency)
            self._panic.record(now, concurrency)

    def decide(
        self,
        now: float,
        scalable: Scalable,
        merged: RevisionLoad,
        standing: Standing,
        *,
        may_shrink: bool,
    ) -> Decision:
        """What there should be."""
        decision = self._bounded(
            scalable, self._wanted(now, scalable, merged, standing, may_shrink=may_shrink)
        )
        decision = self._within_deadline(
            now, scalable, decision, serves=bool(standing.ready or merged.held)
        )
        self.decision = decision
        return decision

    def _wanted(
        self,
        now: float,
        scalable: Scalable,
        merged: RevisionLoad,
        standing: Standing,
        *,
        may_shrink: bool,
    ) -> Decision:
        observed = self._observed(now, merged, standing)
        answer, self._state = decide(now, observed, self.spec, self._state)
        wanted, why = answer.desired, answer.signal
        if merged.floor > wanted:
            wanted, why = merged.floor, "asked"
        is_heard = merged.concurrency is not None and answer.valid
        if wanted < standing.replicas and not (is_heard and may_shrink):
            wanted, why = standing.replicas, "held_on"
        return Decision(wanted=wanted, why=why)

    def _observed(self, now: float, merged: RevisionLoad, standing: Standing) -> Observed:
        held = len(merged.held)
        ready = min(standing.replicas, max(standing.ready, held))
        busy = sum(1 for calls in merged.held.values() if calls)
        free = max(0, ready - held)
        is_heard = merged.concurrency is not None
        return Observed(
            stable=self._stable.average(now)
            if is_heard and not self._stable.is_empty(now)
            else None,
            panic=self._panic.average(now) if is_heard and not self._panic.is_empty(now) else None,
            ready=ready,
            starting=min(standing.replicas - ready, max(0, merged.floor - ready)),
            in_flight=merged.in_flight,
            waiting=merged.waiting,
            idle_s=(*(FREE_S for _ in range(free)), *(0.0 for _ in range(ready - free - busy))),
            oldest_wait_s=merged.oldest_wait_s,
            start_s=merged.start_s,
            call_s=merged.call_s,
            is_crowded=standing.is_crowded,
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
        """A revision of which no pod becomes ready is given up for a while: its pods may hold GPUs
        that others wait for. `serves`: Kubernetes calls one ready, or an activator, which need not
        wait for that, has one."""
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
