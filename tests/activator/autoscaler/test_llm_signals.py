"""What binds a language model, and batches, in decisions: KV memory, queued tokens, first tokens,
occupancy; never CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.autoscaler.decider import decide
from activator.autoscaler.llm_signals import SETTLE_S, FirstTokenTerms
from activator.autoscaler.observation import RevisionObservation
from activator.autoscaler.scaling_decision import DeciderSpec, DeciderState, ScaleDecision
from activator.balancing.instance import slots_of
from activator.balancing.wait_queue import EngineLoad
from pilotlight.spec.function import MethodSpec
from pilotlight.spec.instances.scaling import Scaling
from pilotlight.spec.policies import BatchPolicy, Objectives
from tests.activator.llm.worlds import engine_spec
from tests.fakes.routes import spec_of

SCALING = Scaling(max_instances=20, scaledown_window_s=60)


def language_model(
    *, slots: int = 16, objective_s: float | None = None, scaling: Scaling = SCALING
) -> DeciderSpec:
    objectives = (
        Objectives(first_token_s=objective_s, first_token_ratio=0.9)
        if objective_s is not None
        else None
    )
    spec = engine_spec(max_num_seqs=slots, scaling=scaling, objectives=objectives)
    return DeciderSpec.of(spec, slots=slots_of(spec))


def once(
    observed: RevisionObservation,
    spec: DeciderSpec,
    state: DeciderState | None = None,
    *,
    now: float = 1000.0,
) -> ScaleDecision:
    return decide(now, observed, spec, state or DeciderState())[0]


def load(value: float, *, ready: int = 1, **rest: object) -> RevisionObservation:
    return RevisionObservation(stable=value, panic=value, ready=ready, in_flight=int(value), **rest)  # type: ignore[arg-type]


# -- the terms -------------------------------------------------------------------------------------
def test_an_instance_of_a_language_model_takes_its_sequences_whatever_max_inputs_says() -> None:
    spec = language_model(slots=16, scaling=Scaling(max_inputs=1))

    assert (spec.max_inputs, spec.kpa.target) == (16, 16.0)
    assert (
        language_model(slots=4, scaling=Scaling(max_inputs=32, target_inputs=8)).kpa.target == 4.0
    )


def test_first_tokens_have_an_objective_only_where_one_is_declared() -> None:
    assert language_model().first_token is None
    told = language_model(objective_s=0.5)
    assert told.first_token is not None
    assert told.first_token.objective_s == 0.5
    assert told.first_token.late == pytest.approx(0.1)
    assert told.latency_objective_s == 0.5, "who waits here waits for a first token, too"
    assert DeciderSpec.of(spec_of(objectives=Objectives()), slots=4).first_token is None


# -- KV memory -------------------------------------------------------------------------------------
def test_memory_that_holds_fewer_calls_than_declared_wants_more_instances() -> None:
    decision = once(load(12.0, engine=EngineLoad(slots=4.0)), language_model())

    assert (decision.desired, decision.signal) == (3, "kv_memory")
    assert str(decision) == "1->3 by kv_memory (stable=1 kv_memory=3 min=0)"


def test_memory_that_holds_all_says_nothing() -> None:
    decision = once(load(12.0, engine=EngineLoad(slots=16.0)), language_model())

    assert "kv_memory" not in dict(decision.want)
    assert decision.desired == 1


def test_no_metrics_are_no_signal() -> None:
    decision = once(load(12.0), language_model(objective_s=0.5))

    assert {name for name, _ in decision.want} == {"stable", "min"}


def test_memory_keeps_instances_that_concurrency_alone_would_let_go() -> None:
    seen = load(12.0, ready=3, engine=EngineLoad(slots=4.0), idle_s=())
    assert once(seen, language_model()).stops == 0

    idle = replace(seen, stable=2.0, panic=2.0, in_flight=2, idle_s=(90.0, 90.0))
    assert once(idle, language_model()).desired == 1


# -- queued tokens ---------------------------------------------------------------------------------
def queue(
    tokens: int, *, ready: int = 1, start_s: float = 4.0, calls: float = 8.0, **rest: object
) -> RevisionObservation:
    return load(
        calls,
        ready=ready,
        start_s=start_s,
        engine=EngineLoad(slots=16.0, queued_tokens=tokens, tokens_per_s=1000.0),
        **rest,
    )


@pytest.mark.parametrize("tokens, want", [(3000, 1), (4001, 2), (7000, 2), (100_000, 2)])
def test_prompts_that_an_instance_cannot_work_off_before_another_starts_want_more(
    tokens: int, want: int
) -> None:
    decision = once(queue(tokens), language_model())

    assert dict(decision.want)["queued_tokens"] == want, "no more than twice as many at once"
    assert decision.desired == want


def test_queued_tokens_want_no_more_instances_than_there_are_calls() -> None:
    assert dict(once(queue(10**6, ready=4, calls=5.0), language_model()).want)["queued_tokens"] == 5


def test_an_objective_shorter_than_a_start_is_not_chased() -> None:
    assert once(queue(3000), language_model(objective_s=0.1)).desired == 1, (
        "another instance would be there after the queue is gone"
    )
    assert once(queue(3000, start_s=0.5), language_model(objective_s=0.1)).desired == 2


def test_a_pace_that_nobody_knows_is_no_signal() -> None:
    slow = replace(queue(10**6), engine=EngineLoad(slots=16.0, queued_tokens=10**6))

    assert "queued_tokens" not in dict(once(slow, language_model()).want)


# -- first tokens ----------------------------------------------------------------------------------
def told(late: float, *, first_tokens: int = 20) -> EngineLoad:
    return EngineLoad(slots=16.0, first_tokens=first_tokens, late=late)


def test_late_first_tokens_cut_the_calls_that_an_instance_may_have() -> None:
    spec = language_model(objective_s=0.5)
    decision, state = decide(1000.0, load(12.0, engine=told(0.5)), spec, DeciderState())

    assert state.first_token is not None
    assert state.first_token.target == pytest.approx(9.0)
    assert (decision.desired, decision.signal) == (2, "first_token")


@pytest.mark.parametrize(
    "engine", [told(0.5, first_tokens=4), told(0.1), EngineLoad(slots=16.0), None]
)
def test_few_or_timely_or_unknown_first_tokens_cut_nothing(engine: EngineLoad | None) -> None:
    _, state = decide(
        1000.0, load(12.0, engine=engine), language_model(objective_s=0.5), DeciderState()
    )

    assert state.first_token is None


def test_a_cut_has_time_to_show_before_the_next() -> None:
    spec, state = language_model(objective_s=0.5), DeciderState()
    targets = []
    for second in range(0, 2 * int(SETTLE_S) + 1, 2):
        _, state = decide(1000.0 + second, load(12.0, engine=told(0.9)), spec, state)
        assert state.first_token is not None
        targets.append(round(state.first_token.target, 2))

    assert targets == [9.0] * 5 + [6.75] * 5 + [5.06]


def test_nothing_is_cut_while_an_instance_is_on_its_way() -> None:
    spec = language_model(objective_s=0.5)
    _, state = decide(1000.0, load(12.0, starting=1, engine=told(0.9)), spec, DeciderState())

    assert state.first_token is None


def test_one_call_at_a_time_is_the_least_so_that_a_slow_engine_is_not_multiplied() -> None:
    spec, state = language_model(objective_s=0.001), DeciderState()
    decision = None
    for minute in range(30):
        decision, state = decide(1000.0 + 60 * minute, load(3.0, engine=told(1.0)), spec, state)

    assert decision is not None
    assert decision.desired == 3, (
        "three calls at once need no fourth instance, however late their first tokens are"
    )


def test_the_bound_settles_where_first_tokens_come_in_time() -> None:
    """An engine whose first tokens are late from seven calls at once on, under twelve calls: two
    instances hold it."""
    spec, state, ready = language_model(objective_s=0.5), DeciderState(), 1
    history = []
    for tick in range(900):
        each = 12.0 / ready
        engine = told(0.5 if each > 7 else 0.0)
        idle_s = (90.0,) * (ready - 1) if each < 7 else ()
        decision, state = decide(
            1000.0 + 2 * tick, load(12.0, ready=ready, engine=engine, idle_s=idle_s), spec, state
        )
        ready = max(1, decision.desired)
        history.append(ready)

    assert max(history) <= 3
    assert history.count(1) < 0.2 * len(history), (
        "it is tried again now and then whether one is enough"
    )


def test_the_bound_goes_once_it_bounds_nothing() -> None:
    spec = language_model(objective_s=0.5)
    _, state = decide(1000.0, load(12.0, engine=told(0.9)), spec, DeciderState())
    for second in range(2, 100, 2):
        _, state = decide(1000.0 + second, load(12.0, ready=2, engine=told(0.0)), spec, state)

    assert state.first_token is None


# -- batches ---------------------------------------------------------------------------------------
BATCHED = spec_of(
    methods=(MethodSpec(batch=BatchPolicy(max_batch_size=16, wait_ms=5)),),
    scaling=Scaling(max_inputs=32, max_instances=20),
)


def batches(occupancy: float | None, calls: float, *, ready: int = 1) -> ScaleDecision:
    return once(
        load(calls, ready=ready, occupancy=occupancy),
        DeciderSpec.of(BATCHED, slots=slots_of(BATCHED)),
    )


def test_batches_that_leave_full_want_more_instances() -> None:
    decision = batches(1.0, 30.0)

    assert (decision.desired, decision.signal) == (2, "occupancy")
    assert batches(0.9, 120.0, ready=4).desired == 5


@pytest.mark.parametrize("occupancy, calls", [(0.5, 30.0), (None, 30.0), (1.0, 16.0)])
def test_batches_with_room_want_none_nor_does_a_load_that_is_one_batch(
    occupancy: float | None, calls: float
) -> None:
    assert batches(occupancy, calls).desired == 1


def test_functions_that_gather_nothing_hear_nothing_of_batches() -> None:
    spec = DeciderSpec.of(spec_of(scaling=Scaling(max_inputs=32)), slots=32)

    assert "occupancy" not in dict(once(load(30.0, occupancy=1.0), spec).want)


# -- all together ----------------------------------------------------------------------------------
ENGINES = st.builds(
    EngineLoad,
    slots=st.floats(1, 64),
    queued_tokens=st.integers(0, 10**9),
    tokens_per_s=st.one_of(st.none(), st.floats(0.001, 1e6)),
    first_tokens=st.integers(0, 100),
    late=st.one_of(st.none(), st.floats(0, 1)),
)


@given(
    stable=st.floats(0, 500),
    ready=st.integers(0, 10),
    waiting=st.integers(0, 500),
    engine=ENGINES,
    start_s=st.one_of(st.none(), st.floats(0, 100)),
)
def test_whatever_engines_say_the_ceiling_holds_and_busy_instances_stay(
    stable: float, ready: int, waiting: int, engine: EngineLoad, start_s: float | None
) -> None:
    observed = RevisionObservation(
        stable=stable,
        panic=stable,
        ready=ready,
        in_flight=ready,
        waiting=waiting,
        start_s=start_s,
        engine=engine,
    )
    spec = replace(language_model(), first_token=FirstTokenTerms(objective_s=0.5, late=0.01))

    decision, state = decide(1000.0, observed, spec, DeciderState())

    assert decision.desired <= max(20, observed.capacity)
    assert decision.stops == 0 or observed.capacity > 20, "nobody here is idle"
    assert state.first_token is None or state.first_token.target >= 1
