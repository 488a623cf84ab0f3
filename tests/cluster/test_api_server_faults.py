"""What tests can do to the API server: faults, rights, its absence, pods of their own."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.fakes.absence import away
from tests.fakes.kubernetes.faults import Fault
from tests.fakes.kubernetes.raw import MERGE, RawClient
from tests.fakes.kubernetes.server import ApiServer

PODS = "/api/v1/namespaces/default/pods"


def _pod(name: str, **labels: str) -> dict[str, Any]:
    spec = {"containers": [{"name": "user", "image": "registry.example/a:1"}], "nodeName": "n"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "labels": labels},
        "spec": spec,
    }


async def test_a_fault_meets_the_requests_that_it_names(
    api_server: ApiServer, raw: RawClient
) -> None:
    api_server.faults.add(Fault(status=429, retry_after_s=2, times=1, verb="list", resource="pods"))
    first = await raw.ask("GET", PODS)
    assert (first.status, first.headers["Retry-After"], first.body["reason"]) == (
        429,
        "2",
        "TooManyRequests",
    )
    assert first.body["details"] == {"retryAfterSeconds": 2}
    assert (await raw.ask("GET", PODS)).status == 200


async def test_a_reset_after_the_work_was_done(api_server: ApiServer, raw: RawClient) -> None:
    api_server.faults.add(Fault(reset=True, after=True, times=1, verb="create"))
    with pytest.raises(aiohttp.ClientError):
        await raw.ask("POST", PODS, _pod("a"))
    assert (await raw.ask("GET", f"{PODS}/a")).status == 200


async def test_hanging_requests(api_server: ApiServer, raw: RawClient) -> None:
    fault = api_server.faults.add(Fault(hang=True, path="/pods"))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await raw.ask("GET", PODS)
    api_server.faults.remove(fault)
    assert (await raw.ask("GET", PODS)).status == 200


async def test_away_and_back_with_everything(api_server: ApiServer, raw: RawClient) -> None:
    await raw.ask("POST", PODS, _pod("a"))
    url = api_server.url
    async with away(api_server):
        with pytest.raises(aiohttp.ClientError):
            await raw.ask("GET", PODS)
    assert api_server.url == url
    assert (await raw.ask("GET", f"{PODS}/a")).status == 200


async def test_missing_rights(api_server: ApiServer, raw: RawClient) -> None:
    api_server.rights.deny("list", "pods")
    refused = await raw.ask("GET", PODS)
    assert (refused.status, refused.body["reason"]) == (403, "Forbidden")
    text = (
        'pods is forbidden: User "kubernetes-admin" cannot list resource "pods" in API group '
        '"" in the namespace "default"'
    )
    assert refused.body["message"] == text
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    for verb, allowed in (("list", False), ("get", True)):
        body = {
            "spec": {
                "resourceAttributes": {"verb": verb, "resource": "pods", "namespace": "default"}
            }
        }
        assert (await raw.ask("POST", path, body)).body["status"]["allowed"] is allowed


async def test_a_skewed_clock(api_server: ApiServer, raw: RawClient) -> None:
    api_server.faults.clock_skew_s = 10 * 365 * 86400
    made = await raw.ask("POST", PODS, _pod("a"))
    assert made.body["metadata"]["creationTimestamp"] > "2033"


async def test_a_kind_that_is_not_installed(raw: RawClient, api_server: ApiServer) -> None:
    path = "/apis/serving.knative.dev/v1/namespaces/default/services"
    assert (await raw.ask("GET", path)).status == 200
    api_server.remove_kind("services.serving.knative.dev")
    assert (await raw.ask("GET", path)).body["message"] == "404 page not found"


async def test_requests_and_writes_are_counted(api_server: ApiServer, raw: RawClient) -> None:
    api_server.requests.clear()
    manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}}
    for _ in range(2):
        await raw.apply("/api/v1/namespaces/default/configmaps/a", manifest)
    assert (
        api_server.requests.count(verb="apply", resource="configmaps"),
        api_server.requests.writes(),
    ) == (2, 1)


async def test_pods_go_in_grace(api_server: ApiServer, raw: RawClient) -> None:
    await raw.ask("POST", PODS, _pod("a"))
    first = await raw.ask("DELETE", f"{PODS}/a", {"gracePeriodSeconds": 20})
    assert first.body["metadata"]["deletionGracePeriodSeconds"] == 20
    await raw.ask("DELETE", f"{PODS}/a", {"gracePeriodSeconds": 0})
    assert (await raw.ask("GET", f"{PODS}/a")).status == 404


async def test_evictions_respect_budgets(api_server: ApiServer, raw: RawClient) -> None:
    ready = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    for name in ("a", "b"):
        api_server.put({**_pod(name, app="x"), "status": ready})
    budget = {
        "metadata": {"name": "x"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "x"}}},
    }
    await raw.ask("POST", "/apis/policy/v1/namespaces/default/poddisruptionbudgets", budget)
    eviction = {"deleteOptions": {"gracePeriodSeconds": 0}}
    assert (await raw.ask("POST", f"{PODS}/a/eviction", eviction)).status == 201
    refused = await raw.ask("POST", f"{PODS}/b/eviction", eviction)
    assert (refused.status, refused.body["details"]["causes"][0]["reason"]) == (
        429,
        "DisruptionBudget",
    )


async def test_logs_are_read(api_server: ApiServer, raw: RawClient) -> None:
    api_server.put(_pod("a"))
    waiting = await raw.ask("GET", f"{PODS}/a/log")
    assert waiting.status == 400
    assert "waiting to start" in waiting.body["message"]
    api_server.logs.texts["default", "a", "user"] = "one\ntwo\n"
    assert (await raw.ask("GET", f"{PODS}/a/log", query={"tailLines": "1"})).headers[
        "Content-Length"
    ] == "4"


async def test_a_pod_is_bound_once(api_server: ApiServer, raw: RawClient) -> None:
    body = _pod("a")
    del body["spec"]["nodeName"]
    await raw.ask("POST", PODS, body)
    binding = {"target": {"apiVersion": "v1", "kind": "Node", "name": "n1"}}
    assert [(await raw.ask("POST", f"{PODS}/a/binding", binding)).status for _ in range(2)] == [
        201,
        409,
    ]
    moved = await raw.ask("PATCH", f"{PODS}/a", {"spec": {"nodeName": "n2"}}, media=MERGE)
    assert moved.status == 422


async def test_as_a_process(short_tmp: Path) -> None:
    kubeconfig = short_tmp / "kubeconfig"
    arguments = ("-m", "tests.fakes.kubernetes", "--kubeconfig", str(kubeconfig))
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            await process.stdout.readline()
        async with RawClient(kubeconfig) as client:
            assert (
                await client.ask("POST", "/-/faults", {"status": 503, "times": 1, "verb": "list"})
            ).status == 200
            statuses = [(await client.ask("GET", PODS)).status for _ in range(2)]
            counts = (await client.ask("GET", "/-/requests")).body
        assert statuses == [503, 200]
        assert json.dumps(counts["verbs"]) == '{"list": 2}'
    finally:
        process.terminate()
        await process.wait()
