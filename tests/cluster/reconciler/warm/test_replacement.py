"""The pool on a cluster whose Deployments and ReplicaSets work: a claimed pod is replaced, and stays
when its Deployment is rolled or goes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pilotlight.controller.database.change_notifier import ChangeNotifier
from pilotlight.kubernetes import names
from pilotlight.kubernetes.settings import ClusterSettings
from tests.cluster.reconciler.conftest import RUNTIME, Bench
from tests.cluster.reconciler.warm.conftest import NAMESPACE, SMALL, PoolBench
from tests.fakes.fed_platform import FedPlatform
from tests.fakes.knative.cluster import FakeKnative
from tests.fakes.small_serving import SmallServing

OTHER = "registry.example/runtime@sha256:" + "9" * 64


@pytest.fixture
async def site(
    short_tmp: Path, tmp_path: Path, real_kubeconfig: Path | None
) -> AsyncIterator[PoolBench]:
    """A pool of two pods, without nodes: the test is their kubelet."""
    if real_kubeconfig is not None:
        pytest.skip("reads behind the API: not on a real cluster")
    platform = FedPlatform(tmp_path, notifier=ChangeNotifier())
    async with FakeKnative(short_tmp, nodes=0) as knative:
        bench = Bench(
            server=knative.api,
            serving=SmallServing(knative.api),
            platform=platform,
            kubeconfig=knative.kubeconfig,
            settings=ClusterSettings(
                kubeconfig=str(knative.kubeconfig), runtime_image=RUNTIME, namespace="default"
            ),
        )
        yield PoolBench(bench=bench, shapes=(replace(SMALL, min_pods=2),))
    platform.close()


def pods(site: PoolBench, image: str = RUNTIME) -> list[dict[str, Any]]:
    """Those with that image that are not being deleted."""
    return [
        pod
        for pod in site.bench.server.list("v1", "Pod", NAMESPACE)
        if pod["spec"]["containers"][0]["image"] == image
        and not pod["metadata"].get("deletionTimestamp")
    ]


def make_ready(site: PoolBench, pod: dict[str, Any]) -> str:
    """As a scheduler and a kubelet; returns its name."""
    status = {
        "phase": "Running",
        "podIP": "10.1.0.7",
        "conditions": [{"type": "Ready", "status": "True"}],
    }
    spec = {**pod["spec"], "nodeName": "node-1"}
    site.bench.server.put({**pod, "spec": spec, "status": status})
    return str(pod["metadata"]["name"])


async def test_a_claimed_pod_is_replaced_without_a_write_of_ours_and_outlives_its_deployment(
    site: PoolBench,
) -> None:
    key = site.function()
    async with site.running():
        await site.bench.until(lambda: len(pods(site)) == 2)
        name = make_ready(site, pods(site)[0])
        await site.until_known(name)
        await site.bench.until(lambda: site.pool.shapes[0].warm == 1)
        found = await site.promote(key)
        assert found.name == name
        await site.bench.until(lambda: len(pods(site)) == 3, "not replaced")
        assert site.pool.shapes[0].wanted == 2
    # a new runtime image: warm pods are rolled, the promoted one is nobody's but the function's
    site.bench.settings = replace(site.bench.settings, runtime_image=OTHER)
    async with site.running():
        await site.bench.until(lambda: len(pods(site, OTHER)) == 2, "not rolled")
        for pod in pods(site, OTHER):
            make_ready(site, pod)
        await site.bench.until(lambda: [one["metadata"]["name"] for one in pods(site)] == [name])
    site.shapes = (replace(SMALL, name="other"),)
    async with site.running():
        await site.bench.until(
            lambda: all(
                one["metadata"]["labels"].get(names.WARM_SHAPE, "other") == "other"
                for one in (*pods(site), *pods(site, OTHER))
            )
        )
        assert [one["metadata"]["name"] for one in pods(site)] == [name]
