"""Knative's controllers as tests/fakes/knative restates them: what becomes of a Service, without
any node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from pilotlight.kubernetes.kinds import POD
from tests.fakes.knative.cluster import FakeKnative
from tests.fakes.knative.controllers import condition_of
from tests.fakes.kubernetes.raw import MERGE, RawClient

T = TypeVar("T")
Json = dict[str, Any]
SERVING, SCALING, NETWORKING = (
    "serving.knative.dev/v1",
    "autoscaling.internal.knative.dev/v1alpha1",
    "networking.internal.knative.dev/v1alpha1",
)
SERVICES = f"/apis/{SERVING}/namespaces/t/services"


async def until(look: Callable[[], T | None]) -> T:
    """Look until something true is seen."""
    async with asyncio.timeout(20):
        while not (seen := look()):
            await asyncio.sleep(0.01)
    return seen


def service(
    name: str = "f", revision: str = "f-1", *, initial: str = "0", concurrency: int = 1
) -> Json:
    """A Service with one revision, all traffic to it."""
    scaling = {
        "initial-scale": initial,
        "target": "1",
        "target-utilization-percentage": "100",
        "target-burst-capacity": "0",
        "window": "6s",
    }
    container = {
        "name": "user",
        "image": "registry.example/a:1",
        "ports": [{"name": "http1", "containerPort": 8080}],
        "startupProbe": {
            "httpGet": {"path": "/", "port": 8080},
            "periodSeconds": 1,
            "failureThreshold": 30,
        },
    }
    template = {
        "metadata": {
            "name": revision,
            "labels": {"x": "y"},
            "annotations": {f"autoscaling.knative.dev/{k}": v for k, v in scaling.items()},
        },
        "spec": {
            "containerConcurrency": concurrency,
            "timeoutSeconds": 30,
            "containers": [container],
        },
    }
    traffic = [{"revisionName": revision, "latestRevision": False, "percent": 100}]
    body = {"template": template, "traffic": traffic}
    return {
        "apiVersion": SERVING,
        "kind": "Service",
        "metadata": {"name": name, "namespace": "t"},
        "spec": body,
    }


@pytest.fixture
async def knative(short_tmp: Path, real_kubeconfig: Path | None) -> AsyncIterator[FakeKnative]:
    """Without nodes."""
    if real_kubeconfig is not None:
        pytest.skip("tests of the tests' own Knative")
    async with FakeKnative(short_tmp, nodes=0, speed=4, grace_s=1) as running:
        running.api.add_namespace("t")
        yield running


@pytest.fixture
async def raw(knative: FakeKnative) -> AsyncIterator[RawClient]:
    """Any path."""
    async with RawClient(knative.kubeconfig) as client:
        yield client


def _ready(knative: FakeKnative, kind: str, name: str, status: str = "True") -> Json | None:
    item = knative.api.get(SERVING, kind, name, "t")
    return item if condition_of(item, "Ready").get("status") == status else None


async def test_a_service_becomes_all_that_it_stands_for(
    knative: FakeKnative, raw: RawClient
) -> None:
    await raw.apply(f"{SERVICES}/f", service())
    made = await until(lambda: _ready(knative, "Service", "f"))
    assert made["status"]["traffic"] == [
        {"latestRevision": False, "percent": 100, "revisionName": "f-1"}
    ]
    assert made["status"]["observedGeneration"] == made["metadata"]["generation"]
    deployment = knative.api.get("apps/v1", "Deployment", "f-1-deployment", "t")
    assert deployment is not None
    assert (
        deployment["spec"]["replicas"],
        [c["name"] for c in deployment["spec"]["template"]["spec"]["containers"]],
    ) == (
        0,
        ["user", "queue-proxy"],
    )
    private = await until(lambda: knative.api.get("v1", "Service", "f-1-private", "t"))
    labels = private["metadata"]["labels"]
    assert (labels["networking.internal.knative.dev/serviceType"], labels["x"]) == ("Private", "y")
    scaler = knative.api.get(SCALING, "PodAutoscaler", "f-1", "t")
    assert scaler is not None
    assert condition_of(scaler, "Active")["reason"] == "NoTraffic"


async def test_a_revision_without_traffic_is_unreachable(
    knative: FakeKnative, raw: RawClient
) -> None:
    await raw.apply(f"{SERVICES}/f", service())
    await until(lambda: _ready(knative, "Service", "f"))
    await raw.apply(f"{SERVICES}/f", service(revision="f-2", concurrency=2))

    def reachability(name: str) -> str:
        return str(
            (knative.api.get(SCALING, "PodAutoscaler", name, "t") or {})
            .get("spec", {})
            .get("reachability")
        )

    await until(lambda: (reachability("f-1"), reachability("f-2")) == ("Unreachable", "Reachable"))
    old = knative.api.get(SERVING, "Revision", "f-1", "t")
    assert old is not None
    assert old["metadata"]["labels"]["serving.knative.dev/routingState"] == "reserve"


async def test_traffic_to_a_revision_that_is_not_there(
    knative: FakeKnative, raw: RawClient
) -> None:
    body = service()
    body["spec"]["traffic"][0]["revisionName"] = "f-0"
    await raw.apply(f"{SERVICES}/f", body)
    failed = await until(lambda: _ready(knative, "Service", "f", "False"))
    assert condition_of(failed, "RoutesReady")["reason"] == "RevisionMissing"


async def test_a_revision_whose_name_is_taken(knative: FakeKnative, raw: RawClient) -> None:
    other = {
        "metadata": {"name": "f-1"},
        "spec": {"containers": [{"image": "registry.example/other:1"}]},
    }
    await raw.ask("POST", f"/apis/{SERVING}/namespaces/t/revisions", other)
    await raw.apply(f"{SERVICES}/f", service())
    failed = await until(lambda: _ready(knative, "Service", "f", "False"))
    assert condition_of(failed, "ConfigurationsReady")["reason"] == "RevisionNameTaken"


async def test_a_revision_that_no_node_takes(knative: FakeKnative, raw: RawClient) -> None:
    await raw.apply(f"{SERVICES}/f", service(initial="1"))
    failed = await until(lambda: _ready(knative, "Revision", "f-1", "False"))
    assert condition_of(failed, "ResourcesAvailable")["reason"] == "Unschedulable"


async def test_pods_that_are_refused_are_told(knative: FakeKnative, raw: RawClient) -> None:
    quota = {"metadata": {"name": "plan"}, "spec": {"hard": {"pods": "0"}}}
    await raw.ask("POST", "/api/v1/namespaces/t/resourcequotas", quota)
    await raw.apply(f"{SERVICES}/f", service(initial="1"))

    def failure() -> str:
        return str(
            condition_of(
                knative.api.get("apps/v1", "Deployment", "f-1-deployment", "t"), "ReplicaFailure"
            ).get("message", "")
        )

    assert "exceeded quota: plan, requested: pods=1, used: pods=0, limited: pods=0" in await until(
        failure
    )
    await until(lambda: _ready(knative, "Revision", "f-1", "False"))


async def test_the_cheapest_pods_go_first(knative: FakeKnative, raw: RawClient) -> None:
    await raw.apply(f"{SERVICES}/f", {**service()})
    await until(lambda: _ready(knative, "Service", "f"))
    scale = "/apis/apps/v1/namespaces/t/deployments/f-1-deployment/scale"
    # KPA wants zero: without a PodAutoscaler it leaves the scale alone
    await raw.ask(
        "DELETE",
        f"/apis/{SCALING}/namespaces/t/podautoscalers/f-1",
        {"propagationPolicy": "Orphan"},
    )
    await raw.ask("PATCH", scale, {"spec": {"replicas": 3}}, media=MERGE)
    await until(lambda: len(knative.pods("t")) == 3)
    names = [pod["metadata"]["name"] for pod in knative.pods("t")]
    for name, cost in zip(names, ("100", "-100", "0"), strict=True):
        annotation = {
            "metadata": {"annotations": {"controller.kubernetes.io/pod-deletion-cost": cost}}
        }
        await raw.ask("PATCH", f"/api/v1/namespaces/t/pods/{name}", annotation, media=MERGE)
    cost = "controller.kubernetes.io/pod-deletion-cost"
    await until(
        lambda: all(
            cost in pod["metadata"].get("annotations", {}) for pod in knative.view.items(POD, "t")
        )
    )
    await raw.ask("PATCH", scale, {"spec": {"replicas": 1}}, media=MERGE)
    await until(lambda: len(knative.pods("t")) == 1)
    assert [pod["metadata"]["name"] for pod in knative.pods("t")] == names[:1]


async def test_a_deleted_service_takes_everything_along(
    knative: FakeKnative, raw: RawClient
) -> None:
    await raw.apply(f"{SERVICES}/f", service())
    await until(lambda: knative.api.get("v1", "Service", "f-1-private", "t"))
    await raw.ask("DELETE", f"{SERVICES}/f")
    kinds = (
        (SERVING, "Revision"),
        (SCALING, "PodAutoscaler"),
        (NETWORKING, "ServerlessService"),
        ("apps/v1", "Deployment"),
        ("v1", "Service"),
    )
    await until(lambda: not any(knative.api.list(version, kind, "t") for version, kind in kinds))
