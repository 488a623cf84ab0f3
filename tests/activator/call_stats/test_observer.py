"""Every finished call is in exactly one count, spends one clock, and its stages add up to its
latency."""

from __future__ import annotations

import time
from bisect import bisect_left
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.call_stats.observer import CallStats
from activator.calls.call import AnsweredCall, Call
from activator.metrics.call_counters import FunctionTally, WarmCounters
from activator.routing.call_target import CallTarget
from pilotlight.errors import (
    CircuitOpen,
    DeadlineExceeded,
    NotFound,
    OverQuota,
    PilotlightError,
    StartFailed,
    WorkerCrashed,
)
from pilotlight.spec.observations import (
    CLOCKS,
    LATENCY_BOUNDS,
    MAX_BUCKET,
    SHADOW_ARM,
    Observation,
    latency_bucket,
)
from pilotlight.spec.policies import STAGES, Objectives
from snapshotter.types import StartKind
from tests.fakes.calls import call_of as admitted_call
from tests.fakes.routes import spec_of, target_of

MS = 1_000_000
PARTITION = ("answered", "failed", "refused", "cancelled")
TARGET = target_of(spec_of(objectives=Objectives(stages_s={"exec": 0.05, "queue": 0.01})))


def call_of(
    target: CallTarget = TARGET,
    *,
    start_ms: float = 0.0,
    route_ms: float = 0.0,
    admit_ms: float = 0.0,
) -> Call:
    call = admitted_call(target, b"", key_id="k-1")
    call.began_ns = 0
    call.routed_ns = int(route_ms * MS)
    call.received_ns = call.routed_ns + int(admit_ms * MS)
    if start_ms:
        call.start_ms, call.start_kind = start_ms, StartKind.COLD
    return call


def seen(observer: CallStats) -> Observation:
    (one,) = observer.drain(7)
    return one


def counted(one: Observation) -> dict[str, int]:
    return {name: getattr(one, name) for name in PARTITION if getattr(one, name)}


def answer_warm(
    observer: CallStats,
    call: Call,
    arm: str = "",
    *,
    ended_ns: int,
    dispatched_ns: int,
    picos: int = 0,
) -> None:
    """As the fast path counts it."""
    attempt = AnsweredCall(call)
    attempt.dispatched_ns, attempt.picos = dispatched_ns, picos
    attempt.exec_ms = (ended_ns - dispatched_ns) / MS
    warm_counters(observer, call.target, arm).answered(attempt, 200)


def warm_counters(observer: CallStats, target: CallTarget, arm: str = "") -> WarmCounters:
    function = FunctionTally(("t", "a", "f"))
    return WarmCounters(
        function_of=lambda: function, revision_of=lambda: observer.bucket(target, arm)
    )


def answer(
    observer: CallStats,
    call: Call,
    *,
    status: int = 200,
    queue_ms: float = 0.0,
    exec_ms: float = 20.0,
    **more: Any,
) -> None:
    dispatched_ns = call.received_ns + int((call.start_ms + queue_ms) * MS)
    observer.answered(
        call,
        status=status,
        dispatched_ns=dispatched_ns,
        ended_ns=dispatched_ns + int(exec_ms * MS),
        **more,
    )


@pytest.mark.parametrize("ms", [0.0, 0.3, 1.0, 1.05, 1.1, 99.9, 100.0, 12_345.6, 604_800_000.0])
def test_buckets_are_those_of_the_door(ms: float) -> None:
    assert bisect_left(LATENCY_BOUNDS, ms) == min(latency_bucket(ms), MAX_BUCKET)


@pytest.mark.parametrize(
    "status, outcome, where, why",
    [
        (200, "ok", "answered", ""),
        (302, "ok", "answered", ""),
        (404, "ok", "refused", ""),
        (422, "invalid", "refused", ""),
        (499, "", "cancelled", ""),
        (500, "raised", "failed", "raised"),
        (500, "invalid", "failed", "invalid"),
        (502, "", "failed", "crashed"),
        (504, "", "failed", "late"),
        (503, "ok", "refused", ""),
        (501, "ok", "refused", ""),
        (500, "ok", "failed", ""),
    ],
)
def test_an_answer_is_in_one_count(status: int, outcome: str, where: str, why: str) -> None:
    observer = CallStats()
    answer(observer, call_of(), status=status, outcome=outcome)
    one = seen(observer)
    assert counted(one) == {where: 1}
    assert {
        name: getattr(one, name)
        for name in ("raised", "invalid", "crashed", "late")
        if getattr(one, name)
    } == ({why: 1} if why else {})
    assert bool(one.latency) == (where == "answered")


