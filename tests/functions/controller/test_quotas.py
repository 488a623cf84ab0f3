"""Quotas that a tenant sets for its functions: kept, fed, refused, and only its own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import INJECTIONS, refused, spec

PATH = "/v1/quotas/functions/search/embed"


async def fed(controller: Controller) -> dict[str, Any]:
    """Quotas as activators know them, by function."""
    changes: Any = (await controller.feed())["changes"]
    return {
        change["key"].partition("/")[2]: change["value"]
        for change in changes
        if change["kind"] == "quota"
    }


async def test_a_functions_quotas_are_kept_told_replaced_and_taken_away(
    controller: Controller,
) -> None:
    put = await controller.http.put(
        PATH, json={"requests_per_s": 2.5, "burst": 10, "concurrent": None}
    )
    assert put.json() == {
        "app": "search",
        "function": "embed",
        "environment": "main",
        "quotas": {"requests_per_s": 2.5, "burst": 10},
    }
    assert (await controller.http.get(PATH)).json() == put.json()
    assert await fed(controller) == {"main/search/embed": {"requests_per_s": 2.5, "burst": 10}}
    await controller.http.put(PATH, json={"instances": 1, "queued": 5})
    assert await fed(controller) == {"main/search/embed": {"instances": 1, "queued": 5}}
    assert (await controller.http.delete(PATH)).status_code == 204
    assert (await controller.http.get(PATH)).json()["quotas"] == {}
    assert await fed(controller) == {"main/search/embed": None}


async def test_they_may_come_before_the_first_deploy_and_outlive_the_last(
    controller: Controller,
) -> None:
    await controller.http.put(PATH, json={"concurrent": 1})
    await controller.http.post("/v1/apps/search/deploy", json={"functions": [spec("embed")]})
    await controller.http.delete("/v1/apps/search")
    assert (await controller.http.get(PATH)).json()["quotas"] == {"concurrent": 1}


async def test_environments_have_their_own_and_take_them_along(controller: Controller) -> None:
    await controller.http.post("/v1/environments", json={"name": "staging"})
    staging = {"pilotlight-environment": "staging"}
    await controller.http.put(PATH, json={"concurrent": 1}, headers=staging)
    assert (await controller.http.get(PATH)).json()["quotas"] == {}
    assert (await controller.http.delete("/v1/environments/staging")).status_code == 204
    assert await fed(controller) == {"staging/search/embed": None}


@pytest.mark.parametrize(
    "body, said",
    [
        ({"requests_per_s": -1}, "requests_per_s = -1: must be between 0.001 and 1e+06"),
        ({"body_bytes": 1 << 60}, "body_bytes = 1152921504606846976: must be between 0 and"),
        ({"concurrent": 0.5}, "concurrent = 0.5: must be an integer"),
        ({"burst": 3}, "burst = 3: requires requests_per_s"),
        ({"tokens_per_min": 0}, "tokens_per_min = 0: must be between 1 and 1e+09"),
        ({"weight": 3}, "weight: unknown quota; known: body_bytes"),
        ([1], "body"),
    ],
)
async def test_what_makes_no_sense_is_refused_by_key_value_and_bound(
    controller: Controller, body: Any, said: str
) -> None:
    assert said in refused(await controller.http.put(PATH, json=body), 400)
    assert await fed(controller) == {}


@pytest.mark.parametrize("name", [name for name in INJECTIONS if "/" not in name])
async def test_a_name_is_a_name(controller: Controller, name: str) -> None:
    assert "is not valid" in refused(
        await controller.http.put(f"/v1/quotas/functions/{name}/f", json={"concurrent": 1}), 400
    )
    assert (await controller.http.get(f"/v1/quotas/functions/{name}/f")).json()["quotas"] == {}


async def test_an_environment_that_does_not_exist_has_none(controller: Controller) -> None:
    headers = {"pilotlight-environment": "nowhere"}
    assert "environment create nowhere" in refused(
        await controller.http.put(PATH, json={"concurrent": 1}, headers=headers), 404
    )


async def test_a_tenant_sets_its_own_and_sees_its_own(controller: Controller) -> None:
    await controller.http.put(PATH, json={"concurrent": 1})
    stranger = controller.client(await controller.other_tenant())
    assert (await stranger.get(PATH)).json()["quotas"] == {}
    await stranger.put(PATH, json={"concurrent": 2})
    assert (await controller.http.get(PATH)).json()["quotas"] == {"concurrent": 1}
    body = (await stranger.get("/v1/quotas")).json()
    assert (body["plan"], body["tenant"]["requests_per_s"], body["keys"]) == ("standard", 100, [])
    assert [(f["app"], f["quotas"]) for f in body["functions"]] == [("search", {"concurrent": 2})]


async def test_only_an_administrator_sets_them(controller: Controller) -> None:
    for scope in ("deploy", "invoke", "read-billing"):
        client = controller.client(await controller.new_key(scope=scope))
        refused(await client.put(PATH, json={}), 403)
        refused(await client.delete(PATH), 403)


async def test_a_bound_key_sees_what_it_reaches(controller: Controller) -> None:
    for app, function in (("search", "embed"), ("search", "rank"), ("other", "embed")):
        await controller.http.put(f"/v1/quotas/functions/{app}/{function}", json={"concurrent": 1})
    for bound, seen in (
        ({"app": "search"}, ["embed", "rank"]),
        ({"app": "search", "function": "rank"}, ["rank"]),
    ):
        client = controller.client(
            await controller.new_key(scope="deploy", quotas={"concurrent": 1}, **bound)
        )
        body = (await client.get("/v1/quotas")).json()
        assert [f["function"] for f in body["functions"]] == seen
        assert len(body["keys"]) == 1, "itself, and none that reaches further"
