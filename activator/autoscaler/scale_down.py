"""Which instances stop: the rules that limit the decider's decision, and the choice of victims.

An instance stops only after it was idle for the function's window, the last one after a delay of
its own; or, where the window is "auto", when the function's own pauses say that keeping it costs
more than starting it again. While other starts wait for room, the time of a start is enough. The
longest idle instances are drained first, and never a busy one before an idle one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from activator.autoscaler.observation import RevisionObservation
from activator.autoscaler.scaling_decision import DeciderSpec, ScaleDecision


def limit_scale_down(
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
    """From one to zero: this activator is always in the request path, so that no call is lost, and
    only the last instance's own delay applies."""
    idle_s = min(observed.idle_s, default=0.0)
    delay_s = _idle_window_s(spec.zero_delay_s, observed) if spec.kpa.reachable else 0.0
    if idle_s >= delay_s:
        return decision
    return replace(decision, desired=1, signal="zero_delay", look_again_s=delay_s - idle_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A running instance: its calls in flight, and how long it has been idle (0 while it has
    calls)."""

    id: str
    in_flight: int
    idle_s: float = 0.0


def choose_victims(candidates: Iterable[Candidate], count: int) -> tuple[str, ...]:
    """Ids of the `count` instances to drain, in order; fewer when there are not as many. Ties are
    resolved by id, so the choice is repeatable."""
    order = sorted(candidates, key=lambda c: (c.in_flight, -c.idle_s, c.id))
    return tuple(c.id for c in order[: max(0, count)])
