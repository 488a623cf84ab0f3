"""The pool with the chart's rights and policies alone: what the leader does is allowed, and nobody
makes a pod of the pool another tenant's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pilotlight.kubernetes import kinds, names
from pilotlight.kubernetes.api_request import ApiRequest
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.doctor.checks import examine_cluster
from pilotlight.kubernetes.errors import Forbidden, Invalid
from pilotlight.kubernetes.kinds import DEPLOYMENT, POD, ROLE_BINDING, SECRET
from pilotlight.kubernetes.manifests.warm_pods import POOL_BINDING
from pilotlight.kubernetes.rbac import warm_role
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.spec.function import GIB, Resources
from tests.cluster.reconciler.conftest import RUNTIME, Bench
from tests.cluster.reconciler.warm.conftest import SMALL, PoolBench, labels_of
from tests.fakes.chart import Rendering, install_rights, render
from tests.fakes.fed_platform import spec

Json = dict[str, Any]
WARM = "pilotlight-warm"


@dataclass(kw_only=True)
class InstalledPool(PoolBench):
    """A pool whose leader is the chart's controller, and the other accounts of the cluster."""

    activator: Cluster
    admin: Cluster


@pytest.fixture(name="chart", scope="module")
def _chart() -> Rendering:
    shape = {"name": "small"}
    return render({"config.cluster.warm_pods": [shape], "config.cluster.runtime_image": RUNTIME})


@pytest.fixture(name="site")
async def _site(bench: Bench, chart: Rendering, tmp_path: Path) -> AsyncIterator[InstalledPool]:
    install_rights(chart, bench.server)
    settings = {}
    for account in ("pilotlight-controller", "pilotlight-activator"):
        token = bench.server.rights.add_account("pilotlight", account)
        file = bench.server.write_kubeconfig(tmp_path / account, token)
        settings[account] = ClusterSettings(
            kubeconfig=str(file), namespace="pilotlight", runtime_image=RUNTIME, warm_pods=[SMALL]
        )
    bench.settings = settings["pilotlight-controller"]
    admin = ClusterSettings(kubeconfig=str(bench.kubeconfig))
    async with contextlib.AsyncExitStack() as stack:
        others = [
            await stack.enter_async_context(await Cluster.connect(one))
            for one in (settings["pilotlight-activator"], admin)
        ]
        yield InstalledPool(
            bench=bench,
            namespace=WARM,
            shapes=(SMALL,),
            activator=others[0],
            admin=others[1],
        )


def refused(site: PoolBench) -> list[str]:
    """What clients asked for that they may not."""
    return [
        f"{one.verb} {one.resource} in {one.namespace}"
        for one in site.bench.server.requests
        if one.status in (403, 422)
    ]


async def test_the_leader_keeps_promotes_and_ends_with_the_charts_rights(
    site: InstalledPool,
) -> None:
    key = site.function(spec(resources=Resources(cpu=2, memory_bytes=2 * GIB)))
    async with site.running():
        site.add_pod("one")
        await site.until_known("one")
        promoting = asyncio.create_task(site.promote(key))
        await site.bench.until(lambda: site.resources("one")["limits"]["memory"] == "2Gi")
        site.allocate("one")
        found = await promoting
        assert labels_of(site.pod("one"))["promoted"] == "small"
        await site.pool.require_claimer().delete(
            namespace=found.namespace, name=found.name, uid=found.uid, reason="idle"
        )
        await site.bench.until(lambda: site.pods() == [])
        assert refused(site) == []
        report = await examine_cluster(site.bench.settings, role="controller")
        assert [one.state for one in report if one.what == "rights of controller"] == ["ok"]
        site.bench.server.requests.clear()
    site.shapes = ()
    async with site.running():
        await site.bench.until(lambda: _is_ending(site), "the namespace stays")
    assert refused(site) == []


async def test_an_activator_has_no_rights_there(site: InstalledPool) -> None:
    async with site.running():
        site.add_pod("one")
        promotion = {"metadata": {"labels": {names.TENANT: "t-1"}}}
        for work in (
            site.activator.patch(POD, "one", WARM, promotion),
            site.activator.delete(POD, "one", WARM),
        ):
            with pytest.raises(Forbidden):
                await work
        binding = site.bench.server.get(
            "rbac.authorization.k8s.io/v1", "RoleBinding", POOL_BINDING, WARM
        )
        assert binding is not None
        # nor by a binding by mistake, which the controller cannot make
        site.bench.server.put(_binding("pilotlight:pilotlight-activator:tenant", "activator"))
        with pytest.raises(Invalid, match="in tenants' namespaces only"):
            await site.activator.delete(POD, "one", WARM)
        async with await Cluster.connect(site.bench.settings) as controller:
            with pytest.raises(Invalid, match="only to itself"):
                await controller.apply(
                    _binding("pilotlight:pilotlight-activator:tenant", "activator", name="mine")
                )
            for deed in (
                ApiRequest(verb="list", kind=SECRET, namespace=WARM),
                ApiRequest(verb="create", kind=POD, namespace=WARM),
                ApiRequest(verb="create", kind=DEPLOYMENT, namespace="fn-acme"),
            ):
                assert not await controller.may(deed), deed


def _is_ending(site: PoolBench) -> bool:
    """Whether the namespace is gone, or waits for its last pod."""
    found = site.bench.server.get("v1", "Namespace", WARM)
    return found is None or "deletionTimestamp" in found["metadata"]


