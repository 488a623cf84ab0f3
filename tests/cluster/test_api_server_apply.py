"""Server-side apply in the tests' API server; holds on a real cluster too."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.kubernetes.raw import MERGE, RawClient

pytestmark = pytest.mark.api_server


def _map(name: str, **data: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def _service(*ports: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "s"},
        "spec": {"ports": list(ports), "selector": {"a": "b"}},
    }


async def test_an_apply_creates_then_changes_nothing(raw: RawClient, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps/a"
    made = await raw.apply(path, _map("a", k="1"))
    again = await raw.apply(path, _map("a", k="1"))
    assert (made.status, again.status) == (201, 200)
    assert made.version == again.version
    (entry,) = made.body["metadata"]["managedFields"]
    assert (entry["manager"], entry["operation"], entry["fieldsV1"]) == (
        "one",
        "Apply",
        {"f:data": {"f:k": {}}},
    )


async def test_what_is_applied_no_more_goes(raw: RawClient, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps/a"
    await raw.apply(path, _map("a", k="1", gone="2"))
    after = await raw.apply(path, _map("a", k="1"))
    assert after.body["data"] == {"k": "1"}


async def test_two_managers_keep_their_own(raw: RawClient, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps/a"
    await raw.apply(path, _map("a", mine="1"))
    await raw.apply(path, _map("a", theirs="2"), manager="two")
    after = await raw.apply(path, _map("a", mine="3"))
    assert after.body["data"] == {"mine": "3", "theirs": "2"}


async def test_a_conflict_names_the_manager_and_the_field(raw: RawClient, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps/a"
    await raw.apply(path, _map("a", k="1"))
    refused = await raw.apply(path, _map("a", k="2"), manager="two")
    assert (refused.status, refused.body["reason"]) == (409, "Conflict")
    assert refused.body["details"]["causes"] == [
        {
            "reason": "FieldManagerConflict",
            "message": 'conflict with "one"',
            "field": ".data.k",
        }
    ]
    agreed = await raw.apply(path, _map("a", k="1"), manager="two")
    assert agreed.status == 200


async def test_force_takes_the_field(raw: RawClient, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps/a"
    await raw.apply(path, _map("a", k="1", other="1"))
    taken = await raw.apply(path, _map("a", k="2"), manager="two", force=True)
    owned = {
        entry["manager"]: entry["fieldsV1"] for entry in taken.body["metadata"]["managedFields"]
    }
    assert owned == {"one": {"f:data": {"f:other": {}}}, "two": {"f:data": {"f:k": {}}}}


async def test_a_plain_patch_owns_what_it_changes(raw: RawClient, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps/a"
    await raw.apply(path, _map("a", k="1"))
    await raw.ask(
        "PATCH", path, {"data": {"k": "2"}}, query={"fieldManager": "editor"}, media=MERGE
    )
    refused = await raw.apply(path, _map("a", k="1"))
    assert refused.status == 409
    assert 'conflict with "editor"' in refused.body["message"]


async def test_list_items_merge_by_key(raw: RawClient, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/services/s"
    await raw.apply(path, _service({"name": "http", "port": 80}))
    after = await raw.apply(path, _service({"name": "metrics", "port": 90}), manager="two")
    assert [port["name"] for port in after.body["spec"]["ports"]] == ["http", "metrics"]
    less = await raw.apply(path, _service(), manager="two")
    assert [port["name"] for port in less.body["spec"]["ports"]] == ["http"]


async def test_an_apply_needs_a_manager_and_the_right_kind(raw: RawClient, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps/a"
    assert (await raw.apply(path, {**_map("a"), "kind": "Secret"})).status == 400
    assert (await raw.apply(path, _map("b"))).status == 400
    nobody = await raw.apply(path, _map("a"), manager="")
    assert nobody.status == 422
    assert "fieldManager" in nobody.body["message"]


async def test_a_dry_apply_is_answered_in_full_and_forgotten(
    raw: RawClient, namespace: str
) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps/a"
    dry = await raw.apply(path, _map("a", k="1"), dryRun="All")
    assert dry.body["data"] == {"k": "1"}
    assert (await raw.ask("GET", path)).status == 404
