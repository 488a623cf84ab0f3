"""Deletion in the tests' API server: finalizers, grace, dependents, namespaces."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.fakes.kubernetes.raw import MERGE, RawClient

pytestmark = pytest.mark.api_server


async def _until_gone(raw: RawClient, path: str) -> None:
    async with asyncio.timeout(30):
        while (await raw.ask("GET", path)).status != 404:
            await asyncio.sleep(0.02)


def _owned(name: str, owner: dict[str, Any], **extra: Any) -> dict[str, Any]:
    metadata = owner["metadata"]
    reference = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "name": metadata["name"],
        "uid": metadata["uid"],
        **extra,
    }
    return {"metadata": {"name": name, "ownerReferences": [reference]}}


async def test_finalizers_hold_an_object(raw: RawClient, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    await raw.ask("POST", path, {"metadata": {"name": "a", "finalizers": ["pilotlight.dev/held"]}})
    await raw.ask("DELETE", f"{path}/a")
    held = await raw.ask("GET", f"{path}/a")
    assert held.body["metadata"]["deletionTimestamp"]
    await raw.ask("PATCH", f"{path}/a", {"metadata": {"finalizers": None}}, media=MERGE)
    assert (await raw.ask("GET", f"{path}/a")).status == 404


async def test_a_uid_that_is_not_meant_is_left_alone(raw: RawClient, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    made = await raw.ask("POST", path, {"metadata": {"name": "a"}})
    refused = await raw.ask(
        "DELETE", f"{path}/a", {"preconditions": {"uid": "00000000-0000-0000-0000-000000000000"}}
    )
    assert (refused.status, refused.body["reason"]) == (409, "Conflict")
    done = await raw.ask(
        "DELETE", f"{path}/a", {"preconditions": {"uid": made.body["metadata"]["uid"]}}
    )
    assert done.status == 200


@pytest.mark.parametrize("policy", ["Background", "Foreground"])
async def test_dependents_go_with_their_owner(raw: RawClient, namespace: str, policy: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    owner = (await raw.ask("POST", path, {"metadata": {"name": "owner"}})).body
    await raw.ask("POST", path, _owned("owned", owner, blockOwnerDeletion=True))
    await raw.ask("DELETE", f"{path}/owner", {"propagationPolicy": policy})
    await _until_gone(raw, f"{path}/owned")
    await _until_gone(raw, f"{path}/owner")


async def test_orphans_stay(raw: RawClient, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    owner = (await raw.ask("POST", path, {"metadata": {"name": "owner"}})).body
    await raw.ask("POST", path, _owned("owned", owner))
    await raw.ask("DELETE", f"{path}/owner", {"propagationPolicy": "Orphan"})
    await _until_gone(raw, f"{path}/owner")
    left = await raw.ask("GET", f"{path}/owned")
    assert not left.body["metadata"].get("ownerReferences")


async def test_a_namespace_takes_its_content_along(raw: RawClient, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}"
    await raw.ask(
        "POST",
        f"{path}/configmaps",
        {"metadata": {"name": "a", "finalizers": ["pilotlight.dev/held"]}},
    )
    await raw.ask("DELETE", path)
    assert (await raw.ask("GET", path)).body["status"]["phase"] == "Terminating"
    refused = await raw.ask("POST", f"{path}/configmaps", {"metadata": {"name": "b"}})
    assert (refused.status, refused.body["reason"]) == (403, "Forbidden")
    assert "because it is being terminated" in refused.body["message"]
    assert refused.body["details"]["causes"][0]["reason"] == "NamespaceTerminating"
    await raw.ask("PATCH", f"{path}/configmaps/a", {"metadata": {"finalizers": None}}, media=MERGE)
    await _until_gone(raw, path)
