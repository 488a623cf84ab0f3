"""Processor sharing: the charges of an instance's calls add up to its busy time, to the
nanosecond."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.billing.instance_meter import IdleKind, IdleSpan, InstanceMeter
from pilotlight.errors import Conflict

SECOND = 10**9


def test_a_call_alone_pays_for_all_its_time() -> None:
    meter = InstanceMeter(0)
    meter.begin("a", 5)
    assert meter.end("a", 12) == 7
    assert (meter.busy_ns, meter.in_flight) == (7, 0)


def test_calls_at_once_share_and_the_last_one_takes_what_does_not_divide() -> None:
    meter = InstanceMeter(0)
    for name in "abc":
        meter.begin(name, 0)
    charges = [meter.end(name, 100) for name in "abc"]
    assert sum(charges) == 100
    assert max(charges) - min(charges) <= 2


def test_a_diary_of_overlaps() -> None:
    meter = InstanceMeter(0)
    meter.begin("long", 0)
    meter.begin("short", 10)
    assert meter.end("short", 30) == 10, "half of 20"
    assert meter.end("long", 40) == 30, "10 alone, half of 20, 10 alone"
    assert repr(meter) == "<InstanceMeter 0 calls, busy 0.000 s>"


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=40))
def test_charges_add_up_exactly_whatever_the_overlaps(calls: list[tuple[int, int]]) -> None:
    spans = [(start, start + length) for start, length in calls]
    events = sorted(
        [(start, 0, str(i)) for i, (start, _) in enumerate(spans)]
        + [(end, 1, str(i)) for i, (_, end) in enumerate(spans)]
    )
    meter = InstanceMeter(0)
    charged: dict[str, int] = {}
    for at, is_end, name in events:
        if is_end:
            charged[name] = meter.end(name, at)
        else:
            meter.begin(name, at)
    assert sum(charged.values()) == meter.busy_ns == union_length(spans)
    for i, (start, end) in enumerate(spans):
        assert 0 <= charged[str(i)] <= end - start + len(spans), (
            "never more than its own time, but for carried nanoseconds"
        )


def union_length(spans: list[tuple[int, int]]) -> int:
    total, reached = 0, 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


@given(st.lists(st.integers(-1000, 1000), min_size=2, max_size=30))
def test_a_clock_that_steps_back_never_makes_a_negative_charge(steps: list[int]) -> None:
    meter, now = InstanceMeter(0), 0
    meter.begin("whole", 0)
    for i, step in enumerate(steps):
        now += step
        meter.begin(str(i), now)
        assert meter.end(str(i), now) >= 0
    assert meter.end("whole", now) >= 0


def test_beginning_twice_and_ending_what_never_began_are_errors() -> None:
    meter = InstanceMeter(0)
    meter.begin("a", 0)
    with pytest.raises(Conflict, match="already being metered"):
        meter.begin("a", 1)
    with pytest.raises(KeyError):
        meter.end("b", 1)


def test_the_platform_gives_the_first_idle_seconds_away() -> None:
    meter = InstanceMeter(0, free_ns=60 * SECOND)
    meter.begin("a", 59 * SECOND)
    meter.end("a", 70 * SECOND)
    assert meter.consume_idle(130 * SECOND) == []
    assert meter.consume_idle(140 * SECOND) == [
        IdleSpan(kind=IdleKind.IDLE, started_ns=130 * SECOND, billed_ns=10 * SECOND)
    ]
    meter.begin("b", 145 * SECOND)
    assert meter.consume_idle(150 * SECOND) == [
        IdleSpan(kind=IdleKind.IDLE, started_ns=140 * SECOND, billed_ns=5 * SECOND)
    ]
    meter.end("b", 151 * SECOND)
    assert meter.consume_idle(200 * SECOND) == [], "each pause has its own free window"


def test_an_instance_held_by_min_instances_pays_from_the_first_moment() -> None:
    meter = InstanceMeter(0, free_ns=60 * SECOND, is_reserved=True)
    assert meter.consume_idle(5 * SECOND) == [
        IdleSpan(kind=IdleKind.RESERVED, started_ns=0, billed_ns=5 * SECOND)
    ]
    meter.reserve(10 * SECOND, is_reserved=False)
    meter.reserve(30 * SECOND, is_reserved=True)
    meter.reserve(30 * SECOND, is_reserved=True)
    meter.begin("a", 40 * SECOND)
    spans = meter.consume_idle(41 * SECOND)
    want = IdleSpan(kind=IdleKind.RESERVED, started_ns=5 * SECOND, billed_ns=15 * SECOND)
    assert spans == [want], "one record, however often it pauses"
    meter.reserve(42 * SECOND, is_reserved=False)
    meter.end("a", 43 * SECOND)
    assert meter.consume_idle(104 * SECOND) == [
        IdleSpan(kind=IdleKind.IDLE, started_ns=103 * SECOND, billed_ns=SECOND)
    ]


@given(
    st.lists(
        st.tuples(st.sampled_from(["call", "cut", "hold", "free"]), st.integers(0, 50)), max_size=40
    )
)
def test_busy_idle_and_free_time_never_overlap(story: list[tuple[str, int]]) -> None:
    meter, now, idle = InstanceMeter(0, free_ns=20), 0, []
    for i, (what, length) in enumerate(story):
        now += length
        if what == "call":
            meter.begin(str(i), now)
            now += length
            meter.end(str(i), now)
        elif what == "cut":
            idle += meter.consume_idle(now)
        else:
            meter.reserve(now, is_reserved=what == "hold")
    idle += meter.consume_idle(now)
    assert meter.busy_ns + sum(s.billed_ns for s in idle) <= now
