"""Journals of activators that are gone for good are shipped by a Job, once; those of activators
that are there are nobody's business."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pilotlight.controller.kubernetes import orphaned_journals
from pilotlight.controller.kubernetes.orphaned_journals import DRAINED, OrphanedJournal, drain_job
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.settings import ClusterSettings
from tests.fakes.kubernetes.server import ApiServer

Json = dict[str, Any]
NAMESPACE = "pilotlight"
IMAGE = "registry.example/activator@sha256:" + "0" * 64


def activators(replicas: int, *, still: int | None = None, start: int | None = None) -> Json:
    """The StatefulSet; `still`: pods that it has yet."""
    labels = {"app.kubernetes.io/name": "pilotlight", "app.kubernetes.io/component": "activator"}
    container = {
        "name": "activator",
        "image": IMAGE,
        "command": ["python", "-m", "activator"],
        "args": ["--config", "/etc/pilotlight/config/platform.yaml", "--index", "from-hostname"],
        "env": [{"name": "PILOTLIGHT_HOME", "value": "/var/lib/pilotlight"}],
        "ports": [{"name": "http", "containerPort": 8700}],
        "livenessProbe": {"httpGet": {"path": "/healthz", "port": "http"}},
        "volumeMounts": [
            {"name": "config", "mountPath": "/etc/pilotlight/config"},
            {"name": "journal", "mountPath": "/var/lib/pilotlight"},
        ],
    }
    spec: Json = {
        "replicas": replicas,
        "serviceName": "activators",
        "selector": {"matchLabels": labels},
        "template": {
            "metadata": {"labels": labels},
            "spec": {
                "containers": [container],
                "volumes": [{"name": "config", "configMap": {"name": "platform"}}],
            },
        },
    }
    if start is not None:
        spec["ordinals"] = {"start": start}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": "activator", "namespace": NAMESPACE, "labels": labels},
        "spec": spec,
        "status": {"replicas": replicas if still is None else still},
    }


def claim(ordinal: int, name: str = "activator", **labels: str) -> Json:
    """An activator's journal."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": f"journal-{name}-{ordinal}", "namespace": NAMESPACE, "labels": labels},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }


@pytest.fixture
async def cluster(api_server: ApiServer, kubeconfig: Path) -> AsyncIterator[Cluster]:
    api_server.add_namespace(NAMESPACE)
    async with await Cluster.connect(
        ClusterSettings(kubeconfig=str(kubeconfig), namespace=NAMESPACE)
    ) as cluster:
        yield cluster


def jobs(server: ApiServer) -> list[str]:
    return [job["metadata"]["name"] for job in server.list("batch/v1", "Job", NAMESPACE)]


def finish(server: ApiServer, name: str, condition: str) -> None:
    """The Job's end."""
    job = server.get("batch/v1", "Job", name, NAMESPACE)
    assert job is not None
    server.put({**job, "status": {"conditions": [{"type": condition, "status": "True"}]}})


def label_of(server: ApiServer, ordinal: int) -> str | None:
    found = server.get("v1", "PersistentVolumeClaim", f"journal-activator-{ordinal}", NAMESPACE)
    assert found is not None
    label: str | None = (found["metadata"].get("labels") or {}).get(DRAINED)
    return label


def test_only_ordinals_that_are_not_wanted_and_have_ended_are_departed() -> None:
    claims = [claim(number) for number in range(4)] + [
        claim(7, name="other"),
        claim(3, name="activator-big"),
    ]
    assert [
        journal.ordinal for journal in orphaned_journals.orphaned_journals(activators(2), claims)
    ] == [2, 3]
    assert [
        journal.ordinal
        for journal in orphaned_journals.orphaned_journals(activators(2, still=3), claims)
    ] == [3]
    assert [
        journal.ordinal for journal in orphaned_journals.orphaned_journals(activators(4), claims)
    ] == []
    assert [
        journal.ordinal
        for journal in orphaned_journals.orphaned_journals(activators(2, start=2), claims)
    ] == [
        0,
        1,
    ]


