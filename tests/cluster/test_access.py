"""The facade on whichever API server there is: our own for tests, or with `--kubeconfig` a real
one, each test in a fresh namespace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from pilotlight.kubernetes.api_request import ApiRequest
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.doctor.checks import examine_cluster
from pilotlight.kubernetes.doctor.findings import BROKEN
from pilotlight.kubernetes.errors import (
    AlreadyExists,
    Conflict,
    Invalid,
    KindMissing,
    NamespaceEnding,
    NotFound,
)
from pilotlight.kubernetes.kinds import CONFIG_MAP, LEASE, NAMESPACE, POD, Kind
from pilotlight.kubernetes.leader_election import LeaderElection, LeaseLock, LeaseTerms
from pilotlight.kubernetes.reflector import Reflector
from pilotlight.kubernetes.settings import ClusterSettings

pytestmark = pytest.mark.api_server


@pytest.fixture
async def cluster(kubeconfig: Path) -> AsyncIterator[Cluster]:
    async with await Cluster.connect(ClusterSettings(kubeconfig=str(kubeconfig))) as cluster:
        yield cluster


def config_map(namespace: str, name: str = "a", **data: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace, "labels": {"seen": "yes"}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


async def test_an_object_lives_through_all_verbs(cluster: Cluster, namespace: str) -> None:
    assert (await cluster.apply(config_map(namespace, x="1"), dry_run=True))["data"] == {"x": "1"}
    assert await cluster.get(CONFIG_MAP, "a", namespace) is None
    made = await cluster.apply(config_map(namespace, x="1", y="2"))
    applied = await cluster.apply(config_map(namespace, x="1"))
    assert applied["data"] == {"x": "1"}
    assert applied["metadata"]["uid"] == made["metadata"]["uid"]
    again = await cluster.apply(config_map(namespace, x="1"))
    # nothing changed, nothing written
    assert again["metadata"]["resourceVersion"] == applied["metadata"]["resourceVersion"]
    assert (await cluster.patch(CONFIG_MAP, "a", namespace, {"data": {"z": "3"}}))["data"] == {
        "x": "1",
        "z": "3",
    }
    with pytest.raises(AlreadyExists):
        await cluster.create(config_map(namespace))
    with pytest.raises(Conflict):
        await cluster.replace({**made, "data": {}})
    with pytest.raises(Conflict):
        await cluster.delete(CONFIG_MAP, "a", namespace, uid="00000000-0000-0000-0000-000000000000")
    assert await cluster.delete(CONFIG_MAP, "a", namespace, uid=made["metadata"]["uid"])
    assert not await cluster.delete(CONFIG_MAP, "a", namespace)
    with pytest.raises(NotFound):
        await cluster.patch(CONFIG_MAP, "a", namespace, {"data": {}})


async def test_fields_that_nobody_knows_are_refused(cluster: Cluster, namespace: str) -> None:
    with pytest.raises(Invalid) as caught:
        await cluster.apply({**config_map(namespace), "datum": {}})
    assert [problem.field for problem in caught.value.problems] == ["datum"]


async def test_a_field_of_another_manager_is_not_taken_without_force(
    cluster: Cluster, namespace: str
) -> None:
    await cluster.create(config_map(namespace, x="theirs"))
    other = ClusterSettings(kubeconfig=cluster.settings.kubeconfig, field_manager="somebody-else")
    async with await Cluster.connect(other) as stranger:
        with pytest.raises(Conflict):
            await stranger.apply(config_map(namespace, x="ours"), force=False)
        assert (await stranger.apply(config_map(namespace, x="ours")))["data"] == {"x": "ours"}


async def test_what_is_not_there_is_named(cluster: Cluster, namespace: str) -> None:
    with pytest.raises(KindMissing, match=r"gadgets\.example\.com"):
        await cluster.list(Kind("example.com/v1", "Gadget", "gadgets", True), namespace)
    with pytest.raises(NotFound, match="namespace pl-test-nowhere does not exist"):
        await cluster.apply(config_map("pl-test-nowhere"))


async def test_a_namespace_on_its_way_out_takes_nothing_new(
    cluster: Cluster, namespace: str
) -> None:
    held = config_map(namespace, "held")
    held["metadata"]["finalizers"] = ["example.com/hold"]
    await cluster.create(held)
    await cluster.delete(NAMESPACE, namespace)
    try:
        with pytest.raises(NamespaceEnding):
            await cluster.apply(config_map(namespace, "late"))
    finally:
        await cluster.patch(CONFIG_MAP, "held", namespace, {"metadata": {"finalizers": None}})


async def test_a_reflector_follows(cluster: Cluster, namespace: str) -> None:
    changed = asyncio.Event()
    async with Reflector(
        cluster,
        CONFIG_MAP,
        namespace=namespace,
        selector="seen=yes",
        on_change=lambda _: changed.set(),
    ) as seen:
        await seen.wait_synced(30)
        for index in range(5):
            await cluster.apply(config_map(namespace, f"c{index}"))
        await cluster.delete(CONFIG_MAP, "c0", namespace)
        await cluster.patch(CONFIG_MAP, "c1", namespace, {"metadata": {"labels": {"seen": None}}})
        while {item["metadata"]["name"] for item in seen.items()} != {"c2", "c3", "c4"}:
            changed.clear()
            await changed.wait()


async def test_a_version_from_long_ago_does_not_stop_a_watch(
    cluster: Cluster, namespace: str
) -> None:
    async with aclosing(cluster.watch(CONFIG_MAP, namespace, "seen=yes")) as changes:
        assert (await anext(changes)).type == "SYNCED"
        await cluster.apply(config_map(namespace))
        assert (await anext(changes)).type == "ADDED"


async def test_one_leader(cluster: Cluster, namespace: str) -> None:
    terms = LeaseTerms(lease_s=6, renew_s=4, retry_s=0.2)
    async with LeaderElection(
        cluster, LeaseLock(name="a", namespace=namespace, identity="one"), terms=terms
    ) as one:
        await one.wait_leader()
        async with LeaderElection(
            cluster, LeaseLock(name="a", namespace=namespace, identity="two"), terms=terms
        ) as two:
            await one.aclose()
            await two.wait_leader()
            assert not one.is_leader
            held = await cluster.get(LEASE, "a", namespace)
            assert held is not None
            assert held["spec"]["holderIdentity"] == "two"


async def test_rights_are_known_before_they_are_needed(cluster: Cluster, namespace: str) -> None:
    assert await cluster.may(ApiRequest(verb="create", kind=POD, namespace=namespace))


async def test_doctor_has_an_answer_to_everything(kubeconfig: Path) -> None:
    found = await examine_cluster(ClusterSettings(kubeconfig=str(kubeconfig)), role="operator")
    assert found[0].what == "API server"
    assert all(
        one.way_out or one.commands for one in found if one.state == BROKEN and one.what != "nodes"
    )
