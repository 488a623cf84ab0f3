"""What is estimated of an instance from calls of known behaviour."""

from __future__ import annotations

import pytest

from pilotlight.capacity import instance_model
from pilotlight.capacity.instance_model import MAX_SLOWDOWN, InstanceModel
from pilotlight.capacity.measurements import MeasuredCall
from pilotlight.capacity.simulation import Work
from pilotlight.loadtest.distributions import parse_distribution
from tests.functions.capacity.made_calls import made_calls, made_streams, shared_calls


@pytest.mark.parametrize("slowdown", [0.0, 0.25, 1.0])
def test_the_slowdown_by_other_calls_is_found(slowdown: float) -> None:
    calls = made_calls(2_000, slowdown=slowdown, at_once=6)
    model = instance_model.estimate(calls, slots=8)
    assert model.slowdown == pytest.approx(slowdown, abs=0.06)
    assert model.mean_ms == pytest.approx(20.9, rel=0.08)
    assert model.scv == pytest.approx(0.094, abs=0.03)
    assert (model.measured, model.slots) == (6, 8)


@pytest.mark.parametrize("slowdown", [0.0, 0.4, 1.0])
def test_the_slowdown_is_found_in_calls_that_came_at_random(slowdown: float) -> None:
    """Also where most calls are alone: those in a crowd are short ones, and are no evidence."""
    calls = shared_calls(4_000, rate_per_s=45.0, slowdown=slowdown)
    assert instance_model.estimate(calls, slots=60).slowdown == pytest.approx(slowdown, abs=0.12)


def test_an_instance_is_not_assumed_to_do_more_than_was_measured() -> None:
    model = instance_model.estimate(made_calls(500, at_once=3), slots=8)
    assert model.throughput(3) == pytest.approx(3.0, rel=0.2)
    assert model.throughput(8) == model.throughput(3)
    assert model.speeds[7] == pytest.approx(model.throughput(3) / 8)


def test_without_others_at_once_calls_share_the_instance() -> None:
    model = instance_model.estimate(made_calls(100), slots=4)
    assert (model.slowdown, model.measured) == (0.0, 1)
    assert model.speeds == pytest.approx((1.0, 1 / 2, 1 / 3, 1 / 4))
    assert model.max_rate_per_s == pytest.approx(1000 / model.mean_ms)


def test_calls_that_hold_each_other_up_are_bounded() -> None:
    calls = [
        MeasuredCall(at=n, exec_ms=10.0**n, first_ms=None, calls_at_once=float(n), found=n - 1)
        for n in range(1, 5)
    ]
    assert instance_model.estimate(calls, slots=4).slowdown == MAX_SLOWDOWN


def test_times_of_tokens_are_fitted() -> None:
    calls = made_streams(1_000)
    model = instance_model.estimate(calls, slots=16)
    times = instance_model.token_times(calls, model.works)
    assert times is not None
    assert times.prompt_ms == pytest.approx(5.0, abs=1.0)
    assert times.prompt_token_ms == pytest.approx(0.1, rel=0.05)
    assert times.token_ms == pytest.approx(2.0, rel=0.05)
    assert (times.max_in, times.max_out) == (400, 80)


def test_longer_answers_take_longer_and_keep_their_spread() -> None:
    calls = made_streams(1_000)
    model = instance_model.estimate(calls, slots=16)
    times = instance_model.token_times(calls, model.works)
    assert times is not None
    works = instance_model.works_of_lengths(
        calls,
        model.works,
        times,
        tokens_in=parse_distribution("100", option="--tokens-in"),
        tokens_out=parse_distribution("201", option="--tokens-out"),
    )
    mean = sum(work.whole_ms for work in works) / len(works)
    assert mean == pytest.approx(5 + 10 + 400, rel=0.05)
    assert (
        min(work.whole_ms for work in works)
        < 0.95 * mean
        < 1.05 * mean
        < max(work.whole_ms for work in works)
    )


def test_without_streams_times_of_tokens_are_not_known() -> None:
    calls = made_calls(100)
    works = instance_model.estimate(calls, slots=1).works
    assert instance_model.token_times(calls, works) is None


def test_equal_prompts_have_no_time_by_token() -> None:
    calls = [
        MeasuredCall(
            at=n, exec_ms=30.0, first_ms=10.0, calls_at_once=1.0, tokens_in=50, tokens_out=11
        )
        for n in range(30)
    ]
    model = instance_model.estimate(calls, slots=1)
    times = instance_model.token_times(calls, model.works)
    assert times is not None
    assert (times.prompt_ms, times.prompt_token_ms, times.token_ms) == pytest.approx((10, 0, 2))


def test_an_instance_that_gets_slower_in_all_has_its_capacity_at_all_slots() -> None:
    model = InstanceModel(
        slowdown=1.5, measured=4, slots=4, works=[Work(first_ms=10.0, whole_ms=10.0)]
    )
    assert model.max_rate_per_s == pytest.approx(100 * 4 / 5.5)
