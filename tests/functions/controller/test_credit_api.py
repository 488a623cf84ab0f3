"""Prepaid credit over HTTP: what is answered, to whom, and what is refused."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import httpx
import pytest

from pilotlight.core.transport.controller_client import HEADER_PLATFORM_TOKEN
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import usage

ANA = "/v1/credits/ana"


async def grant(
    http: httpx.AsyncClient, amount: str = "5", *, status: int = 201, **body: Any
) -> dict[str, Any]:
    answer = await http.post(f"{ANA}/grants", json={"amount": amount, **body})
    assert answer.status_code == status, answer.text
    return dict(answer.json())


async def use(controller: Controller, cost: str, record: str = "req-1/1") -> dict[str, Any]:
    values = {"tenant": await controller.tenant(), "started_at": controller.clock.now}
    one = usage(record, cost=f"{Decimal(cost):.12f}", customer="ana", **values)
    answer = await controller.internal(
        "/internal/usage", {"activator": "a-1", "records": [one.to_json()]}
    )
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["budgets"])


async def test_credit_is_granted_used_read_and_closed(controller: Controller) -> None:
    http, now = controller.http, controller.clock.now
    assert (await http.get(ANA)).json() == {"credits": []}
    first = await grant(http, "5", expires_at=now + 60.0, note="order 1")
    assert (first["kind"], first["amount"], first["balance"], first["created"]) == (
        "grant",
        "5",
        "5",
        True,
    )
    second = await grant(http, "2")
    states = await use(controller, "5.5")
    (state,) = states.values()
    assert (state["period"], state["spent"], state["batch"], state["amount"]) == (
        "credit",
        "5.500000000000",
        "5.500000000000",
        "7.000000000000",
    )
    read = await http.get(
        "/internal/budgets", headers={HEADER_PLATFORM_TOKEN: controller.context.key.token}
    )
    assert read.json()["budgets"] == {
        name: {**one, "batch": "0.000000000000"} for name, one in states.items()
    }
    for asked, found in ((next(iter(states)), 1), ("ca-0", 0)):
        read = await http.get(
            "/internal/budgets",
            params={"id": asked},
            headers={HEADER_PLATFORM_TOKEN: controller.context.key.token},
        )
        assert len(read.json()["budgets"]) == found
    (shown,) = (await http.get(ANA)).json()["credits"]
    assert (shown["balance"], shown["used"], shown["granted"]) == ("1.5", "5.5", "7")
    assert shown["grants"] == [{"id": second["id"], "left": "1.5", "expires_at": None}]
    assert (await http.get("/v1/credits")).json()["credits"] == [shown]
    (used,) = (await http.get(f"{ANA}/uses")).json()["uses"]
    assert (used["day"], used["app"], used["function"], used["used"]) == (
        "2027-01-15",
        "search",
        "embed",
        "5.5",
    )
    body = {"grant": second["id"], "amount": "0.5", "note": "too much"}
    taken = (await http.post(f"{ANA}/withdrawals", json=body)).json()
    assert (taken["amount"], taken["grant"], taken["balance"]) == ("-0.5", second["id"], "1")
    assert (await http.delete(ANA)).status_code == 204
    assert (await http.get(ANA)).json() == {"credits": []}
    assert (await http.delete(ANA)).status_code == 404
    page = (await http.get(f"{ANA}/entries", params={"limit": 3})).json()
    rest = (await http.get(f"{ANA}/entries", params={"before": page["before"]})).json()
    entries = page["entries"] + rest["entries"]
    assert [one["amount"] for one in entries] == ["-1", "-0.5", "2", "5"]
    assert rest["before"] is None


async def test_a_grant_that_is_repeated_is_made_once(controller: Controller) -> None:
    http = controller.http
    made = await grant(http, reference="payment-17")
    again = await grant(http, status=200, reference="payment-17")
    assert again == {**made, "created": False}
    await grant(http, "6", status=409, reference="payment-17")
    keyed = [
        await http.post(f"{ANA}/grants", json={"amount": "1"}, headers={"idempotency-key": "one"})
        for _ in range(2)
    ]
    assert keyed[0].json() == keyed[1].json()
    (shown,) = (await http.get(ANA)).json()["credits"]
    assert shown["balance"] == "6"


async def test_customers_are_listed_in_pages(controller: Controller) -> None:
    for customer in ("ana", "ben", "cleo"):
        answer = await controller.http.post(f"/v1/credits/{customer}/grants", json={"amount": "1"})
        assert answer.status_code == 201
    seen: list[str] = []
    while page := (
        await controller.http.get(
            "/v1/credits", params={"limit": 2, "after": seen[-1] if seen else ""}
        )
    ).json()["credits"]:
        seen += [one["customer"] for one in page]
    assert seen == ["ana", "ben", "cleo"]


async def test_another_tenant_and_lesser_keys_neither_read_nor_grant(
    controller: Controller,
) -> None:
    made = await grant(controller.http)
    other = controller.client(await controller.other_tenant())
    assert (await other.get(ANA)).json() == {"credits": []}
    assert (await other.get("/v1/credits")).json() == {"credits": []}
    assert (await other.get(f"{ANA}/entries")).json() == {"entries": [], "before": None}
    assert (await other.get(f"{ANA}/entries", params={"before": made["id"]})).status_code == 400
    assert (await other.get(f"{ANA}/uses")).json()["uses"] == []
    body = {"grant": made["id"]}
    assert (await other.post(f"{ANA}/withdrawals", json=body)).status_code == 404
    assert (await other.delete(ANA)).status_code == 404
    bound = controller.client(await controller.new_key(scope="admin", app="search"))
    reader = controller.client(await controller.new_key(scope="read-billing"))
    theirs = controller.client(await controller.new_key(scope="invoke", customer="ana"))
    for http, reads in ((bound, 403), (reader, 200), (theirs, 403)):
        for path in ("/v1/credits", ANA, f"{ANA}/entries", f"{ANA}/uses"):
            assert (await http.get(path)).status_code == reads, path
        await grant(http, status=403)
        assert (await http.post(f"{ANA}/withdrawals", json=body)).status_code == 403
        assert (await http.delete(ANA)).status_code == 403
    (shown,) = (await controller.http.get(ANA)).json()["credits"]
    assert shown["balance"] == "5"


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
        ({"amount": "9" * 65}, "body.amount"),
        ({"currency": "BTC"}, "currency"),
        ({"expires_at": 1.0}, "expires_at"),
        ({"expires_at": 1e300}, "expires_at"),
        ({"note": "x" * 501}, "body.note"),
        ({"reference": ""}, "body.reference"),
        ({"reference": "x" * 201}, "body.reference"),
        ({"kind": "refund"}, "body.kind"),
    ],
)
async def test_a_wrong_grant_names_the_parameter(
    controller: Controller, body: dict[str, Any], parameter: str
) -> None:
    answer = await controller.http.post(f"{ANA}/grants", json={"amount": "5", **body})
    assert answer.status_code == 400, answer.text
    problem = answer.json()
    assert problem.get("parameter") == parameter or parameter in str(problem), problem
    assert (await controller.http.get(ANA)).json() == {"credits": []}


async def test_only_customers_have_credit(controller: Controller) -> None:
    for customer in ("*", "a b", "-x"):
        answer = await controller.http.post(f"/v1/credits/{customer}/grants", json={"amount": "1"})
        assert answer.status_code == 400, answer.text
