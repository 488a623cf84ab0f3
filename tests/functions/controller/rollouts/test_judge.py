"""When a rollout advances, waits, goes back or is halted, and what it says of it."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from pilotlight.controller.rollouts.decision import decide
from pilotlight.controller.rollouts.plan import Gate, GateKind, RolloutPlan
from pilotlight.controller.rollouts.records import (
    Decision,
    RevisionEvidence,
    RolloutStatus,
    Verdict,
)
from pilotlight.controller.statistics.sequential_tests import Sample
from pilotlight.errors import InvalidInput
from pilotlight.spec.sketches import Sketch
from tests.functions.controller.rollouts.seen import evidence, observed

PLAN = RolloutPlan(steps=(5, 50, 100), every_s=300, min_samples=200)
BEGAN = 1_000_000.0


def decided(
    candidate: RevisionEvidence,
    stable: RevisionEvidence,
    *,
    plan: RolloutPlan = PLAN,
    elapsed_s: float = 400,
    step: int = 0,
    **standing: Any,
) -> Decision:
    """The decision on a step that has lasted so long."""
    return decide(
        plan,
        RolloutStatus(step=step, step_began_at=BEGAN, **standing),
        candidate,
        stable,
        now=BEGAN + elapsed_s,
    )


def test_a_candidate_as_good_as_stable_gets_the_next_step() -> None:
    decision = decided(evidence(1000, failed=1), evidence(19_000, failed=19))
    assert (decision.verdict, decision.weight, decision.action) == (
        Verdict.ADVANCE,
        50,
        "weight 50",
    )
    assert [gate.outcome for gate in decision.gates] == ["pass", "pass", "pass"]


def test_the_last_step_ends_it() -> None:
    decision = decided(evidence(1000), evidence(19_000), step=2)
    assert (decision.verdict, decision.weight) == (Verdict.DONE, 100)


def test_no_calls_are_no_pass_however_long_it_takes() -> None:
    decision = decided(evidence(0), evidence(50_000), elapsed_s=3000)
    assert (decision.verdict, decision.cause, decision.tell) == (Verdict.HOLD, "no_traffic", False)
    assert "stable had 50000" in decision.reasons[0]


def test_a_step_that_does_not_get_on_is_told_once() -> None:
    late = decided(evidence(0), evidence(0), elapsed_s=3700)
    assert (late.verdict, late.tell, late.action) == (Verdict.HOLD, True, "tell")
    assert not decided(evidence(0), evidence(0), elapsed_s=3700, is_told=True).tell


def test_metrics_that_stopped_coming_hold() -> None:
    decision = decided(evidence(1000, recent=observed(0)), evidence(19_000))
    assert (decision.verdict, decision.cause) == (Verdict.HOLD, "metrics_missing")


def test_stable_without_data_holds() -> None:
    decision = decided(evidence(1000), evidence(0))
    assert (decision.verdict, decision.cause) == (Verdict.HOLD, "samples")
    assert any("no data from stable" in reason for reason in decision.reasons)


def test_too_few_samples_hold_and_say_how_many_there_are() -> None:
    decision = decided(evidence(150), evidence(3000))
    assert (decision.verdict, decision.cause) == (Verdict.HOLD, "samples")
    assert "150 of 200 samples" in decision.reasons[0]


def test_a_step_lasts_as_long_as_it_was_asked_to() -> None:
    assert decided(evidence(1000), evidence(19_000), elapsed_s=299).cause == "time"


@pytest.mark.parametrize("elapsed_s", [-5.0, -1e9])
def test_a_clock_before_the_steps_beginning_has_not_passed_it(elapsed_s: float) -> None:
    decision = decided(evidence(1000), evidence(19_000), elapsed_s=elapsed_s)
    assert (decision.verdict, decision.cause) == (Verdict.HOLD, "time")


def test_more_errors_end_it_within_the_step() -> None:
    # the alarm is silent: it is the comparison that sees it
    plan = dataclasses.replace(PLAN, availability=0.9)
    decision = decided(
        evidence(1000, failed=20), evidence(19_000, failed=19), plan=plan, elapsed_s=30
    )
    assert (decision.verdict, decision.cause, decision.weight) == (Verdict.ROLLBACK, "gate", 0)
    assert decision.reasons[0].startswith("error_ratio: 2.00%, stable 0.10%, limit 0.30%: worse")


def test_errors_that_stable_has_too_are_not_held_against_it() -> None:
    plan = dataclasses.replace(PLAN, availability=0.9)
    assert (
        decided(evidence(1000, failed=20), evidence(19_000, failed=380), plan=plan).verdict
        is Verdict.ADVANCE
    )


def test_a_suspicion_waits_for_proof() -> None:
    decision = decided(evidence(300, failed=2), evidence(5700, failed=6))
    assert (decision.verdict, decision.cause) == (Verdict.HOLD, "unclear")


def test_a_slower_tail_ends_it() -> None:
    decision = decided(evidence(500, slow=60, slow_ms=90), evidence(9500, slow=90, slow_ms=60))
    assert (decision.verdict, decision.cause) == (Verdict.ROLLBACK, "gate")
    assert decision.reasons[0].startswith("latency_p99")


def test_cold_starts_are_not_held_against_warm_latency() -> None:
    cold = {
        "warm": observed(500).latency["warm"],
        "cold": {80: 100},
        "exec": observed(500).latency["exec"],
    }
    candidate = evidence(600, latency=cold, cold=100)
    assert decided(candidate, evidence(9500)).verdict is Verdict.ADVANCE


def test_correct_but_twice_the_price_fails_and_a_better_metric_cannot_buy_it() -> None:
    plan = dataclasses.replace(PLAN, gates=(*PLAN.gates, Gate(metric="feedback:accuracy")))
    better, same = Sample(n=900, mean=0.99, variance=0.01), Sample(n=9000, mean=0.90, variance=0.09)
    decision = decided(
        evidence(1000, cost=2, told={"accuracy": better}),
        evidence(19_000, told={"accuracy": same}),
        plan=plan,
    )
    assert decision.verdict is Verdict.ROLLBACK
    assert decision.reasons[0].startswith("cost_per_call: 0.02, stable 0.01, limit 0.012: worse")


def test_a_stated_exchange_lets_a_proven_gain_pay() -> None:
    cost = Gate(
        metric="cost_per_call",
        kind=GateKind.TRADE,
        paid_by="feedback:accuracy",
        exchange=5.0,
        at_most=0.5,
    )
    plan = dataclasses.replace(PLAN, gates=(cost,))
    stable = evidence(19_000, told={"accuracy": Sample(n=9000, mean=0.8, variance=0.01)})
    better = {"accuracy": Sample(n=900, mean=0.9, variance=0.01)}
    assert (
        decided(evidence(1000, cost=1.5, told=better), stable, plan=plan).verdict is Verdict.ADVANCE
    )
    # beyond `at_most`
    assert (
        decided(evidence(1000, cost=2.0, told=better), stable, plan=plan).verdict
        is Verdict.ROLLBACK
    )
    same = {"accuracy": Sample(n=900, mean=0.8, variance=0.01)}
    assert (
        decided(evidence(1000, cost=1.5, told=same), stable, plan=plan).verdict is Verdict.ROLLBACK
    )


def test_a_trade_has_until_the_steps_end_to_be_paid() -> None:
    cost = Gate(
        metric="cost_per_call",
        kind=GateKind.TRADE,
        paid_by="feedback:accuracy",
        exchange=5.0,
        at_most=0.5,
    )
    plan = dataclasses.replace(PLAN, gates=(cost,))
    decision = decided(evidence(1000, cost=1.4), evidence(19_000), plan=plan, elapsed_s=100)
    assert (decision.verdict, decision.cause) == (Verdict.HOLD, "unclear")


def test_worse_feedback_ends_it() -> None:
    plan = dataclasses.replace(PLAN, gates=(Gate(metric="feedback:accuracy"),))
    worse, good = (
        {"accuracy": Sample(n=900, mean=0.7, variance=0.2)},
        {"accuracy": Sample(n=9000, mean=0.9, variance=0.09)},
    )
    decision = decided(evidence(1000, told=worse), evidence(19_000, told=good), plan=plan)
    assert (decision.verdict, decision.cause) == (Verdict.ROLLBACK, "gate")


def test_feedback_that_never_came_holds() -> None:
    plan = dataclasses.replace(PLAN, gates=(Gate(metric="feedback:accuracy"),))
    assert decided(evidence(1000), evidence(19_000), plan=plan).cause == "samples"


def test_the_burn_rate_alarm_ends_it_before_any_comparison() -> None:
    decision = decided(evidence(60, failed=6), evidence(0), elapsed_s=3)
    assert (decision.verdict, decision.cause) == (Verdict.ROLLBACK, "burn_rate")
    assert "14.4" in decision.reasons[0]


def test_a_crash_loop_ends_it_without_a_single_call() -> None:
    decision = decided(evidence(0, starts=3, starts_failed=3), evidence(19_000), elapsed_s=10)
    assert (decision.verdict, decision.cause) == (Verdict.ROLLBACK, "crash_loop")


def test_failed_starts_beside_good_ones_are_no_crash_loop() -> None:
    assert (
        decided(evidence(1000, starts=5, starts_failed=4), evidence(19_000)).verdict
        is Verdict.ADVANCE
    )


def test_answers_that_break_their_schema_end_it() -> None:
    decision = decided(evidence(100, failed=3, invalid=3), evidence(1900), elapsed_s=5)
    assert (decision.verdict, decision.cause) == (Verdict.ROLLBACK, "schema")


def test_both_versions_bad_is_halted_and_names_both() -> None:
    decision = decided(evidence(500, failed=100), evidence(9500, failed=1900))
    assert (decision.verdict, decision.cause, decision.weight) == (Verdict.HALT, "both_bad", 0)
    assert [reason.partition(":")[0] for reason in decision.reasons] == ["candidate", "stable"]


def test_a_candidate_that_mends_a_bad_stable_goes_on() -> None:
    assert decided(evidence(1000), evidence(19_000, failed=3800)).verdict is Verdict.ADVANCE


def test_paused_does_not_advance_and_still_goes_back() -> None:
    assert decided(evidence(1000), evidence(19_000), is_paused=True).cause == "paused"
    assert (
        decided(evidence(1000, failed=100), evidence(19_000), is_paused=True).verdict
        is Verdict.ROLLBACK
    )


def test_a_bound_of_its_own_holds_whatever_stable_does() -> None:
    plan = dataclasses.replace(
        PLAN, gates=(Gate(metric="error_ratio", max=0.01),), availability=0.5
    )
    assert (
        decided(evidence(1000, failed=50), evidence(19_000, failed=950), plan=plan).verdict
        is Verdict.ROLLBACK
    )
    assert decided(evidence(1000, failed=5), evidence(0), plan=plan).verdict is Verdict.ADVANCE


def test_what_says_the_same_with_other_numbers_has_the_same_signature() -> None:
    one, other = decided(evidence(150), evidence(3000)), decided(evidence(151), evidence(3010))
    assert one.reasons != other.reasons
    assert one.signature == other.signature


def shared(
    calls: int, *, at_once: float, exec_ms: int = 20, price: float = 1.0
) -> RevisionEvidence:
    """Calls of an instance that costs so much a second, of which so many shared it on average."""
    seen = observed(calls, cost=price * exec_ms / 1000 / at_once * 100)
    seen.exec_ms = calls * exec_ms
    return RevisionEvidence(step=seen, recent=seen, hour=seen, price=price)


def test_fewer_calls_that_share_an_instance_are_not_held_against_the_candidate() -> None:
    decision = decided(shared(1000, at_once=1), shared(19_000, at_once=4))
    assert decision.verdict is Verdict.ADVANCE
    assert "as if each call had an instance to itself" in decision.gates[2].reason


def test_with_as_many_calls_as_stable_what_was_billed_counts_alone() -> None:
    assert (
        decided(shared(5000, at_once=1), shared(5000, at_once=4), step=1).verdict
        is Verdict.ROLLBACK
    )


def test_twice_the_price_fails_also_where_calls_share_instances() -> None:
    assert (
        decided(shared(1000, at_once=1, price=2.0), shared(19_000, at_once=4)).verdict
        is Verdict.ROLLBACK
    )
    assert (
        decided(shared(1000, at_once=1, exec_ms=40), shared(19_000, at_once=4)).verdict
        is Verdict.ROLLBACK
    )


# -- predictions -----------------------------------------------------------------------------------
WATCHED = dataclasses.replace(
    PLAN, gates=(Gate(metric="prediction_ks"), Gate(metric="quality:accuracy"))
)


def predicted(calls: int, *, mean: float = 0.0, accuracy: float = 0.9) -> RevisionEvidence:
    """A revision whose predictions are normally distributed around `mean`."""
    rng = random.Random(calls)
    right = Sample(n=calls, mean=accuracy, variance=accuracy * (1 - accuracy))
    return dataclasses.replace(
        evidence(calls),
        predictions=Sketch.of([rng.gauss(mean, 1) for _ in range(calls)]),
        quality={"accuracy": right},
    )


def test_a_candidate_that_predicts_as_stable_does_advances() -> None:
    decision = decided(predicted(2_000), predicted(19_000), plan=WATCHED)
    assert decision.verdict is Verdict.ADVANCE
    assert [gate.outcome for gate in decision.gates] == ["pass", "pass"]


def test_other_predictions_than_stables_are_vetoed() -> None:
    decision = decided(predicted(2_000, mean=1.0), predicted(19_000), plan=WATCHED)
    assert (decision.verdict, decision.cause) == (Verdict.ROLLBACK, "gate")
    assert decision.reasons[0].startswith("prediction_ks: 0.3")


def test_a_difference_that_chance_may_explain_holds() -> None:
    decision = decided(predicted(300, mean=0.5), predicted(3_000), plan=WATCHED)
    assert (decision.verdict, decision.cause) == (Verdict.HOLD, "unclear")


def test_worse_predictions_are_vetoed() -> None:
    decision = decided(predicted(2_000, accuracy=0.7), predicted(19_000), plan=WATCHED)
    assert decision.verdict is Verdict.ROLLBACK
    assert decision.reasons[0].startswith("quality:accuracy: 70.00%")


def test_predictions_that_did_not_arrive_are_no_pass() -> None:
    decision = decided(evidence(2_000), predicted(19_000), plan=WATCHED)
    assert (decision.verdict, decision.cause) == (Verdict.HOLD, "samples")
    assert "no data from the candidate" in decision.reasons[0]


def test_an_equal_candidate_is_seldom_vetoed_however_often_it_is_judged() -> None:
    plan = dataclasses.replace(
        PLAN, gates=(Gate(metric="prediction_ks", max=0.0),), false_rollback_rate=0.2
    )
    stopped = 0
    for seed in range(20):
        rng = random.Random(seed)
        ours, theirs = ([rng.gauss(0, 1) for _ in range(600)] for _ in range(2))
        for n in range(100, 600, 50):
            pair = [
                dataclasses.replace(evidence(n), predictions=Sketch.of(values[:n]))
                for values in (ours, theirs)
            ]
            if decided(*pair, plan=plan).verdict is Verdict.ROLLBACK:
                stopped += 1
                break
    assert stopped <= 4  # a fifth of 20


def test_the_distance_of_predictions_pays_for_nothing() -> None:
    with pytest.raises(InvalidInput, match="has no gain"):
        Gate(metric="cost_per_call", kind=GateKind.TRADE, paid_by="prediction_ks", exchange=1)
