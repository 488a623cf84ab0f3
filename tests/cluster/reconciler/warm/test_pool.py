"""The pool's objects and their number, and what is deleted of promoted pods."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace

import pytest

from pilotlight.controller.kubernetes.warm.pool import WarmPool
from pilotlight.controller.kubernetes.warm.status import PoolShape
from pilotlight.errors import Conflict
from pilotlight.kubernetes import names
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.kinds import NAMESPACE as NAMESPACES
from pilotlight.kubernetes.manifests.warm_pods import pool_manifests
from pilotlight.spec.function import Clocks
from tests.cluster.reconciler.warm.conftest import LARGE, NAMESPACE, SMALL, PoolBench
from tests.fakes.fed_platform import ACME, spec


async def test_the_leader_makes_the_pool_and_writes_nothing_more(site: PoolBench) -> None:
    async with site.running():
        assert site.deployed() == {"small": 1, "large": 0, "h100": 1}
        made = {
            (one["kind"], one["metadata"]["name"])
            for one in pool_manifests(site.settings, platform=site.bench.platform.identity().id)
        }
        for kind, name in made:
            version = {"RoleBinding": "rbac.authorization.k8s.io/v1"}.get(kind, "v1")
            version = "networking.k8s.io/v1" if kind == "NetworkPolicy" else version
            where = "" if kind == "Namespace" else NAMESPACE
            assert site.bench.server.get(version, kind, name, where) is not None, (kind, name)
        before = site.bench.server.requests.writes()
        site.add_pod("one")
        site.add_pod("two", ready=False)
        await site.bench.until(lambda: site.pool.shapes[0].starting == 1)
        assert site.bench.server.requests.writes() == before
        assert site.pool.shapes[0] == PoolShape(
            shape="small", wanted=1, warm=1, starting=1, promoted=0
        )
    assert site.pool.claimer is None
    async with site.running():  # the next leader
        assert site.bench.server.requests.writes() == before


async def test_what_somebody_changes_is_put_right_and_a_shape_that_is_gone_is_removed(
    site: PoolBench,
) -> None:
    async with site.running():
        found = site.bench.server.get("apps/v1", "Deployment", "small", NAMESPACE)
        assert found is not None
        site.bench.server.put({**found, "spec": {**found["spec"], "replicas": 50}})
        await site.bench.until(lambda: site.deployed()["small"] == 1)
    site.shapes = (replace(SMALL, cpu=0.5), LARGE)
    async with site.running():
        await site.bench.until(lambda: set(site.deployed()) == {"small", "large"})
        found = site.bench.server.get("apps/v1", "Deployment", "small", NAMESPACE)
        assert found is not None
        (container,) = found["spec"]["template"]["spec"]["containers"]
        assert container["resources"]["requests"]["cpu"] == "500m"


async def test_without_shapes_the_namespace_goes(site: PoolBench) -> None:
    async with site.running():
        assert site.deployed()
    site.shapes = ()
    async with site.running():
        await site.bench.until(
            lambda: site.bench.server.get("v1", "Namespace", NAMESPACE) is None, "still there"
        )


async def test_while_another_platforms_objects_are_there_nothing_is_made_or_claimed(
    site: PoolBench,
) -> None:
    settings, other = site.settings, "p-00000000000000bb"
    for manifest in pool_manifests(settings, platform=other):
        if manifest["kind"] == NAMESPACES.kind:
            site.bench.server.put(manifest)
    site.bench.settings = settings
    async with site.bench.running() as reconciler, await Cluster.connect(settings) as cluster:
        await site.bench.until(lambda: site.bench.statuses.ownership is not None)
        pool = WarmPool(cluster, reconciler, nodes=site.nodes, pool=site.pool)
        await pool.update()
        assert not site.deployed()
        assert not pool.is_leading()


async def test_the_number_follows_recent_starts_and_the_next_leader_knows_them(
    site: PoolBench,
) -> None:
    key = site.function()
    async with site.running():
        for number in range(3):
            site.add_pod(f"p{number}")
        await site.until_known("p0", "p1", "p2")
        for number in range(3):
            await site.promote(key, f"i-{number}")
        await site.bench.until(lambda: site.deployed()["small"] == 3)
    async with site.running():
        assert site.deployed()["small"] == 3
        site.bench.wall_s += 3600
        site.add_pod("p3")  # any change, and time alone after some seconds
        await site.bench.until(lambda: site.deployed()["small"] == 1)


# -- what is deleted -------------------------------------------------------------------------------
async def promoted(site: PoolBench) -> str:
    key = site.function(spec(clocks=Clocks(startup_s=60, execution_s=60)))
    site.add_pod("one")
    await site.until_known("one")
    await site.promote(key)
    return key


@pytest.mark.parametrize(
    "status",
    [
        {"phase": "Failed"},
        {
            "containerStatuses": [
                {"name": "user", "restartCount": 1, "image": "i", "imageID": "i", "ready": True}
            ]
        },
    ],
    ids=["ended", "restarted"],
)
async def test_a_promoted_pod_whose_container_ended_goes(
    site: PoolBench, status: dict[str, object]
) -> None:
    async with site.running():
        await promoted(site)
        site.set_status("one", **status)
        await site.bench.until(lambda: site.pods() == [])


async def test_a_promoted_pod_stays_while_its_revision_does(site: PoolBench) -> None:
    async with site.running():
        await promoted(site)
        await site.bench.until_quiet()
        assert site.pods() == ["one"]
        site.bench.platform.no_function(f"{ACME.id}/main/search/embed")
        assert site.bench.reconciler is not None
        state = site.bench.reconciler.state
        await site.bench.until(lambda: not state.functions)
        site.add_pod("two")  # any change, and time alone after some seconds
        await site.bench.until(lambda: site.pods() == ["two"])


async def test_promoted_pods_go_with_their_tenant(site: PoolBench) -> None:
    async with site.running():
        await promoted(site)
        site.bench.platform.no_tenant()
        assert site.bench.reconciler is not None
        state = site.bench.reconciler.state
        await site.bench.until(lambda: not state.tenants)
        site.add_pod("two")  # any change, and time alone after some seconds
        await site.bench.until(lambda: site.pods() == ["two"])


async def test_a_promoted_pod_that_is_not_ready_after_its_startup_goes(site: PoolBench) -> None:
    async with site.running():
        await promoted(site)
        site.set_status("one", conditions=[{"type": "Ready", "status": "False"}])
        await site.bench.until_quiet()
        assert site.pods() == ["one"]
        at = dt.datetime.fromisoformat(
            site.pod("one")["metadata"]["annotations"][names.PROMOTED_AT]
        )
        assert at.timestamp() == site.bench.wall_s
        site.bench.wall_s += 91
        site.set_status("one", conditions=[{"type": "Ready", "status": "False", "reason": "x"}])
        await site.bench.until(lambda: site.pods() == [])


async def test_a_warm_pod_whose_container_was_restarted_is_replaced_once_it_runs(
    site: PoolBench,
) -> None:
    """A promoted one whose container was restarted must not be taken for one that never was."""
    once = {"name": "user", "restartCount": 1, "image": "i", "imageID": "i", "ready": False}
    async with site.running():
        site.add_pod("one", ready=False)
        site.set_status("one", containerStatuses=[once])
        await site.bench.until(lambda: site.pool.shapes[0].starting == 0)
        assert site.pods() == ["one"]
        site.set_status("one", conditions=[{"type": "Ready", "status": "True"}])
        await site.bench.until(lambda: site.pods() == [])


async def test_an_activator_ends_promoted_pods_and_no_others(site: PoolBench) -> None:
    async with site.running():
        await promoted(site)
        site.add_pod("two")
        await site.until_known("one", "two")
        end = site.pool.require_claimer().delete
        two = site.pod("two")["metadata"]["uid"]
        with pytest.raises(Conflict, match="not promoted"):
            await end(namespace=NAMESPACE, name="two", uid=two, reason="idle")
        with pytest.raises(Conflict, match="in namespace default-warm only"):
            await end(namespace="kube-system", name="one", uid="u", reason="idle")
        await end(namespace=NAMESPACE, name="one", uid="another", reason="idle")
        assert site.pods() == ["one", "two"]
        for _ in range(2):
            await end(namespace=NAMESPACE, name="one", uid=site.uid_of("one"), reason="idle")
        await site.bench.until(lambda: site.pods() == ["two"])
