"""What activators observed comes in once, is added up by minute and hour, and is read back over any
window."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from activator.call_stats.observer import CallStats
from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Store
from pilotlight.controller.slo import observations
from pilotlight.core.transport.controller_client import HEADER_PLATFORM_TOKEN
from pilotlight.errors import InvalidInput
from pilotlight.protocol import OBSERVATIONS_PATH
from pilotlight.spec.observations import Observation
from tests.fakes.databases import empty_sqlite
from tests.fakes.routes import spec_of, target_of
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import ManualClock

NOON = 1_800_000_000.0 - 1_800_000_000.0 % 3600
MINUTE = int(NOON // 60)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOON + 30)


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    store = Store(empty_sqlite(tmp_path / "controller.db"), clock=clock)
    yield store
    store.close()


def seen(
    minute: int = MINUTE,
    *,
    revision: str = "v1",
    arm: str = "",
    function: str = "f-1",
    **counts: Any,
) -> Observation:
    return Observation(
        tenant="t-1", function_id=function, revision=revision, arm=arm, minute=minute, **counts
    )


def post(
    store: Store, *found: Observation, sequence: int = 1, life: str = "a", activator: str = "a-0"
) -> bool:
    body = {
        "activator": activator,
        "life": life,
        "sequence": sequence,
        "observations": [one.to_json() for one in found],
    }
    with store.write() as write:
        return observations.ingest_observations(write, body)


def window(
    store: Store, *, back_s: float = 300, now: float = NOON + 30, **which: Any
) -> dict[tuple[str, str], Observation]:
    with store.read() as sql:
        return observations.window(
            sql, function_id="f-1", since_s=now - back_s, until_s=now, **which
        )


def test_what_was_posted_is_read_back_whole(store: Store) -> None:
    told = seen(
        answered=3,
        failed=1,
        late=1,
        overruns={"queue": 2},
        latency={"warm": {10: 2, 12: 1}, "exec": {9: 3}},
    )
    assert post(store, told)
    assert window(store) == {("v1", ""): told}


def test_a_post_that_comes_twice_counts_once(store: Store) -> None:
    assert [post(store, seen(answered=1)) for _ in range(2)] == [True, False]
    assert window(store)["v1", ""].answered == 1


def test_a_new_life_of_an_activator_begins_to_count_anew(store: Store) -> None:
    assert post(store, seen(answered=1), sequence=7)
    assert post(store, seen(answered=1), sequence=1, life="b")
    assert not post(store, seen(answered=1), sequence=1, life="b")
    assert window(store)["v1", ""].answered == 2


def test_several_activators_are_added_up(store: Store) -> None:
    for number in range(3):
        post(store, seen(answered=2, latency={"warm": {5: 2}}), activator=f"a-{number}")
    found = window(store)["v1", ""]
    assert (found.answered, found.latency) == (6, {"warm": {5: 6}})


def test_revisions_and_arms_are_apart(store: Store) -> None:
    post(
        store,
        seen(answered=1),
        seen(answered=2, revision="v2"),
        seen(answered=3, revision="v2", arm="blue"),
        seen(function="f-2", failed=9),
    )
    assert {series: one.answered for series, one in window(store).items()} == {
        ("v1", ""): 1,
        ("v2", ""): 2,
        ("v2", "blue"): 3,
    }
    assert list(window(store, revision="v2", arm="blue")) == [("v2", "blue")]


def test_a_window_begins_and_ends_with_whole_minutes(store: Store) -> None:
    post(store, *(seen(MINUTE - back, answered=1) for back in range(8)))
    assert window(store, back_s=300, now=NOON + 59)["v1", ""].answered == 5
    assert window(store, back_s=60, now=NOON)["v1", ""].minute == MINUTE - 1


@pytest.mark.parametrize("minutes", [1, 600, -observations.LATE_MINUTES - 1, -100_000])
def test_a_minute_of_another_clock_counts_as_the_current_one(store: Store, minutes: int) -> None:
    post(store, seen(MINUTE + minutes, answered=1))
    assert window(store, back_s=60)["v1", ""].minute == MINUTE


def test_what_was_kept_while_the_controller_was_away_stands_at_its_minute(store: Store) -> None:
    post(store, seen(MINUTE - 15, answered=1))
    assert window(store, back_s=1200)["v1", ""].minute == MINUTE - 15


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"observations": [{"tenant": "t"}]},
        {"observations": "x"},
        {"observations": [seen().to_json() | {"answered": -1}]},
        {"observations": [seen().to_json() | {"answered": 1.5}]},
        {"observations": [seen().to_json() | {"latency": {"lunch": {"1": 1}}}]},
        {"observations": [seen().to_json() | {"overruns": {"lunch": 1}}]},
        {"observations": [seen().to_json() | {"failed": 2**60}]},
        {"activator": "~hours"},
        {"sequence": "x"},
        {"sequence": math.inf},
        {"sequence": -1},
        {"sequence": 10**30},
        {"observations": [seen().to_json() | {"latency": {"warm": {"1000000": 1}}}]},
        {"observations": [seen().to_json() | {"latency": {"warm": {"-1": 1}}}]},
    ],
)
def test_a_broken_post_is_refused_whole(store: Store, broken: dict[str, Any]) -> None:
    body = {
        "activator": "a-0",
        "life": "a",
        "sequence": 1,
        "observations": [seen(answered=1).to_json()],
    }
    with pytest.raises(InvalidInput), store.write() as write:
        observations.ingest_observations(write, {**body, **broken} if broken else {})
    assert window(store) == {}


def _settle(store: Store, now: float) -> list[int]:
    hours: list[int] = []
    while True:
        with store.write() as write:
            hour = observations.due_hour(write.sql, now=now)
            if hour is None:
                return hours
            observations.sum_up(write, hour, observations.functions_of(write.sql, hour))
            observations.mark(write, hour)
            hours.append(hour)


def test_an_hour_is_summed_up_once_when_nothing_can_come_any_more(
    store: Store, clock: ManualClock
) -> None:
    post(store, seen(MINUTE - 1, answered=1, latency={"warm": {3: 1}}), seen(MINUTE, answered=5))
    hour = int(NOON // 3600)
    assert _settle(store, clock.now) == []
    assert _settle(store, NOON + observations.SETTLED_MINUTES * 60) == [hour - 1]
    assert _settle(store, NOON + observations.SETTLED_MINUTES * 60) == []
    with store.read() as sql:
        assert [
            (row.hour, row.answered) for row in sql.execute(sa.select(tables.observation_hours))
        ] == [(hour - 1, 1)]
        assert observations.summed_until(sql) == hour


def test_a_long_window_is_the_same_whether_hours_are_summed_up_or_not(
    store: Store, clock: ManualClock
) -> None:
    for back in range(0, 600, 7):
        clock.now = NOON - back * 60
        post(
            store,
            seen(MINUTE - back, answered=1, overruns={"exec": 1}, latency={"warm": {back % 40: 1}}),
            sequence=1,
            life=str(back),
        )

    def long(since_s: float, until_s: float) -> dict[tuple[str, str], Observation]:
        with store.read() as sql:
            found = observations.long_window(
                sql, function_id="f-1", since_s=since_s, until_s=until_s
            )
        return {series: replace(one, minute=0) for series, one in found.items()}

    spans = [
        (NOON - a * 60, NOON - b * 60)
        for a, b in ((600, 0), (555, 3), (60, 0), (300, 120), (130, 61), (20, 5))
    ]
    before = [long(*span) for span in spans]
    assert len(_settle(store, NOON + 7200)) == 11
    assert [long(*span) for span in spans] == before


def test_old_minutes_go_and_hours_stay(store: Store, clock: ManualClock) -> None:
    post(store, seen(answered=1, latency={"warm": {3: 1}}))
    _settle(store, NOON + 7200)
    clock.now = NOON + 5 * 86_400
    with store.write() as write:
        assert observations.prune(write, days=4) > 0
        assert observations.prune(write, days=4) == 0
        assert write.sql.execute(sa.select(tables.observation_minute_buckets)).all() == []
        long = observations.long_window(
            write.sql, function_id="f-1", since_s=NOON - 86_400, until_s=clock.now
        )
    assert long["v1", ""].latency == {"warm": {3: 1}}
    clock.now = NOON + 101 * 86_400
    with store.write() as write:
        observations.prune(write, days=4)
        assert write.sql.execute(sa.select(tables.observation_hours)).all() == []


def test_nothing_goes_that_was_not_summed_up(store: Store, clock: ManualClock) -> None:
    post(store, seen(answered=1))
    clock.now = NOON + 50 * 86_400
    with store.write() as write:
        assert observations.prune(write, days=4) == 0


async def test_what_an_activator_counts_is_what_the_controller_takes(
    controller: Controller,
) -> None:
    observer = CallStats()
    target = target_of(spec_of())
    observer.refused(target, 429)
    observer.started(target, ok=False)
    (told,) = observer.drain(int(controller.clock.now // 60))
    body = {"activator": "a-0", "life": "a", "sequence": 1, "observations": [told.to_json()]}
    answers = [await controller.internal(OBSERVATIONS_PATH, body) for _ in range(2)]
    assert [answer.json() for answer in answers] == [{"accepted": True}, {"accepted": False}]
    now = controller.clock.now
    with controller.context.store.read() as sql:
        found = observations.window(
            sql, function_id=target.function_id, since_s=now - 60, until_s=now + 60
        )
    assert found == {(target.revision, ""): told}


async def test_nobody_else_tells_what_calls_looked_like(controller: Controller) -> None:
    assert (await controller.http.post(OBSERVATIONS_PATH, json={})).status_code in (400, 403)
    for broken in ("no JSON", "[]", "{}"):
        headers = {HEADER_PLATFORM_TOKEN: controller.context.key.token}
        assert (
            await controller.http.post(OBSERVATIONS_PATH, content=broken, headers=headers)
        ).status_code == 400


def test_a_hundred_observations_cost_little(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    clocks = {clock: dict.fromkeys(range(20, 30), 3) for clock in ("warm", "exec")}
    clocks |= {clock: {0: 30} for clock in ("route", "admit", "queue", "start")}
    found = [seen(function=f"f-{n}", answered=30, latency=clocks) for n in range(100)]
    post(store, *found)
    began = time.process_time()
    for sequence in range(2, 6):
        post(store, *found, sequence=sequence)
    with capsys.disabled():
        print(
            f"\n100 observations with 2,400 buckets: "
            f"{(time.process_time() - began) / 4 * 1000:.1f} ms of the controller's time"
        )
