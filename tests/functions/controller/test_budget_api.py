"""Budgets over HTTP: what is answered, to whom, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

import httpx
import pytest

from pilotlight.controller.billing.budget_periods import DAY_S
from pilotlight.controller.settings import ControllerSettings
from pilotlight.core.transport.controller_client import HEADER_PLATFORM_TOKEN
from tests.fakes.hooks import Received, Receiver
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import usage

HOOK = "https://hooks.example/T0/secret-part"


def allowing_any(controller: Controller) -> Controller:
    """The same controller with `webhooks: any`."""
    config = replace(controller.context.config, settings=ControllerSettings(webhooks="any"))
    return replace(controller, context=replace(controller.context, config=config))


async def put(http: httpx.AsyncClient, *, status: int = 201, **body: Any) -> dict[str, Any]:
    answer = await http.put("/v1/budgets", json={"amount": "10", **body})
    assert answer.status_code == status, answer.text
    return dict(answer.json())


async def spend(
    controller: Controller, cost: str, record: str = "req-1/1", **changes: Any
) -> dict[str, Any]:
    values = {"tenant": await controller.tenant(), "started_at": controller.clock.now, **changes}
    body = {
        "activator": "a-1",
        "records": [usage(record, cost=f"{Decimal(cost):.12f}", **values).to_json()],
    }
    answer = await controller.internal("/internal/usage", body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def test_a_budget_is_made_read_changed_and_deleted(controller: Controller) -> None:
    made = await put(controller.http, app="search", function="embed", webhook=HOOK)
    assert made["webhook_secret"].startswith("whsec_")
    assert (made["created"], made["hard"], made["alerts"], made["currency"], made["period"]) == (
        True,
        True,
        [50, 80, 100],
        "USD",
        "month",
    )

    changed = await put(
        controller.http,
        status=200,
        app="search",
        function="embed",
        amount="12.5",
        hard=False,
        alerts=[90],
        webhook=HOOK,
    )
    assert (changed["id"], changed["created"], changed["webhook_secret"]) == (
        made["id"],
        False,
        None,
    )
    (listed,) = (await controller.http.get("/v1/budgets")).json()["budgets"]
    assert (listed["amount"], listed["hard"], listed["alerts"], listed["webhook"]) == (
        "12.5",
        False,
        [90],
        HOOK,
    )
    assert (await controller.http.get(f"/v1/budgets/{made['id']}")).json() == listed

    assert (await controller.http.delete(f"/v1/budgets/{made['id']}")).status_code == 204
    assert (await controller.http.get("/v1/budgets")).json() == {"budgets": []}
    assert (await controller.http.delete(f"/v1/budgets/{made['id']}")).status_code == 404


async def test_what_is_spent_is_answered_to_the_activator_and_to_the_tenant(
    controller: Controller,
) -> None:
    made = await put(controller.http)
    answer = await spend(controller, "5.000000000001")
    assert answer["budgets"] == {
        made["id"]: {"period": "2027-01", "spent": "5.000000000001", "batch": "5.000000000001"}
    }

    seen = (await controller.http.get(f"/v1/budgets/{made['id']}")).json()
    assert (seen["spent"], seen["left"], seen["percent"], seen["is_spent"]) == (
        "5.000000000001",
        "4.999999999999",
        50.0,
        False,
    )
    assert (seen["current"], seen["begins_at"], seen["ends_at"]) == (
        "2027-01",
        1798761600.0,
        1801440000.0,
    )
    assert [(a["percent"], a["spent"]) for a in seen["alerted"]] == [(50, "5.000000000001")]

    await spend(controller, "6", "req-2/1")
    seen = (await controller.http.get(f"/v1/budgets/{made['id']}")).json()
    assert (seen["left"], seen["percent"], seen["is_spent"]) == ("0", 110.0, True)
    assert [
        a["percent"]
        for a in (await controller.http.get(f"/v1/budgets/{made['id']}/alerts")).json()["alerts"]
    ] == [100, 80, 50]


async def test_the_platforms_own_processes_read_all_budgets_and_nobody_else_does(
    controller: Controller,
) -> None:
    made = await put(controller.http)
    await spend(controller, "3")
    answer = await controller.http.get(
        "/internal/budgets", headers={HEADER_PLATFORM_TOKEN: controller.context.key.token}
    )
    assert answer.json() == {
        "budgets": {made["id"]: {"period": "2027-01", "spent": "3.000000000000", "batch": "0"}}
    }
    assert (await controller.http.get("/internal/budgets")).status_code == 403


async def test_a_forecast_appears_with_the_first_full_day(controller: Controller) -> None:
    made = await put(controller.http, amount="100")
    assert made["forecast"] is None
    await spend(controller, "4", started_at=controller.clock.now - DAY_S)
    await spend(controller, "1", "req-2/1")
    forecast = (await controller.http.get(f"/v1/budgets/{made['id']}")).json()["forecast"]
    assert (forecast["per_day"], forecast["basis_days"], forecast["low"]) == ("4", 1, None)
    assert float(forecast["expected"]) == pytest.approx(
        5 + 4 * (1801440000.0 - controller.clock.now) / DAY_S
    )


# -- wrong input -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "body, parameter",
    [
        ({"amount": "-1"}, "amount"),
        ({"amount": "0"}, "amount"),
        ({"amount": "NaN"}, "amount"),
        ({"amount": "1e400"}, "amount"),
        ({"amount": "1000000000"}, "amount"),
        ({"amount": "0.0000000000001"}, "amount"),
        ({"amount": 10}, "body.amount"),
        ({"amount": None}, "body.amount"),
        ({"amount": "9" * 65}, "body.amount"),
        ({"currency": "BTC"}, "currency"),
        ({"currency": ""}, "currency"),
        ({"period": "week"}, "body.period"),
        ({"limit": 5}, "body.limit"),
        ({"alerts": ["half"]}, "body.alerts.0"),
        ({"alerts": [0]}, "alerts"),
        ({"alerts": [50] * 11}, "body.alerts"),
        ({"function": "embed"}, "function"),
        ({"app": "<script>alert(1)</script>"}, "app"),
        ({"app": "' OR 1=1 --"}, "app"),
        ({"webhook": "http://hooks.example/"}, "webhook"),
        ({"webhook": "https://127.0.0.1/"}, "webhook"),
        ({"webhook": "https://10.0.0.1:8443/x"}, "webhook"),
        ({"webhook": "nonsense"}, "webhook"),
        ({"webhook": ""}, "webhook"),
    ],
)
async def test_wrong_input_is_named_and_changes_nothing(
    controller: Controller, body: dict[str, Any], parameter: str
) -> None:
    answer = await controller.http.put("/v1/budgets", json={"amount": "10", **body})
    assert (answer.status_code, answer.json()["parameter"]) == (400, parameter), answer.text
    assert (await controller.http.get("/v1/budgets")).json() == {"budgets": []}


async def test_an_environment_that_does_not_exist_is_said(controller: Controller) -> None:
    answer = await controller.http.put(
        "/v1/budgets", json={"amount": "10", "environment": "stagin"}
    )
    assert (answer.status_code, "environment create stagin" in answer.json()["detail"]) == (
        404,
        True,
    )


# -- whose it is -----------------------------------------------------------------------------------
async def test_another_tenants_budget_does_not_exist(controller: Controller) -> None:
    made = await put(controller.http, webhook=HOOK)
    async with controller.client(await controller.other_tenant()) as foreign:
        for method, path in (("GET", ""), ("GET", "/alerts"), ("DELETE", ""), ("POST", ":test")):
            answer = await foreign.request(method, f"/v1/budgets/{made['id']}{path}")
            assert (answer.status_code, answer.json()["type"].rpartition("/")[2]) == (
                404,
                "not-found",
            )
        assert (await foreign.get("/v1/budgets")).json() == {"budgets": []}
        theirs = await put(foreign)
    assert theirs["id"] != made["id"]
    assert [b["id"] for b in (await controller.http.get("/v1/budgets")).json()["budgets"]] == [
        made["id"]
    ]


@pytest.mark.parametrize(
    "scope, may_read", [("read-billing", True), ("deploy", True), ("invoke", False)]
)
async def test_a_lower_key_reads_at_most_and_not_the_webhooks_path(
    controller: Controller, scope: str, may_read: bool
) -> None:
    made = await put(controller.http, webhook=HOOK)
    async with controller.client(await controller.new_key(scope=scope)) as http:
        answer = await http.get(f"/v1/budgets/{made['id']}")
        assert answer.status_code == (200 if may_read else 403)
        if may_read:
            assert answer.json()["webhook"] == "https://hooks.example/…"
        assert (await http.put("/v1/budgets", json={"amount": "1"})).status_code == 403
        assert (await http.delete(f"/v1/budgets/{made['id']}")).status_code == 403
        assert (await http.post(f"/v1/budgets/{made['id']}:test")).status_code == 403


async def test_a_key_of_one_environment_deals_with_its_budgets_only(controller: Controller) -> None:
    await controller.http.post("/v1/environments", json={"name": "staging"})
    wide, main = await put(controller.http), await put(controller.http, environment="main")
    key = await controller.new_key(scope="admin", environment="staging")
    async with controller.client(key) as http:
        assert (await http.get("/v1/budgets")).json() == {"budgets": []}
        for budget in (wide, main):
            assert (await http.get(f"/v1/budgets/{budget['id']}")).status_code == 404
            assert (await http.delete(f"/v1/budgets/{budget['id']}")).status_code == 404
        assert (await http.put("/v1/budgets", json={"amount": "1"})).status_code == 403
        assert (
            await http.put("/v1/budgets", json={"amount": "1", "environment": "main"})
        ).status_code == 403
        own = await put(http, environment="staging", app="search")
        assert [b["id"] for b in (await http.get("/v1/budgets")).json()["budgets"]] == [own["id"]]


async def test_what_was_changed_is_in_the_audit_log_without_the_secret(
    controller: Controller,
) -> None:
    made = await put(controller.http, webhook=HOOK)
    await put(controller.http, status=200, amount="20", webhook=HOOK)
    await controller.http.delete(f"/v1/budgets/{made['id']}")
    answer = await controller.http.get("/v1/audit", params={"limit": 3})
    entries = answer.json()["entries"]
    assert [(e["action"], e["subject"]) for e in entries] == [
        ("budget.delete", made["id"]),
        ("budget.put", made["id"]),
        ("budget.put", made["id"]),
    ]
    assert (entries[1]["before"]["amount"], entries[1]["after"]["amount"]) == ("10", "20")
    assert "whsec_" not in answer.text
    assert "whsec_" not in json.dumps(await controller.feed())


# -- the example -----------------------------------------------------------------------------------
async def test_an_example_is_posted_signed(controller: Controller, receiver: Receiver) -> None:
    relaxed = allowing_any(controller)
    async with relaxed.client(controller.key) as http:
        made = await put(http, webhook=receiver.url)
        answer = (await http.post(f"/v1/budgets/{made['id']}:test")).json()
    got = receiver.received[0]
    assert got.is_signed_with(made["webhook_secret"])
    assert (answer["status"], answer["error"], answer["url"]) == (204, None, receiver.url)
    assert Received(
        line=got.line, headers=answer["headers"], body=answer["body"].encode()
    ).is_signed_with(made["webhook_secret"])
    sent = json.loads(got.body)
    assert (
        sent["type"],
        sent["data"]["budget"],
        sent["data"]["percent"],
        sent["data"]["tenant"],
    ) == (
        "budget.test",
        made["id"],
        100,
        "default",
    )
    assert (await controller.http.get(f"/v1/budgets/{made['id']}/alerts")).json() == {"alerts": []}


async def test_a_new_secret_signs_the_next_message(
    controller: Controller, receiver: Receiver
) -> None:
    async with allowing_any(controller).client(controller.key) as http:
        first = await put(http, webhook=receiver.url)
        second = await put(http, status=200, webhook=receiver.url, new_secret=True)
        await http.post(f"/v1/budgets/{first['id']}:test")
    assert receiver.received[0].is_signed_with(second["webhook_secret"])
    assert not receiver.received[0].is_signed_with(first["webhook_secret"])


async def test_an_example_that_is_not_taken_says_why(
    controller: Controller, receiver: Receiver
) -> None:
    receiver.reply = lambda _: b"HTTP/1.1 500 Oh\r\n\r\n"
    async with allowing_any(controller).client(controller.key) as http:
        made = await put(http, webhook=receiver.url)
        answer = (await http.post(f"/v1/budgets/{made['id']}:test")).json()
        assert (answer["status"], answer["error"]) == (
            500,
            "500: expected a status of 200 to 299",
        )
    # The operator closes the door: what was allowed before is not sent any more.
    answer = (await controller.http.post(f"/v1/budgets/{made['id']}:test")).json()
    assert answer["status"] is None
    assert len(receiver.received) == 1


async def test_without_a_webhook_there_is_nothing_to_test(controller: Controller) -> None:
    made = await put(controller.http)
    assert (await controller.http.post(f"/v1/budgets/{made['id']}:test")).status_code == 409
