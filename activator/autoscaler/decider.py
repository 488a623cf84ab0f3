"""How many instances a revision should have: Knative's decision and additional signals.

`decide(now, observed, spec, state)` is pure. Its core is `kpa.step`, with these additions:

* instances that are *starting* count as capacity, so a slow start is neither started twice nor
  mistaken for a panic;
* growth is held back while the running instances would finish the load before a start could help
  (`drains`);
* uncovered waiting calls request starts of their own (`backlog`), and so does a call that has
  waited longer than the latency objective, whatever the averages say (`backlog_age`);
* language models, and functions that gather calls into batches, have their own signals
  (`kv_memory`, `queued_tokens`, `first_token`, `occupancy`; `llm_signals`);
* spare instances while active (`buffer`), floor and ceiling (`min`, `max`);
* an instance is stopped only after it was idle for `scaledown_window_s`, the last one after its own
  delay (`zero_delay`); or, where the window is "auto", when the function's own pauses say that
  keeping it costs more than starting it again (`pauses`; `idle_histogram`); sooner while other
  starts wait for room;
* no data is not zero: without a measurement nothing is stopped (`no_data`).

The decision names the signal that determined it, and contains the numbers that explain it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from activator.autoscaler import kpa
from activator.autoscaler.bounds import Activity, BoundsSpec, RevisionStatus, bound
from activator.autoscaler.idle_histogram import KeepAlivePolicy
from activator.autoscaler.llm_signals import (
    FirstTokenState,
    FirstTokenTerms,
    batch_want,
    engine_wants,
    first_token_state,
)
from activator.autoscaler.observation import RevisionObservation
from activator.balancing.start_estimates import drained_before_start, starts_for_burst
from pilotlight.spec.function import FunctionSpec, Scaling, buffer_count

MAX_STABLE_WINDOW_S = 60.0
MIN_STABLE_WINDOW_S = 1.0
"""The stable window is scaledown_window within these limits: averages over more than a minute react
too late, and a bucket is one second."""
AUTO_STABLE_WINDOW_S = 6.0
"""Knative's shortest window: where the idle histogram decides what is kept, the averages need not
keep anything as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeciderSpec:
    """Settings of one revision.

    Attributes:
        kpa: the core's settings.
        max_inputs: concurrent calls per instance.
        min_instances, max_instances: floor and ceiling.
        buffer_instances: spare instances while active: a number, or a share of the busy ones as
            "15%".
        scaledown_window_s: idle time before an instance is stopped.
        zero_delay_s: idle time before the last one is stopped.
        latency_objective_s: a call that waits longer is a signal; None = off.
        first_token: the first-token objective of a language model; None = none declared.
        max_batch_size: the largest batch of a function's methods; 0 = it gathers no batches.
        keep: decides how long instances stay idle instead of `scaledown_window_s`; None = the
            window decides."""

    kpa: kpa.KpaSpec
    max_inputs: int = 1
    min_instances: int = 0
    max_instances: int = 8
    buffer_instances: int | str = 0
    scaledown_window_s: float = 60.0
    zero_delay_s: float = 60.0
    latency_objective_s: float | None = None
    first_token: FirstTokenTerms | None = None
    max_batch_size: int = 0
    keep: KeepAlivePolicy | None = None

    @classmethod
    def of(cls, spec: FunctionSpec, *, slots: int) -> DeciderSpec:
        """Settings of a function whose instances run `slots` calls at once."""
        own = cls.from_scaling(
            replace(
                spec.scaling,
                max_inputs=slots,
                target_inputs=_at_most(spec.scaling.target_inputs, slots),
            )
        )
        own = replace(
            own,
            max_batch_size=max(
                (m.batch.max_batch_size for m in spec.methods if m.batch is not None), default=0
            ),
        )
        if spec.engine is None or spec.objectives is None:
            return own
        wait_s = (
            own.latency_objective_s
            if own.latency_objective_s is not None
            else spec.objectives.first_token_s
        )
        terms = FirstTokenTerms(
            objective_s=spec.objectives.first_token_s,
            late=round(1 - spec.objectives.first_token_ratio, 9),
        )
        return replace(own, first_token=terms, latency_objective_s=wait_s)

    @classmethod
    def from_scaling(
        cls, scaling: Scaling, *, zero_delay_s: float | None = None, reachable: bool = True
    ) -> DeciderSpec:
        """Settings from what the user declared. `zero_delay_s` None means the same as the window of
        the other instances."""
        stable_s = min(MAX_STABLE_WINDOW_S, max(MIN_STABLE_WINDOW_S, scaling.scaledown_window_s))
        keep = None
        if scaling.waiting_cost is not None:
            stable_s = min(stable_s, AUTO_STABLE_WINDOW_S)
            keep = KeepAlivePolicy(
                waiting_cost=scaling.waiting_cost, longest_s=scaling.scaledown_window_s
            )
        core = kpa.KpaSpec(
            target=float(scaling.target_inputs or scaling.max_inputs),
            total=float(scaling.max_inputs),
            stable_window_s=stable_s,
            target_burst_capacity=kpa.UNLIMITED_BURST,
            reachable=reachable,
        )
        return cls(
            kpa=core,
            max_inputs=scaling.max_inputs,
            min_instances=scaling.min_instances,
            max_instances=scaling.max_instances,
            buffer_instances=scaling.buffer_instances,
            scaledown_window_s=scaling.scaledown_window_s,
            zero_delay_s=scaling.scaledown_window_s if zero_delay_s is None else zero_delay_s,
            latency_objective_s=scaling.latency_objective_s,
            keep=keep,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeciderState:
    """State that is kept between decisions."""

    kpa: kpa.KpaState = field(default_factory=kpa.KpaState)
    first_token: FirstTokenState | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleDecision:
    """How many instances there should be, and why.

    Attributes:
        desired: number of instances, including starting ones.
        valid: False when there was no data and nothing should change.
        signal: what determined it: `stable`, `panic`, `activation`, `delay`, `drains`, `backlog`,
            `backlog_age`, `buffer`, `min`, `kv_memory`, `queued_tokens`, `first_token`,
            `occupancy`, `max`, `scaledown_window`, `pauses`, `zero_delay` or `no_data`.
        capacity: number of ready and starting instances at the decision.
        excess_burst_capacity, in_panic: of the core; -1 where the activator never leaves the path.
        want: number of instances that each signal requests.
        look_again_s: when time alone changes the answer; None = only a new measurement does."""

    desired: int
    valid: bool
    signal: str
    capacity: int
    excess_burst_capacity: int = 0
    in_panic: bool = False
    want: tuple[tuple[str, int], ...] = ()
    look_again_s: float | None = None

    @property
    def wanted(self) -> int:
        """The number that the load needs, without instances that are kept only because they were
        not idle long enough."""
        return max((count for _, count in self.want), default=self.desired)

    @property
    def starts(self) -> int:
        """Number of instances to start."""
        return max(0, self.desired - self.capacity)

    @property
    def stops(self) -> int:
        """Number of instances to drain; `choose_victims` selects them."""
        return max(0, self.capacity - self.desired)

    def __str__(self) -> str:
        wants = " ".join(f"{name}={count}" for name, count in self.want)
        return f"{self.capacity}->{self.desired} by {self.signal} ({wants})"


def _at_most(target: int | None, slots: int) -> int | None:
    return None if target is None else min(target, slots)


def initial_state(now: float, *, spec: DeciderSpec, ready: int) -> DeciderState:
    """Initial state of a decider at `now` with `ready` existing instances."""
    return DeciderState(kpa=kpa.initial_state(now, spec=spec.kpa, ready=ready))


def decide(
    now: float, observed: RevisionObservation, spec: DeciderSpec, state: DeciderState
) -> tuple[ScaleDecision, DeciderState]:
    """Decide at `now` (seconds). Returns the decision and the state for the next one."""
    first_token = first_token_state(now, observed, spec.first_token, state.first_token)
    load = kpa.KpaLoad(
        stable=observed.stable,
        panic=observed.panic,
        ready=observed.ready,
        starting=observed.starting,
    )
    core, core_state = kpa.step(now, load, spec.kpa, state.kpa)
    wants = [
        _core_want(core, observed, spec),
        *_binding_wants(observed, spec, first_token),
        *_own_wants(observed, spec),
    ]
    signal, desired = max(wants, key=lambda want: want[1])
    valid = core.valid or signal != "no_data"
    ceiling = spec.max_instances
    if desired > ceiling and (core.valid or observed.capacity < desired):
        signal, desired = "max", max(ceiling, 0 if core.valid else observed.capacity)
    decision = ScaleDecision(
        desired=desired,
        valid=valid,
        signal=signal,
        capacity=observed.capacity,
        excess_burst_capacity=core.excess_burst_capacity,
        in_panic=core.in_panic,
        want=tuple(wants),
    )
    return _limit_scale_down(decision, observed, spec), replace(
        state, kpa=core_state, first_token=first_token
    )


def _core_want(
    core: kpa.KpaDecision, observed: RevisionObservation, spec: DeciderSpec
) -> tuple[str, int]:
    """The core's request. Without data it is the current number; growth that would come too late to
    help is omitted."""
    if not core.valid:
        return "no_data", observed.capacity
    useful = _useful(observed, spec)
    if useful is not None and core.desired > max(useful, observed.capacity):
        return "drains", max(useful, observed.capacity)
    return core.signal, core.desired


def _useful(observed: RevisionObservation, spec: DeciderSpec) -> int | None:
    """Number of instances that the load can still use once a start begun now is ready; None when
    the times are unknown.

    By Little's law the lasting load is arrivals times call time. Beyond it there are only the
    current calls, plus arrivals, less what the running slots finish meanwhile."""
    if observed.arrivals_per_s is None or observed.call_s is None or observed.start_s is None:
        return None
    drained = drained_before_start(
        slots=observed.ready * spec.max_inputs, start_s=observed.start_s, call_s=observed.call_s
    )
    later = (
        observed.in_flight + observed.waiting + observed.arrivals_per_s * observed.start_s - drained
    )
    return math.ceil(max(observed.arrivals_per_s * observed.call_s, later) / spec.kpa.target)


def _own_wants(observed: RevisionObservation, spec: DeciderSpec) -> list[tuple[str, int]]:
    """Requests of the signals that Knative lacks, where they apply."""
    wants = []
    if observed.waiting:
        wants.append(("backlog", observed.capacity + _backlog(observed, spec, counting_drain=True)))
    objective_s = spec.latency_objective_s
    if observed.waiting and objective_s is not None and observed.oldest_wait_s > objective_s:
        wants.append(
            ("backlog_age", observed.capacity + _backlog(observed, spec, counting_drain=False))
        )
    if spec.kpa.reachable:
        spare = buffer_count(spec.buffer_instances, busy=max(1, observed.busy))
        if spare and (observed.busy or observed.waiting):
            wants.append(("buffer", observed.busy + spare))
        wants.append(("min", spec.min_instances))
    return wants


def _binding_wants(
    observed: RevisionObservation, spec: DeciderSpec, state: FirstTokenState | None
) -> list[tuple[str, int]]:
    """Requests of the signals of a language model, and of a function that gathers calls."""
    wants = engine_wants(observed, target=spec.kpa.target, terms=spec.first_token, state=state)
    batches = (
        batch_want(observed, max_batch_size=spec.max_batch_size) if spec.max_batch_size else None
    )
    return wants if batches is None else [*wants, batches]


def _backlog(observed: RevisionObservation, spec: DeciderSpec, *, counting_drain: bool) -> int:
    slots = (
        spec.max_inputs
        if observed.engine is None
        else max(1, min(spec.max_inputs, math.floor(observed.engine.slots)))
    )
    return starts_for_burst(
        waiting=observed.waiting,
        free_slots=observed.free_slots(slots),
        starting_slots=observed.starting * slots,
        max_inputs=slots,
        instances=observed.capacity,
        max_instances=spec.max_instances,
        running_slots=observed.ready * slots if counting_drain else 0,
        start_s=observed.start_s,
        call_s=observed.call_s,
    )


def _limit_scale_down(
    decision: ScaleDecision, observed: RevisionObservation, spec: DeciderSpec
) -> ScaleDecision:
    """Stop only instances that were idle for long enough; the last one has its own delay."""
    if decision.stops == 0:
        return decision
    if observed.kept is not None and spec.kpa.reachable:
        return _keep_by_histogram(decision, observed, spec)
    window_s = _idle_window_s(spec.scaledown_window_s, observed) if spec.kpa.reachable else 0.0
    expired = sum(1 for idle_s in observed.idle_s if idle_s >= window_s)
    floor = min(observed.capacity - expired, spec.max_instances)
    if decision.desired < floor:
        rests = [window_s - idle_s for idle_s in observed.idle_s if idle_s < window_s]
        return replace(
            decision,
            desired=floor,
            signal="scaledown_window",
            look_again_s=min(rests, default=None),
        )
    return decision if decision.desired else _delay_scale_to_zero(decision, observed, spec)


def _idle_window_s(window_s: float, observed: RevisionObservation) -> float:
    """The idle window. While starts wait for room, idling for longer than a start takes costs
    others more than it can save here."""
    return (
        min(window_s, observed.start_s)
        if observed.is_crowded and observed.start_s is not None
        else window_s
    )


def _keep_by_histogram(
    decision: ScaleDecision, observed: RevisionObservation, spec: DeciderSpec
) -> ScaleDecision:
    """Keep the instances that are worth it by the function's pauses, and those that its calls need
    now; starting ones count in addition."""
    assert observed.kept is not None
    needed = math.ceil((observed.in_flight + observed.waiting) / spec.max_inputs)
    floor = min(
        max(observed.kept, needed) + observed.starting, observed.capacity, spec.max_instances
    )
    return (
        replace(decision, desired=floor, signal="pauses") if decision.desired < floor else decision
    )


def _delay_scale_to_zero(
    decision: ScaleDecision, observed: RevisionObservation, spec: DeciderSpec
) -> ScaleDecision:
    """From one to zero: this activator is always in the request path and needs no probe, so only
    the last instance's retention applies."""
    idle_s = min(observed.idle_s, default=0.0)
    rules = BoundsSpec(
        grace_s=0.0,
        retention_s=_idle_window_s(spec.zero_delay_s, observed),
        always_proxied=True,
        reachable=spec.kpa.reachable,
    )
    standing = RevisionStatus(
        instances=observed.capacity, activity=Activity.INACTIVE, for_s=idle_s, proxied_s=idle_s
    )
    bounded = bound(0, spec=rules, standing=standing)
    if bounded.is_applied:
        return decision
    return replace(decision, desired=1, signal="zero_delay", look_again_s=bounded.look_again_s)
