"""The life of a function with warm pods under class `pilotlight.dev`, on two activators: from zero
in a promoted pod, by load that lasts to pods of its own, and back to zero; the activator that
decides on all that is killed in the middle."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import httpx
import pytest

from tests.e2e.clustered import ClusterUnderTest, RealCluster, cluster_up
from tests.e2e.harness import wait_for
from tests.e2e.test_knative_scaled_by_us import classes, states
from tests.e2e.test_knative_warm import SHAPE, promoted, wait_warm, warm
from tests.fakes.plain_http import NO_TLS

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(500)]

CALLERS = 2
CALL_S = 0.5
PROCESSES = {"a-0": "activator", "a-1": "activator-1"}
LEASE = "/apis/coordination.k8s.io/v1/namespaces/{}/leases/pilotlight-autoscaler"


@pytest.fixture
def cluster(real_cluster: RealCluster | None, redis_url: str) -> Iterator[ClusterUnderTest]:
    """One cluster with warm pods and what is the default with them, and the app deployed."""
    settings: dict[str, Any] = {"warm_pods": [SHAPE], "handover_s": 5.0, "idle_templates": 0}
    with cluster_up(real_cluster, redis_url, **settings) as running:
        running.platform.deploy("podded.py")
        yield running


class Callers:
    """Callers that call `where` again and again, and what they were answered. Each keeps its
    connection, and so its activator: a load that changes over every second needs other pods every
    second."""

    def __init__(self, cluster: ClusterUnderTest) -> None:
        self._cluster = cluster
        self._is_over = threading.Event()
        self.pods: Counter[str] = Counter()
        self.ids: list[str] = []
        self.others: list[str] = []
        self.lost: list[str] = []

    def __repr__(self) -> str:
        return f"<Callers {dict(self.pods)} lost={self.lost} others={self.others}>"

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Call for the time of a block."""
        threads = [threading.Thread(target=self._call_on) for _ in range(CALLERS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            for thread in threads:
                thread.join()

    def _call_on(self) -> None:
        platform = self._cluster.platform
        url = f"{platform.url}/v1/functions/podded/where:invoke"
        with httpx.Client(headers=platform.headers, timeout=60.0, verify=NO_TLS) as client:
            while not self._is_over.is_set():
                self._call(client, url)

    def _call(self, client: httpx.Client, url: str) -> None:
        try:
            answer = client.post(url, json={"seconds": CALL_S})
        except httpx.ConnectError:  # it was not sent
            time.sleep(0.05)
        except httpx.TransportError as e:
            self.lost.append(f"{datetime.now(UTC):%H:%M:%S.%f} {e!r}")
        else:
            if answer.status_code == 200:
                self.pods[str(answer.json())] += 1
                self.ids.append(answer.headers["x-request-id"])
            else:
                self.others.append(f"{answer.status_code} {answer.text}")

    def answered_by(self, pods: set[str]) -> int:
        """Calls that these pods answered."""
        return sum(self.pods[pod] for pod in pods)

    def own(self) -> int:
        """Calls that the function's own pods answered."""
        return self.answered_by({pod for pod in list(self.pods) if pod.startswith("podded-where-")})


def leader(cluster: ClusterUnderTest) -> str:
    """Who leads the autoscaler: identity of an activator's process."""
    answer = cluster.api.get(LEASE.format(cluster.namespace)).raise_for_status()
    return str(answer.json()["spec"]["holderIdentity"])


def kill_leader(cluster: ClusterUnderTest) -> None:
    """kill -9 the activator that leads; returns when another process does."""
    before, began = leader(cluster), time.monotonic()
    cluster.platform.kill(PROCESSES[before.rpartition("-")[0]])
    wait_for(lambda: leader(cluster) not in ("", before), "another leader")
    print(f"{before} killed; {leader(cluster)} leads after {time.monotonic() - began:.1f} s")


@pytest.mark.cluster
def test_from_zero_by_promoted_pods_to_own_ones_and_to_zero_though_the_leader_is_killed(
    cluster: ClusterUnderTest,
) -> None:
    wait_for(lambda: classes(cluster) == {"pilotlight.dev"}, "our class, which is the default")
    for killed_while in ("promoted pods serve", "own pods serve"):
        callers = Callers(cluster)
        try:
            live(cluster, callers, killed_while=killed_while)
        except AssertionError as e:
            raise AssertionError(f"{e}\n{callers}\n{cluster.story()}") from e
        print(repr(callers))


def live(cluster: ClusterUnderTest, callers: Callers, *, killed_while: str) -> None:
    """From zero to zero."""
    wait_warm(cluster)
    pool = {pod["metadata"]["name"] for pod in warm(cluster)}
    began = time.monotonic()

    def seconds(what: str) -> None:
        print(f"{what}: {time.monotonic() - began:.1f} s")

    with callers.calling():
        wait_for(lambda: callers.pods, "a call to be answered")
        assert set(callers.pods) <= pool, "from zero in promoted pods"
        seconds("from zero")
        if killed_while == "promoted pods serve":
            kill_leader(cluster)
        wait_for(callers.own, "own pods to serve", timeout_s=cluster.patience_s)
        seconds("own pods serve")
        wait_for(lambda: not promoted(cluster), "promoted ones to go", timeout_s=cluster.patience_s)
        seconds("promoted pods are gone")
        if killed_while == "own pods serve":
            kill_leader(cluster)
        since = [callers.answered_by(pool), callers.own()]

        def carried() -> bool:
            """Ten calls without one in a promoted pod: an activator whose own pods the other one
            has claimed may have one promoted once more."""
            if callers.answered_by(pool) != since[0]:
                since[:] = [callers.answered_by(pool), callers.own()]
            return callers.own() >= since[1] + 10

        wait_for(carried, "own pods to carry the load")
    cluster.wait_zero("where")
    wait_for(lambda: states(cluster, "Active", "where") == {"False"}, "it to be inactive")
    # nothing but calls that were in the killed activator is lost
    assert (len(callers.lost) <= CALLERS, callers.others) == (True, [])
    rows = wait_for(lambda: records(cluster, callers.ids), "all calls to be billed")
    charged = Counter(str(row["call"]) for row in rows if Decimal(row["cost"]))
    numbered = Counter((row["call"], row["attempt"]) for row in rows)
    wrong = {call for call in callers.ids if charged[call] != 1}
    wrong |= {call for (call, _), number in numbered.items() if number != 1}
    assert not wrong, [(r["id"], r["outcome"], r["cost"]) for r in rows if r["call"] in wrong]


def records(cluster: ClusterUnderTest, calls: list[str]) -> list[dict[str, Any]] | None:
    """The records of these calls, once all have been answered by them: an attempt in which nothing
    ran, because its pod was busy or gone before the request was sent, is repeated elsewhere, and
    has a record of its own, without a cost."""
    rows = [row for row in cluster.platform.usage() if row["call"] in calls]
    return rows if {row["call"] for row in rows if row["outcome"] == "ok"} >= set(calls) else None
