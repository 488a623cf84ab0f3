"""Promoted pods get the size of their functions: in the background where they are large enough,
before they are handed out where they are not; and what happens where the cluster cannot."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from pilotlight.controller.kubernetes.warm import resizing
from pilotlight.controller.kubernetes.warm.status import NoWarmPod
from pilotlight.kubernetes.manifests.pod import pod_spec
from pilotlight.kubernetes.manifests.revisions import RevisionOf
from pilotlight.spec.function import GIB, MIB, FunctionSpec, Resources
from pilotlight.spec.instances.scaling import Scaling
from tests.cluster.reconciler.warm.conftest import H100, LARGE, SMALL, PoolBench
from tests.fakes.fed_platform import ACME, spec
from tests.fakes.kubernetes.faults import Fault

LESS = spec(resources=Resources(cpu=0.5, memory_bytes=700 * MIB))
MORE = spec(resources=Resources(cpu=2, memory_bytes=3 * GIB))
NO_LARGE = (SMALL, H100)


def writes(site: PoolBench) -> list[str]:
    """What was written to pods."""
    return [
        "/".join(filter(None, (one.verb, one.subresource)))
        for one in site.bench.server.requests
        if one.resource == "pods" and one.verb not in ("get", "list", "watch")
    ]


def own_resources(site: PoolBench, made: FunctionSpec) -> object:
    """What the pods of the function's Knative revision ask for."""
    reconciler = site.bench.reconciler
    assert reconciler is not None
    (route,) = reconciler.state.functions.values()
    tenancy = reconciler.state.tenancy(ACME.id, "main")
    assert tenancy is not None
    launch = RevisionOf.of(route, tenancy, next(iter(route.revisions))).launch
    return pod_spec(made, launch, tenancy, config_map="c")["containers"][0]["resources"]


async def test_a_pod_that_is_too_large_is_handed_out_at_once_and_shrinks(site: PoolBench) -> None:
    key = site.function(LESS)
    async with site.running():
        site.add_pod("one")
        await site.until_known("one")
        found = await site.promote(key)
        assert found.name == "one"
        await site.bench.until(lambda: site.resizes["shrunk"])
        assert site.resources("one") == own_resources(site, LESS)
        assert await site.promote(key) == found
    assert writes(site) == ["patch", "patch/resize"]


async def test_a_pod_keeps_room_for_as_many_instances_as_its_shape_says(site: PoolBench) -> None:
    made = spec(resources=Resources(cpu=0.2, memory_bytes=200 * MIB))
    key, other = site.function(made), site.function(replace(made, name="other"))
    async with site.running():
        site.add_pod("one")
        await site.until_known("one")
        await site.promote(key)
        await site.bench.until(lambda: site.resizes["shrunk"])
        assert site.resources("one") == {
            "requests": {"cpu": "1", "memory": "1000Mi"},
            "limits": {"memory": "1000Mi"},
        }
    site.shapes = (replace(SMALL, instances=1), LARGE, H100)
    async with site.running():
        site.add_pod("two")
        await site.until_known("one", "two")
        await site.promote(other, "i-2")
        await site.bench.until(lambda: site.resizes["shrunk"] == 2)
        assert site.resources("two")["requests"] == {"cpu": "200m", "memory": "200Mi"}


async def test_a_pod_that_is_too_small_is_handed_out_once_its_node_has_set_the_size_aside(
    site: PoolBench,
) -> None:
    site.shapes = NO_LARGE
    key = site.function(MORE)
    async with site.running():
        site.add_pod("one")
        await site.until_known("one")
        promoting = asyncio.create_task(site.promote(key))
        await site.bench.until(lambda: "patch/resize" in writes(site))
        assert site.resources("one") == own_resources(site, MORE)
        await asyncio.sleep(0.05)
        assert not promoting.done()
        site.allocate("one")
        assert (await promoting).name == "one"
    async with site.running():  # the next leader finds it as it is
        await site.until_known("one")
        assert (await site.promote(key)).name == "one"
    assert writes(site) == ["patch", "patch/resize"]
    assert site.resizes["grown"] == 2


