"""The same cluster with class `pilotlight.dev`: our leader scales what Knative makes, and Knative
believes it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.clustered import ClusterUnderTest, RealCluster, cluster_up, pods_that_answer
from tests.e2e.harness import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(180)]

REVISIONS = "/apis/serving.knative.dev/v1/revisions"
AUTOSCALERS = "/apis/autoscaling.internal.knative.dev/v1alpha1/podautoscalers"
CLASS = "autoscaling.knative.dev/class"


@pytest.fixture(scope="module")
def cluster(real_cluster: RealCluster | None) -> Iterator[ClusterUnderTest]:
    """One cluster, autoscaled by us, with the app deployed."""
    with cluster_up(real_cluster, autoscaler="pilotlight", unschedulable_grace_s=1.0) as running:
        running.platform.deploy("podded.py")
        yield running


def classes(cluster: ClusterUnderTest, function: str = "") -> set[str]:
    """Which autoscaler Knative was told of: for all functions, or for one."""
    which = "pilotlight.dev/function"
    scalers = cluster.items(AUTOSCALERS, f"{which}={function}" if function else which)
    return {str(one["metadata"]["annotations"][CLASS]) for one in scalers}


def states(cluster: ClusterUnderTest, kind: str, function: str = "") -> set[str]:
    """That condition of all revisions, or of one function's; "" where one has not said."""
    which = "pilotlight.dev/function"
    items = cluster.items(REVISIONS, f"{which}={function}" if function else which)
    said = [
        {one["type"]: one["status"] for one in (item.get("status") or {}).get("conditions", ())}
        for item in items
    ]
    return {str(one.get(kind, "")) for one in said}


@pytest.mark.cluster
def test_a_revision_that_was_made_for_knatives_autoscaler_is_taken_over(
    cluster: ClusterUnderTest,
) -> None:
    (revision,) = wait_for(
        lambda: cluster.items(REVISIONS, "pilotlight.dev/function=add"), "its revision"
    )
    metadata = revision["metadata"]
    path = f"{REVISIONS.rpartition('/')[0]}/namespaces/{metadata['namespace']}/revisions"
    cluster.annotate(f"{path}/{metadata['name']}", CLASS, "kpa.autoscaling.knative.dev")

    def is_ours() -> bool:
        (live,) = cluster.items(REVISIONS, "pilotlight.dev/function=add")
        return bool(live["metadata"]["annotations"][CLASS] == "pilotlight.dev")

    wait_for(is_ours, "our class")
    assert cluster.platform.result("podded/add", {"a": 1, "b": 2}) == 3


@pytest.mark.cluster
def test_from_zero_up_down_to_zero_and_up_again(cluster: ClusterUnderTest) -> None:
    platform = cluster.platform
    wait_for(
        lambda: states(cluster, "Ready") == {"True"},
        "all revisions to be ready, without a pod",
        timeout_s=cluster.patience_s,
    )
    assert not cluster.pods("where")
    first = platform.post("podded/where")
    assert (first.status_code, first.headers["pilotlight-start"]) == (200, "COLD")
    pods = pods_that_answer(platform)
    assert 2 <= len(pods) <= 3
    cluster.wait_zero("where")
    wait_for(lambda: states(cluster, "Active", "where") == {"False"}, "it to be inactive")
    again = platform.post("podded/where")
    assert (again.status_code, again.headers["pilotlight-start"]) == (200, "COLD")
    assert again.json() not in pods
