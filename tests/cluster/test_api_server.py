"""The tests' API server through the official client; the same statements hold on a real cluster
(`-m cluster --kubeconfig FILE`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.kubernetes.raw import JSON_PATCH, MERGE, STRATEGIC, RawClient
from tests.fakes.kubernetes.thread import ThreadedApiServer

pytestmark = pytest.mark.api_server


def _config_map(name: str, **data: str) -> dict[str, object]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def _deployment(name: str, replicas: int = 1) -> dict[str, object]:
    labels = {"app": name}
    template = {
        "metadata": {"labels": labels},
        "spec": {"containers": [{"name": "a", "image": "registry.example/a:1"}]},
    }
    spec = {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}


async def test_an_object_has_what_the_server_gives_it(raw: RawClient, namespace: str) -> None:
    made = await raw.ask(
        "POST", f"/api/v1/namespaces/{namespace}/configmaps", _config_map("a", k="v")
    )
    assert made.status == 201
    metadata = made.body["metadata"]
    assert metadata["uid"]
    assert metadata["creationTimestamp"].endswith("Z")
    assert metadata["namespace"] == namespace
    assert int(metadata["resourceVersion"]) > 0
    got = await raw.ask("GET", f"/api/v1/namespaces/{namespace}/configmaps/a")
    assert got.body["metadata"]["uid"] == metadata["uid"]


async def test_a_name_is_generated_where_only_a_prefix_is_given(
    raw: RawClient, namespace: str
) -> None:
    body = {"metadata": {"generateName": "made-"}}
    names = {
        (await raw.ask("POST", f"/api/v1/namespaces/{namespace}/configmaps", body)).body[
            "metadata"
        ]["name"]
        for _ in range(3)
    }
    assert len(names) == 3
    assert all(name.startswith("made-") and len(name) == 10 for name in names)


async def test_refusals_are_status_documents(raw: RawClient, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    missing = await raw.ask("GET", f"{path}/none")
    assert (missing.status, missing.body["reason"]) == (404, "NotFound")
    assert missing.body["message"] == 'configmaps "none" not found'
    assert missing.body["details"] == {"name": "none", "kind": "configmaps"}
    await raw.ask("POST", path, _config_map("a"))
    twice = await raw.ask("POST", path, _config_map("a"))
    assert (twice.status, twice.body["reason"]) == (409, "AlreadyExists")
    elsewhere = await raw.ask(
        "POST", "/api/v1/namespaces/there-is-none/configmaps", _config_map("a")
    )
    assert elsewhere.body["message"] == 'namespaces "there-is-none" not found'
    assert (await raw.ask("GET", "/apis/nothing.example/v1/things")).status == 404


@pytest.mark.parametrize("name", ["Upper", "under_score", "-dash", "a" * 254])
async def test_bad_names_are_refused(raw: RawClient, namespace: str, name: str) -> None:
    answer = await raw.ask("POST", f"/api/v1/namespaces/{namespace}/configmaps", _config_map(name))
    assert (answer.status, answer.body["reason"]) == (422, "Invalid")
    assert "metadata.name" in answer.body["message"]


async def test_bad_labels_are_refused(raw: RawClient, namespace: str) -> None:
    body = {"metadata": {"name": "a", "labels": {"ok": "no spaces here"}}}
    answer = await raw.ask("POST", f"/api/v1/namespaces/{namespace}/configmaps", body)
    assert (answer.status, answer.body["details"]["causes"][0]["field"]) == (422, "metadata.labels")


async def test_a_replace_needs_the_newest_version(raw: RawClient, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    first = (await raw.ask("POST", path, _config_map("a", k="1"))).body
    second = await raw.ask("PUT", f"{path}/a", {**first, "data": {"k": "2"}})
    assert second.status == 200
    late = await raw.ask("PUT", f"{path}/a", {**first, "data": {"k": "3"}})
    assert (late.status, late.body["reason"]) == (409, "Conflict")
    assert "the object has been modified" in late.body["message"]


async def test_a_write_that_changes_nothing_is_no_version(raw: RawClient, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    made = await raw.ask("POST", path, _config_map("a", k="1"))
    again = await raw.ask("PUT", f"{path}/a", made.body)
    patched = await raw.ask("PATCH", f"{path}/a", {"data": {"k": "1"}}, media=MERGE)
    assert made.version == again.version == patched.version


async def test_dry_runs_are_checked_and_forgotten(raw: RawClient, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    dry = await raw.ask("POST", path, _config_map("a"), query={"dryRun": "All"})
    assert dry.status == 201
    assert (await raw.ask("GET", f"{path}/a")).status == 404


async def test_generations_count_changes_of_the_spec_only(raw: RawClient, namespace: str) -> None:
    path = f"/apis/apps/v1/namespaces/{namespace}/deployments"
    made = await raw.ask("POST", path, _deployment("a", 0))
    assert made.body["metadata"]["generation"] == 1
    labelled = await raw.ask(
        "PATCH", f"{path}/a", {"metadata": {"labels": {"x": "y"}}}, media=MERGE
    )
    assert labelled.body["metadata"]["generation"] == 1
    scaled = await raw.ask("PATCH", f"{path}/a", {"spec": {"paused": True}}, media=MERGE)
    assert scaled.body["metadata"]["generation"] == 2


async def test_a_pod_of_an_account_that_is_not_there_is_refused(
    raw: RawClient, namespace: str
) -> None:
    container = {"name": "a", "image": "registry.example/a:1"}
    spec = {"serviceAccountName": "nobody", "containers": [container]}
    pod = {"metadata": {"name": "one"}, "spec": spec}
    refused = await raw.ask("POST", f"/api/v1/namespaces/{namespace}/pods", pod)
    assert refused.status == 403
    assert f"error looking up service account {namespace}/nobody" in refused.body["message"]


async def test_scale_is_a_subresource(raw: RawClient, namespace: str) -> None:
    path = f"/apis/apps/v1/namespaces/{namespace}/deployments"
    await raw.ask("POST", path, {**_deployment("a", 0)})
    scaled = await raw.ask("PATCH", f"{path}/a/scale", {"spec": {"replicas": 0}}, media=MERGE)
    assert (scaled.body["kind"], scaled.body["spec"]) == (
        "Scale",
        {"replicas": 0} if scaled.body["spec"] else {},
    )
    assert scaled.body["status"]["selector"] == "app=a"


async def test_the_status_is_written_apart(raw: RawClient, namespace: str) -> None:
    path = f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets"
    body = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "a"},
        "spec": {"minAvailable": 1},
    }
    made = (await raw.ask("POST", path, {**body, "status": {"currentHealthy": 7}})).body
    assert made.get("status", {}).get("currentHealthy", 0) == 0
    patched = await raw.ask(
        "PATCH",
        f"{path}/a/status",
        {"spec": {"minAvailable": 5}, "status": {"conditions": []}},
        media=MERGE,
    )
    assert patched.body["spec"]["minAvailable"] == 1


async def test_unknown_fields_are_refused_or_warned_about_and_pruned(
    raw: RawClient, namespace: str
) -> None:
    path = f"/apis/apps/v1/namespaces/{namespace}/deployments"
    body = {**_deployment("a", 0)}
    body["spec"] = {**body["spec"], "replikas": 2}  # type: ignore[dict-item]
    strict = await raw.ask("POST", path, body, query={"fieldValidation": "Strict"})
    assert strict.status == 400
    assert 'unknown field "spec.replikas"' in strict.body["message"]
    warned = await raw.ask("POST", path, body, query={"fieldValidation": "Warn"})
    assert warned.status == 201
    assert any("spec.replikas" in text for text in warned.warnings)
    assert "replikas" not in warned.body["spec"]


async def test_wrong_types_and_missing_fields_are_refused(raw: RawClient, namespace: str) -> None:
    path = f"/apis/apps/v1/namespaces/{namespace}/deployments"
    wrong = _deployment("a")
    wrong["spec"] = {**wrong["spec"], "replicas": "two"}  # type: ignore[dict-item]
    assert (await raw.ask("POST", path, wrong)).status == 400
    missing = _deployment("a")
    missing["spec"] = {key: value for key, value in wrong["spec"].items() if key == "template"}  # type: ignore[attr-defined]
    answer = await raw.ask("POST", path, missing)
    assert answer.status == 422
    assert "spec.selector" in answer.body["message"]


async def test_immutable_config_maps_stay(raw: RawClient, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    await raw.ask("POST", path, {**_config_map("a", k="1"), "immutable": True})
    refused = await raw.ask("PATCH", f"{path}/a", {"data": {"k": "2"}}, media=MERGE)
    assert refused.status == 422
    assert "immutable" in refused.body["message"]


async def test_patches_of_three_kinds(raw: RawClient, namespace: str) -> None:
    path = f"/apis/apps/v1/namespaces/{namespace}/deployments"
    await raw.ask("POST", path, _deployment("a", 0))
    merged = await raw.ask(
        "PATCH", f"{path}/a", {"metadata": {"annotations": {"x": "1"}}}, media=MERGE
    )
    assert merged.body["metadata"]["annotations"]["x"] == "1"
    container = {"name": "a", "env": [{"name": "E", "value": "1"}]}
    template = {"spec": {"template": {"spec": {"containers": [container]}}}}
    strategic = await raw.ask("PATCH", f"{path}/a", template, media=STRATEGIC)
    (found,) = strategic.body["spec"]["template"]["spec"]["containers"]
    assert (found["image"], found["env"]) == ("registry.example/a:1", [{"name": "E", "value": "1"}])
    steps = [
        {"op": "test", "path": "/metadata/annotations/x", "value": "1"},
        {"op": "remove", "path": "/metadata/annotations/x"},
    ]
    removed = await raw.ask("PATCH", f"{path}/a", steps, media=JSON_PATCH)
    assert "x" not in removed.body["metadata"].get("annotations", {})
    assert (await raw.ask("PATCH", f"{path}/a", steps, media=JSON_PATCH)).status == 422


async def test_lists_by_label_field_and_page(raw: RawClient, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    for index in range(5):
        body = _config_map(f"c{index}")
        body["metadata"] = {
            "name": f"c{index}",
            "labels": {"parity": "odd" if index % 2 else "even", f"n{index}": ""},
        }
        await raw.ask("POST", path, body)

    async def names(**query: str) -> list[str]:
        return [
            item["metadata"]["name"]
            for item in (await raw.ask("GET", path, query=query)).body["items"]
        ]

    assert await names(labelSelector="parity=odd") == ["c1", "c3"]
    assert await names(labelSelector="parity in (odd,even),!n0") == ["c1", "c2", "c3", "c4"]
    assert await names(labelSelector="n2") == ["c2"]
    assert await names(fieldSelector="metadata.name=c4") == ["c4"]
    first = await raw.ask("GET", path, query={"labelSelector": "parity", "limit": "2"})
    assert (
        first.body["metadata"]["remainingItemCount"] >= 3
        if "remainingItemCount" in first.body["metadata"]
        else True
    )
    rest = await raw.ask(
        "GET",
        path,
        query={
            "labelSelector": "parity",
            "limit": "9",
            "continue": first.body["metadata"]["continue"],
        },
    )
    assert [item["metadata"]["name"] for item in (*first.body["items"], *rest.body["items"])] == [
        f"c{i}" for i in range(5)
    ]


async def test_a_lease_goes_to_one_of_two(raw: RawClient, namespace: str) -> None:
    path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
    body = {"metadata": {"name": "l"}, "spec": {"holderIdentity": "", "leaseDurationSeconds": 15}}
    free = (await raw.ask("POST", path, body)).body
    answers = [
        await raw.ask("PUT", f"{path}/l", {**free, "spec": {**free["spec"], "holderIdentity": who}})
        for who in ("a", "b")
    ]
    assert [answer.status for answer in answers] == [200, 409]
    wrong = {"metadata": {"name": "m"}, "spec": {"leaseDurationSeconds": 0}}
    assert (await raw.ask("POST", path, wrong)).status == 422


def test_the_dynamic_client_discovers_knative(
    threaded_api_server: ThreadedApiServer, kubeconfig: Path, tmp_path: Path
) -> None:
    from kubernetes import client, config, dynamic  # 1,000 modules that no other test needs

    with config.new_client_from_config(str(kubeconfig)) as api:
        dynamic_client = dynamic.DynamicClient(api, cache_file=str(tmp_path / "discovered"))
        service = dynamic_client.resources.get(api_version="serving.knative.dev/v1", kind="Service")
        assert (service.name, service.namespaced) == ("services", True)
        assert "status" in service.subresources
        assert dynamic_client.resources.get(api_version="v1", kind="Service").group_version == "v1"
        assert client.VersionApi(api).get_code().git_version.startswith("v1.")
        made = client.CoreV1Api(api).create_namespaced_config_map(
            "default", {"metadata": {"name": "a"}, "data": {"k": "v"}}
        )
        assert made.metadata.managed_fields[0].operation == "Update"
