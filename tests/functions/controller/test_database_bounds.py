"""What a tenant writes into the database has bounds, and leaves the disk's floor free."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import httpx

from pilotlight.controller import application, calls
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import BUNDLE, BUNDLE_DIGEST, instance, refused, spec
from weight_cache.disk import DiskFloor


async def test_labels_of_a_deploy_have_bounds(controller: Controller) -> None:
    async def deployed(labels: dict[str, str]) -> httpx.Response:
        return await controller.http.post("/v1/apps/search/deploy", json={"functions": [spec()], "labels": labels})

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


async def test_a_command_has_a_bound_and_the_audit_log_keeps_its_beginning(controller: Controller) -> None:
    controller.agent.instances.append(instance(await controller.tenant()))

    async def run(argv: list[str]) -> httpx.Response:
        return await controller.http.post("/v1/instances/i-1:exec", json={"argv": argv})

    assert "at most 131072" in refused(await run(["sh", "-c", "x" * 131_072]), 400)
    assert (await run(["sh", "-c", "true"])).status_code == 200
    assert (await run(["sh", "-c", "é" * 50_000])).status_code == 200
    long, short = [one["after"] for one in (await controller.http.get("/v1/audit")).json()["entries"] if one["action"] == "instance.exec"]
    assert short == {"argv": ["sh", "-c", "true"]}
    assert long["cut"] is True
    assert long["bytes"] > 100_000
    assert len(long["sha256"]) == 64
    assert long["argv"][:2] == ["sh", "-c"]
    assert len(json.dumps(long)) < 8_192


async def test_a_disk_below_its_floor_takes_no_growing_change_and_lets_one_delete(controller: Controller) -> None:
    await controller.http.post("/v1/apps/search/deploy", json={"functions": [spec()]})
    await controller.http.put("/v1/secrets/old", json={"value": "x"})
    full = replace(controller.context, database_floor=DiskFloor(Path("/"), 1 << 30, free=lambda _: 1 << 20))
    transport = httpx.ASGITransport(application.build(full), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://controller", headers=controller.http.headers) as http:
        for method, path, body in (
            ("POST", "/v1/apps/search/deploy", {"functions": [spec(description="new")], "labels": {"a": "b"}}),
            ("PUT", "/v1/secrets/new", {"value": "x"}),
            ("POST", "/v1/environments", {"name": "staging"}),
            ("POST", "/v1/keys", {"scope": "invoke"}),
            ("PUT", "/v1/webhooks/new", {"url": "https://example.org/x", "events": ["call.finished"]}),
        ):
            assert "platform.disk_floor_bytes" in refused(await http.request(method, path, json=body), 507)
            stranger = await http.request(method, path, json=body, headers={"authorization": "Bearer pl_nobody"})
            assert stranger.status_code == 401
        assert (await http.delete("/v1/secrets/old")).status_code == 204
        assert (await http.post("/v1/apps/search:stop")).status_code == 200
        assert (await http.delete("/v1/apps/search")).status_code == 204


async def test_deployed_functions_of_a_tenant_have_a_bound(controller: Controller) -> None:
    key = await controller.other_tenant()
    acme = controller.client(key)
    await acme.put(f"/v1/blobs/{BUNDLE_DIGEST}", content=BUNDLE)

    async def deploy(app: str, count: int) -> httpx.Response:
        return await acme.post(f"/v1/apps/{app}/deploy", json={"functions": [spec(f"f{n}") for n in range(count)]})

    assert (await deploy("one", 3)).status_code == 200
    assert (await controller.http.patch("/v1/tenants/acme", json={"overrides": {"functions": 2}})).status_code == 200
    assert (await deploy("one", 3)).status_code == 200, "as many as it had"
    answer = await deploy("two", 1)
    assert "functions = 2; nothing was deployed" in refused(answer, 507)
    assert answer.json()["quota"] == "functions"
    assert (await acme.get("/v1/apps/two")).status_code == 404
    assert (await deploy("one", 1)).status_code == 200
    assert (await deploy("two", 1)).status_code == 200
    assert (await acme.get("/v1/tenant")).json()["use"]["functions"] == 2


async def test_kept_results_of_a_tenant_have_a_bound_and_the_oldest_go(controller: Controller) -> None:
    key = await controller.other_tenant()
    acme = controller.client(key)
    tenant = (await acme.get("/v1/whoami")).json()["tenant"]["id"]
    assert (await controller.http.patch("/v1/tenants/acme", json={"overrides": {"result_bytes": 3_500_000}})).status_code == 200

    async def ended(number: int, *, state: str = "SUCCEEDED", sequence: int = 2, size: int = 1_000_000, whose: str = tenant) -> None:
        now = controller.clock()
        record = {
            "id": f"req-{number}", "tenant": whose, "environment": "main", "app": "a", "function": "f", "method": "", "state": state,
            "sequence": sequence, "submitted_at": now + number, "expires_at": now + 1000, "result": "A" * size,
        }  # fmt: skip
        assert (await controller.internal("/internal/calls", {"calls": [record]})).status_code == 200

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
        assert calls.expire(write, now=controller.clock() + 2000, limit=10) == 2
    assert await used() == 0
    assert (await controller.http.get("/v1/tenant")).json()["use"]["result_bytes"] == 0
