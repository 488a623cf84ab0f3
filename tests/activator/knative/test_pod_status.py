"""What Pod objects say, and when a start has waited long enough: pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from activator.knative import pod_status, start_failure
from activator.knative.pod_status import Blocker, PodBlocker, WorkerExit
from activator.knative.pod_watcher import Pod
from snapshotter import errors

CRASHED = {"lastState": {"terminated": {"exitCode": 1, "reason": "Error", "message": "boom"}}}


def pod_with(
    *,
    user: Mapping[str, Any] | None = None,
    conditions: tuple[Mapping[str, Any], ...] = (),
    **status: Any,
) -> dict[str, Any]:
    containers = [{"name": "queue-proxy", "state": {"running": {}}}]
    if user is not None:
        containers.insert(0, {"name": "user", "image": "registry.example/fn", **user})
    return {"status": {"containerStatuses": containers, "conditions": list(conditions), **status}}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"state": {"waiting": {"reason": reason, "message": message}}}


def disrupted(reason: str) -> dict[str, Any]:
    return {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": reason,
        "message": f"because {reason}",
    }


@pytest.mark.parametrize(
    "body, bar, says",
    [
        (
            pod_with(user=waiting("ErrImagePull", "not found")),
            Blocker.PULL,
            "registry.example/fn: ErrImagePull: not found",
        ),
        (pod_with(user=waiting("ImagePullBackOff")), Blocker.IMAGE, "ImagePullBackOff"),
        (pod_with(user=waiting("InvalidImageName", "x")), Blocker.IMAGE, "InvalidImageName: x"),
        (
            pod_with(user=waiting("CreateContainerConfigError", 'secret "s" not found')),
            Blocker.CONFIG,
            'secret "s" not found',
        ),
        (
            pod_with(user={**waiting("CrashLoopBackOff"), **CRASHED}),
            Blocker.CRASH,
            "Error, exit status 1: boom",
        ),
        (
            pod_with(
                conditions=(
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": "0/1 nodes",
                    },
                )
            ),
            Blocker.UNSCHEDULABLE,
            "0/1 nodes",
        ),
    ],
)
def test_what_keeps_a_pod_from_starting(body: dict[str, Any], bar: Blocker, says: str) -> None:
    obstacle = pod_status.pod_blocker(body)
    assert obstacle is not None
    assert obstacle.bar is bar
    assert says in obstacle.message


@pytest.mark.parametrize(
    "body",
    [
        pod_with(user=waiting("ContainerCreating")),
        pod_with(user=waiting("PodInitializing")),
        pod_with(user={"state": {"running": {}}}),
        pod_with(
            conditions=({"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"},)
        ),
        {},
    ],
)
def test_nothing_speaks_against_a_pod_that_is_on_its_way(body: dict[str, Any]) -> None:
    assert pod_status.pod_blocker(body) is None
    assert pod_status.worker_exit(body) is None


@pytest.mark.parametrize(
    "body, reason",
    [
        (pod_with(phase="Failed", reason="Evicted", message="low on memory"), "evicted"),
        (pod_with(phase="Failed", conditions=(disrupted("PreemptionByScheduler"),)), "evicted"),
        (pod_with(phase="Failed", conditions=(disrupted("DeletionByPodGC"),)), "node_lost"),
        (pod_with(phase="Failed", reason="NodeLost"), "node_lost"),
        (
            pod_with(
                phase="Failed",
                user={"state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}},
            ),
            "out_of_memory",
        ),
        (pod_with(user={"state": {"terminated": {"exitCode": 137, "reason": "Error"}}}), "killed"),
        (pod_with(user={"state": {"terminated": {"exitCode": 3, "reason": "Error"}}}), "exited"),
        (pod_with(phase="Succeeded"), "exited"),
    ],
)
def test_how_a_worker_ended(body: dict[str, Any], reason: str) -> None:
    ending = pod_status.worker_exit(body)
    assert ending is not None
    assert ending.reason == reason


def test_the_sidecar_is_not_the_worker() -> None:
    body = pod_with(user={"state": {"running": {}}, "restartCount": 0})
    body["status"]["containerStatuses"].append(
        {"name": "queue-proxy", "state": {"terminated": {"exitCode": 1}}, "restartCount": 7}
    )
    assert pod_status.restarts_of(body) == 0
    assert pod_status.worker_exit(body) is None


@pytest.mark.parametrize(
    "body, says",
    [
        ({"status": {"phase": "Pending"}}, "no node yet"),
        (
            pod_with(conditions=({"type": "PodScheduled", "status": "True"},)),
            "is creating the container",
        ),
        (
            pod_with(
                user=waiting("ContainerCreating"),
                conditions=({"type": "PodScheduled", "status": "True"},),
            ),
            "ContainerCreating",
        ),
        (pod_with(user={"state": {"running": {}}}), "its worker is starting"),
        (
            pod_with(
                user={"state": {"running": {}}}, conditions=({"type": "Ready", "status": "True"},)
            ),
            "ready",
        ),
        (pod_with(user=waiting("ImagePullBackOff")), "image"),
    ],
)
def test_how_far_it_is(body: dict[str, Any], says: str) -> None:
    assert says in pod_status.stage_of(body)


# -- verdicts --------------------------------------------------------------------------------------


def pod(
    name: str = "p",
    *,
    bar: Blocker | None = None,
    since: float = 0.0,
    message: str = "why",
    **more: Any,
) -> Pod:
    values: dict[str, Any] = {
        "uid": name,
        "life": f"{name}.0",
        "namespace": "n",
        "name": name,
        "key": "f@v1",
        "ip": None,
        "node": "",
        "node_addresses": frozenset(),
        "is_ready": False,
        "is_ending": False,
        "ending": None,
        "obstacle": PodBlocker(bar, message) if bar is not None else None,
        "obstacle_since": since,
        "restarts": 0,
        "stage": "it has no node yet",
        "seen_at": 0.0,
        "labels": {},
        "cost": None,
    }
    return Pod(**{**values, **more})


def test_as_long_as_one_pod_may_come_a_start_waits() -> None:
    assert start_failure.of_pods([], grace_s=10, now=99) is None
    assert start_failure.of_pods([pod(), pod("q", bar=Blocker.IMAGE)], grace_s=10, now=99) is None


def test_room_is_given_a_grace_and_what_is_hopeless_none() -> None:
    assert (
        start_failure.of_pods([pod(bar=Blocker.UNSCHEDULABLE, since=5)], grace_s=10, now=14) is None
    )
    assert isinstance(
        start_failure.of_pods([pod(bar=Blocker.UNSCHEDULABLE, since=5)], grace_s=10, now=15),
        errors.NoCapacity,
    )
    assert start_failure.of_pods([pod(bar=Blocker.PULL, since=5)], grace_s=10, now=9) is None
    for bar in (Blocker.CONFIG, Blocker.CRASH):
        assert isinstance(
            start_failure.of_pods([pod(bar=bar, since=5)], grace_s=10, now=5), errors.StartFailed
        )
    assert isinstance(
        start_failure.of_pods([pod(bar=Blocker.IMAGE, since=5)], grace_s=10, now=5),
        errors.BundleUnavailable,
    )
    assert isinstance(
        start_failure.of_pods([pod(bar=Blocker.PULL, since=5)], grace_s=10, now=10),
        errors.BundleUnavailable,
    )


def test_a_pod_that_leaves_is_no_hope() -> None:
    pods = [
        pod(is_ending=True),
        pod("q", ending=WorkerExit("evicted", "")),
        pod("r", bar=Blocker.CONFIG),
    ]
    assert isinstance(start_failure.of_pods(pods, grace_s=10, now=0), errors.StartFailed)


@pytest.mark.parametrize(
    "message, resource",
    [
        ("0/3 nodes are available: 1 Insufficient memory, 2 Insufficient nvidia.com/gpu.", "gpu"),
        ("0/3 nodes are available: 3 Insufficient memory.", "memory"),
        ("0/3 nodes are available: 3 Insufficient cpu.", "cpu"),
        ("0/3 nodes are available: 3 node(s) had untolerated taint {a: }.", "unschedulable"),
    ],
)
def test_what_is_short_is_named_in_a_word(message: str, resource: str) -> None:
    error = start_failure.of_pods(
        [pod(bar=Blocker.UNSCHEDULABLE, message=message)], grace_s=0, now=1
    )
    assert error is not None
    assert error.detail["resource"] == resource


def test_a_worker_that_was_evicted_before_it_was_ready_is_replaced() -> None:
    assert start_failure.of_crash(WorkerExit("evicted", "low on memory"), "p") is None
    assert isinstance(
        start_failure.of_crash(WorkerExit("out_of_memory", "OOMKilled"), "p"), errors.StartFailed
    )
