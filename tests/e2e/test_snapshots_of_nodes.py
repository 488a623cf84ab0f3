"""Snapshots on a cluster by the command line: the node agent makes and uploads them behind a pod that
booted cold; the controller lists, quarantines and deletes them by its answers to the agent's
reports."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conftest import RequireOrSkip
from tests.e2e.clustered import ClusterUnderTest, cluster_up
from tests.e2e.frozen import why_no_criu
from tests.e2e.harness import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(180)]


def listed(cluster: ClusterUnderTest) -> list[dict[str, Any]]:
    """`pilotlight snapshot list --json`."""
    return list(json.loads(cluster.platform.cli("snapshot", "list", "--json").stdout))


def test_a_snapshot_of_a_node_is_listed_quarantined_everywhere_and_deleted(
    require_or_skip: RequireOrSkip,
) -> None:
    if why := why_no_criu():
        require_or_skip(why)
    with cluster_up(None, restore_into_pods=True) as cluster:
        platform, copies = cluster.platform, cluster.directory / "blobs" / "snapshots"
        platform.deploy("podded.py")
        platform.result("podded/stays")
        (found,) = wait_for(
            lambda: [row for row in listed(cluster) if row["where"] == "disk, store"],
            "a snapshot with a recorded copy",
            timeout_s=90,
            poll_s=0.5,
        )
        assert (found["state"], found["labels"]["function"]) == ("READY", "stays")
        assert found["node"]
        assert found["image_bytes"] > 0
        assert len(list(copies.rglob("*.json"))) == 1

        platform.cli("snapshot", "quarantine", found["id"], "--reason", "it leaks")
        wait_for(lambda: not list(copies.rglob("*.json")), "its copy to be removed", timeout_s=60)
        (row,) = [row for row in listed(cluster) if row["id"] == found["id"]]
        assert (row["state"], row["where"]) == ("QUARANTINED", "disk")
        assert row["reason"].endswith("it leaks")
        kept = platform.local.paths.home / "node" / "snapshots" / "quarantine"
        assert list(kept.glob(f"{found['id']}.*"))

        platform.cli("app", "delete", "podded", "--yes")
        wait_for(
            lambda: not list(kept.parent.glob("*sn-*")) and not list(kept.glob("sn-*")),
            "the node to have deleted it",
            timeout_s=60,
        )
        assert listed(cluster) == []
