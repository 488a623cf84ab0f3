"""Snapshots through the control plane: whose they are, the switch that outlives deploys, and what
goes with what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pilotlight.controller.registry import snapshot_gc
from pilotlight.controller.registry.launch_spec import function_id
from pilotlight.spec.identifiers import FunctionId
from snapshotter.errors import ProofsBusy
from snapshotter.types import RevisionKey, SnapshotState, TemplateInfo
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import snapshot, spec


async def deploy(controller: Controller, *specs: dict[str, Any], app: str = "search") -> None:
    answer = await controller.http.post(f"/v1/apps/{app}/deploy", json={"functions": list(specs)})
    assert answer.status_code == 200, answer.text


async def id_of(controller: Controller, function: str = "hello") -> FunctionId:
    return function_id(
        tenant=await controller.tenant(), environment="main", app="search", function=function
    )


async def launch_of(controller: Controller, function: str = "hello") -> dict[str, Any]:
    """The launch that activators are told, of its only revision."""
    changes: Any = (await controller.feed())["changes"]
    routes = [
        c["value"] for c in changes if c["kind"] == "function" and c["key"].endswith(f"/{function}")
    ]
    (revision,) = routes[-1]["revisions"].values()
    return dict(revision["launch"])


async def audited(controller: Controller) -> list[str]:
    return [entry["action"] for entry in (await controller.http.get("/v1/audit")).json()["entries"]]


async def test_snapshots_are_listed_shown_proven_and_deleted(controller: Controller) -> None:
    tenant = await controller.tenant()
    controller.agent.snapshots = [
        snapshot(tenant, state=SnapshotState.QUARANTINED, reason="three restores failed"),
        snapshot(tenant, name="sn-2"),
    ]

    listed = (await controller.http.get("/v1/snapshots", params={"app": "search"})).json()[
        "snapshots"
    ]
    assert [(s["id"], s["state"], s["labels"]["function"]) for s in listed] == [
        ("sn-1", "QUARANTINED", "hello"),
        ("sn-2", "READY", "hello"),
    ]
    assert (await controller.http.get("/v1/snapshots/sn-1")).json()[
        "reason"
    ] == "three restores failed"
    assert (await controller.http.post("/v1/snapshots/sn-1:prove")).json()["state"] == "READY"
    quarantined = await controller.http.post(
        "/v1/snapshots/sn-1:quarantine", json={"reason": "it leaks"}
    )
    assert quarantined.json()["state"] == "QUARANTINED"
    assert quarantined.json()["reason"].endswith(": it leaks")
    assert (await controller.http.delete("/v1/snapshots/sn-1")).json() == {"deleted": 1}
    assert [s.id for s in controller.agent.snapshots] == ["sn-2"]
    assert (await audited(controller))[:3] == [
        "snapshot.delete",
        "snapshot.quarantine",
        "snapshot.prove",
    ]


async def test_a_tenant_that_asks_for_too_many_proofs_is_told_when_to_ask_again(
    controller: Controller,
) -> None:
    controller.agent.snapshots = [snapshot(await controller.tenant())]
    controller.agent.prove_failure = ProofsBusy(
        "a proof of this tenant is under way", {"retry_after_s": 17.6}
    )

    answer = await controller.http.post("/v1/snapshots/sn-1:prove")

    assert (answer.status_code, answer.headers["retry-after"]) == (429, "18")


async def test_a_tenant_sees_and_touches_its_own_snapshots_only(controller: Controller) -> None:
    await deploy(controller, spec())
    controller.agent.snapshots = [
        snapshot(await controller.tenant(), f"{await id_of(controller)}@v1-abcdef")
    ]
    stranger = controller.client(await controller.other_tenant())

    assert (await stranger.get("/v1/snapshots")).json() == {"snapshots": []}
    for method, path in [
        ("GET", "/v1/snapshots/sn-1"),
        ("POST", "/v1/snapshots/sn-1:prove"),
        ("POST", "/v1/snapshots/sn-1:quarantine"),
        ("DELETE", "/v1/snapshots/sn-1"),
        ("DELETE", "/v1/functions/search/hello/snapshots"),
    ]:
        body = {"reason": "x"} if path.endswith("quarantine") else None
        answer = await stranger.request(method, path, json=body)
        assert (answer.status_code, answer.json()["type"].rpartition("/")[2]) == (404, "not-found")
    assert (
        await stranger.put("/v1/functions/search/hello/snapshots", json={"enabled": False})
    ).status_code == 404
    assert len(controller.agent.snapshots) == 1
    invoker = controller.client(await controller.new_key(scope="invoke"))
    assert (await invoker.get("/v1/snapshots")).status_code == 403


async def test_switching_off_reaches_the_launch_deletes_what_is_there_and_outlives_deploys(
    controller: Controller,
) -> None:
    await deploy(controller, spec())
    assert (await launch_of(controller))["snapshot"] is True
    function = await id_of(controller)
    controller.agent.snapshots = [
        snapshot(await controller.tenant(), f"{function}@{v}", name=v) for v in ("v1-a", "v2-b")
    ]

    answer = await controller.http.put(
        "/v1/functions/search/hello/snapshots", json={"enabled": False}
    )
    assert answer.json() == {"app": "search", "function": "hello", "enabled": False, "deleted": 2}
    launch = await launch_of(controller)
    assert (launch["snapshot"], launch["forkable"]) == (False, True), (
        "Templates are memory, not disk"
    )
    assert (await audited(controller))[0] == "snapshots.disable"

    await deploy(controller, spec(env={"A": "1"}))
    assert (await launch_of(controller))["snapshot"] is False
    assert (await controller.http.get("/v1/apps/search")).json()["functions"][0][
        "snapshots"
    ] is False

    await controller.http.put("/v1/functions/search/hello/snapshots", json={"enabled": True})
    assert (await launch_of(controller))["snapshot"] is True


async def test_switching_it_the_way_it_is_tells_nobody(controller: Controller) -> None:
    await deploy(controller, spec())
    before = (await controller.feed())["seq"]
    assert (
        await controller.http.put("/v1/functions/search/hello/snapshots", json={"enabled": True})
    ).json()["deleted"] == 0
    assert (await controller.feed())["seq"] == before
    assert "snapshots.enable" not in await audited(controller)


async def test_what_the_code_forbids_no_switch_allows(controller: Controller) -> None:
    await deploy(controller, spec(snapshot=False))
    await controller.http.put("/v1/functions/search/hello/snapshots", json={"enabled": True})
    launch = await launch_of(controller)
    assert (launch["snapshot"], launch["forkable"]) == (False, False)


async def test_switching_off_while_the_node_is_away_is_kept_and_says_so(
    controller: Controller, short_tmp: Path
) -> None:
    await deploy(controller, spec())
    (short_tmp / "snapshotter.sock").unlink()
    answer = await controller.http.put(
        "/v1/functions/search/hello/snapshots", json={"enabled": False}
    )
    assert (answer.status_code, answer.json()["deleted"]) == (200, None)
    assert (await launch_of(controller))["snapshot"] is False


async def test_launches_name_the_variables_of_their_secrets_and_never_a_value(
    controller: Controller,
) -> None:
    for name, values in (("db", {"USER": "u", "PASSWORD": "hunter2"}), ("other", {"X": "1"})):
        await controller.http.put(f"/v1/secrets/{name}", json={"values": values})
    await deploy(controller, spec(secrets=["db"]))
    assert (await launch_of(controller))["secret_variables"] == ["PASSWORD", "USER"]

    await controller.http.put("/v1/secrets/db", json={"values": {"URL": "hunter2"}})
    assert (await launch_of(controller))["secret_variables"] == ["URL"]
    assert "hunter2" not in json.dumps((await controller.feed())["changes"])


async def test_a_new_value_of_a_known_variable_changes_no_route(controller: Controller) -> None:
    await controller.http.put("/v1/secrets/db", json={"values": {"URL": "a"}})
    await deploy(controller, spec(secrets=["db"]))
    before: Any = (await controller.feed())["seq"]
    await controller.http.put("/v1/secrets/db", json={"values": {"URL": "b"}})
    changes: Any = (await controller.feed(after=before))["changes"]
    assert [c["kind"] for c in changes] == ["secret"]


async def test_snapshots_go_with_the_app_and_with_a_function_that_a_deploy_leaves_out(
    controller: Controller,
) -> None:
    await deploy(controller, spec("one"), spec("two"))
    tenant, ids = (
        await controller.tenant(),
        [await id_of(controller, name) for name in ("one", "two")],
    )
    controller.agent.snapshots = [
        snapshot(tenant, f"{function}@v1-a", name=function) for function in ids
    ]

    await deploy(controller, spec("one"))
    assert [s.id for s in controller.agent.snapshots] == [ids[0]]
    await deploy(controller, spec("one", env={"A": "1"}))
    assert len(controller.agent.snapshots) == 1, "what a rollback comes back from stays"
    assert (await controller.http.delete("/v1/apps/search")).status_code == 204
    assert controller.agent.snapshots == []


async def test_deleting_an_app_does_not_wait_for_a_node_that_is_away_and_the_sweep_finds_the_rest(
    controller: Controller, short_tmp: Path
) -> None:
    await deploy(controller, spec("gone"), spec("kept"), spec("off"))
    tenant, ids = (
        await controller.tenant(),
        {name: await id_of(controller, name) for name in ("gone", "kept", "off")},
    )
    controller.agent.snapshots = [
        snapshot(tenant, f"{function}@v1-a", name=name) for name, function in ids.items()
    ]
    hidden = (short_tmp / "snapshotter.sock").rename(short_tmp / "away.sock")
    await deploy(controller, spec("kept"), spec("off"))
    await controller.http.put("/v1/functions/search/off/snapshots", json={"enabled": False})
    assert len(controller.agent.snapshots) == 3

    hidden.rename(short_tmp / "snapshotter.sock")
    assert await snapshot_gc.sweep(controller.context.agent, controller.context.store) == 2
    assert [s.id for s in controller.agent.snapshots] == ["kept"]


async def test_a_functions_snapshots_are_deleted_without_switching_it_off(
    controller: Controller,
) -> None:
    await deploy(controller, spec())
    controller.agent.snapshots = [
        snapshot(await controller.tenant(), f"{await id_of(controller)}@v1-a")
    ]
    assert (await controller.http.delete("/v1/functions/search/hello/snapshots")).json() == {
        "deleted": 1
    }
    assert (await launch_of(controller))["snapshot"] is True


async def test_a_template_is_dropped_by_its_owner_only(controller: Controller) -> None:
    labels = {
        "tenant": await controller.tenant(),
        "environment": "main",
        "app": "search",
        "function": "hello",
    }
    revision = RevisionKey("f-1@v1-abcdef")
    controller.agent.templates = [
        TemplateInfo(
            revision=revision,
            pid=1,
            pss_bytes=1,
            threads=(),
            phases_ms={},
            forks=0,
            last_used_at=0.0,
            labels=labels,
        )
    ]
    stranger = controller.client(await controller.other_tenant())
    assert (await stranger.delete(f"/v1/templates/{revision}")).status_code == 404
    assert (await controller.http.delete(f"/v1/templates/{revision}")).status_code == 204
    assert controller.agent.templates == []