@pytest.mark.parametrize(
    "error, where",
    [
        (OverQuota(""), "refused"),
        (NotFound(""), "refused"),
        (StartFailed(""), "failed"),
        (WorkerCrashed(""), "failed"),
        (DeadlineExceeded(""), "failed"),
        (CircuitOpen(""), "failed"),
    ],
)
def test_a_call_that_got_no_answer_is_refused_or_failed(error: PilotlightError, where: str) -> None:
    observer = CallStats()
    observer.refused(TARGET, error.status, error)
    one = seen(observer)
    assert counted(one) == {where: 1}
    assert (one.crashed, one.late) == (
        int(isinstance(error, WorkerCrashed)),
        int(isinstance(error, DeadlineExceeded)),
    )


def test_a_warm_call_is_counted_the_same_on_the_fast_path() -> None:
    slow, fast = CallStats(), CallStats()
    for observer, is_fast in ((slow, False), (fast, True)):
        call = call_of()
        if is_fast:
            answer_warm(observer, call, ended_ns=60 * MS, dispatched_ns=MS // 2, picos=7)
        else:
            observer.answered(
                call, status=200, outcome="ok", ended_ns=60 * MS, dispatched_ns=MS // 2, picos=7
            )
    assert seen(fast) == seen(slow)


def test_a_warm_call_that_waited_for_its_quotas_is_told_stage_by_stage() -> None:
    observer = CallStats()
    call = call_of(route_ms=2, admit_ms=30)
    answer_warm(observer, call, ended_ns=60 * MS, dispatched_ns=40 * MS)
    one = seen(observer)
    assert {clock: list(one.latency[clock]) for clock in ("route", "admit", "queue", "exec")} == {
        "route": [latency_bucket(2)],
        "admit": [latency_bucket(30)],
        "queue": [latency_bucket(8)],
        "exec": [latency_bucket(20)],
    }
    assert one.overruns == {"admit": 1}


@given(st.tuples(*[st.floats(0, 5000)] * 5), st.booleans())
def test_stages_add_up_to_the_latency(
    stages: tuple[float, float, float, float, float], streamed: bool
) -> None:
    observer = CallStats()
    route_ms, admit_ms, queue_ms, start_ms, exec_ms = stages
    call = call_of(route_ms=route_ms, admit_ms=admit_ms, start_ms=start_ms)
    answer(observer, call, queue_ms=queue_ms, exec_ms=exec_ms, streamed=streamed)
    latency = seen(observer).latency
    (clock,) = set(latency) - set(STAGES)
    (bucket,) = latency[clock]
    assert LATENCY_BOUNDS[bucket] * 1.001 + 0.001 >= sum(stages)
    assert bucket == 0 or LATENCY_BOUNDS[bucket - 1] <= sum(stages) * 1.001 + 0.001
    assert {stage: sum(latency[stage].values()) for stage in STAGES} == dict.fromkeys(STAGES, 1)


def test_each_stage_over_its_budget_is_an_overrun() -> None:
    observer = CallStats()
    answer(observer, call_of(), queue_ms=11, exec_ms=49)
    answer(observer, call_of(start_ms=6000), exec_ms=51)
    assert seen(observer).overruns == {"queue": 1, "exec": 1, "start": 1}


@pytest.mark.parametrize(
    "start_ms, streamed, clock",
    [(0, False, "warm"), (0, True, "first_byte"), (5, False, "cold"), (5, True, "cold")],
)
def test_an_answered_call_spends_one_clock(start_ms: float, streamed: bool, clock: str) -> None:
    observer = CallStats()
    answer(observer, call_of(start_ms=start_ms), streamed=streamed)
    one = seen(observer)
    assert [name for name in ("warm", "cold", "first_byte") if name in one.latency] == [clock]
    assert (one.answered, one.cold, one.streams) == (1, int(start_ms > 0), int(streamed))


def test_a_stream_counts_by_its_first_byte() -> None:
    observer = CallStats()
    answer(observer, call_of(), exec_ms=9000, streamed=True, first_byte_ms=100)
    assert seen(observer).latency["first_byte"] == {latency_bucket(100): 1}


def test_a_stream_that_breaks_was_answered_and_not_completed() -> None:
    observer = CallStats()
    answer(observer, call_of(), status=502, streamed=True, completed=False)
    answer(observer, call_of(), status=499, streamed=True, completed=False)
    answer(observer, call_of(), streamed=True)
    one = seen(observer)
    assert counted(one) == {"answered": 2, "cancelled": 1}
    assert (one.streams, one.streams_completed) == (2, 1)


def test_nobody_waits_for_a_submitted_call() -> None:
    observer = CallStats()
    answer(observer, call_of(), is_awaited=False, queue_ms=60_000)
    one = seen(observer)
    assert (one.answered, one.latency, one.calls_billed) == (1, {}, 1)


def test_arms_and_shadows_are_apart() -> None:
    observer = CallStats()
    answer(observer, call_of(), arm="blue")
    answer_warm(observer, call_of(), "blue", ended_ns=MS, dispatched_ns=0)
    observer.shadowed(TARGET, status=200, exec_ms=3, matched=True)
    observer.shadowed(TARGET, status=500, exec_ms=3, matched=None)
    observer.skipped(TARGET)
    observer.degraded(TARGET)
    observer.degraded(TARGET, 500)
    found = {one.arm: one for one in observer.drain(7)}
    assert {arm: counted(one) for arm, one in found.items()} == {
        "": {"answered": 1, "failed": 1},
        "blue": {"answered": 2},
        SHADOW_ARM: {"answered": 1, "failed": 1},
    }
    shadow = found[SHADOW_ARM]
    assert (shadow.compared, shadow.matched, shadow.skipped, found[""].degraded) == (1, 1, 1, 1)


def test_starts_are_counted() -> None:
    observer = CallStats()
    for ok in (True, False, False):
        observer.started(TARGET, ok=ok)
    one = seen(observer)
    assert (one.starts, one.starts_failed, counted(one)) == (3, 2, {})


def test_what_was_taken_is_not_counted_again() -> None:
    observer = CallStats()
    answer(observer, call_of())
    assert [len(observer.drain(1)), len(observer.drain(1))] == [1, 0]


def test_a_route_counts_on_after_its_counts_were_taken() -> None:
    observer = CallStats()
    counters, attempt = warm_counters(observer, TARGET), AnsweredCall(call_of())
    assert observer.drain(1) == []
    found = []
    for calls in (2, 0, 1):
        for _ in range(calls):
            counters.answered(attempt, 200)
        found.append([one.answered for one in observer.drain(1)])
    assert found == [[2], [], [1]]


def test_every_clock_that_is_told_is_one_of_the_door() -> None:
    observer = CallStats()
    answer(observer, call_of(start_ms=3))
    answer(observer, call_of(), streamed=True)
    answer(observer, call_of())
    # those of language models: test_tokens_observed.py
    assert set(seen(observer).latency) | {"ttft", "itl", "kv"} == set(CLOCKS)


def test_a_warm_call_costs_little(capsys: pytest.CaptureFixture[str]) -> None:
    observer, rounds = CallStats(), 20_000
    counters, attempt = warm_counters(observer, TARGET), AnsweredCall(call_of())
    attempt.exec_ms, attempt.dispatched_ns, attempt.picos = 23.156_789, 300_000, 1234
    best = float("inf")
    for _ in range(5):
        began = time.thread_time_ns()
        for _ in range(rounds):
            counters.answered(attempt, 200)
        best = min(best, (time.thread_time_ns() - began) / rounds / 1000)
        observer.drain(1)
    with capsys.disabled():
        print(f"\nobserving a warm call: {best:.2f} µs")
    assert best < 15  # ten times the budget: a loaded machine is no defect, another algorithm is
