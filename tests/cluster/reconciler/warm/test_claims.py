"""Claims of warm pods: one pod for one start, whoever asks at once, and as few writes as that
takes."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from pilotlight.controller.kubernetes.warm import claims
from pilotlight.controller.kubernetes.warm.status import NoWarmPod, PromotedPod
from pilotlight.errors import Conflict, NotFound, Unavailable
from pilotlight.kubernetes import names
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.kinds import POD
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.spec.engines import EngineSpec
from pilotlight.spec.function import (
    GIB,
    FunctionKind,
    FunctionSpec,
    MethodSpec,
    Resources,
    WeightsSpec,
)
from pilotlight.spec.instances.scaling import Scaling
from snapshotter.types import LaunchSpec
from tests.cluster.reconciler.warm.conftest import H100, LARGE, NAMESPACE, PoolBench, labels_of
from tests.fakes.fed_platform import ACME, spec
from tests.fakes.kubernetes.faults import Fault
from tests.fakes.node_reports import node_report

MODEL = spec(
    "chat",
    kind=FunctionKind.ENGINE,
    module="",
    qualname="",
    methods=(MethodSpec(name="", is_generator=True),),
    weights=(WeightsSpec(name="model", manifest="ab" * 32),),
    engine=EngineSpec(model="model", max_model_len=8192, max_num_seqs=64),
)
MANY = spec(scaling=Scaling(max_instances=100))
UNLIMITED = replace(ACME, plan={})


def writes(site: PoolBench) -> list[str]:
    """What was written to pods."""
    return [
        one.verb
        for one in site.bench.server.requests
        if one.resource == "pods" and one.verb not in ("get", "list", "watch")
    ]


async def test_a_claimed_pod_is_the_revisions_by_one_write(site: PoolBench) -> None:
    key = site.function()
    async with site.running():
        before = site.add_pod("one")
        await site.until_known("one")
        found = await site.promote(key)
        again = await site.promote(key)
        assert found == again
        after = site.pod("one")
        assert writes(site) == ["patch"]
        await site.pool.require_claimer().delete(
            namespace=found.namespace, name=found.name, uid=found.uid, reason="idle"
        )
        assert len(writes(site)) == 2
    assert (found.namespace, found.name, found.ip, found.node) == (
        NAMESPACE,
        "one",
        "10.1.0.7",
        "node-1",
    )
    assert labels_of(after) == {
        "managed-by": "default.pilotlight",
        "platform": site.bench.platform.identity().id,
        "promoted": "small",
        "tenant": ACME.id,
        "environment": "main",
        "app": "search",
        "function": "embed",
        "function-id": key.partition("@")[0],
        "revision": "v1-000001",
        "network": "open",
    }
    said = after["metadata"]["annotations"]
    assert (said[names.KEY], said[names.ATTEMPT]) == (key, "i-1")
    assert "ownerReferences" not in after["metadata"], "a rollout must not take it along"
    assert before["spec"] == after["spec"]


async def test_the_launch_document_is_for_that_pod_alone(site: PoolBench) -> None:
    key = site.function()
    async with site.running():
        site.add_pod("one")
        await site.until_known("one")
        found = await site.promote(key)
        launch = LaunchSpec.from_json(json.loads(json.dumps(found.launch)))
        assert site.bench.reconciler is not None
        tenancy = site.bench.reconciler.state.tenancy(ACME.id, "main")
    assert tenancy is not None
    assert tenancy.grants is not None
    assert tenancy.grants.verify(launch)
    assert (launch.uid, launch.labels["pod"], launch.trust_domain) == (64000, found.uid, ACME.id)
    moved = replace(launch, labels={**launch.labels, "pod": "another"})
    assert not tenancy.grants.verify(moved)


async def test_of_many_starts_at_once_none_shares_a_pod(site: PoolBench) -> None:
    """Of each start two requests, as of an activator that asks again."""
    key = site.function(MANY, tenant=UNLIMITED)
    async with site.running():
        pods = [f"p{number}" for number in range(10)]
        for name in pods:
            site.add_pod(name)
        await site.until_known(*pods)
        asked = [f"i-{number}" for number in range(30)] * 2
        found = await asyncio.gather(
            *(site.promote(key, attempt) for attempt in asked), return_exceptions=True
        )
    got = {
        attempt: one.uid
        for attempt, one in zip(asked, found, strict=True)
        if isinstance(one, PromotedPod)
    }
    assert len(got) == len(set(got.values())) == 10
    refused = [one for one in found if isinstance(one, NoWarmPod)]
    assert len(refused) == 40
    assert {one.detail["reason"] for one in refused} == {"empty"}
    assert writes(site) == ["patch"] * 10
    assert site.warm is not None
    assert len(site.warm.starts.of("small")) == 30, "starts without a pod count, each once"


async def test_two_leaders_never_claim_the_same_pod(site: PoolBench) -> None:
    """One that was stopped for longer than its lease, and believes that it leads."""
    key = site.function(MANY, tenant=UNLIMITED)
    other = site.twin()
    async with site.running(), other.running():  # each with its own informers
        pods = [f"p{number}" for number in range(12)]
        for name in pods:
            site.add_pod(name)
        await site.until_known(*pods)
        await other.until_known(*pods)
        found = await asyncio.gather(
            *(
                one.promote(key, f"i-{who}-{number}")
                for number in range(12)
                for who, one in enumerate((site, other))
            ),
            return_exceptions=True,
        )
    got = Counter(one.uid for one in found if isinstance(one, PromotedPod))
    assert got
    assert set(got.values()) == {1}
    assert all(isinstance(one, PromotedPod | NoWarmPod) for one in found)


async def test_an_answer_that_was_lost_is_found_again(site: PoolBench) -> None:
    key = site.function()
    async with site.running():
        site.add_pod("one")
        site.add_pod("two")
        await site.until_known("one", "two")
        site.bench.server.faults.add(
            Fault(verb="patch", resource="pods", reset=True, after=True, times=1)
        )
        first = await site.promote(key)
    async with site.running():  # by the next leader
        await site.until_known("one", "two")
        assert await site.promote(key) == first
    assert names.PROMOTED not in site.pod("two")["metadata"]["labels"]


async def test_a_pod_that_is_deleted_at_the_moment_of_its_claim_is_not_given(
    site: PoolBench,
) -> None:
    """A ReplicaSet makes itself smaller; the leader has not seen it yet."""
    key = site.function()
    async with site.running() as warm:
        for name in ("one", "two"):
            site.add_pod(name)
        await site.until_known("one", "two")
        site.bench.server.faults.add(Fault(verb="patch", resource="pods", delay_s=0.3, times=1))
        async with await Cluster.connect(
            ClusterSettings(kubeconfig=str(site.bench.kubeconfig))
        ) as admin:
            found, _ = await asyncio.gather(
                site.promote(key), admin.delete(POD, "one", NAMESPACE, grace_s=30)
            )
        assert found.name == "two"
        await site.bench.until(lambda: warm.cache.of_attempt("i-1") is not None)
        assert await site.promote(key) == found


async def test_a_pod_that_failed_for_the_caller_is_not_given_again(site: PoolBench) -> None:
    key = site.function()
    async with site.running():
        for name in ("one", "two"):
            site.add_pod(name)
        await site.until_known("one", "two")
        first = await site.promote(key)
        second = await site.promote(key, exclude=(first.uid,))
        assert first.uid != second.uid


async def test_the_smallest_shape_that_fits_and_the_node_with_snapshot_and_weights(
    site: PoolBench,
) -> None:
    key = site.function()
    site.nodes.take(node_report("node-2", revisions=[key]), now=site.bench.wall_s)
    async with site.running():
        site.add_pod("a-large", LARGE, node="node-2")
        site.add_pod("b-small", node="node-1")
        site.add_pod("c-small", node="node-2")
        site.add_pod("d-small", node="node-2", ready=False)
        site.add_pod("e-h100", H100, node="node-2")
        await site.until_known("a-large", "b-small", "c-small", "d-small", "e-h100")
        found = [(await site.promote(key, f"i-{number}")).name for number in range(3)]
        assert found == ["c-small", "b-small", "a-large"]
        with pytest.raises(NoWarmPod, match="no warm pod of small, large is ready; 1 start") as e:
            await site.promote(key, "i-4")
    assert e.value.retry_after_s


async def refusal(site: PoolBench, key: str, attempt: str) -> NoWarmPod | None:
    """Why a start got no pod; None if it got one."""
    try:
        await site.promote(key, attempt)
    except NoWarmPod as e:
        return e
    return None


HAVING_IMAGE = spec(image="d" * 64, container_image=f"r.example/fn/{ACME.id}@sha256:{'1' * 64}")


@pytest.mark.parametrize(
    "made, there, elsewhere",
    [
        (MODEL, {"engines": ["vllm"]}, {"engines": ["another"]}),
        (MODEL, {"revisions": ["KEY"]}, {"engines": ["another"]}),
        (HAVING_IMAGE, {"images": [f"{ACME.id}/{'1' * 64}"]}, {"images": [f"t-other/{'1' * 64}"]}),
    ],
    ids=["engine", "engine with a snapshot", "image"],
)
async def test_a_function_with_an_environment_of_its_own_gets_a_pod_where_that_is(
    site: PoolBench, made: FunctionSpec, there: dict[str, Any], elsewhere: dict[str, Any]
) -> None:
    site.bench.settings = replace(site.bench.settings, restore_into_pods=True)
    key = site.function(made)
    has = {name: [key if one == "KEY" else one for one in ones] for name, ones in there.items()}
    async with site.running():
        for name in ("one", "two", "three"):
            site.add_pod(name, node=f"node-{name}")
        await site.until_known("one", "two", "three")
        site.nodes.take(node_report("node-one", **elsewhere), now=site.bench.wall_s)
        refused = await refusal(site, key, "i-0")
        assert refused is not None
        assert refused.detail["reason"] == ("image" if made.image else "engine")
        site.nodes.take(node_report("node-two", **has), now=site.bench.wall_s)
        found = await site.promote(key, "i-1")
        assert found.name == "two"
        assert LaunchSpec.from_json(found.launch).container_image == made.container_image
        gone = await refusal(site, key, "i-2")
        assert gone is not None, "the other nodes still do not have it"


@pytest.mark.parametrize(
    "made, plan, said, reason",
    [
        (spec(resources=Resources(memory_bytes=33 * GIB)), {}, "no shape", "no-shape"),
        (spec(resources=Resources(gpu=("L4",), gpu_count=1)), {}, "no shape", "no-shape"),
        (spec(scaling=Scaling(max_instances=1)), {}, "max_instances = 1", "max-instances"),
        (spec(), {"instances": 1}, "1 instances, 2 pods", "quota"),
        (spec(), {"isolation": "dedicated"}, "nodes of its own", "isolation"),
        (HAVING_IMAGE, {}, "cluster.restore_into_pods", "image"),
        (spec(env={"A": "x" * 200_000}), {}, "its launch document has 4", "document"),
        (MODEL, {}, "cluster.restore_into_pods", "engine"),
        (
            spec(resources=Resources(gpu=("H100",), gpu_count=1)),
            {"gpus": 0},
            "0 GPUs",
            "quota",
        ),
    ],
    ids=[
        "memory",
        "gpu",
        "max-instances",
        "instances",
        "dedicated",
        "image",
        "document",
        "engine",
        "gpus",
    ],
)
async def test_what_does_not_fit_or_exceeds_the_plan_is_refused_with_the_reason(
    site: PoolBench, made: FunctionSpec, plan: dict[str, object], said: str, reason: str
) -> None:
    key = site.function(made, tenant=replace(ACME, plan=plan))
    async with site.running():
        for name in ("one", "two", "three"):
            site.add_pod(name)
        site.add_pod("h", H100)
        site.own_pod("fn-acme")
        await site.until_known("one", "two", "three", "h")
        found = [await refusal(site, key, f"i-{number}") for number in range(3)]
    (refused, *_) = [one for one in found if one is not None]
    assert said in str(refused)
    assert refused.detail["reason"] == reason


async def test_revisions_of_others_and_of_nobody_get_no_pod(site: PoolBench) -> None:
    key = site.function()
    async with site.running():
        site.add_pod("one")
        await site.until_known("one")
        for tenant, revision in ((ACME.id, "f-1@v1"), ("t-other", key), (ACME.id, f"{key}0")):
            with pytest.raises(NotFound):
                await site.promote(revision, tenant=tenant)
        await site.promote(key)
        other = site.function(spec("other"))
        await site.until_known("one")
        with pytest.raises(Conflict, match="a start of"):
            await site.promote(other)
    assert writes(site) == ["patch"]


async def test_who_does_not_lead_claims_nothing(site: PoolBench) -> None:
    key = site.function()
    async with site.running():
        site.add_pod("one")
        await site.until_known("one")
        site.bench.may_write = False
        with pytest.raises(Unavailable) as refused:
            await site.promote(key)
        assert refused.value.retry_after_s
    with pytest.raises(Unavailable):
        await site.promote(key)
    assert not writes(site)


async def test_a_claim_that_the_cluster_refuses_or_does_not_answer_says_so(site: PoolBench) -> None:
    key = site.function()
    async with site.running():
        site.add_pod("one")
        await site.until_known("one")
        site.bench.server.rights.deny("patch", "pods")
        with pytest.raises(Unavailable, match="does not answer or refuses") as refused:
            await site.promote(key)
        assert not refused.value.detail["may_be_done"]


async def test_an_api_server_that_does_not_answer_costs_a_start_no_more_than_its_deadline(
    site: PoolBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It carried the claim out: the start finds its pod when it asks again."""
    monkeypatch.setattr(claims, "CLAIM_S", 0.2)
    key = site.function()
    async with site.running() as warm:
        for name in ("one", "two"):
            site.add_pod(name)
        await site.until_known("one", "two")
        site.bench.server.faults.add(
            Fault(verb="patch", resource="pods", hang=True, after=True, times=1)
        )
        with pytest.raises(Unavailable) as refused:
            await site.promote(key)
        assert refused.value.retry_after_s
        assert refused.value.detail["may_be_done"]
        await site.bench.until(lambda: warm.cache.of_attempt("i-1") is not None)
        assert (await site.promote(key, claimed_only=True)).name == "one"
        assert (await site.promote(key)).name == "one"
        with pytest.raises(NoWarmPod) as none:  # of a start that has none
            await site.promote(key, "i-2", claimed_only=True)
        assert none.value.detail["reason"] == "not-claimed"
    assert writes(site) == ["patch"]
