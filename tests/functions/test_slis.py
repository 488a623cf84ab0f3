"""Budgets of stages add up, and sums of observations lose nothing."""

from __future__ import annotations

import pytest

from pilotlight.errors import InvalidInput
from pilotlight.spec.observations import Observation, count_eligible, count_errors, sum_observations
from pilotlight.spec.policies import MIN_STAGE_S, STAGES, Objectives

WARM = tuple(stage for stage in STAGES if stage != "start")


def test_stages_share_what_a_warm_call_may_take() -> None:
    budgets = Objectives().budgets_s()
    assert tuple(budgets) == STAGES
    assert sum(budgets[stage] for stage in WARM) == pytest.approx(0.1)
    assert sum(budgets.values()) == pytest.approx(5.0)


def test_a_given_budget_stands_and_the_others_share_the_rest() -> None:
    budgets = Objectives(stages_s={"exec": 0.09, "start": 1.0}).budgets_s()
    assert (budgets["exec"], budgets["start"]) == (0.09, 1.0)
    assert sum(budgets[stage] for stage in WARM) == pytest.approx(0.1)


def test_stages_keep_something_where_others_were_given_everything() -> None:
    budgets = Objectives(stages_s={"exec": 3.0}).budgets_s()
    assert sum(budgets[stage] for stage in ("route", "admit", "queue")) == pytest.approx(0.01)
    assert (
        min(Objectives(warm_latency_s=0.001, cold_latency_s=0.001).budgets_s().values())
        >= MIN_STAGE_S
    )


def test_there_is_no_budget_of_a_stage_that_there_is_not() -> None:
    with pytest.raises(InvalidInput, match="lunch"):
        Objectives(stages_s={"lunch": 1})


def test_observations_are_added_up_and_stay_as_they_were() -> None:
    one = Observation(
        tenant="t",
        function_id="f",
        revision="v1",
        minute=5,
        answered=2,
        overruns={"exec": 1},
        latency={"warm": {3: 2}},
    )
    two = Observation(
        tenant="t",
        function_id="f",
        revision="v2",
        minute=4,
        failed=1,
        overruns={"exec": 2},
        latency={"warm": {3: 1, 4: 1}},
    )
    total = sum_observations([one, two])
    assert total is not None
    assert (total.minute, total.answered, total.failed, total.overruns, total.latency) == (
        4,
        2,
        1,
        {"exec": 3},
        {"warm": {3: 3, 4: 1}},
    )
    assert one.latency == {"warm": {3: 2}}
    assert sum_observations([]) is None


def test_a_stream_that_broke_is_an_error_of_those_judged() -> None:
    one = Observation(
        tenant="t",
        function_id="f",
        revision="v",
        minute=1,
        answered=9,
        failed=1,
        refused=50,
        streams=3,
        streams_completed=2,
    )
    assert (count_eligible(one), count_errors(one)) == (10, 2)
