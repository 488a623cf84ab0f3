"""Asking the audit log: by whom, what, when, from where; pages; whose; and that it cannot be
changed."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from pilotlight.controller.database import audit_trail
from pilotlight.controller.database.store import Store
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import INJECTIONS, ManualClock, refused


async def ask(client: httpx.AsyncClient, **params: Any) -> list[dict[str, Any]]:
    answer = await client.get("/v1/audit", params=params)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["entries"])


async def actions(client: httpx.AsyncClient, **params: Any) -> list[str]:
    return [entry["action"] for entry in await ask(client, **params)]


async def test_an_entry_says_who_what_from_where_before_and_after(controller: Controller) -> None:
    await controller.other_tenant()
    headers = {"x-forwarded-for": "203.0.113.7", "x-request-id": "mine"}
    await controller.http.patch(
        "/v1/tenants/acme", json={"overrides": {"gpus": 2}}, headers=headers
    )
    (entry,) = await ask(controller.http, tenant="acme", limit=1)
    key = (await controller.http.get("/v1/whoami")).json()["key"]
    assert {
        name: entry[name]
        for name in (
            "at",
            "tenant_name",
            "actor",
            "action",
            "subject",
            "before",
            "after",
            "request",
            "address",
        )
    } == {
        "at": controller.clock.now,
        "tenant_name": "acme",
        "actor": key,
        "action": "tenant.change",
        "subject": "acme",
        "before": {"plan": "standard", "overrides": {}, "suspended": False},
        "after": {"plan": "standard", "overrides": {"gpus": 2}, "suspended": False},
        "request": "mine",
        "address": "203.0.113.7",
    }


@pytest.mark.parametrize(
    "given, kept",
    [
        ("203.0.113.7", "203.0.113.7"),
        # the last one is the activator's, the rest whatever a caller likes to say
        ("6.6.6.6, 203.0.113.7", "203.0.113.7"),
        ("2001:db8::7", "2001:db8::7"),
        ("<script>" * 40, ("<script>" * 40)[: audit_trail.MAX_ADDRESS]),
    ],
)
async def test_the_address_is_the_one_that_the_activator_saw(
    controller: Controller, given: str, kept: str
) -> None:
    await controller.http.post("/v1/keys", json={}, headers={"x-forwarded-for": given})
    assert (await ask(controller.http, limit=1))[0]["address"] == kept


async def test_who_comes_past_the_activator_is_named_by_the_connection(
    controller: Controller,
) -> None:
    await controller.http.post("/v1/keys", json={})
    assert (await ask(controller.http, limit=1))[0]["address"] == "127.0.0.1", (
        "as the transport of these tests says"
    )


async def test_filters_narrow_and_are_no_patterns(controller: Controller) -> None:
    other = (
        await controller.http.post(
            "/v1/keys", json={"scope": "admin"}, headers={"x-forwarded-for": "203.0.113.7"}
        )
    ).json()
    controller.clock.now += 100
    await controller.client(other["secret"]).put("/v1/secrets/token", json={"value": "x"})
    http, noon = controller.http, controller.clock.now
    assert await actions(http, actor=other["id"]) == ["secret.put"]
    assert await actions(http, action="secret.put") == ["secret.put"]
    assert await actions(http, action="key.*") == ["key.create", "key.create"]
    assert await actions(http, subject=other["id"]) == ["key.create"]
    assert await actions(http, address="203.0.113.7") == ["key.create"]
    assert await actions(http, since=noon) == ["secret.put"]
    assert "secret.put" not in await actions(http, until=noon)
    assert await actions(
        http, since=noon, until=noon + 1, action="secret.*", subject="token", actor=other["id"]
    ) == ["secret.put"]
    for text in (*INJECTIONS, "%.%", "_ey.create", "*x"):
        for name in ("actor", "action", "subject", "address"):
            assert await actions(http, **{name: text}) == [], (name, text)


async def test_pages_go_back_to_the_first_entry(controller: Controller) -> None:
    for _ in range(7):
        await controller.new_key()
    everything = [entry["id"] for entry in await ask(controller.http)]
    seen: list[int] = []
    before_id: int | None = None
    while True:
        page = (
            await controller.http.get(
                "/v1/audit", params={"limit": 4, **({"before_id": before_id} if before_id else {})}
            )
        ).json()
        seen += [entry["id"] for entry in page["entries"]]
        before_id = page["before_id"]
        if before_id is None:
            break
    assert seen == everything == sorted(everything, reverse=True)


@pytest.mark.parametrize(
    "params",
    [
        {"limit": 0},
        {"limit": 1001},
        {"before_id": -1},
        {"before_id": 1 << 64},
        {"since": "soon"},
        {"until": "nan"},
    ],
)
async def test_a_question_that_makes_no_sense_is_refused(
    controller: Controller, params: dict[str, Any]
) -> None:
    refused(await controller.http.get("/v1/audit", params=params), 400)


async def test_a_tenant_reads_its_own_and_the_operator_every_log(controller: Controller) -> None:
    own = controller.client(await controller.other_tenant())
    assert {entry["tenant_name"] for entry in await ask(own)} == {"acme"}
    assert await ask(own, tenant="acme") == await ask(own)
    for tenant in ("default", "*", "nobody"):
        refused(await own.get("/v1/audit", params={"tenant": tenant}), 403)
    assert {entry["tenant_name"] for entry in await ask(controller.http)} == {"default"}
    assert await ask(controller.http, tenant="acme") == await ask(own)
    assert {entry["tenant_name"] for entry in await ask(controller.http, tenant="*")} == {
        "default",
        "acme",
    }
    refused(await controller.http.get("/v1/audit", params={"tenant": "nobody"}), 404)


@pytest.mark.parametrize(
    "body",
    [
        {"scope": "deploy"},
        {"scope": "invoke"},
        {"scope": "read-billing"},
        {"scope": "admin", "app": "search"},
    ],
)
async def test_only_an_administrator_of_the_whole_tenant_reads_it(
    controller: Controller, body: dict[str, str]
) -> None:
    refused(await controller.client(await controller.new_key(**body)).get("/v1/audit"), 403)


@pytest.mark.parametrize("statement", ["UPDATE audit SET actor = 'k-other'", "DELETE FROM audit"])
def test_the_log_cannot_be_rewritten(store: Store, clock: ManualClock, statement: str) -> None:
    with store.write() as write:
        audit_trail.record(write, tenant="t-1", actor="k-1", action="key.create", subject="k-2")
    with pytest.raises(sa.exc.IntegrityError, match="append-only"), store.write() as write:
        write.sql.exec_driver_sql(statement)
    with store.read() as sql:
        assert [
            entry["actor"]
            for entry in audit_trail.entries(sql, audit_trail.AuditQuery(tenant="t-1"), limit=9)
        ] == ["k-1"]


def test_addresses_do_not_leak_from_one_request_into_another(store: Store) -> None:
    with audit_trail.with_client_address("203.0.113.7"), store.write() as write:
        audit_trail.record(write, tenant="t-1", actor="k-1", action="a", subject="x")
    with store.write() as write:
        audit_trail.record(write, tenant="t-1", actor="platform", action="b", subject="x")
    with store.read() as sql:
        assert [
            e["address"]
            for e in audit_trail.entries(sql, audit_trail.AuditQuery(tenant=None), limit=9)
        ] == [
            "",
            "203.0.113.7",
        ]
