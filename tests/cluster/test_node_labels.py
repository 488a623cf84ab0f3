"""Labels of nodes, against the tests' API server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pilotlight.controller.kubernetes.node_labels import (
    MAX_LABELS,
    NodeLabels,
    desired_labels,
    label_patch,
)
from pilotlight.controller.kubernetes.node_reports import FRESH_S, NodeReports
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.names import snapshot_label, weights_label
from pilotlight.kubernetes.settings import ClusterSettings
from snapshotter.node_reports import NodeReport
from tests.fakes.kubernetes.faults import Fault
from tests.fakes.kubernetes.server import ApiServer
from tests.fakes.node_reports import node_report

MODEL, OTHER = "a" * 64, "b" * 64
SETTINGS = ClusterSettings()
HOT_MODEL, HOT_OTHER = weights_label(SETTINGS, MODEL), weights_label(SETTINGS, OTHER)
PATIENCE_S = 20.0


class CountedNodes(NodeReports):
    """Reports, and how often they were looked at."""

    looks = 0

    def fresh(self, *, now: float) -> dict[str, NodeReport]:
        self.looks += 1
        return super().fresh(now=now)


class Bench:
    """A controller's labels beside an API server with two nodes."""

    def __init__(self, server: ApiServer, kubeconfig: Path) -> None:
        self.server = server
        self.nodes = CountedNodes()
        self.now = 1000.0
        self._settings = ClusterSettings(kubeconfig=str(kubeconfig))
        for name in ("node-1", "node-2"):
            server.put(
                {
                    "apiVersion": "v1",
                    "kind": "Node",
                    "metadata": {"name": name, "labels": {"zone": "x"}},
                }
            )

    @contextlib.asynccontextmanager
    async def running(self, *, settle_s: float = 0.0) -> AsyncIterator[NodeLabels]:
        async with await Cluster.connect(self._settings) as cluster:
            labels = NodeLabels(
                cluster, self.nodes, wall=lambda: self.now, look_s=0.02, settle_s=settle_s
            )
            task = asyncio.create_task(labels.run())
            try:
                yield labels
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def labels(self, name: str = "node-1") -> dict[str, str]:
        node: Any = self.server.get("v1", "Node", name)
        return dict(node["metadata"].get("labels") or {})

    async def until(self, wanted: dict[str, str], name: str = "node-1") -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.labels(name) != wanted:
                await asyncio.sleep(0.005)


@pytest.fixture
def bench(api_server: ApiServer, kubeconfig: Path) -> Bench:
    return Bench(api_server, kubeconfig)


def test_weights_and_snapshots_take_turns_and_there_is_a_bound() -> None:
    report = node_report(
        weights=[f"{n:064x}" for n in range(1, 100)][::-1],
        revisions=[f"f-1@v{n}" for n in range(5)],
    )
    wanted = desired_labels(report, SETTINGS)

    assert len(wanted) <= MAX_LABELS
    assert snapshot_label(SETTINGS, "f-1@v4") in wanted
    assert desired_labels(None, SETTINGS) == frozenset()


def test_only_what_differs_is_written_and_labels_of_others_stay() -> None:
    labels = {"zone": "x", HOT_MODEL: "hot", HOT_OTHER: "hot"}

    assert label_patch(labels, frozenset([HOT_MODEL]), SETTINGS) == {HOT_OTHER: None}
    assert label_patch(labels, frozenset([HOT_MODEL, HOT_OTHER]), SETTINGS) == {}
    other = ClusterSettings(namespace="team-b")
    assert label_patch(labels, frozenset(), other) == {}  # those of a neighbour's cache


async def test_a_node_says_what_is_hot_and_no_longer_when_it_is_cold(bench: Bench) -> None:
    async with bench.running():
        bench.nodes.take(node_report(weights=[MODEL], revisions=["f-1@v1"]), now=bench.now)
        await bench.until(
            {"zone": "x", HOT_MODEL: "hot", snapshot_label(SETTINGS, "f-1@v1"): "hot"}
        )
        bench.nodes.take(node_report(weights=[OTHER]), now=bench.now)
        await bench.until({"zone": "x", HOT_OTHER: "hot"})

        assert bench.labels("node-2") == {"zone": "x"}


async def test_a_node_that_fell_silent_loses_its_labels(bench: Bench) -> None:
    async with bench.running():
        bench.nodes.take(node_report(weights=[MODEL]), now=bench.now)
        await bench.until({"zone": "x", HOT_MODEL: "hot"})
        bench.now += FRESH_S + 1

        await bench.until({"zone": "x"})


async def test_nothing_is_written_while_nothing_changes(bench: Bench) -> None:
    async with bench.running() as labels:
        bench.nodes.take(node_report(weights=[MODEL]), now=bench.now)
        await bench.until({"zone": "x", HOT_MODEL: "hot"})
        writes = labels.writes
        looks = bench.nodes.looks
        while bench.nodes.looks < looks + 20:
            bench.nodes.take(node_report(weights=[MODEL]), now=bench.now)
            await asyncio.sleep(0.005)

        assert labels.writes == writes == 1


async def test_a_new_controller_waits_for_reports_before_it_takes_labels_away(bench: Bench) -> None:
    bench.server.put(
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": "node-3", "labels": {HOT_MODEL: "hot"}},
        }
    )
    async with bench.running(settle_s=60.0) as labels:
        bench.nodes.take(node_report(weights=[MODEL]), now=bench.now)
        await bench.until({"zone": "x", HOT_MODEL: "hot"})
        assert bench.labels("node-3") == {HOT_MODEL: "hot"}
        bench.now += 61.0

        await bench.until({}, "node-3")
        assert labels.writes == 3  # the silent node-1 lost its own, too


async def test_an_api_server_that_refuses_is_asked_again(bench: Bench) -> None:
    bench.server.faults.add(Fault(status=403, verb="patch", resource="nodes", times=1))
    async with bench.running() as labels:
        bench.nodes.take(node_report(weights=[MODEL]), now=bench.now)
        # one that is no node of the cluster
        bench.nodes.take(node_report("node-9", weights=[MODEL]), now=bench.now)
        await bench.until({"zone": "x", HOT_MODEL: "hot"})

        assert labels.writes == 2
