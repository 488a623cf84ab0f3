"""From one environment to another, and deployments in the words of model servers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest

from snapshotter.linux.egress_policy import DENIED, EgressPolicy
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import refused, spec

BETWEEN = {"from_environment": "staging", "to_environment": "main"}


async def staged(controller: Controller, *specs: dict[str, Any], **terms: Any) -> httpx.AsyncClient:
    """An app that serves in the environment `staging`; a client of whoever deployed it."""
    await controller.http.post("/v1/environments", json={"name": "staging"})
    author = controller.client(await controller.new_key(scope="deploy"))
    body = {"functions": list(specs) or [spec()], **terms}
    answer = await author.post(
        "/v1/apps/search/deploy", json=body, headers={"pilotlight-environment": "staging"}
    )
    assert answer.status_code == 200, answer.text
    return author


@pytest.mark.parametrize("how", ["promote", "deploy a version"])
async def test_a_key_of_an_app_lets_nothing_serve_that_falls_back_to_another_app(
    controller: Controller, how: str
) -> None:
    rung = {"kind": "function", "function": "other/small"}
    await staged(controller, {**spec(), "fallback": [rung]})
    bound = controller.client(await controller.new_key(scope="deploy", app="search"))
    if how == "promote":
        answer = await bound.post("/v1/apps/search:promote", json=BETWEEN)
    else:
        headers = {"pilotlight-environment": "staging"}
        answer = await bound.post(
            "/v1/deployments",
            json={"modelId": "search/hello", "version": "stable"},
            headers=headers,
        )
    assert refused(answer, 403), answer.text
    assert (await controller.http.post("/v1/apps/search:promote", json=BETWEEN)).status_code == 200


def let_ask_for(controller: Controller, networks: list[str]) -> None:
    """From now on the operator lets functions ask for these, and each function has a network of its
    own."""
    config = replace(controller.context.config, egress=EgressPolicy.of(DENIED, [], networks))
    object.__setattr__(controller.context, "config", config)


@pytest.mark.parametrize("how", ["deploy", "promote", "deploy a version"])
async def test_networks_that_the_operator_does_not_open_are_refused_whichever_way_a_function_is_deployed(
    controller: Controller, how: str
) -> None:
    asking = {**spec(), "egress": ["10.0.0.7"]}
    let_ask_for(controller, ["10.0.0.0/24"])
    author = await staged(controller, asking)
    let_ask_for(controller, ["10.9.0.0/24"])
    headers = {"pilotlight-environment": "staging"}
    if how == "deploy":
        answer = await author.post(
            "/v1/apps/search/deploy", json={"functions": [asking]}, headers=headers
        )
    elif how == "promote":
        answer = await author.post("/v1/apps/search:promote", json=BETWEEN)
    else:
        answer = await author.post(
            "/v1/deployments",
            json={"modelId": "search/hello", "version": "stable"},
            headers=headers,
        )
    assert refused(answer, 400), answer.text
    assert (
        "10.0.0.7/32 is not available to functions; snapshotter.egress_on_request allows 10.9.0.0/24"
        in answer.json()["detail"]
    )


async def manifest(controller: Controller, revision: str = "stable") -> dict[str, Any]:
    return dict(
        (await controller.http.get(f"/v1/apps/search/functions/hello/revisions/{revision}")).json()
    )


async def test_the_very_same_revision_serves_in_the_other_environment(
    controller: Controller,
) -> None:
    await staged(controller, meta={"git.commit": "abc"}, evaluation={"accuracy": 0.9})
    answer = await controller.http.post(
        "/v1/apps/search:promote", json={**BETWEEN, "message": "ship it"}
    )
    assert answer.status_code == 200, answer.text
    done = answer.json()
    assert (done["environment"], done["version"], done["functions"][0]["stage"]) == (
        "main",
        1,
        "live",
    )
    there = await manifest(controller)
    assert there["evaluation"] == {"accuracy": 0.9}
    name = done["functions"][0]["revision"]
    assert there["lineage"] == {
        "git.commit": "abc",
        "promoted_from": f"staging/search/hello@{name}",
    }
    entry = (await controller.http.get("/v1/apps/search/history")).json()["history"][0]
    assert (entry["action"], entry["message"], entry["labels"]) == (
        "promote",
        "ship it",
        {"from": "staging"},
    )
    again = (await controller.http.post("/v1/apps/search:promote", json=BETWEEN)).json()[
        "functions"
    ][0]
    assert (again["created"], again["revision"]) == (False, name)


async def test_promoting_is_an_approval_of_whoever_did_not_deploy_it(
    controller: Controller,
) -> None:
    author = await staged(controller)
    await controller.http.post(
        "/v1/apps/search/deploy", json={"functions": [spec(description="old")]}
    )
    await controller.http.put("/v1/apps/search/policy", json={"approvals": 1})
    own = (await author.post("/v1/apps/search:promote", json=BETWEEN)).json()["functions"][0]
    assert (own["stage"], own["approvals"]) == ("waiting", 1)
    other = (await controller.http.post("/v1/apps/search:promote", json=BETWEEN)).json()[
        "functions"
    ][0]
    assert (other["stage"], other["revision"]) == ("live", own["revision"])
    assert [one["note"] for one in (await manifest(controller))["approvals"]["given"]] == [
        "promoted from staging"
    ]


async def test_a_promotion_by_who_deployed_it_there_before_is_no_approval_and_no_conflict(
    controller: Controller,
) -> None:
    author = await staged(controller)
    for body in ({"functions": [spec()]}, {"functions": [spec(description="other")]}):
        assert (await controller.http.post("/v1/apps/search/deploy", json=body)).status_code == 200
    done = await controller.http.post("/v1/apps/search:promote", json=BETWEEN)
    assert done.status_code == 200, done.text
    assert (
        done.json()["functions"][0]["stage"],
        (await manifest(controller))["approvals"]["given"],
    ) == ("live", [])
    assert (await author.post("/v1/apps/search:promote", json=BETWEEN)).status_code == 200


async def test_what_a_promotion_needs_is_named(controller: Controller) -> None:
    author = await staged(controller)
    promote = "/v1/apps/search:promote"
    assert "both environments" in refused(
        await author.post(promote, json={**BETWEEN, "from_environment": "main"}), 400
    )
    assert "no app 'search'" in refused(
        await author.post(promote, json={"from_environment": "main", "to_environment": "staging"}),
        404,
    )
    assert "does not exist" in refused(
        await author.post(promote, json={**BETWEEN, "to_environment": "moon"}), 404
    )
    bound = controller.client(await controller.new_key(scope="deploy", environment="staging"))
    assert "bound to environment 'staging'" in refused(await bound.post(promote, json=BETWEEN), 403)
    await controller.http.post("/v1/apps/search/deploy", json={"functions": [spec(), spec("more")]})
    assert "staging has no more of search, but main has" in refused(
        await author.post(promote, json=BETWEEN), 409
    )
    assert (await author.post(promote, json={**BETWEEN, "function": "hello"})).status_code == 200


async def test_secrets_must_be_where_the_revision_goes(controller: Controller) -> None:
    await controller.http.post("/v1/environments", json={"name": "staging"})
    await controller.http.put(
        "/v1/secrets/token", json={"value": "x"}, headers={"pilotlight-environment": "staging"}
    )
    await staged(controller, spec(secrets=["token"]))
    detail = refused(await controller.http.post("/v1/apps/search:promote", json=BETWEEN), 400)
    assert "no secret 'token' in environment 'main'" in detail


# -- model servers' words --------------------------------------------------------------------------


async def model(controller: Controller, **changes: Any) -> httpx.Response:
    body = {
        "modelId": "search/hello",
        "version": "stable",
        "resources": None,
        "rolloutPolicy": "all_at_once",
    }
    return await controller.http.post("/v1/deployments", json={**body, **changes})


async def versions(controller: Controller) -> None:
    for n in (1, 2):
        await controller.http.post(
            "/v1/apps/search/deploy", json={"functions": [spec(description=f"number {n}")]}
        )


async def test_a_version_of_a_model_is_deployed(controller: Controller) -> None:
    await versions(controller)
    done = (await model(controller, version="v1")).json()
    assert (done["modelId"], done["stage"], done["version"][:2]) == ("search/hello", "live", "v1")
    assert (await manifest(controller))["ordinal"] == 1
    assert "nothing" not in refused(await model(controller, version="v7"), 404)
    assert "use the form app/function" in refused(await model(controller, modelId="search"), 400)


async def test_other_resources_are_another_revision_of_the_same_code(
    controller: Controller,
) -> None:
    await versions(controller)
    done = (
        await model(
            controller, resources={"cpu": 2.0}, rolloutPolicy={"type": "canary", "steps": [25, 100]}
        )
    ).json()
    assert (done["stage"], done["version"][:2], done["rollout"] != "") == ("rollout", "v3", True)
    told = await manifest(controller, "candidate")
    assert (told["resources"]["cpu"], told["lineage"]["resources_of"][:2]) == (2.0, "v2")
    same = (await model(controller, resources={"cpu": 1.0})).json()
    assert same["version"].startswith("v2-"), "what is asked for is what it has"
    assert "cpu = 0" in refused(await model(controller, resources={"cpu": 0}), 400)


@pytest.mark.parametrize(
    "wrong",
    [{"rolloutPolicy": "slowly"}, {"rolloutPolicy": {"type": "canary", "steps": []}}, {"extra": 1}],
)
async def test_a_deployment_has_exactly_its_fields(
    controller: Controller, wrong: dict[str, Any]
) -> None:
    await versions(controller)
    refused(await model(controller, **wrong), 400)


async def test_one_function_that_is_deployed_wakes_all_of_a_stopped_app(
    controller: Controller,
) -> None:
    await staged(controller)
    both = {"functions": [spec(), spec("more")]}
    assert (await controller.http.post("/v1/apps/search/deploy", json=both)).status_code == 200

    async def stopped() -> dict[str, bool]:
        changes: Any = (await controller.feed())["changes"]
        routes = [
            change["value"]
            for change in changes
            if change["kind"] == "function" and change["value"]["environment"] == "main"
        ]
        return {route["function"]: route["stopped"] for route in routes}

    for path, body in (
        (
            "/v1/deployments",
            {
                "modelId": "search/hello",
                "version": "stable",
                "resources": None,
                "rolloutPolicy": "all_at_once",
            },
        ),
        ("/v1/apps/search:promote", {**BETWEEN, "function": "hello"}),
    ):
        assert (await controller.http.post("/v1/apps/search:stop")).status_code == 200
        assert await stopped() == {"hello": True, "more": True}
        answer = await controller.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert await stopped() == {"hello": False, "more": False}
