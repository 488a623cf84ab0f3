"""What a drill concludes from its calls and their records."""

from __future__ import annotations

import math

import pytest

from pilotlight.drills.verdict import Ledger, Submitted, ledger_of, outage_of, problems_of
from pilotlight.loadtest.results import Result


def call(due_s: float, *, ms: float = 10.0, error: str = "", id: str = "") -> Result:
    return Result(due_s=due_s, status=0 if error else 200, error=error, latency_ms=ms, id=id)


def test_calls_fail_from_when_the_first_one_was_due_until_one_is_answered_again() -> None:
    calls = [
        call(0.0, ms=5.0),
        call(1.0, ms=50.0, error="connect"),
        call(2.0, ms=7.0),
        call(3.0, ms=100.0, error="timeout"),
        call(4.0, ms=500.0),
        call(4.2, ms=20.0),
    ]
    outage = outage_of(calls, fault_s=0.9)
    assert (outage.calls, outage.failed) == (6, 2)
    assert outage.errors == {"connect": 1, "timeout": 1}
    assert outage.unavailable_s == pytest.approx(3.22)
    assert (outage.before_p99_ms, outage.after_p99_ms, outage.slowest_ms) == (5.0, 500.0, 500.0)


def test_calls_that_fail_to_the_end_fail_until_then() -> None:
    outage = outage_of([call(0.0), call(1.0, ms=2000.0, error="timeout")], fault_s=0.5)
    assert outage.unavailable_s == pytest.approx(2.0)
    assert outage.after_p99_ms is None


def test_without_a_failure_nothing_was_away() -> None:
    assert outage_of([call(0.0), call(1.0)], fault_s=0.5).unavailable_s == 0.0
    assert outage_of([], fault_s=0.5).calls == 0


def test_answers_are_looked_for_in_the_ledger() -> None:
    calls = [
        call(1.0, ms=0.0, id="lost early"),
        call(2.0, id="there"),
        call(3.0, id="twice"),
        call(9.0, id="lost late"),
        call(5.0, error="connect"),
    ]
    ledger = ledger_of(calls, {"there": 1, "twice": 2, "others": 1}, fault_s=4.0)
    assert ledger.checked == 4
    assert ledger.missing == ("lost early", "lost late")
    assert ledger.doubled == ("twice",)
    assert ledger.rpo_s == pytest.approx(3.0)


def test_what_is_lost_after_the_fault_alone_is_no_age() -> None:
    assert ledger_of([call(9.0, id="late")], {}, fault_s=4.0).rpo_s == 0.0


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"recovered_s": None}, "was not back within 60 s"),
        ({"max_outage_s": 0.5}, "calls failed for 1.1 s, more than --max-outage 0.5s"),
        ({"ledger": Ledger(checked=2, missing=("a",))}, "1 answered calls have no usage record"),
        ({"ledger": Ledger(checked=2, doubled=("a",))}, "1 answered calls have more than one"),
        ({"submitted": Submitted(accepted=2, lost=("a",))}, "1 accepted calls have no result"),
        ({"findings": ["the neighbour failed"]}, "the neighbour failed"),
    ],
)
def test_each_loss_is_a_problem(changed: dict[str, object], said: str) -> None:
    usual = {
        "recovered_s": 1.0,
        "timeout_s": 60.0,
        "outage": outage_of([call(0.0, ms=1100.0, error="connect")], fault_s=0.0),
        "max_outage_s": math.inf,
        "ledger": Ledger(checked=2),
        "submitted": Submitted(accepted=2),
        "findings": [],
    }
    assert problems_of(**usual) == []  # type: ignore[arg-type]
    (problem,) = problems_of(**{**usual, **changed})  # type: ignore[arg-type]
    assert said in problem
