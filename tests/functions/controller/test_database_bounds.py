"""What a tenant writes into the database has bounds, and leaves the disk's floor free."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from pilotlight.controller import http_app
from pilotlight.controller.database import retention, tables
from pilotlight.controller.identity import api_keys, tenants
from pilotlight.controller.registry import secret_store
from pilotlight.controller.release import app_history
from pilotlight.controller.scheduling import submitted_calls
from pilotlight.controller.server import idempotency
from pilotlight.core.disk_floor import DiskFloor
from pilotlight.core.transport.controller_client import HEADER_PLATFORM_TOKEN
from pilotlight.protocol import CALLS_PATH, HEADER_REPLAYED, USAGE_PATH
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import BUNDLE, BUNDLE_DIGEST, instance, refused, spec, usage


async def test_labels_of_a_deploy_have_bounds(controller: Controller) -> None:
    async def deployed(labels: dict[str, str]) -> httpx.Response:
        return await controller.http.post(
            "/v1/apps/search/deploy", json={"functions": [spec()], "labels": labels}
        )

    assert (await deployed({"team": "x" * 1024})).status_code == 200
    many = {str(n): "x" * 1000 for n in range(17)}
    for labels in (
        {"team": "x" * 1025},
        {"t" * 129: "x"},
        {"": "x"},
        {str(n): "x" for n in range(65)},
        many,
    ):
        detail = refused(await deployed(labels), 400)
        assert "labels" in detail


async def test_a_command_has_a_bound_and_the_audit_log_keeps_its_beginning(
    controller: Controller,
) -> None:
    controller.agent.instances.append(instance(await controller.tenant()))

    async def run(argv: list[str]) -> httpx.Response:
        return await controller.http.post("/v1/instances/i-1:exec", json={"argv": argv})

    assert "at most 131072" in refused(await run(["sh", "-c", "x" * 131_072]), 400)
    assert (await run(["sh", "-c", "true"])).status_code == 200
    assert (await run(["sh", "-c", "é" * 50_000])).status_code == 200
    long, short = [
        one["after"]
        for one in (await controller.http.get("/v1/audit")).json()["entries"]
        if one["action"] == "instance.exec"
    ]
    assert short == {"argv": ["sh", "-c", "true"]}
    assert long["cut"] is True
    assert long["bytes"] > 100_000
    assert len(long["sha256"]) == 64
    assert long["argv"][:2] == ["sh", "-c"]
    assert len(json.dumps(long)) < 8_192


async def test_a_disk_below_its_floor_takes_no_growing_change_and_lets_one_delete(
    controller: Controller,
) -> None:
    await controller.http.post("/v1/apps/search/deploy", json={"functions": [spec()]})
    await controller.http.put("/v1/secrets/old", json={"value": "x"})
    full = replace(
        controller.context, database_floor=DiskFloor(Path("/"), 1 << 30, free=lambda _: 1 << 20)
    )
    transport = httpx.ASGITransport(http_app.build_app(full), raise_app_exceptions=False)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://controller", headers=controller.http.headers
    ) as http:
        for method, path, body in (
            (
                "POST",
                "/v1/apps/search/deploy",
                {"functions": [spec(description="new")], "labels": {"a": "b"}},
            ),
            ("PUT", "/v1/secrets/new", {"value": "x"}),
            ("POST", "/v1/environments", {"name": "staging"}),
            ("POST", "/v1/keys", {"scope": "invoke"}),
            (
                "PUT",
                "/v1/webhooks/new",
                {"url": "https://example.org/x", "events": ["call.finished"]},
            ),
        ):
            assert "platform.disk_floor_bytes" in refused(
                await http.request(method, path, json=body), 507
            )
            stranger = await http.request(
                method, path, json=body, headers={"authorization": "Bearer pl_nobody"}
            )
            assert stranger.status_code == 401
        assert (await http.delete("/v1/secrets/old")).status_code == 204
        assert (await http.post("/v1/apps/search:stop")).status_code == 200
        assert (await http.delete("/v1/apps/search")).status_code == 204


async def test_a_disk_below_its_floor_takes_usage_and_no_results(controller: Controller) -> None:
    free = [1 << 20]
    floor = DiskFloor(Path("/"), 1 << 30, free=lambda _: free[0])
    transport = httpx.ASGITransport(
        http_app.build_app(replace(controller.context, database_floor=floor)),
        raise_app_exceptions=False,
    )
    tenant, now = await controller.tenant(), controller.clock()
    record = {
        "id": "req-1",
        "tenant": tenant,
        "environment": "main",
        "app": "a",
        "function": "f",
        "method": "",
        "state": "SUCCEEDED",
        "sequence": 1,
        "submitted_at": now,
        "expires_at": now + 1000,
        "result": "AAAA",
    }
    bodies = {
        CALLS_PATH: {"calls": [record]},
        USAGE_PATH: {"activator": "a-0", "records": [usage(tenant=tenant).to_json()]},
    }
    headers = {HEADER_PLATFORM_TOKEN: controller.context.key.token}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://controller", headers=headers
    ) as http:
        assert "platform.disk_floor_bytes" in refused(
            await http.post(CALLS_PATH, json=bodies[CALLS_PATH]), 507
        )
        assert (await http.post(USAGE_PATH, json=bodies[USAGE_PATH])).status_code == 200
        assert (
            await http.post(
                CALLS_PATH, json=bodies[CALLS_PATH], headers={HEADER_PLATFORM_TOKEN: "x"}
            )
        ).status_code == 403
        free[0] = 2 << 30
        assert (await http.post(CALLS_PATH, json=bodies[CALLS_PATH])).status_code == 200


async def test_deployed_functions_of_a_tenant_have_a_bound(controller: Controller) -> None:
    key = await controller.other_tenant()
    acme = controller.client(key)
    await acme.put(f"/v1/blobs/{BUNDLE_DIGEST}", content=BUNDLE)

    async def deploy(app: str, count: int) -> httpx.Response:
        return await acme.post(
            f"/v1/apps/{app}/deploy", json={"functions": [spec(f"f{n}") for n in range(count)]}
        )

    assert (await deploy("one", 3)).status_code == 200
    assert (
        await controller.http.patch("/v1/tenants/acme", json={"overrides": {"functions": 2}})
    ).status_code == 200
    assert (await deploy("one", 3)).status_code == 200, "as many as it had"
    answer = await deploy("two", 1)
    assert "functions = 2; nothing was deployed" in refused(answer, 507)
    assert answer.json()["quota"] == "functions"
    assert (await acme.get("/v1/apps/two")).status_code == 404
    assert (await deploy("one", 1)).status_code == 200
    assert (await deploy("two", 1)).status_code == 200
    assert (await acme.get("/v1/tenant")).json()["use"]["functions"] == 2


async def test_kept_results_of_a_tenant_have_a_bound_and_the_oldest_go(
    controller: Controller,
) -> None:
    key = await controller.other_tenant()
    acme = controller.client(key)
    tenant = (await acme.get("/v1/whoami")).json()["tenant"]["id"]
    assert (
        await controller.http.patch(
            "/v1/tenants/acme", json={"overrides": {"result_bytes": 3_500_000}}
        )
    ).status_code == 200

    async def ended(
        number: int,
        *,
        state: str = "SUCCEEDED",
        sequence: int = 2,
        size: int = 1_000_000,
        whose: str = tenant,
    ) -> None:
        now = controller.clock()
        record = {
            "id": f"req-{number}",
            "tenant": whose,
            "environment": "main",
            "app": "a",
            "function": "f",
            "method": "",
            "state": state,
            "sequence": sequence,
            "submitted_at": now + number,
            "expires_at": now + 1000,
            "result": "A" * size,
        }
        assert (
            await controller.internal("/internal/calls", {"calls": [record]})
        ).status_code == 200

    async def kept() -> list[str]:
        return [one["id"] for one in (await acme.get("/v1/calls")).json()["calls"]]

    async def used() -> int:
        return int((await acme.get("/v1/tenant")).json()["use"]["result_bytes"])

    await ended(0, whose=await controller.tenant())
    await ended(0, state="QUEUED", sequence=1, size=0)
    for number in range(1, 6):
        await ended(number)
    assert await kept() == ["req-5", "req-4", "req-3", "req-0"], "what has not ended stays"
    assert 3_000_000 < await used() < 3_500_000
    assert "result_bytes" in refused(await acme.get("/v1/calls/req-1"), 404)
    await ended(5, sequence=3, size=500_000)
    assert 2_500_000 < await used() < 2_600_000
    await ended(6, size=4_000_000)
    assert await kept() == ["req-0"]
    with controller.context.store.write() as write:
        assert submitted_calls.expire(write, now=controller.clock() + 2000, limit=10) == 2
    assert await used() == 0
    assert (await controller.http.get("/v1/tenant")).json()["use"]["result_bytes"] == 0


async def test_secrets_of_a_tenant_have_a_bound(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secret_store, "MAX_SECRETS", 2)
    await controller.http.post("/v1/environments", json={"name": "staging"})

    async def put(name: str, environment: str = "main") -> httpx.Response:
        return await controller.http.put(
            f"/v1/secrets/{name}",
            json={"value": "x"},
            headers={"pilotlight-environment": environment},
        )

    assert [(await put("one")).status_code, (await put("two", "staging")).status_code] == [200, 200]
    assert "has 2 secrets, which is the maximum" in refused(await put("three"), 409)
    assert (await put("one")).status_code == 200, "one that is there may change"
    assert (await controller.http.delete("/v1/secrets/one")).status_code == 204
    assert (await put("three")).status_code == 200


async def test_environments_of_a_tenant_have_a_bound(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenants, "MAX_ENVIRONMENTS", 2)

    async def make(name: str) -> httpx.Response:
        return await controller.http.post("/v1/environments", json={"name": name})

    assert (await make("staging")).status_code == 201
    refusal = await make("test")
    assert "has 2 environments, which is the maximum" in refused(refusal, 409)
    assert "pilotlight environment delete" in refusal.json()["hint"]
    assert (await controller.http.delete("/v1/environments/staging")).status_code == 204
    assert (await make("test")).status_code == 201


async def test_api_keys_of_a_tenant_have_a_bound(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_keys, "MAX_KEYS", 3)

    async def make(**body: Any) -> httpx.Response:
        return await controller.http.post("/v1/keys", json={"scope": "invoke", **body})

    first = (await make(expires_in_s=100)).json()["id"]
    second = (await make()).json()["id"]
    assert "has 3 active API keys, which is the maximum" in refused(await make(), 409)
    assert "which is the maximum" in refused(
        await controller.http.post(f"/v1/keys/{second}:rotate", json={"grace_s": 60}), 409
    )
    assert (await controller.http.post(f"/v1/keys/{second}:rotate", json={})).status_code == 201, (
        "of two one ends"
    )
    controller.clock.now += 200
    third = (await make()).json()["id"], "what expired counts no longer"
    assert "which is the maximum" in refused(await make(), 409)
    assert {first, third[0]} <= {
        one["id"] for one in (await controller.http.get("/v1/keys")).json()["keys"]
    }


async def test_keys_that_ended_are_listed_up_to_a_bound(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_keys, "MAX_ENDED", 3)
    monkeypatch.setattr(api_keys, "_ENDED_AT_ONCE", 0)
    ended = []
    for number in range(6):
        made = (
            await controller.http.post(
                "/v1/keys", json={"scope": "invoke", "expires_in_s": 50 if number % 2 else None}
            )
        ).json()
        ended.append(made["id"])
        if number % 2 == 0:
            assert (await controller.http.delete(f"/v1/keys/{made['id']}")).status_code == 204
        controller.clock.now += 100
    last = (await controller.http.post("/v1/keys", json={"scope": "invoke"})).json()["id"]
    shown = {one["id"] for one in (await controller.http.get("/v1/keys")).json()["keys"]}
    assert shown & {*ended, last} == {*ended[-3:], last}
    assert (await controller.http.get("/v1/whoami")).status_code == 200


async def test_answers_under_idempotency_keys_have_a_bound_and_the_oldest_go(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def make(number: int, client: httpx.AsyncClient = controller.http) -> httpx.Response:
        controller.clock.now += 1
        return await client.post(
            "/v1/keys", json={"scope": "invoke"}, headers={"idempotency-key": f"k{number}"}
        )

    def kept() -> dict[str, int]:
        table = tables.idempotency_keys
        with controller.context.store.read() as sql:
            found = sql.execute(sa.select(table.c.key, table.c.kept_bytes, table.c.answer)).all()
        assert all(row.kept_bytes == idempotency.ROW_BYTES + len(row.answer) for row in found)
        return {row.key.partition("/")[2]: row.kept_bytes for row in found}

    first = await make(0)
    other = controller.client(await controller.other_tenant())
    await make(100, other)
    monkeypatch.setattr(idempotency, "MAX_TENANT_BYTES", 3 * kept()["k0"] + 100)
    for number in range(1, 4):
        await make(number)
    assert set(kept()) == {"k1", "k2", "k3", "k100"}, "each tenant has its own"
    assert (await make(3)).headers[HEADER_REPLAYED] == "true"
    again = await make(0)
    assert again.json()["id"] != first.json()["id"], "what was forgotten runs again"
    monkeypatch.setattr(idempotency, "MAX_TENANT_BYTES", 10)
    assert (await make(9)).status_code == 201
    assert set(kept()) == {"k9", "k100"}, "the newest stays until the next"


async def test_revisions_of_a_tenant_have_a_bound_and_those_that_were_given_up_go(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "KEPT_PER_FUNCTION", 10)
    acme = controller.client(await controller.other_tenant())
    await acme.put(f"/v1/blobs/{BUNDLE_DIGEST}", content=BUNDLE)

    async def deploy(app: str, number: int, **changes: Any) -> httpx.Response:
        controller.clock.now += 1
        return await acme.post(
            f"/v1/apps/{app}/deploy",
            json={"functions": [spec("f", description=str(number), **changes)]},
        )

    def kept() -> dict[str, int]:
        functions, revisions = tables.functions, tables.revisions
        query = sa.select(functions.c.app, sa.func.count(revisions.c.name)).outerjoin(
            revisions, revisions.c.function == functions.c.id
        )
        with controller.context.store.read() as sql:
            return {row[0]: row[1] for row in sql.execute(query.group_by(functions.c.app))}

    for number in range(2):
        assert (await deploy("tagged", number, tags={"team": "search"})).status_code == 200
    for number in range(3):
        assert (await deploy("gone", number)).status_code == 200
    for app in ("tagged", "gone"):
        assert (await acme.delete(f"/v1/apps/{app}")).status_code == 204
    await acme.put(f"/v1/blobs/{BUNDLE_DIGEST}", content=BUNDLE)
    for number in range(5):
        assert (await deploy("here", number)).status_code == 200
    assert (
        await controller.http.patch("/v1/tenants/acme", json={"overrides": {"functions": 1}})
    ).status_code == 200
    assert kept() == {"tagged": 2, "gone": 3, "here": 5}
    assert (await deploy("here", 100)).status_code == 200
    assert kept() == {"tagged": 2, "here": 6}, (
        "of an app that was deleted nothing is left that counts"
    )
    refused(await acme.get("/v1/apps/gone/history"), 404)
    for number in (101, 102):
        assert (await deploy("here", number)).status_code == 200
    answer = await deploy("here", 103)
    assert "10 for each of functions = 1; nothing was deployed" in refused(answer, 507)
    assert answer.json()["quota"] == "functions"
    assert "pilotlight app prune" in answer.json()["hint"]
    assert (await deploy("here", 102)).status_code == 200, (
        "a deploy without a new revision changes nothing"
    )
    assert (await acme.post("/v1/apps/here:prune", json={"keep": 3})).json()["revisions"] == 5
    assert (await deploy("here", 103)).status_code == 200
    assert kept() == {"tagged": 2, "here": 4}, "bills are grouped by tags"
    controller.clock.now += retention.TAGS_KEPT_S
    await controller.http.patch("/v1/tenants/acme", json={"overrides": {"functions": 0}})
    await deploy("here", 103)
    assert kept() == {"here": 4}


async def test_histories_of_a_tenant_have_a_bound_and_the_newest_of_each_app_stay(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "KEPT_PER_FUNCTION", 5)
    acme = controller.client(await controller.other_tenant())
    await acme.put(f"/v1/blobs/{BUNDLE_DIGEST}", content=BUNDLE)

    async def change(app: str, *descriptions: str) -> None:
        for description in descriptions:
            controller.clock.now += 1
            answer = await acme.post(
                f"/v1/apps/{app}/deploy", json={"functions": [spec("f", description=description)]}
            )
            assert answer.status_code == 200, answer.text

    async def entries(app: str) -> int:
        return len(
            (await acme.get(f"/v1/apps/{app}/history", params={"limit": 1000}))
            .json()
            .get("history", [])
        )

    await change("old", "a", "b")
    await change("gone", "a")
    assert (await acme.delete("/v1/apps/gone")).status_code == 204
    await change("busy", *"ab" * 6)
    assert [await entries(app) for app in ("old", "gone", "busy")] == [2, 2, 12]
    await controller.http.patch("/v1/tenants/acme", json={"overrides": {"functions": 2}})
    await change("busy", "a")
    assert [await entries(app) for app in ("old", "gone", "busy")] == [2, 0, 5]
    assert (await acme.post("/v1/apps/old/functions/f:rollback", json={})).status_code == 200


async def test_an_apps_history_keeps_what_is_looked_at(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_history, "MAX_ENTRIES", 5)
    for description in "abababa":
        await controller.http.post(
            "/v1/apps/search/deploy", json={"functions": [spec("f", description=description)]}
        )
    kept = (await controller.http.get("/v1/apps/search/history")).json()["history"]
    assert [entry["version"] for entry in kept] == [7, 6, 5, 4, 3]
