"""Which failures are tried again, after how long, and how many a caller may cause."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.resilience import declared_retries
from activator.resilience.declared_retries import (
    BURST,
    RetryBudgets,
    delay_s,
    is_failure,
    may_retry,
    pause_s,
)
from activator.worker_client.connection import WorkerConnectionLost
from pilotlight import errors
from pilotlight.spec.function import FunctionSpec, MethodSpec
from pilotlight.spec.policies import RetryPolicy

FIXED = RetryPolicy(
    max_retries=3, initial_delay_s=1, backoff_coefficient=2, max_delay_s=3, jitter=0
)


@dataclass
class FakeTarget:
    spec: FunctionSpec


@dataclass
class FakeCall:
    policy: RetryPolicy | None = FIXED
    retries: int = 0
    target: FakeTarget = field(init=False)

    def __post_init__(self) -> None:
        self.target = FakeTarget(
            FunctionSpec(name="f", bundle="", methods=(MethodSpec(name=""),), retries=self.policy)
        )


def test_delays_double_up_to_their_cap() -> None:
    assert [delay_s(FIXED, n, random.Random(0)) for n in (1, 2, 3, 4)] == [1, 2, 3, 3]


@given(st.integers(1, 10_000), st.floats(0, 1), st.floats(1, 10), st.integers(0, 1000))
def test_a_delay_is_never_above_its_cap_nor_below_what_jitter_leaves(
    attempt: int, jitter: float, backoff: float, seed: int
) -> None:
    policy = RetryPolicy(
        max_retries=100,
        initial_delay_s=2,
        backoff_coefficient=backoff,
        max_delay_s=60,
        jitter=jitter,
    )
    wait_s = delay_s(policy, attempt, random.Random(seed))
    assert 2 * (1 - jitter) - 1e-9 <= wait_s <= 60


@pytest.mark.parametrize(
    "error, expected",
    [
        (errors.WorkerCrashed("it died"), True),
        (errors.StartFailed("import failed"), True),
        (errors.Unavailable("no room"), True),
        (errors.FunctionRaised("ValueError"), True),
        (errors.DeadlineExceeded("ran too long", clock="execution"), True),
        (errors.DeadlineExceeded("did not start", clock="startup"), True),
        (WorkerConnectionLost("gone", sent=True), True),
        (errors.DeadlineExceeded("waited", clock="queue"), False),
        (errors.CircuitOpen("it fails", revision="r"), False),
        (errors.InvalidInput("x"), False),
        (errors.OverQuota("x"), False),
        (errors.TooManyRequests("full"), False),
        (errors.OverBudget("spent"), False),
        (errors.NotFound("x"), False),
    ],
)
def test_failures_are_tried_again_and_refusals_are_not(
    error: BaseException, expected: bool
) -> None:
    assert is_failure(error) is expected
    assert may_retry(error, FakeCall()) is expected


def test_nothing_is_tried_again_without_a_policy_or_beyond_it() -> None:
    crash = errors.WorkerCrashed("it died")
    assert not may_retry(crash, FakeCall(policy=None))
    assert may_retry(crash, FakeCall(retries=2))
    assert not may_retry(crash, FakeCall(retries=3))
    assert pause_s(FakeCall(policy=None), left_s=100, rng=random.Random(0)) is None


def test_nothing_is_tried_again_past_the_callers_deadline() -> None:
    call = FakeCall(retries=1)
    assert pause_s(call, left_s=2.5, rng=random.Random(0)) == 2
    assert pause_s(call, left_s=2, rng=random.Random(0)) is None


def test_retries_are_a_share_of_the_calls_of_their_caller() -> None:
    allowed = RetryBudgets(0.2)
    for _ in range(int(BURST)):
        assert allowed.try_acquire("k", 0)
    assert not allowed.try_acquire("k", 0)
    allowed.for_caller("k", 0).calls += 10
    assert [allowed.try_acquire("k", 0) for _ in range(3)] == [True, True, False]


def test_one_callers_storm_takes_nothing_from_another() -> None:
    allowed = RetryBudgets(0.2)
    while allowed.try_acquire("storm", 0):
        pass
    assert allowed.try_acquire("calm", 0)


def test_a_caller_of_few_calls_has_a_retry_now_and_then() -> None:
    allowed = RetryBudgets(0.2)
    while allowed.try_acquire("k", 0):
        pass
    assert not allowed.try_acquire("k", 5)
    assert allowed.try_acquire("k", 10)


def test_a_burst_is_all_that_is_kept() -> None:
    allowed = RetryBudgets(1.0)
    allowed.for_caller("k", 0).calls += 1_000_000
    assert sum(allowed.try_acquire("k", 0) for _ in range(100)) == BURST


def test_a_share_of_zero_allows_none_at_all() -> None:
    assert not RetryBudgets(0.0).try_acquire("k", 0)


def test_a_flood_of_callers_does_not_fill_the_memory() -> None:
    allowed = RetryBudgets(0.2)
    for n in range(declared_retries.MAX_CALLERS + 10):
        allowed.for_caller(f"k-{n}", 0)
    assert repr(allowed) == f"<RetryBudgets {declared_retries.MAX_CALLERS} callers, 0.2 per call>"
