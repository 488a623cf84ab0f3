"""Experiments from plan to winner: who is counted, what is shown, what makes it invalid, and what
stops an arm by itself."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
import sqlalchemy as sa

from pilotlight.controller.dashboard.pages.functions.experiments import drawn, tone_of
from pilotlight.controller.database import tables
from pilotlight.controller.experiments import guardrails, report
from pilotlight.protocol import UsageRecord
from pilotlight.spec.traffic import from_json
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import refused, spec, usage
from tests.functions.controller.test_dashboard import sign_in

PICO = 1e-12


class Lab:
    """A function with two revisions, and an experiment on it. Owner: the test."""

    def __init__(self, controller: Controller, tenant: str, old: str, new: str) -> None:
        self.controller, self.tenant, self.old, self.new = controller, tenant, old, new
        self.id = ""
        self._calls = 0

    def arms(self, *shares: float) -> list[dict[str, Any]]:
        """`old` and the others `new`."""
        names = ("control", "bold", "bolder")
        return [
            {"name": n, "revision": self.new if at else self.old, "share": s}
            for at, (n, s) in enumerate(zip(names, shares, strict=False))
        ]

    async def create(self, **changes: Any) -> dict[str, Any]:
        """An experiment that runs."""
        body = {
            "app": "search",
            "function": "hello",
            "name": "faster",
            "arms": self.arms(50, 50),
            "start": True,
            **changes,
        }
        answer = await self.controller.http.post("/v1/experiments", json=body)
        assert answer.status_code == 201, answer.text
        self.id = answer.json()["id"]
        return dict(answer.json())

    def record(self, unit: str, arm: str = "control", **changes: Any) -> UsageRecord:
        """A call of a unit in an arm."""
        self._calls += 1
        values = {
            "tenant": self.tenant,
            "function": "hello",
            "function_id": "f-1",
            "revision": self.old if arm == "control" else self.new,
            "experiment": self.id,
            "arm": arm,
            "unit": unit,
            "started_at": self.controller.clock.now + self._calls * 1e-3,
        }
        return usage(f"req-{self._calls}/1", **{**values, **changes})

    async def put(self, records: Sequence[UsageRecord]) -> None:
        """Into the ledger, as an activator does."""
        answer = await self.controller.internal(
            "/internal/usage",
            {"activator": "a", "records": [record.to_json() for record in records]},
        )
        assert answer.status_code == 200, answer.text

    async def fill(
        self,
        units: int = 100,
        *,
        calls: int = 5,
        arms: Sequence[str] = ("control", "bold"),
        **bad: Any,
    ) -> None:
        """The same many units for each arm; `bad`: of every call of the arms but the first."""
        records = [
            self.record(f"{arm}-{unit}", arm, **(bad if arm != "control" else {}))
            for arm in arms
            for unit in range(units)
            for _ in range(calls)
        ]
        await self.put(records)

    async def report(self) -> dict[str, Any]:
        """What is shown."""
        answer = await self.controller.http.get(f"/v1/experiments/{self.id}/report")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def act(self, verb: str, **body: Any) -> Any:
        """Start, stop or conclude."""
        return await self.controller.http.post(f"/v1/experiments/{self.id}:{verb}", json=body)

    async def state(self) -> dict[str, Any]:
        """The experiment."""
        return dict((await self.controller.http.get(f"/v1/experiments/{self.id}")).json())

    async def followed(self) -> Any:
        """The traffic document that activators have."""
        changes = (await self.controller.feed())["changes"]
        routes = [change for change in changes if change["kind"] == "function"]  # type: ignore[attr-defined]
        return from_json(routes[-1]["value"]["document"])


@pytest.fixture
async def lab(controller: Controller) -> Lab:
    names = []
    for module in ("app", "better"):
        answer = await controller.http.post(
            "/v1/apps/search/deploy", json={"functions": [spec(module=module)]}
        )
        assert answer.status_code == 200, answer.text
        names.append(answer.json()["functions"][0]["revision"])
    return Lab(controller, await controller.tenant(), *names)


def arm(report: dict[str, Any], name: str) -> dict[str, Any]:
    return next(dict(one) for one in report["arms"] if one["name"] == name)


def compared(report: dict[str, Any], metric: str, name: str = "bold") -> dict[str, Any]:
    return next(
        dict(one) for one in report["comparisons"] if (one["metric"], one["arm"]) == (metric, name)
    )


# -- life ------------------------------------------------------------------------------------------
async def test_units_are_let_in_at_the_start_and_out_at_the_kill_switch(lab: Lab) -> None:
    assert (await lab.create(start=False))["state"] == "DRAFT"
    assert (await lab.followed()).experiment is None
    assert (await lab.act("start")).json()["state"] == "RUNNING"
    followed = (await lab.followed()).experiment
    assert (followed.id, [(one.name, one.share) for one in followed.arms]) == (
        lab.id,
        [("control", 50), ("bold", 50)],
    )
    stopped = (await lab.act("stop", reason="it burns")).json()
    assert (stopped["state"], stopped["reason"], (await lab.followed()).experiment) == (
        "STOPPED",
        "it burns",
        None,
    )
    assert "STOPPED" in refused(await lab.act("stop"), 409)
    assert "only a DRAFT can be started" in refused(await lab.act("start"), 409)


async def test_a_function_has_one_experiment_at_a_time_and_names_are_taken_once(lab: Lab) -> None:
    await lab.create()
    body = {"app": "search", "function": "hello", "arms": lab.arms(50, 50), "start": True}
    for name, words in (
        ("faster", "another name"),
        ("other", "experiment 'faster' runs on search/hello"),
    ):
        assert words in refused(
            await lab.controller.http.post("/v1/experiments", json={**body, "name": name}), 409
        )


async def test_a_canary_does_not_begin_while_an_experiment_compares_nor_an_experiment_while_a_canary_runs(
    lab: Lab,
) -> None:
    await lab.create()
    plan = {"steps": [5, 100], "every_s": 60}
    canary = {"functions": [spec(module="best")], "rollout": plan}
    assert "runs on search/hello" in refused(
        await lab.controller.http.post("/v1/apps/search/deploy", json=canary), 409
    )
    await lab.act("stop")
    assert (
        await lab.controller.http.post("/v1/apps/search/deploy", json=canary)
    ).status_code == 200
    body = {
        "app": "search",
        "function": "hello",
        "name": "other",
        "arms": lab.arms(50, 50),
        "start": True,
    }
    assert "rollout" in refused(await lab.controller.http.post("/v1/experiments", json=body), 409)


async def test_a_rollback_ends_it(lab: Lab) -> None:
    await lab.create()
    answer = await lab.controller.http.post(
        "/v1/apps/search/functions/hello:rollback", json={"to": lab.old}
    )
    assert answer.status_code == 200, answer.text
    assert ((await lab.state())["state"], (await lab.followed()).experiment) == ("STOPPED", None)


async def test_webhooks_are_told(lab: Lab) -> None:
    hook = {"url": "https://hooks.invalid/here", "events": ["experiment.*"]}
    assert (await lab.controller.http.put("/v1/webhooks/chat", json=hook)).is_success
    await lab.create()
    await lab.fill(status=502)
    assert guardrails.check_all(lab.controller.context.store) == [f"{lab.id}/bold"]
    with lab.controller.context.store.read() as sql:
        told = sql.execute(
            sa.select(tables.deliveries.c.event, tables.deliveries.c.body).order_by(
                tables.deliveries.c.event
            )
        ).all()
    assert [one.event for one in told] == [
        "experiment.arm_stopped",
        "experiment.started",
        "experiment.stopped",
    ]
    assert json.loads(told[0].body)["arm"] == "bold"


async def test_the_winner_gets_all_traffic_and_a_version_in_the_history(lab: Lab) -> None:
    await lab.create()
    concluded = (await lab.act("conclude", arm="control")).json()
    assert (concluded["state"], concluded["winner"]) == ("CONCLUDED", "control")
    followed = await lab.followed()
    assert (followed.experiment, followed.weights) == (None, {lab.old: 100})
    history = (await lab.controller.http.get("/v1/apps/search/history")).json()["history"]
    assert [entry["action"] for entry in history[:2]] == ["experiment.conclude", "experiment.start"]


def sides(**changes: Any) -> list[dict[str, Any]]:
    """Two arms, the second one changed."""
    return [
        {"name": "a", "revision": "@old", "share": 50},
        {"name": "b", "revision": "@new", "share": 50, **changes},
    ]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"unit": "request"}, "single requests cannot be units"),
    ({"unit": "header:authorization"}, "header:"),
    ({"unit": "cookie"}, "cookie"),
    ({"percent": 0}, "percent"),
    ({"percent": 101}, "percent"),
    ({"arms": sides()[:1]}, "2 to 8 arms"),
    ({"arms": sides(name="a")}, "share a name"),
    ({"arms": sides(share=40)}, "add up to 100"),
    ({"arms": sides(name="B b")}, "B b"),
    ({"guardrails": ["error_ratio"]}, "METRIC"),
    ({"guardrails": ["luck +1"]}, "luck"),
    ({"guardrails": ["feedback: +1"]}, "feedback:"),
    ({"name": "no name!"}, "name"),
]


async def test_what_cannot_be_followed_is_refused_when_it_is_planned(lab: Lab) -> None:
    for changes, words in REFUSED:
        body = {
            "app": "search",
            "function": "hello",
            "name": "faster",
            "arms": lab.arms(50, 50),
            **changes,
        }
        text = json.dumps(body).replace("@old", lab.old).replace("@new", lab.new)
        assert words in refused(
            await lab.controller.http.post("/v1/experiments", json=json.loads(text)), 400
        )
    unknown = {
        "app": "search",
        "function": "hello",
        "name": "faster",
        "arms": [{**arm, "revision": "v9-nope"} for arm in lab.arms(50, 50)],
    }
    assert "v9-nope" in refused(
        await lab.controller.http.post("/v1/experiments", json=unknown), 404
    )
    assert (await lab.controller.http.get("/v1/experiments")).json() == {"experiments": []}


async def test_arms_name_revisions_as_anything_else_does(lab: Lab) -> None:
    arms = [
        {"name": "control", "revision": "v1", "share": 50},
        {"name": "bold", "revision": "stable", "share": 50},
    ]

    made = await lab.create(arms=arms)

    assert [arm["revision"] for arm in made["arms"]] == [lab.old, lab.new]


async def test_what_is_not_there_or_not_ones_own_is_not_there(lab: Lab) -> None:
    body = {"app": "search", "function": "nobody", "name": "faster", "arms": lab.arms(50, 50)}
    refused(await lab.controller.http.post("/v1/experiments", json=body), 404)
    await lab.create()
    path = f"/v1/experiments/{lab.id}"
    stranger = lab.controller.client(await lab.controller.other_tenant())
    elsewhere = lab.controller.client(await lab.controller.new_key(scope="deploy", app="chat"))
    for client in (stranger, elsewhere):
        for answer in (
            await client.get(path),
            await client.get(f"{path}/report"),
            await client.post(f"{path}:stop", json={}),
        ):
            refused(answer, 404)
        assert (await client.get("/v1/experiments")).json() == {"experiments": []}
    refused(await elsewhere.post("/v1/experiments", json={**body, "function": "hello"}), 403)
    caller = lab.controller.client(await lab.controller.new_key(scope="invoke"))
    refused(await caller.post(f"{path}:stop", json={}), 403)
    mine = lab.controller.client(
        await lab.controller.new_key(scope="deploy", app="search", function="hello")
    )
    assert (await mine.post(f"{path}:stop", json={})).status_code == 200


async def test_an_environment_goes_with_its_experiments_and_what_was_told_there(lab: Lab) -> None:
    assert (await lab.controller.http.post("/v1/environments", json={"name": "staging"})).is_success
    staging = lab.controller.client(lab.controller.key, environment="staging")
    revision = (await staging.post("/v1/apps/search/deploy", json={"functions": [spec()]})).json()[
        "functions"
    ][0]["revision"]
    function = (await staging.get("/v1/apps/search")).json()["functions"][0]["id"]
    arms = [{"name": name, "revision": revision, "share": 50} for name in ("control", "bold")]
    body = {"app": "search", "function": "hello", "name": "faster", "arms": arms, "start": True}
    lab.id = (await staging.post("/v1/experiments", json=body)).json()["id"]
    record = lab.record("ann", environment="staging", function_id=function)
    await lab.put([record])
    assert (
        await staging.post("/v1/feedback", json={"request_id": record.call, "label": "good"})
    ).status_code == 200
    assert (await staging.delete("/v1/apps/search")).is_success
    assert (await staging.get("/v1/experiments")).json()["experiments"][0]["state"] == "STOPPED"
    answer = await lab.controller.http.delete("/v1/environments/staging")
    assert answer.status_code == 204, answer.text
    with lab.controller.context.store.read() as sql:
        for table in (
            tables.experiments,
            tables.exposures,
            tables.exposure_latency,
            tables.feedback,
        ):
            assert sql.execute(sa.select(sa.func.count()).select_from(table)).scalar_one() == 0, (
                table.name
            )


# -- exposures -------------------------------------------------------------------------------------
async def test_a_unit_is_exposed_once_however_often_it_calls_and_records_that_come_twice_count_once(
    lab: Lab,
) -> None:
    await lab.create()
    records = [
        lab.record("ann"),
        lab.record("ann", status=500),
        lab.record("ben", "bold", degraded="cached", revision="v0"),
    ]
    await lab.put(records[:2])
    await lab.put(records)
    shown = await lab.report()
    assert [
        (one["name"], one["units"], one["calls"], one["mistagged"]) for one in shown["arms"]
    ] == [
        ("control", 1, 2, 0),
        ("bold", 1, 1, 0),
    ]
    assert shown["valid"], "a degraded answer comes from elsewhere on purpose"


async def test_copies_spans_attempts_that_ran_nothing_and_requests_without_a_unit_are_no_exposures(
    lab: Lab,
) -> None:
    await lab.create()
    await lab.put(
        [
            lab.record("ann", kind="SHADOW"),
            lab.record("ann", kind="START"),
            lab.record("ann", outcome="busy", status=503),
        ]
    )
    await lab.put(
        [
            lab.record("ann", experiment="x-gone"),
            lab.record("ann", experiment=""),
            lab.record(""),
            lab.record("", "bold"),
        ]
    )
    assert [one["units"] for one in (await lab.report())["arms"]] == [0, 0]


# -- the report ------------------------------------------------------------------------------------
async def test_arms_are_compared_by_errors_latency_cost_and_tokens(lab: Lab) -> None:
    await lab.create()
    rng = random.Random(1)
    records = []
    for number in range(150):
        for name, slow, dear in (("control", 1, 1), ("bold", 2, 3)):
            for _ in range(8):
                took = {
                    "queued_ms": 0,
                    "start_ms": 0,
                    "exec_ms": round(rng.uniform(80, 120) * slow),
                }
                cost = f"{1000 * dear * PICO:.12f}"
                records.append(
                    lab.record(
                        f"{name}{number}",
                        name,
                        **took,
                        cost=cost,
                        tokens_in=3,
                        tokens_out=7,
                        status=200,
                    )
                )
    await lab.put(records)
    shown = await lab.report()
    assert (shown["valid"], shown["problems"]) == (True, [])
    control = arm(shown, "control")["metrics"]
    assert control["error_ratio"]["value"] == 0
    assert control["latency_mean"]["low"] < 100 < control["latency_mean"]["high"]
    assert control["cost_per_call"]["value"] == pytest.approx(1e-9)
    assert control["cost_per_1k_tokens"]["value"] == pytest.approx(1e-7)
    assert (
        compared(shown, "latency_mean")["verdict"],
        compared(shown, "latency_p50")["verdict"],
    ) == ("higher", "higher")
    assert compared(shown, "latency_mean")["low"] > 80
    assert compared(shown, "cost_per_call")["relative"] == pytest.approx(2.0)
    assert compared(shown, "cost_per_call")["verdict"] == "higher"
    assert compared(shown, "error_ratio")["verdict"] == "not shown"


async def test_cold_starts_do_not_blur_latency(lab: Lab) -> None:
    await lab.create()
    await lab.fill(exec_ms=3)
    await lab.put(
        [lab.record(f"bold-{n}", "bold", start_kind="COLD", start_ms=9000) for n in range(100)]
    )
    shown = await lab.report()
    assert arm(shown, "bold")["metrics"]["latency_p99"]["value"] < 20
    assert compared(shown, "cold_ratio")["verdict"] == "higher"


async def test_what_callers_say_is_compared_too(lab: Lab) -> None:
    await lab.create()
    await lab.fill(60, calls=2)
    records = [lab.record(f"{name}-{n}", name) for name in ("control", "bold") for n in range(60)]
    await lab.put(records)
    rng = random.Random(2)
    for record in records:
        better = record.arm == "bold"
        body = {
            "request_id": record.call,
            "label": "good" if better else "bad",
            "metrics": {"rating": rng.choice([4, 5] if better else [1, 2])},
        }
        answer = await lab.controller.http.post("/v1/feedback", json=body)
        assert answer.status_code == 200, answer.text
    shown = await lab.report()
    assert compared(shown, "feedback:rating")["verdict"] == "higher"
    assert compared(shown, "feedback:label=good")["value"] == 1.0
    assert arm(shown, "bold")["metrics"]["feedback:rating"]["low"] > 3


async def test_nothing_is_said_of_too_few(lab: Lab) -> None:
    await lab.create()
    assert (await lab.report())["comparisons"] == []
    await lab.fill(5)
    shown = await lab.report()
    assert (shown["comparisons"], arm(shown, "bold")["metrics"], shown["valid"]) == ([], {}, True)
    assert [one["state"] for one in shown["guardrails"]] == ["unknown"]


# -- what makes it invalid -------------------------------------------------------------------------
async def test_a_split_that_is_not_the_planned_one_invalidates_everything(lab: Lab) -> None:
    await lab.create()
    await lab.put([lab.record(f"u{n}", "bold" if n < 700 else "control") for n in range(1000)])
    shown = await lab.report()
    assert not shown["valid"]
    assert shown["problems"][0].startswith(
        "sample ratio mismatch: control 300 (planned 500), bold 700 (planned 500)"
    )
    assert {one["verdict"] for one in shown["comparisons"]} == {"invalid"}
    assert "is invalid: sample ratio mismatch" in refused(
        await lab.act("conclude", arm="bold"), 409
    )
    assert (await lab.act("conclude", arm="bold", force=True)).json()["winner"] == "bold"


async def test_an_answer_of_another_revision_than_the_arms_invalidates_everything(lab: Lab) -> None:
    await lab.create()
    await lab.fill()
    assert (await lab.report())["valid"]
    await lab.put([lab.record("bold-1", "bold", revision=lab.old)])
    shown = await lab.report()
    assert shown["problems"] == [
        f"arm bold: 1 calls were answered by a revision other than {lab.new}"
    ]
    assert arm(shown, "bold")["mistagged"] == 1


async def test_a_unit_that_met_two_arms_and_an_arm_that_is_not_planned_invalidate_everything(
    lab: Lab,
) -> None:
    await lab.create()
    await lab.fill()
    await lab.put([lab.record("bold-1", "control"), lab.record("zoe", "ghost")])
    problems = (await lab.report())["problems"]
    assert any("1 units met more than one arm" in one for one in problems)
    assert any("'ghost'" in one for one in problems)


# -- guardrails ------------------------------------------------------------------------------------
async def test_an_arm_that_fails_is_stopped_by_itself_and_its_units_go_to_the_first(
    lab: Lab,
) -> None:
    await lab.create(arms=lab.arms(40, 30, 30))
    await lab.fill(arms=("control", "bold", "bolder"))
    assert guardrails.check_all(lab.controller.context.store) == []
    await lab.put([lab.record(f"bold-{n}", "bold", status=500) for n in range(100)])
    assert guardrails.check_all(lab.controller.context.store) == [f"{lab.id}/bold"]
    assert guardrails.check_all(lab.controller.context.store) == []
    found = await lab.state()
    assert found["state"] == "RUNNING"
    assert "error_ratio +0.02" in found["stopped"]["bold"]["reason"]
    followed = (await lab.followed()).experiment
    assert [(one.name, one.share) for one in followed.arms] == [
        ("control", 40),
        ("control", 30),
        ("bolder", 30),
    ]
    audit = (await lab.controller.http.get("/v1/audit", params={"limit": 1})).json()["entries"][0]
    assert (audit["action"], audit["actor"]) == ("experiment.stop_arm", "platform")


async def test_units_of_a_stopped_arm_break_nothing_when_they_meet_the_first(lab: Lab) -> None:
    await lab.create(arms=lab.arms(40, 30, 30))
    for name, units in (("control", 40), ("bold", 30), ("bolder", 30)):
        await lab.fill(units, arms=(name,))
    lab.controller.clock.now += 60
    assert (await lab.act("stop", arm="bold", reason="ugly")).status_code == 200
    lab.controller.clock.now += 60
    await lab.put(
        [lab.record(f"bold-{n}", "control") for n in range(30)]
        + [lab.record(f"late-{n}", "control") for n in range(300)]
    )
    shown = await lab.report()
    assert (shown["valid"], shown["problems"]) == (True, []), "shares are others since the stop"
    assert [(one["name"], one["units"]) for one in shown["arms"]] == [
        ("control", 340),
        ("bold", 30),
        ("bolder", 30),
    ]
    assert arm(shown, "control")["calls"] == 40 * 5 + 300, (
        "what units of another arm did here is left out"
    )


async def test_the_experiment_ends_when_the_last_other_arm_is_stopped(lab: Lab) -> None:
    await lab.create()
    await lab.fill(status=502)
    assert guardrails.check_all(lab.controller.context.store) == [f"{lab.id}/bold"]
    found = await lab.state()
    assert found["state"] == "STOPPED"
    assert found["reason"].startswith("arm bold: guardrail 'error_ratio +0.02' is breached")
    assert (await lab.followed()).experiment is None


async def test_bounds_may_be_relative_and_may_be_floors(lab: Lab) -> None:
    bounds = {
        "latency_p50 +20%": ("within", "breached"),
        "latency_p99 +20%": ("open", "open"),
        "latency_mean +5": ("within", "breached"),
        "cost_per_call +50%": ("within", "breached"),
        "cost_per_call +200%": ("within", "within"),
        "cost_per_call -50%": ("within", "within"),
        "exec_mean +500000": ("within", "within"),
        "feedback:rating -1": ("unknown", "unknown"),
    }
    await lab.create(
        guardrails=list(bounds),
        arms=[*lab.arms(50, 25), {"name": "bolder", "revision": lab.new, "share": 25}],
    )
    await lab.fill(200, calls=3, arms=("control", "bold"))
    records = [
        lab.record(f"bolder-{n}", "bolder", exec_ms=400, cost="0.000000092000")
        for n in range(200)
        for _ in range(3)
    ]
    await lab.put(records)
    found: dict[str, dict[str, str]] = {}
    for one in (await lab.report())["guardrails"]:
        found.setdefault(one["guardrail"], {})[one["arm"]] = one["state"]
    assert {bound: (states["bold"], states["bolder"]) for bound, states in found.items()} == bounds


async def test_a_good_arm_is_left_alone(lab: Lab) -> None:
    await lab.create()
    rng = random.Random(9)
    for _ in range(6):
        names = [
            (name, f"{name}{rng.randrange(200)}")
            for name in ("control", "bold")
            for _ in range(150)
        ]
        await lab.put(
            [
                lab.record(unit, name, status=500 if rng.random() < 0.03 else 200)
                for name, unit in names
            ]
        )
        assert guardrails.check_all(lab.controller.context.store) == []
    assert [one["state"] for one in (await lab.report())["guardrails"]] != [report.BREACHED]


async def test_feedback_that_waited_is_joined_by_the_same_round(lab: Lab) -> None:
    call = f"req-{int(lab.controller.clock.now * 1000):012x}{7:020x}"
    answer = await lab.controller.http.post(
        "/v1/feedback", json={"request_id": call, "metrics": {"rating": 1}}
    )
    assert (answer.status_code, answer.json()["waiting"]) == (202, True)
    await lab.put([usage(f"{call}/1", tenant=lab.tenant)])
    guardrails.check_all(lab.controller.context.store)
    again = await lab.controller.http.post(
        "/v1/feedback", json={"request_id": call, "metrics": {"rating": 1}}
    )
    assert (again.status_code, again.json()["replayed"], again.headers["idempotency-replayed"]) == (
        200,
        True,
        "true",
    )
    assert "already" in refused(
        await lab.controller.http.post(
            "/v1/feedback", json={"request_id": call, "metrics": {"rating": 2}}
        ),
        409,
    )


async def test_feedback_over_http_is_strict(lab: Lab) -> None:
    for metrics in ({"rating": "5"}, {"rating": True}, {"rating": None}):
        refused(
            await lab.controller.http.post(
                "/v1/feedback", json={"request_id": "req-1", "metrics": metrics}
            ),
            400,
        )
    refused(
        await lab.controller.http.post(
            "/v1/feedback", content='{"request_id": "req-1", "metrics": {"rating": NaN}}'
        ),
        400,
    )
    refused(
        await lab.controller.http.post(
            "/v1/feedback", json={"request_id": "req-unknown", "label": "good"}
        ),
        404,
    )


# -- the page --------------------------------------------------------------------------------------
async def test_the_page_shows_intervals_and_says_loudly_when_nothing_counts(lab: Lab) -> None:
    headers = await sign_in(lab.controller, lab.controller.key)
    client = lab.controller.client(None)
    assert (
        "No experiments in main yet"
        in (await client.get("/dashboard/experiments", headers=headers)).text
    )
    made = await lab.create(name="greet", guardrails=["latency_mean +5", "feedback:rating -1"])
    await lab.fill(60, exec_ms=400)
    for path in ("/dashboard/experiments", f"/dashboard/experiments/{lab.id}"):
        page = await client.get(path, headers=headers)
        assert page.status_code == 200, page.text
        for said in (
            "search/hello: greet",
            "<b>Valid.</b>",
            "Warm latency p50",
            'class="interval bad"',
            lab.new,
            "higher",
        ):
            assert said in page.text, said
        assert "style=" not in page.text, "the policy forbids it"
    await lab.put([lab.record("bold-1", "bold", revision=lab.old)])
    assert guardrails.check_all(lab.controller.context.store) == [f"{lab.id}/bold"]
    page = await client.get(f"/dashboard/experiments/{made['id']}", headers=headers)
    for said in (
        "Invalid: the results below do not count.",
        "1 calls were answered by a revision other",
        "guardrail &#39;latency_mean +5&#39;",
    ):
        assert said in page.text, said
    assert (await client.get("/dashboard/experiments/x-none", headers=headers)).status_code == 404
    biller = await sign_in(lab.controller, await lab.controller.new_key(scope="read-billing"))
    assert (await client.get("/dashboard/experiments", headers=biller)).status_code == 403


def test_an_interval_is_drawn_around_zero() -> None:
    found = drawn({"value": 1.0, "low": -1.0, "high": 3.0}, "ms")
    assert (found.left, found.dot, found.right) == pytest.approx(
        (120 - 113 / 3, 120 + 113 / 3, 233)
    )
    assert found.alt_text == "+1 ms, between \u22121 ms and +3 ms"
    assert drawn({"value": 0.0, "low": None, "high": None}, "").right == 240
    assert (
        tone_of("latency_p99", "lower"),
        tone_of("error_ratio", "higher"),
        tone_of("feedback:rating", "higher"),
    ) == ("good", "bad", "")
