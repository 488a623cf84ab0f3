"""Services of a node, its kubelet and its container runtime, that are killed while a pod is
promoted, serves or ends: no call is lost, no pod is two functions', nothing is billed twice.

Neither is on the way of a promotion, which is a write to the API server and a message to the pod:
what a node runs goes on without them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.clustered import ClusterUnderTest, RealCluster, cluster_up
from tests.e2e.harness import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(400)]

Json = dict[str, Any]
SHAPE = {"name": "small", "cpu": 0.1, "memory_bytes": 512 << 20, "min_pods": 3, "max_pods": 4}
PODS, WARM, PROMOTED = "/api/v1/pods", "pilotlight.dev/warm-shape", "pilotlight.dev/promoted"
SERVICES = ("kubelet", "containerd")
STEPS = ("before", "claimed", "sent", "mounted", "serving", "ending")
LONG_S, AWAY_S = 3.0, 20.0
SOURCE = """
import os
import time

import pilotlight

app = pilotlight.App("two")


@app.function(cpu=0.1, memory="256MiB", max_instances=3, scaledown_window=2)
def one(seconds: float = 0.0) -> str:
    time.sleep(seconds)
    return os.uname().nodename


@app.function(cpu=0.1, memory="256MiB", max_instances=3, scaledown_window=2)
def other(seconds: float = 0.0) -> str:
    time.sleep(seconds)
    return os.uname().nodename
"""
FUNCTIONS = ("one", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a caller got."""

    function: str
    status: int
    said: str
    request: str
    took_s: float


@dataclass(kw_only=True)
class Calls:
    """All calls of a story. Owner: the test; its threads append."""

    cluster: ClusterUnderTest
    answers: list[Answer] = field(default_factory=list)

    def call(self, function: str, seconds: float = 0.0) -> Answer:
        """Call, and remember the answer."""
        began = time.monotonic()
        found: httpx.Response = self.cluster.platform.post(f"two/{function}", {"seconds": seconds})
        said = found.json() if found.status_code == 200 else found.text
        answer = Answer(
            function=function,
            status=found.status_code,
            said=str(said),
            request=found.headers.get("x-request-id", ""),
            took_s=time.monotonic() - began - seconds,
        )
        self.answers.append(answer)
        return answer

    def pods(self, function: str) -> set[str]:
        """Pods that answered."""
        return {one.said for one in self.answers if one.function == function}

    def expect_good(self) -> None:
        """Every call was answered, no pod served both functions, and each call is billed once."""
        bad = [one for one in self.answers if one.status != 200]
        assert not bad, f"{bad}\n{self.cluster.story()}"
        assert not self.pods("one") & self.pods("other"), self.answers
        requests = {one.request for one in self.answers}
        assert len(requests) == len(self.answers)

        def billed() -> dict[str, int]:
            rows = self.cluster.platform.usage()
            counts = dict.fromkeys(requests, 0)
            for row in rows:
                if row["call"] in counts:
                    counts[row["call"]] += 1
            return counts

        wait_for(lambda: all(billed().values()), "each call to be billed")
        assert set(billed().values()) == {1}


@pytest.fixture(scope="module")
def cluster(real_cluster: RealCluster | None) -> Iterator[ClusterUnderTest]:
    """One cluster with warm pods, and two functions."""
    settings: dict[str, Any] = {"warm_pods": [SHAPE], "handover_s": 30.0, "idle_templates": 0}
    with cluster_up(real_cluster, **settings) as running:
        file = running.directory / "two.py"
        file.write_text(SOURCE)
        running.platform.cli("deploy", str(file), "--no-wait")
        yield running


@pytest.fixture(params=SERVICES)
def service(request: pytest.FixtureRequest, cluster: ClusterUnderTest) -> str:
    """A service of the node that can be killed."""
    name = str(request.param)
    if not cluster.may_kill(name):
        pytest.skip(f"{name}: not a service of this cluster's node that tests may kill")
    return name


def is_ready(pod: Json) -> bool:
    return not pod["metadata"].get("deletionTimestamp") and any(
        one["type"] == "Ready" and one["status"] == "True"
        for one in pod["status"].get("conditions", ())
    )


def promoted(cluster: ClusterUnderTest) -> list[Json]:
    return cluster.items(PODS, PROMOTED)


