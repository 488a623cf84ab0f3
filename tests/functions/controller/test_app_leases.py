"""Leases of apps: who deployed one with a lease and does not renew it, loses it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pilotlight.controller.deployments import app_leases
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import spec
from tests.functions.controller.test_api import problem_of


async def deploy(controller: Controller, app: str = "search", **terms: Any) -> None:
    answer = await controller.http.post(
        f"/v1/apps/{app}/deploy", json={"functions": [spec()], **terms}
    )
    assert answer.status_code == 200, answer.text


async def apps(controller: Controller) -> dict[str, float | None]:
    listed = (await controller.http.get("/v1/apps")).json()["apps"]
    return {app["name"]: app["expires_at"] for app in listed}


async def test_an_app_whose_lease_ended_is_deleted_with_what_it_consists_of(
    controller: Controller,
) -> None:
    await deploy(controller, lease_s=60)
    await deploy(controller, app="kept")
    assert await apps(controller) == {"kept": None, "search": controller.clock.now + 60}
    controller.clock.now += 59
    await app_leases.delete_expired(controller.context)
    assert set(await apps(controller)) == {"kept", "search"}
    controller.clock.now += 2
    await app_leases.delete_expired(controller.context)
    assert await apps(controller) == {"kept": None}
    newest = (await controller.http.get("/v1/audit", params={"limit": 1})).json()["entries"][0]
    assert (newest["action"], newest["actor"]) == ("app.delete", "platform")
    history = (await controller.http.get("/v1/apps/search/history")).json()["history"]
    assert [entry["action"] for entry in history] == ["delete", "deploy"]


async def test_a_renewed_app_stays_for_another_lease(controller: Controller) -> None:
    await deploy(controller, lease_s=60)
    controller.clock.now += 50
    answer = await controller.http.post("/v1/apps/search:renew")
    assert answer.json() == {"app": "search", "expires_at": controller.clock.now + 60}
    controller.clock.now += 59
    await app_leases.delete_expired(controller.context)
    assert "search" in await apps(controller)


async def test_a_deploy_without_a_lease_keeps_the_app(controller: Controller) -> None:
    await deploy(controller, lease_s=60)
    await deploy(controller)
    assert await apps(controller) == {"search": None}
    problem_of(await controller.http.post("/v1/apps/search:renew"), 409, "conflict")


async def test_an_app_that_is_not_there_cannot_be_renewed(controller: Controller) -> None:
    problem_of(await controller.http.post("/v1/apps/search:renew"), 404, "not-found")
    await deploy(controller, lease_s=60)
    await controller.http.delete("/v1/apps/search")
    problem_of(await controller.http.post("/v1/apps/search:renew"), 404, "not-found")
    await app_leases.delete_expired(controller.context)


async def test_a_key_that_may_not_deploy_cannot_renew(controller: Controller) -> None:
    await deploy(controller, lease_s=60)
    invoker = controller.client(await controller.new_key(scope="invoke"))
    problem_of(await invoker.post("/v1/apps/search:renew"), 403, "forbidden")


@pytest.mark.parametrize("lease_s", [0, 9, -1, 31 * 86_400])
async def test_a_lease_has_bounds(controller: Controller, lease_s: float) -> None:
    answer = await controller.http.post(
        "/v1/apps/search/deploy", json={"functions": [spec()], "lease_s": lease_s}
    )
    assert "lease_s" in problem_of(answer, 400, "invalid-input")["detail"]


async def test_an_app_that_was_deleted_meanwhile_keeps_no_other_one(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    await deploy(controller, lease_s=60)
    controller.clock.now += 61
    with controller.context.store.read() as sql:
        (place,) = app_leases.expired(sql, now=controller.clock.now)
    gone = replace(place, app="gone")
    monkeypatch.setattr(app_leases, "expired", lambda *_, **__: [gone, place])
    await app_leases.delete_expired(controller.context)
    assert await apps(controller) == {}