async def test_a_leader_resizes_what_another_one_claimed_before_it_ended(
    site: PoolBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.shapes = NO_LARGE
    monkeypatch.setattr(resizing, "GROW_S", 0.2)
    key = site.function(MORE)
    async with site.running():
        site.add_pod("one")
        await site.until_known("one")
        hanging = site.bench.server.faults.add(Fault(path="/resize", hang=True))
        promoting = asyncio.create_task(site.promote(key))
        await site.bench.until(lambda: "patch/resize" in writes(site))
        site.bench.may_write = False
        with pytest.raises(NoWarmPod):
            await promoting
    site.bench.server.faults.remove(hanging)
    site.bench.may_write = True
    monkeypatch.undo()
    async with site.running():
        await site.until_known("one")
        promoting = asyncio.create_task(site.promote(key))
        await site.bench.until(lambda: site.resources("one") == own_resources(site, MORE))
        site.allocate("one")
        assert (await promoting).name == "one"


@pytest.mark.parametrize("reason", ["Deferred", "Infeasible", ""])
async def test_a_pod_that_does_not_grow_is_deleted_and_its_node_left_alone_for_a_while(
    site: PoolBench,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`""`: its kubelet says nothing."""
    site.shapes = NO_LARGE
    key, fits = site.function(MORE), site.function(spec("fits"))
    async with site.running() as warm:
        for name, node in (("a", "node-1"), ("b", "node-1"), ("c", "node-2")):
            site.add_pod(name, node=node)
        await site.until_known("a", "b", "c")
        promoting = asyncio.create_task(site.promote(key))
        await site.bench.until(lambda: "patch/resize" in writes(site))
        if reason:
            site.refuse("a", reason)
        with pytest.raises(NoWarmPod, match="does not grow to 2 CPU") as refused:
            await promoting
        assert refused.value.detail["reason"] == "not-resized"
        assert writes(site) == ["patch", "patch/resize", "delete"]
        promoting = asyncio.create_task(site.promote(key, "i-2"))
        await site.bench.until(lambda: writes(site).count("patch/resize") == 2)
        site.allocate("c")
        assert (await promoting).name == "c", "of the other node"
        with pytest.raises(NoWarmPod, match="is ready"):
            await site.promote(key, "i-3")
        # who fits as it is gets the other pod of that node
        assert (await site.promote(fits, "i-4")).name == "b"
        assert "node-1 do not grow" in warm.resizer.trouble()
        await site.bench.until(lambda: "node-1 do not grow" in site.pool.trouble)
    outcome = reason.lower() or "unanswered"
    assert site.resizes == {outcome: 1, "grown": 1}
    assert caplog.text.count("event=pod_not_grown") == 1


@pytest.mark.parametrize("status", [404, 403, 422], ids=["old", "rights", "policy"])
async def test_where_the_cluster_does_not_resize_pods_only_those_that_suffice_are_used(
    site: PoolBench, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    less = site.function(replace(LESS, name="less", scaling=Scaling(max_instances=9)))
    more = site.function(MORE)
    site.shapes = NO_LARGE
    async with site.running() as warm:
        pods = [f"p{number}" for number in range(5)]
        for name in pods:
            site.add_pod(name)
        await site.until_known(*pods)
        site.bench.server.faults.add(Fault(path="/resize", status=status, message="no"))
        with pytest.raises(NoWarmPod) as refused:
            await site.promote(more, "m-1")
        assert refused.value.detail["reason"] == "not-resized"
        with pytest.raises(NoWarmPod) as refused:
            await site.promote(more, "m-2")
        assert refused.value.detail["reason"] == "no-shape", "it costs one pod, not each time one"
        await site.promote(less, "l-1")
        await site.bench.until(lambda: site.resizes["refused"] == 2)
        for number in range(2, 4):
            await site.promote(less, f"l-{number}")
        await asyncio.sleep(0.05)
        assert writes(site).count("patch/resize") == 2
        assert site.resources("p1") == site.resources("p4")
        assert "pods do not grow: " in warm.resizer.trouble()
        assert "pods do not shrink: " in warm.resizer.trouble()
    assert caplog.text.count("event=resize_refused") == 2
    assert site.pool.trouble == "", "it leads no more"


async def test_a_start_whose_first_claim_was_lost_makes_no_fourth_write(site: PoolBench) -> None:
    key = site.function(LESS)
    async with site.running():
        site.add_pod("one")
        site.add_pod("two")
        await site.until_known("one", "two")
        site.bench.server.faults.add(
            Fault(verb="patch", resource="pods", status=422, message="no", times=1)
        )
        found = await site.promote(key)
        assert found.name == "two"
        await asyncio.sleep(0.05)
        assert writes(site) == ["patch", "patch"]
        assert site.resources("two")["requests"] == {"cpu": "1", "memory": "1Gi"}


async def test_a_function_of_gpus_gets_its_cpu_and_memory_and_never_other_gpus(
    site: PoolBench,
) -> None:
    made = spec(resources=Resources(cpu=2, memory_bytes=16 * GIB, gpu=("H100",), gpu_count=1))
    two = replace(made, name="two", resources=replace(made.resources, gpu_count=2))
    key, of_two = site.function(made), site.function(two)
    async with site.running():
        site.add_pod("h", H100)
        site.add_pod("l", LARGE)
        await site.until_known("h", "l")
        assert (await site.promote(key)).name == "h"
        await site.bench.until(lambda: site.resizes["shrunk"])
        given = site.resources("h")
        assert (given["requests"]["cpu"], given["limits"]["memory"]) == ("2", "16Gi")
        assert given["limits"]["nvidia.com/gpu"] == "1"
        with pytest.raises(NoWarmPod, match="no shape"):
            await site.promote(of_two, "i-2")