def settle(cluster: ClusterUnderTest) -> None:
    """Until the pool is full, and no function has a pod."""

    def is_settled() -> bool:
        return (
            sum(is_ready(pod) for pod in cluster.items(PODS, WARM)) >= 3
            and not promoted(cluster)
            and not any(cluster.pods(function, ending=True) for function in FUNCTIONS)
        )

    try:
        wait_for(is_settled, "the pool to be full", timeout_s=cluster.patience_s)
    except AssertionError as e:
        raise AssertionError(f"{e}\n{cluster.story()}") from e


def wait_ending(cluster: ClusterUnderTest) -> None:
    """Until a promoted pod is being deleted."""
    wait_for(
        lambda: any(one["metadata"].get("deletionTimestamp") for one in promoted(cluster)),
        "a pod to be deleted",
        poll_s=0.005,
        timeout_s=cluster.patience_s,
    )


def markers(cluster: ClusterUnderTest) -> set[str]:
    """Uids of the pods whose document the node agent has seen."""
    directory = cluster.platform.local.paths.home / "node" / "promoted"
    return {file.name for file in directory.iterdir() if not file.name.startswith(".")}


def mounted(cluster: ClusterUnderTest) -> int:
    """Promotions that the node agent has finished."""
    log: Path = cluster.platform.local.logs / "snapshotter.log"
    return log.read_text(errors="replace").count("pods.promoted ")


@pytest.mark.cluster
@pytest.mark.parametrize("step", STEPS)
def test_a_service_of_the_node_that_is_killed_while_a_pod_is_promoted(
    cluster: ClusterUnderTest, service: str, step: str
) -> None:
    """`before`: it is away when the calls come; `claimed`: as soon as a pod is claimed; `sent`: as
    soon as the node agent has the document; `mounted`: once it has shown the pod its tenant's
    directory; `serving`: while a call runs; `ending`: while a pod is being deleted. It is back once
    all calls are answered, or after `AWAY_S`: a call that came to a pod of its function's own, on a
    busy machine, waits for it."""
    settle(cluster)
    calls = Calls(cluster=cluster)
    known, shown = markers(cluster), mounted(cluster)
    reached = {
        "claimed": lambda: promoted(cluster),
        "sent": lambda: markers(cluster) - known,
        "mounted": lambda: mounted(cluster) > shown,
    }
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(3) as pool:

        def both(seconds: float) -> list[Future[Answer]]:
            return [pool.submit(calls.call, function, seconds) for function in FUNCTIONS]

        if step in ("serving", "ending"):
            for going in both(0.0):
                going.result()
        if step == "ending":
            wait_ending(cluster)
        if step in ("before", "ending"):
            stack.enter_context(cluster.service_away(service))
        running = both(LONG_S)
        if step in reached:
            wait_for(reached[step], f"the pod to be {step}", poll_s=0.001)
        elif step == "serving":
            time.sleep(LONG_S / 6)
        if step not in ("before", "ending"):
            stack.enter_context(cluster.service_away(service))
        running.append(pool.submit(calls.call, "one"))
        wait(running, timeout=AWAY_S)
        if all(going.done() for going in running):
            calls.call("other")
        stack.close()
        for going in running:
            going.result()
    print(f"{service} {step}: {max(one.took_s for one in calls.answers):.2f} s at most")
    settle(cluster)  # nothing is left of whatever was begun
    calls.call("one")
    calls.expect_good()


@pytest.mark.cluster
def test_a_service_of_the_node_that_is_killed_while_load_is_handed_over(
    cluster: ClusterUnderTest, service: str
) -> None:
    """As soon as a pod of the function's own serves, from when on the promoted one drains."""
    settle(cluster)
    calls, stop = Calls(cluster=cluster), threading.Event()

    def load() -> None:
        while not stop.is_set():
            calls.call("one", 0.3)

    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        loading = [pool.submit(load), pool.submit(load)]
        try:
            wait_for(
                lambda: any(one.said.startswith("two-one-") for one in calls.answers),
                "an own pod to serve",
                timeout_s=cluster.patience_s,
            )
            stack.enter_context(cluster.service_away(service))
            time.sleep(8)
            stack.close()
            wait_for(
                lambda: not promoted(cluster), "promoted pods to go", timeout_s=cluster.patience_s
            )
        except AssertionError as e:
            raise AssertionError(f"{e}\n{cluster.story()}") from e
        finally:
            stop.set()
        for going in loading:
            going.result()
    print(f"{service} draining: {len(calls.answers)} calls in {len(calls.pods('one'))} pods")
    calls.expect_good()
