"""Schedules: what is due becomes one call, whoever is killed when; what was missed; pausing; who
takes the calls."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Store
from pilotlight.controller.deployments import app_registry
from pilotlight.controller.identity import tenants
from pilotlight.controller.registry.app_ref import AppRef
from pilotlight.controller.scheduling import dispatch_queue, schedules, submitted_calls
from pilotlight.controller.scheduling.schedules import GRACE_S, ScheduleEntry
from pilotlight.errors import InvalidInput
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.record_json import from_json
from tests.functions.controller.parts import ManualClock, spec

HOUR = 3600.0


class Killed(Exception):
    """What kill -9 before a commit is to the database."""


class Clockwork:
    """An app with one function that has schedules, and the rounds of a controller. Owner: the
    test."""

    def __init__(self, store: Store, clock: ManualClock) -> None:
        self.store, self.clock = store, clock
        self.clock.now = 1_800_000_000.0  # 08:00 UTC
        with store.write() as write:
            self.tenant = tenants.create(write, name="acme", uid_base=None, actor="platform").id
        self.place = AppRef(
            tenant=self.tenant, uid=None, environment="main", app="search", actor="k-1"
        )

    def deploy(self, *found: dict[str, Any], **changes: Any) -> None:
        with self.store.write() as write:
            app_registry.deploy(
                write,
                self.place,
                specs=[from_json(FunctionSpec, spec(schedules=list(found), **changes))],
            )

    def fire(self) -> int:
        with self.store.write() as write:
            return schedules.fire_due(write)

    def fire_and_die(self) -> None:
        with self.store.write() as write:
            assert schedules.fire_due(write) == 1
            raise Killed

    def listing(self) -> list[ScheduleEntry]:
        with self.store.read() as sql:
            return schedules.listing(sql, tenant=self.tenant, environment="main")

    def pause(self, *, is_paused: bool = True) -> None:
        with self.store.write() as write:
            schedules.pause(write, self.listing()[0], is_paused=is_paused, actor="k-1")

    def claim(self, activator: str = "a-0") -> list[dict[str, Any]]:
        with self.store.write() as write:
            return dispatch_queue.claim(write, activator=activator)

    def take(self, *names: str, activator: str = "a-0") -> list[str]:
        with self.store.write() as write:
            return dispatch_queue.acknowledge(write, activator=activator, ids=names)


@pytest.fixture(name="clockwork")
def _clockwork(store: Store, clock: ManualClock) -> Clockwork:
    return Clockwork(store, clock)


def test_a_due_time_becomes_one_call_that_can_be_asked_for_at_once(clockwork: Clockwork) -> None:
    clockwork.deploy({"cron": "0 9 * * *", "arguments": {"city": "Rome"}})
    clockwork.clock.now += HOUR - 1
    assert clockwork.fire() == 0
    clockwork.clock.now += 1
    assert (clockwork.fire(), clockwork.fire()) == (1, 0)
    (held,) = clockwork.claim()
    record = held["record"]
    assert (record["state"], record["submitted_at"]) == ("QUEUED", clockwork.clock.now)
    assert record["schedule"] == clockwork.listing()[0].id
    assert json.loads(base64.b64decode(held["body"])) == {"city": "Rome"}
    with clockwork.store.read() as sql:
        assert (
            submitted_calls.get(sql, tenant=clockwork.tenant, call=record["id"])["state"]
            == "QUEUED"
        )


def test_a_controller_that_is_killed_before_its_commit_makes_the_same_call_again_and_no_second_one(
    clockwork: Clockwork,
) -> None:
    clockwork.deploy({"period_s": 60})
    clockwork.clock.now += 60
    with pytest.raises(Killed):
        clockwork.fire_and_die()
    assert clockwork.claim() == []
    assert (clockwork.fire(), len(clockwork.claim()), clockwork.fire()) == (1, 1, 0)


def test_times_of_the_last_minute_are_made_up_for_each_by_its_own_call(
    clockwork: Clockwork,
) -> None:
    clockwork.deploy({"period_s": 20})
    clockwork.clock.now += 50
    assert clockwork.fire() == 2
    assert [held["record"]["submitted_at"] for held in clockwork.claim()] == [
        1_800_000_020.0,
        1_800_000_040.0,
    ]
    assert clockwork.listing()[0].next_at == 1_800_000_060.0


def test_what_was_missed_is_left_out(clockwork: Clockwork) -> None:
    clockwork.deploy({"cron": "0 * * * *"})
    clockwork.clock.now += 5 * HOUR + 2 * GRACE_S
    assert clockwork.fire() == 0
    assert clockwork.listing()[0].next_at == 1_800_000_000.0 + 6 * HOUR


def test_what_was_missed_is_caught_up_with_by_one_call_for_all(clockwork: Clockwork) -> None:
    clockwork.deploy({"cron": "0 * * * *", "missed": "catch_up"})
    clockwork.clock.now += 5 * HOUR + 2 * GRACE_S
    assert (clockwork.fire(), clockwork.fire()) == (1, 0)
    assert clockwork.listing()[0].next_at == 1_800_000_000.0 + 6 * HOUR


def test_a_clock_that_is_set_back_brings_no_time_twice(clockwork: Clockwork) -> None:
    clockwork.deploy({"cron": "0 * * * *"})
    clockwork.clock.now += HOUR
    assert clockwork.fire() == 1
    clockwork.clock.now -= HOUR / 2
    assert clockwork.fire() == 0
    clockwork.deploy({"cron": "0 * * * *"}, description="another revision")
    clockwork.deploy({"cron": "0 */1 * * *"})
    assert clockwork.listing()[0].next_at == 1_800_000_000.0 + 2 * HOUR


def test_a_deploy_keeps_what_is_the_same_changes_what_is_not_and_drops_the_rest(
    clockwork: Clockwork,
) -> None:
    clockwork.deploy({"period_s": 100}, {"period_s": 200})
    clockwork.clock.now += 30
    clockwork.deploy({"period_s": 100}, description="another revision")
    assert [(planned.number, planned.next_at) for planned in clockwork.listing()] == [
        (0, 1_800_000_100.0)
    ]
    clockwork.deploy({"period_s": 300})
    assert [planned.next_at for planned in clockwork.listing()] == [1_800_000_330.0]
    clockwork.deploy()
    assert clockwork.listing() == []


def test_a_stopped_app_is_not_called_and_goes_on_with_its_next_time_when_it_is_deployed_again(
    clockwork: Clockwork,
) -> None:
    clockwork.deploy({"cron": "0 * * * *"})
    with clockwork.store.write() as write:
        app_registry.stop(write, clockwork.place)
    clockwork.clock.now += 3 * HOUR
    assert clockwork.fire() == 0
    assert clockwork.listing()[0].next_at is None
    clockwork.deploy({"cron": "0 * * * *"})
    assert clockwork.listing()[0].next_at == 1_800_000_000.0 + 4 * HOUR


def test_a_deleted_app_is_not_called(clockwork: Clockwork) -> None:
    clockwork.deploy({"period_s": 10})
    with clockwork.store.write() as write:
        app_registry.delete(write, clockwork.place)
    clockwork.clock.now += 30
    assert (clockwork.fire(), clockwork.listing()) == (0, [])


def test_a_paused_schedule_stays_paused_over_deploys_and_makes_up_for_nothing(
    clockwork: Clockwork,
) -> None:
    clockwork.deploy({"cron": "0 * * * *", "missed": "catch_up"})
    clockwork.pause()
    clockwork.deploy({"cron": "30 * * * *", "missed": "catch_up"})
    clockwork.clock.now += 3 * HOUR
    assert clockwork.fire() == 0
    clockwork.pause(is_paused=False)
    assert clockwork.fire() == 0
    assert clockwork.listing()[0].next_at == 1_800_000_000.0 + 3.5 * HOUR


def test_a_schedule_that_cannot_be_is_refused_and_nothing_is_deployed(clockwork: Clockwork) -> None:
    with pytest.raises(InvalidInput, match="never matches"):
        clockwork.deploy({"cron": "0 0 31 2 *"})
    with pytest.raises(InvalidInput, match="no method 'other'"):
        clockwork.deploy({"period_s": 10, "method": "other"})
    assert clockwork.listing() == []


def test_a_claim_goes_to_one_activator_and_to_another_only_when_it_was_not_taken_in_time(
    clockwork: Clockwork,
) -> None:
    clockwork.deploy({"period_s": 60})
    clockwork.clock.now += 60
    clockwork.fire()
    (held,) = clockwork.claim("a-0")
    assert clockwork.claim("a-1") == []
    # it died before it wrote it down, and asks again
    assert [again["due"] for again in clockwork.claim("a-0")] == [held["due"]]
    clockwork.clock.now += dispatch_queue.CLAIM_S + 1
    assert [again["due"] for again in clockwork.claim("a-1")] == [held["due"]]
    # it had it in its journal, and is told that it is another's
    assert clockwork.take(held["due"], activator="a-0") == []
    assert clockwork.take(held["due"], activator="a-1") == [held["due"]]


def test_what_was_taken_is_its_keepers_for_good_however_often_it_asks(clockwork: Clockwork) -> None:
    clockwork.deploy({"period_s": 60})
    clockwork.clock.now += 60
    clockwork.fire()
    (held,) = clockwork.claim("a-0")
    assert clockwork.take(held["due"]) == [held["due"]]
    clockwork.clock.now += 100 * dispatch_queue.CLAIM_S
    clockwork.pause()
    assert (clockwork.claim("a-1"), clockwork.claim("a-0")) == ([], [])
    assert clockwork.take(held["due"]) == [held["due"]]
    with clockwork.store.write() as write:
        assert dispatch_queue.purge(write, now=clockwork.clock.now + dispatch_queue.KEPT_S) == 1
    assert clockwork.take(held["due"]) == [held["due"]]  # it has not ended: who asks has it
    assert clockwork.take("req-unknown/1") == []


def test_a_schedule_whose_time_zone_was_lost_holds_up_no_other(clockwork: Clockwork) -> None:
    clockwork.deploy({"cron": "0 9 * * *", "timezone": "Europe/Berlin"}, {"cron": "1 9 * * *"})
    with clockwork.store.write() as write:
        table = tables.schedules
        lost = sa.func.replace(table.c.document, "Europe/Berlin", "Europe/Atlantis")
        write.sql.execute(
            sa.update(table).where(table.c.number == 0).values(document=lost, next_at=write.now + 1)
        )
    clockwork.clock.now += HOUR + 60
    assert (clockwork.fire(), clockwork.fire()) == (1, 0)
    assert [planned.next_at for planned in clockwork.listing()] == [
        clockwork.clock.now + schedules.BROKEN_S,
        clockwork.clock.now + 24 * HOUR,
    ]