def test_the_job_is_the_activators_own_pod_with_the_departed_ones_volume() -> None:
    import kubernetes_validate

    job = drain_job(activators(1), OrphanedJournal(claim=claim(2), ordinal=2), labels={})
    kubernetes_validate.validate(job, "1.34", strict=True)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["args"] == [
        "--config",
        "/etc/pilotlight/config/platform.yaml",
        "--index",
        "2",
        "--drain-journal",
    ]
    assert (container["image"], container["command"]) == (IMAGE, ["python", "-m", "activator"])
    assert "livenessProbe" not in container
    assert pod["restartPolicy"] == "Never"
    assert pod["volumes"] == [
        {"name": "config", "configMap": {"name": "platform"}},
        {"name": "journal", "persistentVolumeClaim": {"claimName": "journal-activator-2"}},
    ]
    assert (
        job["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]
        == "journal-drain"
    )


async def test_a_departed_journal_is_drained_once_and_says_so(
    cluster: Cluster, api_server: ApiServer
) -> None:
    api_server.put(activators(1))
    for number in range(2):
        api_server.put(claim(number))
    await orphaned_journals.drain_orphans(cluster, platform="p-0123456789abcdef")
    assert jobs(api_server) == ["drain-journal-activator-1"]
    await orphaned_journals.drain_orphans(cluster, platform="p-0123456789abcdef")
    assert label_of(api_server, 1) is None
    finish(api_server, "drain-journal-activator-1", "Complete")
    await orphaned_journals.drain_orphans(cluster, platform="p-0123456789abcdef")
    assert label_of(api_server, 1) == "true"
    api_server.requests.clear()
    await orphaned_journals.drain_orphans(cluster, platform="p-0123456789abcdef")
    assert api_server.requests.writes() == 0


async def test_one_whose_pod_still_ends_is_left_alone(
    cluster: Cluster, api_server: ApiServer
) -> None:
    api_server.put(activators(1))
    api_server.put(claim(1))
    api_server.put(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "activator-1", "namespace": NAMESPACE},
            "spec": {"containers": [{"name": "activator", "image": IMAGE}]},
        }
    )
    await orphaned_journals.drain_orphans(cluster, platform="p-0123456789abcdef")
    assert jobs(api_server) == []


async def test_a_drain_that_failed_is_told_and_not_called_done(
    cluster: Cluster, api_server: ApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    api_server.put(activators(1))
    api_server.put(claim(1))
    await orphaned_journals.drain_orphans(cluster, platform="p-0123456789abcdef")
    finish(api_server, "drain-journal-activator-1", "Failed")
    await orphaned_journals.drain_orphans(cluster, platform="p-0123456789abcdef")
    assert label_of(api_server, 1) is None
    assert "kubectl logs job/drain-journal-activator-1" in caplog.text


async def test_an_activator_that_comes_back_writes_new_records(
    cluster: Cluster, api_server: ApiServer
) -> None:
    api_server.put(activators(1))
    api_server.put(claim(1))
    await orphaned_journals.drain_orphans(cluster, platform="p-0123456789abcdef")
    finish(api_server, "drain-journal-activator-1", "Complete")
    await orphaned_journals.drain_orphans(cluster, platform="p-0123456789abcdef")
    api_server.put(activators(2))
    await orphaned_journals.drain_orphans(cluster, platform="p-0123456789abcdef")
    assert label_of(api_server, 1) is None
    assert jobs(api_server) == []
    api_server.put(activators(1))
    await orphaned_journals.drain_orphans(cluster, platform="p-0123456789abcdef")
    assert jobs(api_server) == ["drain-journal-activator-1"]


async def test_a_drain_that_nobody_looked_at_before_its_activator_came_back_counts_for_nothing(
    cluster: Cluster, api_server: ApiServer
) -> None:
    api_server.put(activators(1))
    api_server.put(claim(1))
    await orphaned_journals.drain_orphans(cluster, platform="p-0123456789abcdef")
    finish(api_server, "drain-journal-activator-1", "Complete")
    api_server.put(activators(2))
    await orphaned_journals.drain_orphans(cluster, platform="p-0123456789abcdef")
    assert jobs(api_server) == []
    api_server.put(activators(1))
    await orphaned_journals.drain_orphans(cluster, platform="p-0123456789abcdef")
    await orphaned_journals.drain_orphans(cluster, platform="p-0123456789abcdef")
    assert label_of(api_server, 1) is None
    assert jobs(api_server) == ["drain-journal-activator-1"]
