"""What the decider adds to Knative's core, mostly as time diaries."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.autoscaler import decider, kpa
from activator.autoscaler.observation import RevisionObservation
from activator.autoscaler.scale_down import Candidate, choose_victims
from activator.autoscaler.scaling_decision import DeciderSpec, DeciderState, ScaleDecision
from activator.autoscaler.windows import TimeWindow
from activator.balancing.start_estimates import starts_for_burst
from pilotlight.spec.instances.scaling import Scaling


def spec_of(**scaling: object) -> DeciderSpec:
    return DeciderSpec.from_scaling(Scaling(**scaling))  # type: ignore[arg-type]


def once(observed: RevisionObservation, spec: DeciderSpec, *, now: float = 0.0) -> ScaleDecision:
    return decider.decide(now, observed, spec, DeciderState())[0]


def load(value: float, **rest: object) -> RevisionObservation:
    return RevisionObservation(stable=value, panic=value, **rest)  # type: ignore[arg-type]


# -- the request_scale_up from zero ----------------------------------------------------------------------------


def request_scale_up(waiting: int, **changes: object) -> int:
    facts = {
        "free_slots": 0,
        "starting_slots": 0,
        "max_inputs": 1,
        "instances": 0,
        "max_instances": 8,
        **changes,
    }
    return starts_for_burst(waiting=waiting, **facts)  # type: ignore[arg-type]


def test_a_burst_on_a_cold_function_starts_all_its_instances_at_once() -> None:
    assert request_scale_up(100) == 8
    assert request_scale_up(1) == 1
    assert request_scale_up(0) == 0
    assert request_scale_up(100, max_inputs=16) == 7


def test_a_burst_is_not_started_for_twice() -> None:
    assert request_scale_up(8, starting_slots=8, instances=8, max_instances=20) == 0
    assert request_scale_up(10, starting_slots=8, instances=8, max_instances=20) == 2
    assert request_scale_up(3, free_slots=2, instances=2) == 1
    assert request_scale_up(100, instances=8) == 0
    assert request_scale_up(100, instances=9) == 0, "a lowered ceiling is never a negative start"


@pytest.mark.parametrize("start_s, want", [(0.012, 4), (60.0, 0), (1.0, 2), (None, 4)])
def test_a_slow_start_is_not_begun_for_a_backlog_that_will_be_gone(
    start_s: float | None, want: int
) -> None:
    # Two running slots finish one call each per second: 20 ms buy nothing, 1 s two calls, 60 s all.
    assert request_scale_up(4, instances=2, running_slots=2, start_s=start_s, call_s=1.0) == want


# -- the layer around the core ---------------------------------------------------------------------


def test_starting_instances_are_capacity_and_no_panic() -> None:
    spec = spec_of(max_instances=20)
    calm = once(load(6.0, ready=1, starting=5, in_flight=1, waiting=5), spec)
    assert (calm.desired, calm.starts, calm.in_panic) == (6, 0, False)
    panic = once(load(6.0, ready=1, in_flight=1, waiting=5), spec)
    assert (panic.desired, panic.starts, panic.in_panic) == (6, 5, True)


def test_waiting_calls_ask_before_the_averages_do() -> None:
    decision = once(load(0.1, ready=0, waiting=5), spec_of(max_instances=20))
    assert (decision.desired, decision.signal, decision.starts) == (5, "backlog", 5)
    assert str(decision) == "0->5 by backlog (stable=1 backlog=5 min=0)"


def test_growth_is_held_back_when_the_running_ones_drain_the_load_first() -> None:
    spec = spec_of(max_inputs=4, max_instances=20)
    # 100 calls of 10 ms on 8 slots are gone in 0.125 s; an instance needs 30 s to start.
    burst = load(
        100.0, ready=2, in_flight=8, waiting=92, start_s=30.0, call_s=0.01, arrivals_per_s=3.0
    )
    assert (once(burst, spec).desired, once(burst, spec).signal) == (2, "drains")
    lasting = replace(burst, arrivals_per_s=2000.0)
    assert once(lasting, spec).desired > 2, "1,000 calls per second more than 800 do not drain"
    quick = replace(burst, start_s=0.01)
    assert once(quick, spec).desired == 20, "a fork of 10 ms helps"


def test_the_oldest_waiting_call_is_a_signal_of_its_own() -> None:
    spec = spec_of(max_inputs=1, max_instances=20, latency_objective_s=2.0)
    slow = load(
        3.0,
        ready=2,
        in_flight=2,
        waiting=4,
        start_s=60.0,
        call_s=1.0,
        arrivals_per_s=0.1,
        oldest_wait_s=1.9,
    )
    assert (once(slow, spec).desired, once(slow, spec).signal) == (2, "drains")
    late = once(replace(slow, oldest_wait_s=2.1), spec)
    assert (late.desired, late.signal) == (6, "backlog_age")
    assert once(replace(slow, oldest_wait_s=2.1, starting=4), spec).starts == 0, (
        "starts on their way cover it already"
    )
    assert once(replace(slow, oldest_wait_s=99.0), spec_of(max_instances=20)).desired == 2, (
        "without an objective it is silent"
    )


@pytest.mark.parametrize(
    "buffer, busy, want", [(2, 3, 5), ("15%", 10, 12), ("15%", 1, 2), (0, 3, 3)]
)
def test_the_buffer_stands_ready_beside_the_busy_ones(
    buffer: int | str, busy: int, want: int
) -> None:
    spec = spec_of(buffer_instances=buffer, max_instances=50)
    decision = once(load(float(busy), ready=busy, in_flight=busy), spec)
    assert decision.desired == want
    assert decision.signal == ("buffer" if want > busy else "stable")


def test_an_idle_function_has_no_buffer() -> None:
    assert once(load(0.0, ready=0), spec_of(buffer_instances=3)).desired == 0


def test_floor_and_ceiling_bind_and_say_so() -> None:
    low = once(load(0.0, ready=0), spec_of(min_instances=2))
    assert (low.desired, low.signal) == (2, "min")
    high = once(load(50.0, ready=8, in_flight=8, waiting=42), spec_of(max_instances=8))
    assert (high.desired, high.signal) == (8, "max")
    lowered = once(load(5.0, ready=5, in_flight=5), spec_of(max_instances=3))
    assert (lowered.desired, lowered.stops) == (3, 2)


def test_no_data_is_never_zero() -> None:
    nothing = RevisionObservation(stable=None, panic=None, ready=3, idle_s=(500.0, 500.0, 500.0))
    assert once(nothing, spec_of()) == ScaleDecision(
        desired=3, valid=False, signal="no_data", capacity=3, want=(("no_data", 3), ("min", 0))
    )
    assert once(replace(nothing, ready=9), spec_of(max_instances=8)).desired == 9
    floor = once(replace(nothing, ready=0, idle_s=()), spec_of(min_instances=2))
    assert (floor.valid, floor.desired, floor.signal) == (True, 2, "min")
    waiting = once(
        RevisionObservation(stable=None, panic=None, ready=0, waiting=20), spec_of(max_instances=8)
    )
    assert (waiting.valid, waiting.desired, waiting.signal) == (True, 8, "backlog")


def test_only_instances_idle_for_the_window_go() -> None:
    spec = spec_of(scaledown_window_s=60)
    decision = once(load(1.0, ready=4, in_flight=1, idle_s=(70.0, 59.0, 10.0)), spec)
    assert (decision.desired, decision.signal, decision.look_again_s) == (
        3,
        "scaledown_window",
        1.0,
    )
    rested = once(load(1.0, ready=4, in_flight=1, idle_s=(70.0, 61.0, 60.0)), spec)
    assert rested.stops == 2, "Knative's rate: at most half per tick"


def test_an_unreachable_revision_goes_down_at_once_but_not_its_busy_instances() -> None:
    spec = DeciderSpec.from_scaling(Scaling(min_instances=2), reachable=False)
    decision = once(load(0.0, ready=5, in_flight=1, idle_s=(1.0, 1.0, 1.0, 1.0)), spec)
    assert decision.desired == 1
    assert once(load(0.0, ready=1, idle_s=(0.0,)), spec).desired == 0


def test_the_last_instance_has_a_delay_of_its_own() -> None:
    spec = DeciderSpec.from_scaling(Scaling(scaledown_window_s=10), zero_delay_s=300)
    early = once(load(0.0, ready=1, idle_s=(200.0,)), spec)
    assert (early.desired, early.signal, early.look_again_s) == (1, "zero_delay", 100.0)
    assert once(load(0.0, ready=1, idle_s=(300.0,)), spec).desired == 0


def test_a_restarted_decider_keeps_the_scale_it_finds() -> None:
    spec = spec_of(scaledown_window_s=60)
    state = decider.initial_state(100.0, spec=spec, ready=5)
    quiet = load(0.0, ready=5, idle_s=(90.0,) * 5)
    decision, state = decider.decide(102.0, quiet, spec, state)
    assert (decision.desired, decision.in_panic, decision.signal) == (5, True, "panic")
    decision, _ = decider.decide(161.0, quiet, spec, state)
    assert (decision.desired, decision.in_panic) == (2, False)


# -- diaries ---------------------------------------------------------------------------------------


class Diary:
    """A little world: one revision whose instances appear at once and serve until told
    otherwise."""

    def __init__(self, spec: DeciderSpec) -> None:
        self.spec = spec
        self.state = decider.initial_state(0.0, spec=spec, ready=0)
        self.stable = TimeWindow(spec.kpa.stable_window_s)
        self.panic = TimeWindow(max(1.0, spec.kpa.stable_window_s / 10))
        self.ready = 0
        self.busy_until: list[float] = []

    def second(self, now: float, calls: int) -> ScaleDecision:
        """`calls` are in the house during this second."""
        self.stable.record(now, calls)
        self.panic.record(now, calls)
        busy = min(self.ready, -(-calls // self.spec.max_inputs))
        self.busy_until = (
            [now] * busy
            + self.busy_until[busy : self.ready]
            + [now] * max(0, self.ready - len(self.busy_until))
        )
        in_flight = min(calls, self.ready * self.spec.max_inputs)
        observed = RevisionObservation(
            stable=self.stable.average(now),
            panic=self.panic.average(now),
            ready=self.ready,
            in_flight=in_flight,
            waiting=calls - in_flight,
            idle_s=tuple(now - last for last in self.busy_until[busy : self.ready]),
        )
        decision, self.state = decider.decide(now, observed, self.spec, self.state)
        self.ready = decision.desired
        return decision


def test_diary_of_a_burst_and_the_quiet_after_it() -> None:
    diary = Diary(spec_of(max_inputs=1, max_instances=8, scaledown_window_s=10))
    scale = [diary.second(float(now), 8 if 3 <= now < 6 else 0).desired for now in range(40)]
    assert scale[:3] == [0, 0, 0]
    assert scale[3:15] == [8] * 12, "all at once, and nobody leaves within the window"
    assert scale[-1] == 0
    assert scale == sorted(scale[:4]) + sorted(scale[4:], reverse=True), "no flapping"


def test_diary_of_a_trickle_keeps_its_one_instance() -> None:
    diary = Diary(spec_of(scaledown_window_s=10))
    scale = [diary.second(float(now), 1 if now % 8 == 0 else 0).desired for now in range(80)]
    assert set(scale) == {1}


def test_diary_of_a_zero_window() -> None:
    diary = Diary(spec_of(scaledown_window_s=0))
    assert [diary.second(float(now), 1 if now == 1 else 0).desired for now in range(5)] == [
        0,
        1,
        0,
        0,
        0,
    ]


def test_diary_of_a_ramp_never_falls() -> None:
    diary = Diary(spec_of(max_inputs=4, target_inputs=2, max_instances=50, scaledown_window_s=60))
    scale = [diary.second(float(now), now).desired for now in range(60)]
    assert scale == sorted(scale)
    assert scale[-1] >= 15


# -- victims ---------------------------------------------------------------------------------------


def test_the_idlest_goes_first_and_a_busy_one_never_before_an_idle_one() -> None:
    house = [
        Candidate(id="busy", in_flight=3),
        Candidate(id="calm", in_flight=0, idle_s=5.0),
        Candidate(id="bored", in_flight=0, idle_s=50.0),
        Candidate(id="light", in_flight=1),
    ]
    assert choose_victims(house, 4) == ("bored", "calm", "light", "busy")
    assert choose_victims(house, 1) == ("bored",)
    assert choose_victims(house, -1) == ()


def test_the_core_is_reached_through_the_spec_of_the_user() -> None:
    spec = spec_of(max_inputs=16, target_inputs=8, scaledown_window_s=300)
    assert spec.kpa == kpa.KpaSpec(
        target=8.0, total=16.0, stable_window_s=60.0, target_burst_capacity=-1
    )
    assert spec.zero_delay_s == 300


# -- what always holds -----------------------------------------------------------------------------


def test_a_starting_instance_is_never_stopped_nor_multiplied_without_traffic() -> None:
    decision = once(load(0.0, ready=0, starting=1), spec_of())
    assert (decision.desired, decision.signal) == (1, "scaledown_window")


@st.composite
def houses(draw: st.DrawFn) -> RevisionObservation:
    ready = draw(st.integers(0, 12))
    idle_s = tuple(draw(st.lists(st.floats(0, 200), max_size=ready)))
    value = st.one_of(st.none(), st.floats(0, 500))
    has_data = draw(st.booleans())
    return RevisionObservation(
        stable=draw(st.floats(0, 500)) if has_data else None,
        panic=draw(st.floats(0, 500)) if has_data else None,
        ready=ready,
        starting=draw(st.integers(0, 12)),
        in_flight=draw(st.integers(ready - len(idle_s), 4 * (ready - len(idle_s)))),
        waiting=draw(st.integers(0, 300)),
        idle_s=idle_s,
        oldest_wait_s=draw(st.floats(0, 100)),
        start_s=draw(value),
        call_s=draw(value),
        arrivals_per_s=draw(value),
    )


@given(
    house=houses(),
    minimum=st.integers(0, 4),
    maximum=st.integers(4, 10),
    spare=st.sampled_from([0, 2, "50%"]),
)
def test_a_decision_respects_bounds_busy_instances_and_missing_data(
    house: RevisionObservation, minimum: int, maximum: int, spare: int | str
) -> None:
    spec = spec_of(
        min_instances=minimum,
        max_instances=maximum,
        buffer_instances=spare,
        max_inputs=4,
        latency_objective_s=1.0,
    )
    decision = once(house, spec)
    assert decision.desired >= minimum
    assert decision.desired <= max(maximum, house.capacity), "nothing is started beyond the ceiling"
    expired = sum(1 for idle_s in house.idle_s if idle_s >= spec.scaledown_window_s)
    assert decision.stops <= max(expired, house.capacity - maximum), (
        "who is busy, starting or only just idle stays"
    )
    if house.stable is None:
        assert decision.stops == 0
    if not decision.valid:
        assert (decision.starts, decision.signal) == (0, "no_data")
    assert decision.starts == 0 or decision.stops == 0


# -- by the function's own pauses ------------------------------------------------------------------
AUTO = {"max_inputs": 2, "scaledown_window_s": 3600.0, "waiting_cost": 10.0}


def test_what_the_pauses_say_is_worth_keeping_is_kept_whatever_it_idled() -> None:
    seen = load(0.0, ready=4, idle_s=(500.0,) * 4, start_s=20.0, kept=3)
    decision = once(seen, spec_of(**AUTO))
    assert (decision.desired, decision.signal) == (3, "pauses")


def test_what_they_do_not_goes_at_once_the_last_one_too() -> None:
    assert (
        once(load(0.0, ready=1, idle_s=(2.0,), start_s=0.1, kept=0), spec_of(**AUTO)).desired == 0
    )


def test_calls_that_are_there_count_before_any_pause() -> None:
    seen = load(0.1, ready=4, in_flight=5, idle_s=(1.0,), start_s=0.1, kept=0)
    assert once(seen, spec_of(**AUTO)).desired == 3


def test_one_that_starts_takes_no_ready_ones_place() -> None:
    seen = load(0.1, ready=1, starting=1, in_flight=2, start_s=20.0, kept=1)
    assert once(seen, spec_of(**AUTO)).desired == 2


def test_the_pauses_keep_what_exists_within_the_ceiling_and_start_nothing() -> None:
    idle = load(0.0, ready=3, idle_s=(9.0,) * 3, kept=8)
    assert once(idle, spec_of(**AUTO)).desired == 3
    assert once(idle, spec_of(**AUTO, max_instances=2)).desired == 2, "the ceiling was lowered"


def test_a_decision_that_the_pauses_do_not_change_keeps_its_signal() -> None:
    seen = load(0.0, ready=3, idle_s=(9.0,) * 3, kept=1)
    decision = once(seen, spec_of(**AUTO, min_instances=1))
    assert (decision.desired, decision.signal) == (1, "stable")


def test_without_pauses_to_go_by_the_longest_window_holds() -> None:
    assert once(load(0.0, ready=1, idle_s=(600.0,)), spec_of(**AUTO)).desired == 1
    assert once(load(0.0, ready=1, idle_s=(3600.0,)), spec_of(**AUTO)).desired == 0


def test_floor_and_reachability_count_beside_the_pauses() -> None:
    assert (
        once(
            load(0.0, ready=3, idle_s=(9.0,) * 3, kept=0), spec_of(**AUTO, min_instances=2)
        ).desired
        == 2
    )
    gone = DeciderSpec.from_scaling(Scaling(**AUTO), reachable=False)  # type: ignore[arg-type]
    assert once(load(0.0, ready=3, idle_s=(9.0,) * 3, kept=3), gone).desired == 0


def test_while_starts_wait_for_room_a_fixed_window_is_no_longer_than_a_start() -> None:
    spec = spec_of(scaledown_window_s=60.0)
    assert once(load(0.0, ready=2, idle_s=(9.0, 30.0), start_s=10.0), spec).desired == 2
    assert (
        once(load(0.0, ready=2, idle_s=(9.0, 30.0), start_s=10.0, is_crowded=True), spec).desired
        == 1
    )
