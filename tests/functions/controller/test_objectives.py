"""Error budgets, alarms that page nobody for three calls, and what is not released meanwhile."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.slo import (
    burn_rate,
    error_budget,
    loop,
    observations,
    release_freeze,
    slo_alerts,
    views,
)
from pilotlight.controller.slo.burn_rate import (
    BURN_RATE_ALERTS,
    DAY,
    FAST,
    HOUR,
    BudgetSpend,
    Severity,
    Sli,
    compute_budget_spend,
    exceeds_burn_rate,
)
from pilotlight.errors import ReleaseFrozen
from pilotlight.spec.observations import UNCOUNTED_ARMS, Observation, latency_bucket
from pilotlight.spec.policies import Objectives
from pilotlight.spec.record_json import to_json
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import refused, spec
from tests.functions.controller.test_dashboard import sign_in

OWN = Objectives(availability=0.99, warm_latency_s=0.1, freeze=True, stages_s={"exec": 0.08})


def seen(**counts: Any) -> Observation:
    return Observation(tenant="t-1", function_id="f-1", revision="v1", minute=0, **counts)


# -- pure ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "sli, counts, bad, total",
    [
        (Sli.AVAILABILITY, {"answered": 95, "failed": 5, "refused": 50, "cancelled": 7}, 5, 100),
        (
            Sli.WARM_LATENCY,
            {
                "answered": 10,
                "latency": {
                    "warm": {latency_bucket(90): 8, latency_bucket(200): 2},
                    "cold": {80: 9},
                },
            },
            2,
            10,
        ),
        (Sli.FIRST_TOKEN, {"latency": {"first_byte": {latency_bucket(900): 1, 3: 4}}}, 1, 5),
        (Sli.COLD_LATENCY, {"latency": {"cold": {latency_bucket(9000): 1, 3: 4}}}, 1, 5),
        (Sli.COMPLETION, {"answered": 9, "streams": 4, "streams_completed": 3}, 1, 4),
        (Sli.DEGRADED, {"answered": 10, "degraded": 4}, 4, 10),
    ],
)
def test_a_bad_call_spends_one_budget_only(
    sli: Sli, counts: dict[str, Any], bad: int, total: int
) -> None:
    observation = seen(**counts)
    assert (
        compute_budget_spend(observation, Objectives(), sli).bad,
        compute_budget_spend(observation, Objectives(), sli).total,
    ) == (bad, total)
    others = {
        other: compute_budget_spend(observation, Objectives(), other).bad
        for other in Sli
        if other is not sli
    }
    assert {other for other, count in others.items() if count} <= (
        {Sli.COLD_LATENCY} if sli is Sli.WARM_LATENCY else set()
    )


def test_no_data_is_no_number() -> None:
    nothing = compute_budget_spend(None, Objectives(), Sli.AVAILABILITY)
    assert (nothing.ratio, nothing.burn, nothing.left) == (None, None, None)
    assert burn_rate.burn(seen(refused=9), Objectives()) is None


def test_a_budget_of_nothing_is_overspent_by_one() -> None:
    one = compute_budget_spend(
        seen(answered=10, degraded=1), Objectives(degraded_ratio=0), Sli.DEGRADED
    )
    assert (
        one.burn,
        compute_budget_spend(seen(answered=10), Objectives(degraded_ratio=0), Sli.DEGRADED).burn,
    ) == (float("inf"), 0.0)


def test_a_burn_rate_of_one_spends_the_budget() -> None:
    one = compute_budget_spend(seen(answered=999, failed=1), Objectives(), Sli.AVAILABILITY)
    assert one.burn == pytest.approx(1.0)
    assert one.left == pytest.approx(0.0)


@pytest.mark.parametrize(
    "short, long, does",
    [
        ((1, 3), (1, 3), False),
        ((3, 3), (3, 3), False),
        ((3, 20), (5, 100), True),
        ((2, 20), (5, 100), False),
        ((3, 20), (4, 100), False),
        ((0, 20), (50, 100), False),
        ((20, 1000), (20, 10_000), False),
        ((3, 1000), (30, 1000), False),
        ((0, 0), (50, 100), False),
    ],
)
def test_few_failures_page_nobody(
    short: tuple[int, int], long: tuple[int, int], does: bool
) -> None:
    def of(pair: tuple[int, int]) -> BudgetSpend:
        return BudgetSpend(bad=pair[0], total=pair[1], budget=0.001)

    assert exceeds_burn_rate(of(short), of(long), FAST.factor) is does


def test_alarms_are_those_of_the_rules_for_prometheus() -> None:
    assert [(alarm.severity.value, alarm.factor, alarm.name) for alarm in BURN_RATE_ALERTS] == [
        ("page", 14.4, "1h/5m"),
        ("page", 6.0, "6h/30m"),
        ("ticket", 3.0, "1d/2h"),
        ("ticket", 1.0, "3d/6h"),
    ]


# -- in the controller -----------------------------------------------------------------------------
@dataclass
class World:
    controller: Controller
    function_id: str
    posts: int = 0

    @property
    def now(self) -> float:
        return self.controller.clock.now

    def see(self, *, arm: str = "", at: float | None = None, **counts: Any) -> None:
        """An activator tells of calls, at this minute or another."""
        self.posts += 1
        minute = int((self.now if at is None else at) // 60)
        one = Observation(
            tenant="t",
            function_id=self.function_id,
            revision="v1",
            arm=arm,
            minute=minute,
            **counts,
        )
        real, self.controller.clock.now = self.now, minute * 60.0
        with self.controller.context.store.write() as write:
            observations.ingest_observations(
                write,
                {
                    "activator": "a",
                    "life": str(self.posts),
                    "sequence": 1,
                    "observations": [one.to_json()],
                },
            )
        self.controller.clock.now = real

    def judge(self) -> list[str]:
        return loop.evaluate_function(self.controller.context.store, self.function_id, now=self.now)

    def after(self, seconds: float) -> list[str]:
        self.controller.clock.now += seconds
        return self.judge()

    def open(self) -> list[tuple[str, str]]:
        with self.controller.context.store.read() as sql:
            return [
                (alarm.sli, alarm.severity)
                for alarm in slo_alerts.open_alerts(sql, self.function_id)
            ]

    def told(self) -> list[tuple[str, Mapping[str, Any]]]:
        table = tables.deliveries
        with self.controller.context.store.read() as sql:
            rows = sql.execute(sa.select(table.c.event, table.c.body).order_by(table.c.at))
            return [(row.event, json.loads(row.body)) for row in rows]


async def _world(controller: Controller, objectives: Objectives | None) -> World:
    more = {"objectives": to_json(objectives)} if objectives is not None else {}
    answer = await controller.http.post(
        "/v1/apps/search/deploy", json={"functions": [spec(**more)]}
    )
    assert answer.status_code in (200, 201), answer.text
    with controller.context.store.read() as sql:
        function_id = sql.execute(sa.select(tables.functions.c.id)).scalar_one()
    body = {"url": "https://hooks.example.com/x", "events": ["slo.*"]}
    assert (await controller.http.put("/v1/webhooks/pager", json=body)).status_code in (200, 201)
    controller.clock.now -= controller.clock.now % HOUR
    controller.clock.now += 1830
    return World(controller, function_id)


@pytest.fixture
async def world(controller: Controller) -> World:
    return await _world(controller, OWN)


async def test_a_burst_of_failures_pages_once_and_is_over_when_it_is(world: World) -> None:
    world.see(answered=50, failed=50)
    assert world.judge() == ["slo.page"]
    assert world.judge() == []
    assert world.after(60) == []
    world.see(answered=1000)
    assert world.open() == [("availability", "page")]
    for _ in range(12):
        world.see(answered=1000)
        told = world.after(60)
        if told:
            break
    assert told == ["slo.resolved"]
    assert sorted(event for event, _ in world.told()) == ["slo.page", "slo.resolved"]
    body = world.told()[0][1]
    assert (body["app"], body["function"], body["sli"], body["severity"], body["window"]) == (
        "search",
        "hello",
        "availability",
        "page",
        "1h/5m",
    )
    assert (body["bad"], body["total"], body["burn_rate"]) == (50, 100, 50.0)


async def test_one_failure_of_three_calls_pages_nobody(world: World) -> None:
    world.see(answered=2, failed=1)
    assert (world.judge(), world.open()) == ([], [])


async def test_who_was_paged_gets_a_ticket_afterwards_for_what_is_lost(world: World) -> None:
    world.see(answered=300, failed=300)
    assert world.judge() == ["slo.page"]
    for _ in range(10):
        world.see(answered=30)
        told = world.after(300)
        if told:
            break
    assert told == ["slo.resolved", "slo.ticket"]
    assert world.open() == [("availability", "ticket")]


async def test_a_slow_leak_is_a_ticket(world: World) -> None:
    for hours in range(30):
        world.see(at=world.now - hours * HOUR, answered=480, failed=20)
    assert set(world.judge()) == {"slo.ticket"}
    assert world.open() == [("availability", "ticket")]


async def test_intentional_refusals_shadows_and_replays_spend_nothing(world: World) -> None:
    world.see(refused=500, cancelled=500, answered=10)
    for arm in UNCOUNTED_ARMS:
        world.see(arm=arm, failed=500)
    assert world.judge() == []


async def test_a_slow_success_names_the_stage_that_overran(world: World) -> None:
    slow = {
        "warm": {latency_bucket(400): 60, 3: 40},
        "exec": {3: 100},
        "queue": {latency_bucket(390): 60},
    }
    world.see(answered=100, latency=slow, overruns={"queue": 60, "exec": 2})
    assert world.judge() == ["slo.page"]
    ((_, body),) = world.told()
    assert (body["sli"], body["stage"]) == ("warm_latency", "queue")


async def test_nobody_is_told_of_a_latency_that_was_never_promised(controller: Controller) -> None:
    world = await _world(controller, None)
    world.see(answered=100, latency={"warm": {latency_bucket(4000): 100}})
    assert world.judge() == []
    world.see(failed=100)
    assert world.judge() == ["slo.page"]


async def test_missing_metrics_neither_begin_nor_end_an_alarm(world: World) -> None:
    world.see(answered=50, failed=50)
    world.judge()
    assert world.after(2 * HOUR) == []  # the activators are away
    assert world.open() == [("availability", "page")]
    # nothing in the longest window of a page either
    assert world.after(7 * HOUR) == ["slo.resolved"]


async def test_a_clock_that_jumps_back_ends_no_alarm_early(world: World) -> None:
    world.see(answered=50, failed=50)
    world.judge()
    world.see(at=world.now - 1200, answered=10_000)
    assert world.after(-1200) == []
    assert world.open() == [("availability", "page")]


async def test_the_same_alarm_is_told_once_whatever_dies(world: World) -> None:
    world.see(answered=50, failed=50)
    world.judge()
    for _ in range(3):
        assert world.after(20) == []  # another process would find the row
    assert len(world.told()) == 1


async def test_a_function_that_is_gone_has_no_open_alarms(world: World) -> None:
    world.see(answered=50, failed=50)
    world.judge()
    assert (await world.controller.http.delete("/v1/apps/search")).status_code == 204
    assert world.judge() == ["slo.resolved"]
    assert world.open() == []


async def test_every_function_that_was_called_is_looked_at(world: World) -> None:
    assert loop.evaluate_all(world.controller.context.store, now=world.now) == 0
    world.see(answered=50, failed=50)
    assert loop.evaluate_all(world.controller.context.store, now=world.now) == 1
    assert world.open() == [("availability", "page")]
    world.controller.clock.now += 2 * DAY
    assert (
        loop.evaluate_all(world.controller.context.store, now=world.now) == 1
    )  # its alarm is open still


async def test_a_function_whose_objectives_cannot_be_read_holds_up_no_other(world: World) -> None:
    world.see(answered=50, failed=50)
    done = await world.controller.http.post(
        "/v1/apps/aaa/deploy", json={"functions": [spec(objectives=to_json(OWN))]}
    )
    assert done.status_code == 200
    with world.controller.context.store.write() as write:
        ids = sa.select(tables.functions.c.id).where(tables.functions.c.app == "aaa")
        broken = write.sql.execute(ids).scalar_one()
        text = sa.func.replace(
            tables.revisions.c.spec, '"availability":0.99', '"availability":"none"'
        )
        write.sql.execute(
            sa.update(tables.revisions)
            .where(tables.revisions.c.function == broken)
            .values(spec=text)
        )
        one = Observation(
            tenant="t", function_id=broken, revision="v1", minute=int(world.now // 60), answered=9
        )
        observations.add(write, [one])
    for is_thorough in (False, True):
        loop.evaluate_all(world.controller.context.store, now=world.now, is_thorough=is_thorough)
        assert world.open() == [("availability", "page")]


async def test_a_glance_finds_who_has_to_be_paged_and_passes_over_who_is_well(world: World) -> None:
    world.see(answered=5000, failed=2)
    assert loop.evaluate_all(world.controller.context.store, now=world.now, is_thorough=False) == 0
    world.see(answered=50, failed=500)
    assert loop.evaluate_all(world.controller.context.store, now=world.now, is_thorough=False) == 1
    assert world.open() == [("availability", "page")]
    world.controller.clock.now += HOUR
    assert (
        loop.evaluate_all(world.controller.context.store, now=world.now, is_thorough=False) == 1
    )  # its alarm may end


async def test_hours_are_summed_up_and_old_minutes_dropped_by_the_way(world: World) -> None:
    for hours in range(1, 200, 7):
        world.see(at=world.now - hours * HOUR, answered=10, latency={"warm": {3: 10}})
    loop.roll_up(
        world.controller.context.store,
        now=world.now,
        keep_days=world.controller.context.config.settings.observations_days,
    )
    with world.controller.context.store.read() as sql:
        oldest = sql.execute(
            sa.select(sa.func.min(tables.observation_minutes.c.minute))
        ).scalar_one()
        made = error_budget.slo_target(sql, world.function_id)
        month = error_budget.budget_window_observation(sql, made, now=world.now)
    assert oldest >= world.now // 60 - 4 * 1440
    assert month is not None
    assert (month.answered, month.latency) == (290, {"warm": {3: 290}})


# -- releases --------------------------------------------------------------------------------------
def _demand(world: World) -> None:
    with world.controller.context.store.read() as sql:
        release_freeze.require_error_budget(sql, world.function_id, now=world.now)


async def test_nothing_is_released_while_a_budget_is_spent(world: World) -> None:
    _demand(world)
    world.see(answered=900, failed=100)
    with pytest.raises(ReleaseFrozen) as caught:
        _demand(world)
    assert caught.value.detail["slis"] == ["availability"]
    world.see(answered=100_000)
    _demand(world)


async def test_a_deploy_is_refused_while_frozen_and_an_administrator_may_override_it(
    world: World,
) -> None:
    world.see(answered=900, failed=100)
    http = world.controller.http
    body = {"functions": [spec(objectives=to_json(OWN), tags={"changed": "yes"})]}
    assert "has spent its error budget" in refused(
        await http.post("/v1/apps/search/deploy", json=body), 409
    )
    answer = await http.post("/v1/apps/search/deploy", json={**body, "override_freeze": True})
    assert answer.status_code in (200, 201), answer.text


async def test_a_handful_of_calls_freezes_nothing(world: World) -> None:
    world.see(answered=5, failed=4)
    _demand(world)


async def test_a_function_that_does_not_ask_for_it_is_never_frozen(controller: Controller) -> None:
    world = await _world(controller, Objectives())
    world.see(failed=1000)
    _demand(world)


# -- asked -----------------------------------------------------------------------------------------
async def test_a_function_tells_what_is_left_and_where_it_goes(world: World) -> None:
    world.see(
        answered=95,
        failed=5,
        latency={"warm": {3: 90, latency_bucket(300): 5}, "exec": {3: 95}},
        overruns={"exec": 5},
    )
    world.judge()
    body = (await world.controller.http.get("/v1/slos/search/hello")).json()
    by_name = {one["sli"]: one for one in body["slis"]}
    availability = by_name["availability"]
    assert (availability["target"], availability["ratio"], availability["budget_left"]) == (
        0.99,
        0.95,
        -4.0,
    )
    assert availability["burn_rates"]["5m"] == availability["burn_rates"]["3d"] == 5.0
    assert (by_name["first_token"]["ratio"], by_name["first_token"]["burn_rates"]["1h"]) == (
        None,
        None,
    )
    assert (by_name["warm_latency"]["bound_s"], by_name["warm_latency"]["bad"]) == (0.1, 5)
    assert (body["is_declared"], body["frozen"], body["worst_stage"]) == (True, True, "exec")
    stage = next(one for one in body["stages"] if one["stage"] == "exec")
    assert (stage["budget_s"], stage["calls"], stage["overruns"]) == (0.08, 95, 5)
    assert [
        one["function"] for one in (await world.controller.http.get("/v1/slos")).json()["slos"]
    ] == ["hello"]


async def test_the_page_calls_a_budget_spent_by_the_rule_of_alarms_and_of_frozen_releases(
    world: World,
) -> None:
    async def shown() -> tuple[str, dict[str, Any]]:
        session = await sign_in(world.controller, world.controller.key)
        page = await world.controller.client(None).get("/dashboard/objectives", headers=session)
        body = (await world.controller.http.get("/v1/slos/search/hello")).json()
        return page.text, next(one for one in body["slis"] if one["sli"] == "availability")

    world.see(failed=3)
    world.judge()
    page, availability = await shown()
    # three failures of three calls are a hundred times the budget, and mean nothing
    assert (availability["budget_left"], availability["is_spent"]) == (-99.0, False)
    assert ("too few calls" in page, "spent</span>" in page) == (True, False)
    world.see(failed=40)
    page, availability = await shown()  # before the next evaluation: no alarm is open yet
    assert (availability["is_spent"], "100 \u00d7 spent" in page) == (True, True)
    assert "spent, no alarm" in page


def test_what_is_left_of_a_budget_that_allows_nothing_is_below_zero() -> None:
    spend = BudgetSpend(bad=9, total=30, budget=0)
    assert views.rate(spend.left) == -1e6


async def test_another_tenants_objectives_do_not_exist(world: World) -> None:
    async with world.controller.client(await world.controller.other_tenant()) as other:
        assert (await other.get("/v1/slos")).json() == {"slos": []}
        refused(await other.get("/v1/slos/search/hello"), 404)


async def test_a_key_of_one_function_reaches_its_objectives_only(world: World) -> None:
    key = await world.controller.new_key(
        name="bound", scope="deploy", app="search", function="other"
    )
    async with world.controller.client(key) as bound:
        assert (await bound.get("/v1/slos")).json() == {"slos": []}
        refused(await bound.get("/v1/slos/search/hello"), 403)


def test_severities_are_told_as_events() -> None:
    assert {slo_alerts.EVENTS[severity] for severity in Severity} | {slo_alerts.RESOLVED} == {
        "slo.page",
        "slo.ticket",
        "slo.resolved",
    }
