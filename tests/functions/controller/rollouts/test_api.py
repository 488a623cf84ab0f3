"""Rollouts over HTTP: what is told of them, who may see and overrule them, and that a deploy can be
one."""

from __future__ import annotations

from typing import Any

from pilotlight.controller.release import traffic
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import refused, spec
from tests.functions.controller.rollouts.seen import observed

PLAN = {"steps": [5, 50, 100], "every_s": 60, "min_samples": 100}


async def deployed(controller: Controller, **more: Any) -> dict[str, Any]:
    """A first revision that serves, and a second one as a canary; what the second deploy answered
    for its function."""
    for body in (
        {"functions": [spec()]},
        {"functions": [spec(resources={"cpu": 2.0})], "rollout": {**PLAN, **more}},
    ):
        answer = await controller.http.post("/v1/apps/search/deploy", json=body)
        assert answer.status_code == 200, answer.text
    return dict(answer.json()["functions"][0])


async def weights(controller: Controller) -> dict[str, int]:
    """The function's traffic."""
    function = (await controller.http.get("/v1/apps/search")).json()["functions"][0]["id"]
    with controller.context.store.read() as sql:
        return dict(traffic.get(sql, function).weights)


async def see(
    controller: Controller,
    rollout: dict[str, Any],
    revision: str,
    calls: int,
    *,
    sequence: int,
    **more: Any,
) -> None:
    """An activator tells of calls of a revision."""
    function = (await controller.http.get("/v1/apps/search")).json()["functions"][0]["id"]
    seen = observed(calls, **more)
    seen.tenant, seen.function_id, seen.revision = await controller.tenant(), function, revision
    seen.minute = int(controller.clock.now // 60)
    body = {"activator": "a", "life": "x", "sequence": sequence, "observations": [seen.to_json()]}
    assert (await controller.internal("/internal/observations", body)).status_code == 200


async def test_a_deploy_can_be_a_canary(controller: Controller) -> None:
    done = await deployed(controller)
    assert done["stage"] == "rollout"
    rollout = (await controller.http.get(f"/v1/rollouts/{done['rollout']}")).json()
    told = {
        key: rollout[key]
        for key in ("app", "function", "candidate", "state", "steps", "step", "weight", "every_s")
    }
    assert told == {
        "app": "search",
        "function": "hello",
        "candidate": done["revision"],
        "state": "running",
        "steps": [5, 50, 100],
        "step": 0,
        "weight": 5,
        "every_s": 60,
    }
    assert rollout["plan"]["min_samples"] == 100
    assert await weights(controller) == {rollout["stable"]: 95, rollout["candidate"]: 5}


async def test_the_first_revision_needs_no_canary(controller: Controller) -> None:
    answer = await controller.http.post(
        "/v1/apps/search/deploy", json={"functions": [spec()], "rollout": PLAN}
    )
    assert answer.json()["functions"][0]["stage"] == "live"


async def test_a_plan_that_cannot_be_is_refused_before_anything_changes(
    controller: Controller,
) -> None:
    await controller.http.post("/v1/apps/search/deploy", json={"functions": [spec()]})
    for plan, why in (
        ({"steps": [50, 5, 100]}, "must rise"),
        ({"gates": [{"metric": "luck"}]}, "unknown metric 'luck'"),
        ({"step": 1}, "step"),
    ):
        body = {"functions": [spec(resources={"cpu": 2.0})], "rollout": plan}
        assert why in refused(await controller.http.post("/v1/apps/search/deploy", json=body), 400)
    assert (await controller.http.get("/v1/apps/search")).json()["version"] == 1


async def test_numbers_and_reasons_are_told_while_it_runs(controller: Controller) -> None:
    done = await deployed(controller)
    rollout = (await controller.http.get(f"/v1/rollouts/{done['rollout']}")).json()
    await see(controller, rollout, rollout["candidate"], 50, sequence=1)
    await see(controller, rollout, rollout["stable"], 950, sequence=2)
    now = (await controller.http.get(f"/v1/rollouts/{done['rollout']}")).json()["now"]
    assert (now["verdict"], now["cause"]) == ("hold", "samples")
    gate = now["gates"][0]
    assert (gate["metric"], gate["outcome"], gate["candidate"], gate["samples"], gate["unit"]) == (
        "error_ratio",
        "no_data",
        0,
        50,
        "share",
    )


async def test_a_hand_overrules_it(controller: Controller) -> None:
    path = f"/v1/rollouts/{(await deployed(controller))['rollout']}"
    assert (await controller.http.post(f"{path}:pause")).json()["state"] == "paused"
    assert (await controller.http.post(f"{path}:resume")).json()["state"] == "running"
    promoted = (await controller.http.post(f"{path}:promote")).json()
    assert (promoted["state"], promoted["weight"]) == ("done", 100)
    assert "has ended" in refused(await controller.http.post(f"{path}:abort"), 409)
    assert await weights(controller) == {promoted["candidate"]: 100}


async def test_lists_are_newest_first_and_filtered(controller: Controller) -> None:
    done = await deployed(controller)
    for asked, count in (
        ({}, 1),
        ({"state": "active"}, 1),
        ({"state": "done"}, 0),
        ({"app": "other"}, 0),
        ({"function": "hello"}, 1),
    ):
        found = (await controller.http.get("/v1/rollouts", params=asked)).json()["rollouts"]
        assert len(found) == count, asked
    assert found[0]["id"] == done["rollout"]


async def test_another_tenants_rollout_does_not_exist(controller: Controller) -> None:
    path = f"/v1/rollouts/{(await deployed(controller))['rollout']}"
    stranger = controller.client(await controller.other_tenant())
    refused(await stranger.get(path), 404)
    for verb in ("pause", "resume", "promote", "abort"):
        refused(await stranger.post(f"{path}:{verb}"), 404)
    assert (await stranger.get("/v1/rollouts")).json()["rollouts"] == []


async def test_a_key_reaches_rollouts_of_its_own_function_only(controller: Controller) -> None:
    path = f"/v1/rollouts/{(await deployed(controller))['rollout']}"
    own = controller.client(
        await controller.new_key(scope="deploy", environment="main", app="search", function="hello")
    )
    other = controller.client(
        await controller.new_key(scope="deploy", environment="main", app="search", function="else")
    )
    reader = controller.client(await controller.new_key(scope="invoke"))
    assert (await own.get(path)).status_code == 200
    refused(await other.get(path), 404)
    refused(await other.post(f"{path}:abort"), 404)
    refused(await reader.get(path), 403)
    assert (await own.post(f"{path}:abort")).json()["state"] == "aborted"


async def test_an_unknown_rollout_is_named(controller: Controller) -> None:
    assert "ro-nothing" in refused(await controller.http.get("/v1/rollouts/ro-nothing"), 404)
