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
* an instance is stopped only after it was idle for long enough (`scaledown_window`, `zero_delay`,
  `pauses`; `scale_down`);
* no data is not zero: without a measurement nothing is stopped (`no_data`).

The decision names the signal that determined it, and contains the numbers that explain it.
"""

from __future__ import annotations

import math
from dataclasses import replace

from activator.autoscaler import kpa
from activator.autoscaler.llm_signals import (
    FirstTokenState,
    batch_want,
    engine_wants,
    first_token_state,
)
from activator.autoscaler.observation import RevisionObservation
from activator.autoscaler.scale_down import limit_scale_down
from activator.autoscaler.scaling_decision import DeciderSpec, DeciderState, ScaleDecision
from activator.balancing.start_estimates import drained_before_start, starts_for_burst
from pilotlight.spec.instances.scaling import buffer_count


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
    return limit_scale_down(decision, observed, spec), replace(
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
