"""Releases over the API: what is refused before any traffic moves, who must agree, and how one gets
back."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from pilotlight.controller.database.store import Write
from pilotlight.controller.release import compatibility, release_gates
from pilotlight.errors import Incompatible
from pilotlight.protocol import PROBLEM_BASE
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.record_json import from_json
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import refused, spec

HELLO = "/v1/apps/search/functions/hello"
TRAFFIC = "/v1/functions/search/hello/traffic"


def numbered(n: int, **changes: Any) -> dict[str, Any]:
    """The n-th version of a function."""
    return spec(description=f"number {n}", **changes)


def takes(**properties: Any) -> list[dict[str, Any]]:
    return [
        {
            "name": "",
            "schema": {"type": "object", "properties": properties, "additionalProperties": False},
        }
    ]


async def deploy(controller: Controller, body: dict[str, Any], **terms: Any) -> httpx.Response:
    return await controller.http.post("/v1/apps/search/deploy", json={"functions": [body], **terms})


async def deployed(controller: Controller, body: dict[str, Any], **terms: Any) -> dict[str, Any]:
    answer = await deploy(controller, body, **terms)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["functions"][0])


async def serving(controller: Controller) -> list[tuple[str, int]]:
    functions = (await controller.http.get("/v1/apps/search")).json()["functions"]
    return [
        (share["revision"].partition("-")[0], share["weight"]) for share in functions[0]["traffic"]
    ]


async def routed(controller: Controller) -> Any:
    changes: Any = (await controller.feed())["changes"]
    return [change["value"] for change in changes if change["kind"] == "function"][-1]


async def back(controller: Controller, **body: Any) -> dict[str, Any]:
    answer = await controller.http.post(f"{HELLO}:rollback", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


# -- what is refused before any traffic moves ------------------------------------------------------


async def test_a_schema_that_breaks_callers_is_refused_unless_said_otherwise(
    controller: Controller,
) -> None:
    await deployed(controller, numbered(1, methods=takes(a={"type": "number"})))
    narrower = numbered(2, methods=takes(a={"type": "integer"}))
    answer = await deploy(controller, narrower)
    detail = refused(answer, 409)
    assert answer.json()["type"] == PROBLEM_BASE + "incompatible-schema"
    assert answer.json()["breaks"] == ["argument 'a': accepted number, now accepts only integer"]
    assert "v1-" in detail
    assert "--allow-breaking" in detail
    assert await serving(controller) == [("v1", 100)]
    assert (await controller.http.get(f"{HELLO}/revisions")).json()["revisions"][0][
        "ordinal"
    ] == 1, "nothing is left of it"
    assert (await deployed(controller, narrower, allow_breaking=True))["stage"] == "live"


async def test_schemas_are_compared_while_others_may_write(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare, store = compatibility.breaking_changes, controller.context.store
    compared: list[str] = []

    def watched(old: FunctionSpec, new: FunctionSpec) -> list[str]:
        with store.write():  # waits for ever in a transaction of this thread's own
            compared.append(new.description)
        return compare(old, new)

    monkeypatch.setattr(compatibility, "breaking_changes", watched)
    async with asyncio.timeout(30):
        first = await deployed(controller, numbered(1))
        await deployed(controller, numbered(2))
        aside = await deployed(controller, numbered(3), no_traffic=True)
        answer = await controller.http.patch(
            TRAFFIC, json={"weights": {first["revision"]: 50, aside["revision"]: 50}}
        )
        assert answer.status_code == 200, answer.text
        await deployed(controller, numbered(4), no_traffic=True)
        answer = await controller.http.post(f"{HELLO}:promote", json={"revision": "v4"})
        assert answer.status_code == 200, answer.text
    assert compared == ["number 2", "number 3", "number 4"]


async def test_what_serves_is_read_again_after_a_comparison(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = from_json(FunctionSpec, numbered(1, methods=takes(a={"type": "integer"})))
    second = from_json(FunctionSpec, numbered(2, methods=takes(a={"type": "number"})))
    third = from_json(FunctionSpec, numbered(3, methods=takes(a={"type": "integer"})))
    store, serving_now, tries = controller.context.store, [first], 0
    compare = compatibility.breaking_changes

    def overtaken(old: FunctionSpec, new: FunctionSpec) -> list[str]:
        serving_now[0] = second
        return compare(old, new)

    def make(write: Write) -> None:
        nonlocal tries
        tries += 1
        release_gates.require_compatible(serving_now[0], third, serving="v")

    monkeypatch.setattr(compatibility, "breaking_changes", overtaken)
    with pytest.raises(Incompatible):
        release_gates.write_with_gates(store, make)
    assert tries == 3


async def test_an_offline_evaluation_that_does_not_reach_its_gates_is_refused(
    controller: Controller,
) -> None:
    await deployed(controller, numbered(1))
    body = numbered(2, require={"accuracy": ">= 0.91", "loss": "< 0.5"})
    answer = await deploy(controller, body, evaluation={"accuracy": 0.9})
    refused(answer, 409)
    assert answer.json()["failed"] == [
        "accuracy >= 0.91: the value is 0.9",
        "loss < 0.5: the metric is missing",
    ]
    assert await serving(controller) == [("v1", 100)]
    done = await deployed(
        controller, body, evaluation={"accuracy": 0.5, "hello.accuracy": 0.92, "loss": 0.1}
    )
    manifest = (await controller.http.get(f"{HELLO}/revisions/{done['revision']}")).json()
    assert [(gate["gate"], gate["passes"]) for gate in manifest["requires"]] == [
        ("accuracy >= 0.91", True),
        ("loss < 0.5", True),
    ]


@pytest.mark.parametrize("number", ["0.9", True, None])
async def test_numbers_of_an_evaluation_are_numbers(controller: Controller, number: Any) -> None:
    refused(await deploy(controller, spec(), evaluation={"accuracy": number}), 400)


async def test_a_revision_without_traffic_is_checked_when_it_shall_take_some(
    controller: Controller,
) -> None:
    refused(await deploy(controller, numbered(1), no_traffic=True), 400)
    await deployed(controller, numbered(1, methods=takes(a={"type": "number"})))
    done = await deployed(
        controller, numbered(2, methods=takes(a={"type": "integer"})), no_traffic=True, tag="next"
    )
    assert (done["stage"], await serving(controller)) == ("no_traffic", [("v1", 100)])
    assert (await routed(controller))["document"]["tags"]["next"] == done["revision"]
    assert set((await routed(controller))["revisions"]) == {
        done["revision"],
        (await back_name(controller, "v1")),
    }
    refused(await controller.http.post(f"{HELLO}:promote", json={"revision": "next"}), 409)
    answer = await controller.http.post(
        f"{HELLO}:promote", json={"revision": "next", "allow_breaking": True}
    )
    assert answer.json() == {
        "app": "search",
        "function": "hello",
        "revision": done["revision"],
        "stage": "live",
        "rollout": "",
    }
    assert await serving(controller) == [("v2", 100)]


async def test_no_hand_gives_traffic_to_what_a_deploy_would_refuse(controller: Controller) -> None:
    first = (await deployed(controller, numbered(1, methods=takes(a={"type": "number"}))))[
        "revision"
    ]
    worse = numbered(2, methods=takes(a={"type": "integer"}), require={"accuracy": ">= 0.9"})
    second = (await deployed(controller, worse, no_traffic=True, tag="next"))["revision"]
    hands: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("PATCH", TRAFFIC, {"weights": {first: 95, second: 5}}),
        ("PUT", TRAFFIC, {"weights": {second: 100}}),
        ("PATCH", TRAFFIC, {"pins": {"default": "next"}}),
        ("POST", f"{HELLO}:pin", {"tenant": "default", "revision": "next"}),
        ("POST", f"{HELLO}:rollback", {"to": "next"}),
        (
            "POST",
            "/v1/experiments",
            {
                "app": "search",
                "function": "hello",
                "name": "x",
                "unit": "key",
                "percent": 10,
                "start": True,
                "arms": [
                    {"name": "a", "revision": first, "share": 50},
                    {"name": "b", "revision": second, "share": 50},
                ],
            },
        ),
    )
    for method, path, body in hands:
        assert "would break callers of v1" in refused(
            await controller.http.request(method, path, json=body), 409
        ), path
    split = {"weights": {first: 95, second: 5}, "allow_breaking": True}
    assert "accuracy >= 0.9" in refused(await controller.http.patch(TRAFFIC, json=split), 409)
    client = controller.client(await controller.new_key(scope="deploy"))
    assert "scope 'admin'" in refused(
        await client.patch(TRAFFIC, json={**split, "override_freeze": True}), 403
    )
    assert await serving(controller) == [("v1", 100)]


async def test_what_has_served_is_given_traffic_by_hand_whatever_it_breaks(
    controller: Controller,
) -> None:
    first = (await deployed(controller, numbered(1, methods=takes(a={"type": "integer"}))))[
        "revision"
    ]
    second = (await deployed(controller, numbered(2, methods=takes(a={"type": "number"}))))[
        "revision"
    ]
    answer = await controller.http.patch(TRAFFIC, json={"weights": {first: 50, second: 50}})
    assert answer.status_code == 200, answer.text


async def back_name(controller: Controller, reference: str) -> str:
    return str((await controller.http.get(f"{HELLO}/revisions/{reference}")).json()["revision"])


async def test_only_an_administrator_overrides_a_freeze(controller: Controller) -> None:
    client = controller.client(await controller.new_key(scope="deploy"))
    body = {"functions": [spec()], "override_freeze": True}
    assert "scope 'admin'" in refused(await client.post("/v1/apps/search/deploy", json=body), 403)


async def test_traffic_that_stays_cannot_be_rolled_out(controller: Controller) -> None:
    detail = refused(
        await deploy(controller, spec(), no_traffic=True, rollout={"steps": [5, 100]}), 400
    )
    assert "set only one of them" in detail


# -- approvals -------------------------------------------------------------------------------------


async def test_a_protected_app_waits_for_somebody_else(controller: Controller) -> None:
    await deployed(controller, numbered(1))
    assert (await controller.http.put("/v1/apps/search/policy", json={"approvals": 1})).json() == {
        "approvals": 1
    }
    done = await deployed(controller, numbered(2))
    assert (done["stage"], done["approvals"], await serving(controller)) == (
        "waiting",
        1,
        [("v1", 100)],
    )
    promoted = await controller.http.post(f"{HELLO}:promote", json={"revision": "v2"})
    assert "needs 1 more approval" in refused(promoted, 409)
    assert promoted.json()["type"] == PROBLEM_BASE + "approval-required"
    own = await controller.http.post(f"{HELLO}/revisions/v2:approve", json={})
    assert "approve it with another key" in refused(own, 409)
    other = controller.client(await controller.new_key(scope="deploy"))
    approved = await other.post(f"{HELLO}/revisions/v2:approve", json={"note": "looks good"})
    assert approved.json()["missing"] == 0
    assert (await other.post(f"{HELLO}/revisions/v2:approve", json={})).json()["missing"] == 0, (
        "once more is no more"
    )
    assert await serving(controller) == [("v1", 100)], "an approval moves nothing by itself"
    assert (await controller.http.post(f"{HELLO}:promote", json={"revision": "v2"})).json()[
        "stage"
    ] == "live"
    given = (await controller.http.get(f"{HELLO}/revisions/v2")).json()["approvals"]
    assert (given["missing"], [one["note"] for one in given["given"]]) == (0, ["looks good"])


async def test_no_other_way_leads_around_an_approval(controller: Controller) -> None:
    await deployed(controller, numbered(1))
    await controller.http.put("/v1/apps/search/policy", json={"approvals": 2})
    done = await deployed(controller, numbered(2))
    weights = {"weights": {done["revision"]: 100}}
    for answer in (
        await controller.http.post(f"{HELLO}:rollback", json={"to": "v2"}),
        await controller.http.post(f"{HELLO}:pin", json={"tenant": "default", "revision": "v2"}),
        await controller.http.patch("/v1/functions/search/hello/traffic", json=weights),
        await controller.http.post(
            f"{HELLO}:promote", json={"revision": "v2", "rollout": {"steps": [5, 100]}}
        ),
    ):
        assert "needs 2 more approvals" in refused(answer, 409)
    assert await serving(controller) == [("v1", 100)]
    assert (await deployed(controller, numbered(2)))["stage"] == "waiting", (
        "deploying it again changes nothing"
    )


async def test_going_back_to_what_has_served_asks_nobody(controller: Controller) -> None:
    await deployed(controller, numbered(1))
    await deployed(controller, numbered(2))
    await controller.http.put("/v1/apps/search/policy", json={"approvals": 3})
    assert (await back(controller))["revision"].startswith("v1-")


async def test_the_first_revision_of_a_protected_app_takes_no_calls_until_it_is_approved(
    controller: Controller,
) -> None:
    await deployed(controller, spec("other"))
    await controller.http.put("/v1/apps/search/policy", json={"approvals": 1})
    done = await controller.http.post(
        "/v1/apps/search/deploy", json={"functions": [spec("other"), spec()]}
    )
    assert [one["stage"] for one in done.json()["functions"]] == ["live", "waiting"]
    functions = {
        one["name"]: one
        for one in (await controller.http.get("/v1/apps/search")).json()["functions"]
    }
    assert (functions["hello"]["traffic"], functions["hello"]["spec"]["name"]) == ([], "hello")
    assert "has no serving revision" in refused(
        await controller.http.post(f"{HELLO}:rollback", json={}), 409
    )
    other = controller.client(await controller.new_key(scope="deploy"))
    await other.post(f"{HELLO}/revisions/v1:approve", json={})
    assert (await controller.http.post(f"{HELLO}:promote", json={"revision": "v1"})).json()[
        "stage"
    ] == "live"
    assert (await routed(controller))["function"] == "hello"
    assert (await controller.http.delete("/v1/apps/search")).status_code == 204


async def test_only_an_administrator_protects_an_app(controller: Controller) -> None:
    await deployed(controller, spec())
    client = controller.client(await controller.new_key(scope="deploy"))
    assert "scope 'admin'" in refused(
        await client.put("/v1/apps/search/policy", json={"approvals": 1}), 403
    )
    assert (await client.get("/v1/apps/search/policy")).json() == {"approvals": 0}
    refused(await controller.http.put("/v1/apps/search/policy", json={"approvals": 11}), 400)
    refused(await controller.http.put("/v1/apps/nothing/policy", json={"approvals": 1}), 404)


# -- back and forth --------------------------------------------------------------------------------


async def test_a_rollback_is_a_new_entry_of_the_history(controller: Controller) -> None:
    for n in (1, 2, 3):
        await deployed(controller, numbered(n))
    moved = await back(controller, message="it was slow")
    assert (moved["revision"].partition("-")[0], moved["traffic"]["weights"]) == (
        "v2",
        {moved["revision"]: 100},
    )
    history = (await controller.http.get("/v1/apps/search/history")).json()["history"]
    newest = history[0]
    assert (newest["version"], newest["action"], newest["message"]) == (
        4,
        "rollback",
        "it was slow",
    )
    assert newest["functions"][0]["revision"] == moved["revision"]
    assert (await back(controller))["revision"].startswith("v1-"), (
        "one more goes further back, and not to what was left"
    )
    assert "no revision of search/hello served before v1-" in refused(
        await controller.http.post(f"{HELLO}:rollback", json={}), 409
    )
    assert (await back(controller, to="v3"))["revision"].startswith("v3-"), (
        "any revision that is kept can serve again"
    )
    detail = refused(await controller.http.post(f"{HELLO}:rollback", json={"to": "v9"}), 404)
    assert "no revision, alias or tag 'v9'" in detail


async def test_an_app_goes_back_with_all_its_functions_or_none(controller: Controller) -> None:
    async def deploy_all(n: int, *names: str) -> None:
        body = {"functions": [numbered(n, name=name) for name in names]}
        answer = await controller.http.post("/v1/apps/search/deploy", json=body)
        assert answer.status_code == 200, answer.text

    async def history() -> list[dict[str, Any]]:
        return list((await controller.http.get("/v1/apps/search/history")).json()["history"])

    async def audited() -> list[str]:
        entries = (await controller.http.get("/v1/audit", params={"limit": 9})).json()["entries"]
        return [entry["action"] for entry in entries]

    async def heaviest() -> dict[str, str]:
        functions = (await controller.http.get("/v1/apps/search")).json()["functions"]
        return {one["name"]: one["traffic"][0]["revision"][:2] for one in functions}

    for n in (1, 2):
        await deploy_all(n, "hello", "other")
    moved = await controller.http.post("/v1/apps/search:rollback", json={"message": "slow"})
    assert moved.status_code == 200, moved.text
    assert await heaviest() == {"hello": "v1", "other": "v1"}
    newest, deploy, *_ = await history()
    assert (newest["version"], newest["action"], newest["message"]) == (3, "rollback", "slow")
    assert [one["function"] for one in newest["functions"]] == ["hello", "other"]
    assert deploy["action"] == "deploy"
    assert (await audited())[:2] == ["app.rollback", "app.deploy"]

    await deploy_all(3, "hello", "other", "third")
    before = await history(), await audited(), await heaviest()
    answer = await controller.http.post("/v1/apps/search:rollback", json={})
    assert "no revision of search/third served before" in refused(answer, 409)
    assert (await history(), await audited(), await heaviest()) == before


async def test_from_a_split_one_goes_back_to_the_older_side(controller: Controller) -> None:
    for n in (1, 2):
        await deployed(controller, numbered(n))
    names = [await back_name(controller, f"v{n}") for n in (1, 2)]
    for share in (90, 10):
        weights = {names[1]: share, names[0]: 100 - share}
        assert (
            await controller.http.patch(
                "/v1/functions/search/hello/traffic", json={"weights": weights}
            )
        ).status_code == 200
        assert (await back(controller))["revision"] == names[0]


async def test_a_rollback_ends_the_rollout_and_takes_its_way_back(controller: Controller) -> None:
    await deployed(controller, numbered(1))
    done = await deployed(controller, numbered(2), rollout={"steps": [10, 100]})
    assert (done["stage"], done["rollout"] != "") == ("rollout", True)
    assert await serving(controller) == [("v1", 90), ("v2", 10)]
    aliases = (await controller.http.get(f"{HELLO}/aliases")).json()["aliases"]
    assert {name: revision[:2] for name, revision in aliases.items()} == {
        "stable": "v1",
        "candidate": "v2",
    }
    again = await deployed(controller, numbered(2))
    assert (again["stage"], again["rollout"]) == ("rollout", done["rollout"]), (
        "deployed again, its steps go on"
    )
    assert (await back(controller))["revision"].startswith("v1-")
    manifest = (await controller.http.get(f"{HELLO}/revisions/v2")).json()
    assert (manifest["rollout"]["state"], await serving(controller)) == (
        "rolled_back",
        [("v1", 100)],
    )
    assert "candidate" not in (await controller.http.get(f"{HELLO}/aliases")).json()["aliases"]


async def test_a_pin_answers_one_tenant_by_a_revision(controller: Controller) -> None:
    await controller.other_tenant()
    for n in (1, 2):
        await deployed(controller, numbered(n))
    pinned = await controller.http.post(f"{HELLO}:pin", json={"tenant": "acme", "revision": "v1"})
    assert pinned.json()["revision"].startswith("v1-")
    assert list((await routed(controller))["document"]["pins"]) == ["acme"]
    assert (await controller.http.get("/v1/apps/search/history")).json()["history"][0][
        "action"
    ] == "pin"
    assert "no tenant 'nobody'" in refused(
        await controller.http.post(f"{HELLO}:pin", json={"tenant": "nobody", "revision": "v1"}), 400
    )
    assert (
        await controller.http.post(f"{HELLO}:pin", json={"tenant": "acme", "revision": None})
    ).json()["revision"] is None


# -- names and manifests ---------------------------------------------------------------------------


async def test_aliases_stand_for_revisions_and_move(controller: Controller) -> None:
    for n in (1, 2):
        await deployed(controller, numbered(n))
    moved = await controller.http.put(f"{HELLO}/aliases/blessed", json={"revision": "v1"})
    assert {name: revision[:2] for name, revision in moved.json()["aliases"].items()} == {
        "stable": "v2",
        "blessed": "v1",
    }
    assert (await routed(controller))["document"]["tags"]["blessed"] == moved.json()["aliases"][
        "blessed"
    ]
    assert (await back_name(controller, "blessed")).startswith("v1-")
    assert (
        await controller.http.put(f"{HELLO}/aliases/blessed", json={"revision": "stable"})
    ).json()["aliases"]["blessed"][:2] == "v2"
    assert (await controller.http.delete(f"{HELLO}/aliases/blessed")).status_code == 204
    refused(await controller.http.delete(f"{HELLO}/aliases/blessed"), 404)
    for name, told in (
        ("stable", "managed by the platform"),
        ("v7", "not the form of a revision name"),
        ("Blessed", "lower-case letters"),
    ):
        assert told in refused(
            await controller.http.put(f"{HELLO}/aliases/{name}", json={"revision": "v1"}), 400
        )


async def test_a_manifest_pins_everything_and_a_diff_tells_it_apart(controller: Controller) -> None:
    meta = {"git.commit": "a" * 40, "dataset": "sha256:1"}
    await deployed(controller, numbered(1, methods=takes(a={"type": "number"})), meta=meta)
    await deployed(
        controller,
        numbered(1, methods=takes(a={"type": "number"})),
        meta={"git.commit": "b" * 40, "ticket": "7"},
    )
    card = {"task": "text-embedding", "owner": "search", "tokenizer": "bert"}
    second = numbered(2, methods=takes(a={"type": "integer"}), card=card, resources={"cpu": 2.0})
    await deployed(controller, second, allow_breaking=True, evaluation={"accuracy": 0.93})
    first, manifest = [
        (await controller.http.get(f"{HELLO}/revisions/v{n}")).json() for n in (1, 2)
    ]
    assert first["lineage"] == {**meta, "ticket": "7"}, "its first words stay"
    assert (manifest["card"]["task"], manifest["evaluation"], manifest["weight"]) == (
        "text-embedding",
        {"accuracy": 0.93},
        100,
    )
    assert manifest["code"]["bundle"] == second["bundle"]
    assert manifest["schemas"][0]["arguments"]["properties"] == {"a": {"type": "integer"}}
    assert manifest["aliases"] == ["stable"]
    assert len(manifest["environment_digest"]) == 64
    diff = (
        await controller.http.get(f"{HELLO}/revisions:diff", params={"from": "v1", "to": "stable"})
    ).json()
    changes = {change["what"]: (change["from"], change["to"]) for change in diff["changes"]}
    assert changes["resources.cpu"] == (1.0, 2.0)
    assert changes["methods[0].schema.properties.a.type"] == ("number", "integer")
    assert diff["breaks"] == ["argument 'a': accepted number, now accepts only integer"]


async def test_revisions_are_within_the_reach_of_a_key_only(controller: Controller) -> None:
    await deployed(controller, spec())
    bound = controller.client(
        await controller.new_key(scope="deploy", app="search", function="hello")
    )
    assert (await bound.get(f"{HELLO}/revisions")).status_code == 200
    elsewhere = controller.client(await controller.new_key(scope="deploy", app="other"))
    assert (await elsewhere.get(f"{HELLO}/revisions")).status_code == 403
    stranger = controller.client(await controller.other_tenant())
    for method, path in (
        ("GET", "/revisions"),
        ("GET", "/revisions/v1"),
        ("POST", ":rollback"),
        ("GET", "/aliases"),
    ):
        refused(await stranger.request(method, HELLO + path, json={}), 404)