def _binding(role: str, account: str, *, name: str = "mistake") -> Json:
    who = {"kind": "ServiceAccount", "name": f"pilotlight-{account}", "namespace": "pilotlight"}
    return {
        "apiVersion": ROLE_BINDING.api_version,
        "kind": ROLE_BINDING.kind,
        "metadata": {"name": name, "namespace": WARM},
        "roleRef": {"apiGroup": ROLE_BINDING.group, "kind": "ClusterRole", "name": role},
        "subjects": [who],
    }


def _labels(**changed: str | None) -> Json:
    return {"metadata": {"labels": {f"{names.DOMAIN}/{k}": v for k, v in changed.items()}}}


async def test_a_promoted_pod_stays_what_it_was_promoted_to(site: InstalledPool) -> None:
    """Whoever asks: the controller itself, or an administrator."""
    key = site.function()
    async with site.running(), await Cluster.connect(site.bench.settings) as controller:
        site.add_pod("one")
        await site.until_known("one")
        await site.promote(key)
        before = site.pod("one")
        for patch in (
            _labels(tenant="t-other"),
            _labels(**{"function-id": None}),
            _labels(network="open2"),
            _labels(**{"warm-shape": "small"}),
            _labels(**{"warm-shape": "small", "promoted": None, "tenant": None}),
            {"metadata": {"annotations": {names.KEY: "f-2@v1"}}},
            {"metadata": {"annotations": {names.ATTEMPT: None}}},
        ):
            with pytest.raises(Invalid, match="stays what it was promoted to"):
                await controller.patch(POD, "one", WARM, patch)
            with pytest.raises(Invalid, match="the controller alone"):
                await site.admin.patch(POD, "one", WARM, patch)
        other = {"spec": {"containers": [{**before["spec"]["containers"][0], "image": "evil"}]}}
        for who in (controller, site.admin):
            with pytest.raises(Invalid, match="spec of a pod"):
                await who.patch(POD, "one", WARM, other)
        assert site.pod("one") == before
        await site.admin.patch(POD, "one", WARM, {"metadata": {"labels": {"theirs": "x"}}})


def _resources(site: PoolBench, changed: Json, *, container: str = "user") -> list[Json]:
    """A JSON patch that changes resources of a pod."""
    containers = site.pod("one")["spec"]["containers"]
    index = [one["name"] for one in containers].index(container)
    path = f"/spec/containers/{index}/resources"
    return [
        {"op": "add", "path": f"{path}/{kind}/{name}", "value": value}
        for kind, values in changed.items()
        for name, value in values.items()
    ]


async def test_only_the_controller_resizes_a_pod_and_only_a_promoted_one(
    site: InstalledPool,
) -> None:
    """CPU and memory of its launcher's container, as the function's own pods have them."""
    larger = {"requests": {"memory": "2Gi"}, "limits": {"memory": "2Gi"}}
    key = site.function()
    async with site.running(), await Cluster.connect(site.bench.settings) as controller:
        site.add_pod("one")
        await site.until_known("one")

        async def resize(who: Cluster, patch: list[Json]) -> None:
            await who.json_patch(POD, "one", WARM, patch, subresource="resize")

        with pytest.raises(Invalid, match="once it was promoted"):
            await resize(controller, _resources(site, larger))
        await site.promote(key)
        with pytest.raises(Invalid, match="the controller alone resizes"):
            await resize(site.admin, _resources(site, larger))
        with pytest.raises(Forbidden):
            await resize(site.activator, _resources(site, larger))
        restart = [{"resourceName": "memory", "restartPolicy": "RestartContainer"}]
        policy = {"op": "add", "path": "/spec/containers/0/resizePolicy", "value": restart}
        for patch, said in (
            (_resources(site, {"limits": {"memory": "2Gi"}}), "equal to its request"),
            (_resources(site, {"requests": {"memory": "512Mi"}}), "equal to its request"),
            ([policy], "without a restart"),
        ):
            with pytest.raises(Invalid, match=said):
                await resize(controller, patch)
        with pytest.raises(Invalid, match="pod updates may not change fields"):
            await controller.json_patch(POD, "one", WARM, _resources(site, larger))
        await resize(controller, _resources(site, larger))
        assert site.resources("one")["limits"]["memory"] == "2Gi"
        for namespace in ("default", "fn-acme"):
            deed = ApiRequest(verb="patch", kind=POD, namespace=namespace, subresource="resize")
            assert not await controller.may(deed)


async def test_a_container_that_a_webhook_put_beside_the_launchers_keeps_its_resources(
    site: InstalledPool,
) -> None:
    key = site.function()
    async with site.running(), await Cluster.connect(site.bench.settings) as controller:
        mesh = {"name": "mesh", "image": "mesh", "resources": {"requests": {"cpu": "10m"}}}
        site.add_pod("one", beside=[mesh])
        await site.until_known("one")
        await site.promote(key)
        patch = _resources(site, {"requests": {"cpu": "4"}}, container="mesh")
        with pytest.raises(Invalid, match="only the container of its launcher"):
            await controller.json_patch(POD, "one", WARM, patch, subresource="resize")


def test_the_controllers_role_is_the_one_that_the_chart_makes(
    chart: Rendering, tmp_path: Path
) -> None:
    settings = ClusterSettings(runtime_image=RUNTIME, warm_pods=[SMALL])
    assert chart.one("ClusterRole", ":warm")["metadata"]["name"] == warm_role(settings)
    assert not [one for one in render({}).of("ClusterRole") if "warm" in one["metadata"]["name"]]
    assert kinds.DEPLOYMENT.plural in str(chart.one("ClusterRole", ":warm")["rules"])
