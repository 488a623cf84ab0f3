"""Knative's pod autoscaler decision, number for number, as a pure function.

Per tick, the averages over a long (stable) and a short (panic) window are divided by the target and
limited in how fast they may grow or shrink. While the short one shows that load has at least
doubled (`panic_threshold`), the scale only rises. Excess burst capacity is how much of a sudden
burst the ready instances could still take.

Source: knative/serving pkg/autoscaler/scaling/autoscaler.go (Apache-2.0), semantics restated."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from activator.autoscaler.windows import MaxWindow

UNLIMITED_BURST = -1
"""Target burst capacity that always keeps the activator in the request path, as on this
platform."""
MIN_ACTIVATORS = 2
"""Of Knative's own activators, in its resources."""
DELAY_SLOT_S = 2
"""The scale-down delay stores one number per 2 s, Knative's tick."""
PANIC_WINDOW_PERCENT = 10.0
"""Length of the panic window, in percent of the stable one."""


def panic_window_s(stable_window_s: float, percentage: float) -> int:
    """Length of the panic window: a share of the stable one, rounded half up to whole seconds, at
    least 1."""
    return max(1, math.floor(stable_window_s * percentage / 100 + 0.5))


ACTIVATION_BUFFER_S = 30.0
"""Added to the progress deadline, so that the reason of a failed start is known before its
instances are removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KpaSpec:
    """Settings of one revision.

    Attributes:
        target: desired load per instance; > 0.
        total: capacity of one instance, for the burst capacity.
        stable_window_s: length of the stable window; panic ends that long after its cause.
        panic_threshold: desired ÷ ready instances from which it is a panic.
        max_scale_up_rate, max_scale_down_rate: factors per tick, > 1.
        target_burst_capacity: 0 none, -1 unlimited, else the calls of a burst.
        activation_scale: minimum whenever it is not zero; below 2 without effect.
        scale_down_delay_s: a lower scale applies only once it was desired for this long.
        reachable: an unreachable revision gets no traffic and may scale down at once."""

    target: float
    total: float
    stable_window_s: float = 60.0
    panic_threshold: float = 2.0
    max_scale_up_rate: float = 1000.0
    max_scale_down_rate: float = 2.0
    target_burst_capacity: float = 211.0
    activation_scale: int = 0
    scale_down_delay_s: float = 0.0
    reachable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class KpaState:
    """State between ticks: start of the panic (None: no panic), its highest scale, the window of
    the delay."""

    panic_at: float | None = None
    max_panic: int = 0
    delay: MaxWindow | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KpaLoad:
    """Measurements of a tick.

    Attributes:
        stable, panic: load averaged over the two windows, summed over all instances; None = no
            data.
        ready: instances that accept calls.
        starting: starting instances. Knative has no such number; 0 gives its exact decision."""

    stable: float | None
    panic: float | None
    ready: int
    starting: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KpaDecision:
    """The decision. If `valid` is False there was no data, and the other fields have no meaning.

    Attributes:
        want_stable, want_panic: what each window requests, limited by the rates.
        excess_burst_capacity: calls beyond the target burst that ready instances could take;
            negative = keep buffering.
        signal: `stable`, `panic`, `activation` or `delay`: which of them set `desired`."""

    valid: bool
    desired: int = 0
    want_stable: int = 0
    want_panic: int = 0
    excess_burst_capacity: int = 0
    in_panic: bool = False
    signal: str = "no_data"


def initial_state(now: float, *, spec: KpaSpec, ready: int) -> KpaState:
    """Initial state at `now` with `ready` instances from before a restart. Two or more start in
    panic, so that the restart keeps the scale for one stable window."""
    slots = math.ceil(spec.scale_down_delay_s / DELAY_SLOT_S)
    delay = MaxWindow(size=slots) if slots else None
    return KpaState(panic_at=now if ready > 1 else None, max_panic=ready, delay=delay)


def step(now: float, load: KpaLoad, spec: KpaSpec, state: KpaState) -> tuple[KpaDecision, KpaState]:
    """Run one tick at `now` (seconds). Returns the decision and the new state."""
    if load.stable is None or load.panic is None:
        return KpaDecision(valid=False), state
    capacity = max(1, load.ready + load.starting)
    raw_panic = math.ceil(load.panic / spec.target)
    want_stable, stable_activated = _limited(math.ceil(load.stable / spec.target), capacity, spec)
    want_panic, panic_activated = _limited(raw_panic, capacity, spec)
    state = _panic(now, raw_panic / capacity >= spec.panic_threshold, spec, state)
    desired, signal = want_stable, "activation" if stable_activated else "stable"
    if state.panic_at is not None:
        if want_panic > want_stable:
            desired, signal = want_panic, "activation" if panic_activated else "panic"
        if state.max_panic > desired:
            desired, signal = state.max_panic, "panic"
        state = replace(state, max_panic=desired)
    if spec.reachable and state.delay is not None:
        state = replace(state, delay=state.delay.record(math.floor(now) // DELAY_SLOT_S, desired))
        delayed = state.delay.current if state.delay is not None else None
        if delayed is not None and delayed > desired:
            desired, signal = delayed, "delay"
    decision = KpaDecision(
        valid=True,
        desired=desired,
        want_stable=want_stable,
        want_panic=want_panic,
        excess_burst_capacity=burst_capacity(ready=load.ready, panic_load=load.panic, spec=spec),
        in_panic=state.panic_at is not None,
        signal=signal,
    )
    return decision, state


def burst_capacity(*, ready: int, panic_load: float, spec: KpaSpec) -> int:
    """Capacity of the ready instances less the target burst and the current load, rounded down.
    Targets of 0 and -1 are returned as they are."""
    if spec.target_burst_capacity == 0:
        return 0
    if spec.target_burst_capacity < 0:
        return UNLIMITED_BURST
    return math.floor(ready * spec.total - spec.target_burst_capacity - panic_load)


def _limited(wanted: int, capacity: int, spec: KpaSpec) -> tuple[int, bool]:
    """Limit `wanted` by the rates from `capacity`. Also returns whether the activation scale raised
    it."""
    ceiling = math.ceil(spec.max_scale_up_rate * capacity)
    floor = math.floor(capacity / spec.max_scale_down_rate) if spec.reachable else 0
    limited = min(max(wanted, floor), ceiling)
    if spec.activation_scale > 1 and wanted > 0 and spec.activation_scale > limited:
        return spec.activation_scale, True
    return limited, False


def _panic(now: float, is_over: bool, spec: KpaSpec, state: KpaState) -> KpaState:
    if is_over:
        return replace(state, panic_at=now)
    if state.panic_at is not None and state.panic_at + spec.stable_window_s < now:
        return replace(state, panic_at=None, max_panic=0)
    return state


def clamp(desired: int, *, minimum: int, maximum: int) -> int:
    """`desired` within the bounds; a maximum of 0 means none."""
    if desired < minimum:
        return minimum
    return maximum if maximum and desired > maximum else desired
