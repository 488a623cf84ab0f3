"""A platform on a cluster with warm pods, under our autoscaler (their default) and Knative's: calls
from zero, promoted; what takes their place; and processes that are killed while a pod is
promoted."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from snapshotter.images.images import RUNTIME_PACKAGES
from tests.conftest import RequireOrSkip
from tests.e2e.clustered import ClusterUnderTest, RealCluster, cluster_up
from tests.e2e.frozen import why_no_criu
from tests.e2e.harness import wait_for
from tests.fakes.image_registry import ImageRegistry
from tests.fakes.wheels import make_wheel, repack_installed

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(180)]

Json = dict[str, Any]
SHAPE = {"name": "small", "cpu": 0.2, "memory_bytes": 1 << 30, "min_pods": 3, "max_pods": 6}
WARM, PROMOTED = "pilotlight.dev/warm-shape", "pilotlight.dev/promoted"
PODS = "/api/v1/pods"


LASTING_S = 4.0
"""On a busy machine a first start may take as long as load that is handed over to a pod of the
function's own (six seconds here), which then answers."""
DEFAULT_AUTOSCALER = pytest.mark.parametrize(
    "cluster", ["pilotlight"], indirect=True, scope="module"
)
"""For what does not depend on the autoscaler."""


@pytest.fixture(scope="module", params=["pilotlight", "kpa"])
def cluster(
    request: pytest.FixtureRequest, real_cluster: RealCluster | None
) -> Iterator[ClusterUnderTest]:
    """One cluster with warm pods, and the app deployed. Load of less than six seconds is not handed
    over."""
    settings: dict[str, Any] = {"warm_pods": [SHAPE], "handover_s": 12.0, "idle_templates": 0}
    if request.param == "kpa":  # ours is the default
        settings["autoscaler"] = "kpa"
    with cluster_up(real_cluster, **settings) as running:
        running.platform.deploy("podded.py")
        yield running


def is_ready(pod: Json) -> bool:
    return any(
        one["type"] == "Ready" and one["status"] == "True"
        for one in pod["status"].get("conditions", ())
    )


def warm(cluster: ClusterUnderTest) -> list[Json]:
    """Warm pods that are ready."""
    return [
        pod
        for pod in cluster.items(PODS, WARM)
        if is_ready(pod) and not pod["metadata"].get("deletionTimestamp")
    ]


def promoted(cluster: ClusterUnderTest) -> set[str]:
    """Names of promoted pods, those that go included."""
    return {pod["metadata"]["name"] for pod in cluster.items(PODS, PROMOTED)}


def wait_warm(cluster: ClusterUnderTest, count: int = 3) -> None:
    """Until the pool is full, and `where` at zero."""
    try:
        cluster.wait_zero("where")
        wait_for(
            lambda: len(warm(cluster)) >= count and not promoted(cluster),
            "warm pods",
            timeout_s=cluster.patience_s,
        )
    except AssertionError as e:
        raise AssertionError(f"{e}\n{cluster.story()}") from e


def call(cluster: ClusterUnderTest, seconds: float = 0.0) -> httpx.Response:
    return cluster.platform.post("podded/where", {"seconds": seconds})


@pytest.mark.cluster
def test_from_zero_with_a_warm_pod_to_its_end(cluster: ClusterUnderTest) -> None:
    for _ in range(3):
        wait_warm(cluster)
        before = {pod["metadata"]["name"] for pod in warm(cluster)}
        began = time.monotonic()
        first = call(cluster)
        took_s = time.monotonic() - began
        assert first.status_code == 200, first.text + cluster.story()
        print(f"from zero with a warm pod: {took_s:.3f} s, {first.headers['pilotlight-start']}")
        if took_s < LASTING_S:
            break
    assert first.json() in before
    assert promoted(cluster) == {first.json()}
    assert first.headers["pilotlight-start"] in ("COLD", "RESTORE")
    # the pool is refilled; the pod is deleted when the function's window is over
    wait_for(lambda: len(warm(cluster)) >= 3, "another warm pod", timeout_s=cluster.patience_s)
    wait_for(lambda: not promoted(cluster), "its end", timeout_s=cluster.patience_s)
    request = first.headers["x-request-id"]
    rows = wait_for(lambda: cluster.platform.usage("call = ?", request), "the call to be billed")
    assert len(rows) == 1


@pytest.mark.cluster
def test_a_call_beside_another_is_answered_by_a_fork_in_the_same_pod(
    cluster: ClusterUnderTest,
) -> None:
    wait_warm(cluster)
    pod = call(cluster, 4.0).json()  # calls take longer than a start
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(call, cluster, 4.0)
        time.sleep(0.5)  # it runs
        began = time.monotonic()
        answer = call(cluster)
        took_s = time.monotonic() - began
        assert beside.result().json() == pod
    timing = answer.headers.get("server-timing")
    print(f"a further instance in a promoted pod: {took_s:.3f} s, {timing}")
    assert answer.headers["pilotlight-start"] == "FORK", answer.text + cluster.story()
    assert answer.json() == pod
    assert promoted(cluster) == {pod}


@pytest.mark.cluster
@DEFAULT_AUTOSCALER
@pytest.mark.parametrize("function", ["larger", "smaller"])
def test_a_warm_pod_gets_the_size_of_the_function_that_it_serves(
    cluster: ClusterUnderTest, function: str
) -> None:
    """In place: one of them grows before it serves, the other one shrinks while it does."""
    cluster.platform.deploy("sized.py")
    cluster.wait_zero(function)
    wait_warm(cluster)
    before = {pod["metadata"]["name"] for pod in warm(cluster)}
    began = time.monotonic()
    answer = cluster.platform.post(f"sized/{function}", {})
    took_s = time.monotonic() - began
    assert answer.status_code == 200, answer.text + cluster.story()
    print(f"{function} than the shape: {took_s:.3f} s, {answer.headers.get('server-timing')}")
    assert answer.json() in before, cluster.story()
    wanted = own_resources(cluster, function)
    try:
        wait_for(lambda: given(cluster, function) == wanted, "its size", poll_s=0.02)
    except AssertionError as e:
        raise AssertionError(f"{e}\n{wanted}\n{cluster.story()}") from e


def own_resources(cluster: ClusterUnderTest, function: str) -> Json:
    """What the pods of the function's Knative revision ask for."""
    services = "/apis/serving.knative.dev/v1/services"
    (service,) = cluster.items(services, f"pilotlight.dev/function={function}")
    return dict(service["spec"]["template"]["spec"]["containers"][0]["resources"])


def given(cluster: ClusterUnderTest, function: str) -> Json | None:
    """What the kubelet says that a promoted pod's container has; None while it has not answered."""
    for pod in cluster.items(PODS, f"{PROMOTED},pilotlight.dev/function={function}"):
        for one in pod["status"].get("containerStatuses", ()):
            if pod["spec"]["containers"][0]["resources"] == one.get("resources"):
                return dict(one["resources"])
    return None


@pytest.mark.cluster
def test_starts_at_once_are_served_in_warm_pods_alone(cluster: ClusterUnderTest) -> None:
    """In one, if its Template is there in time, and in three otherwise."""
    wait_warm(cluster)
    names = {pod["metadata"]["name"] for pod in warm(cluster)}
    with ThreadPoolExecutor(3) as pool:
        began = time.monotonic()
        answers = list(pool.map(lambda _: call(cluster, 2.0), range(3)))
        print(f"three starts at once: {time.monotonic() - began - 2.0:.3f} s")
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.json() for answer in answers} <= names


@pytest.mark.cluster
def test_load_that_lasts_is_handed_over_to_pods_of_the_functions_own_without_a_lost_call(
    cluster: ClusterUnderTest,
) -> None:
    wait_warm(cluster)
    stop, seen, statuses = threading.Event(), Counter[str](), Counter[int]()

    def load() -> None:
        while not stop.is_set():
            answer = call(cluster, 0.3)
            statuses[answer.status_code] += 1
            seen[str(answer.json())] += 1

    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load)
        try:
            wait_for(lambda: len(seen) >= 2, "an own pod to serve", timeout_s=60)
            first, *others = seen
            wait_for(lambda: not promoted(cluster), "the promoted one to go", timeout_s=30)
            served = seen[first]
            wait_for(lambda: sum(seen[other] for other in others) > 5, "others to serve")
            assert seen[first] == served
        except AssertionError as e:
            raise AssertionError(f"{e}\n{seen}\n{cluster.story()}") from e
        finally:
            stop.set()
        loading.result()
    assert set(statuses) == {200}
    assert others[0].startswith("podded-where-")


KILLED = ("snapshotter", "controller", "activator", "weight_cache")


@DEFAULT_AUTOSCALER
@pytest.mark.parametrize("process", KILLED)
@pytest.mark.parametrize("step", ["before", "asked", "promoted"])
def test_a_process_that_is_killed_while_a_pod_is_promoted(
    cluster: ClusterUnderTest, process: str, step: str
) -> None:
    """`before`: it is just coming back when the call comes; `asked`: as soon as the call waits;
    `promoted`: as soon as a pod is claimed."""
    platform = cluster.platform
    wait_warm(cluster)
    if step == "before":
        pid = platform.kill(process)
    with ThreadPoolExecutor(1) as pool:
        answering = pool.submit(_answer_of, cluster)
        if step != "before":
            if step == "promoted":
                wait_for(lambda: promoted(cluster) or answering.done(), "a claim", poll_s=0.002)
            pid = platform.kill(process)
        status = answering.result(60)
    platform.wait_restarted(process, pid)
    # a call is lost with the activator that has it, and with nothing else
    assert status == 200 or process == "activator", f"{status}\n{cluster.story()}"
    again = call(cluster)
    assert again.status_code == 200, again.text + cluster.story()
    rows = wait_for(lambda: platform.usage("call = ?", again.headers["x-request-id"]), "the record")
    assert len(rows) == 1
    # nothing is left of whatever was begun
    wait_warm(cluster)


PACKED = """
import pilotlight

image = pilotlight.Image.python("VERSION").pip_install("plmodel==1.0").env({"MODEL": "small"})
app = pilotlight.App("packed")


@app.function(image=image, cpu=0.1, memory="256MiB", scaledown_window=2)
def model() -> list[str]:
    import os

    import plmodel

    return [os.uname().nodename, f"{os.environ['MODEL']} {plmodel.version}"]
"""


@pytest.mark.cluster
@pytest.mark.slow  # compiles and compresses an interpreter's library
@pytest.mark.timeout(900)
def test_a_function_with_packages_of_its_own_answers_from_a_warm_pod_booted_then_restored(
    real_cluster: RealCluster | None,
    image_registry: ImageRegistry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    require_or_skip: RequireOrSkip,
) -> None:
    """The pool's image does not have them: the node has pulled the function's image, after a pod of
    its own booted there."""
    if why := why_no_criu():
        require_or_skip(why)
    repack_installed(tmp_path, [*RUNTIME_PACKAGES, "click", "h11"])
    make_wheel(tmp_path, "plmodel", "1.0")
    (app := tmp_path / "packed.py").write_text(
        PACKED.replace("VERSION", f"{sys.version_info.major}.{sys.version_info.minor}")
    )
    user = {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "DOCKER_CONFIG": str(image_registry.login),
    }
    for name, value in user.items():
        monkeypatch.setenv(name, value)
    with cluster_up(
        real_cluster,
        warm_pods=[{**SHAPE, "min_pods": 1, "max_pods": 2}],
        handover_s=600.0,
        idle_templates=0,
        restore_into_pods=True,
        registry=f"{image_registry.host}/functions",
        image_pull_secrets=["registry"],
        node={"registry_login": str(image_registry.login / "config.json")},
    ) as cluster:
        cluster.platform.cli("deploy", str(app), "--no-wait")
        (service,) = wait_for(
            lambda: cluster.items(
                "/apis/serving.knative.dev/v1/services", "pilotlight.dev/function=model"
            ),
            "the function's Service",
        )
        cluster.add_pull_secret(
            service["metadata"]["namespace"], "registry", image_registry.login / "config.json"
        )
        starts = [_from_zero(cluster)]
        while starts[-1] != "RESTORE":
            assert len(starts) < 12, f"{starts}\n{cluster.story()}"
            starts.append(_from_zero(cluster))
    print(f"starts of a function with an image of its own: {starts}")
    assert starts[0] == "COLD in a pod of its own"
    assert "COLD" in starts


def _from_zero(cluster: ClusterUnderTest) -> str:
    """How a call of `packed/model` from zero was answered."""
    cluster.wait_zero("model")
    wait_for(lambda: warm(cluster) and not promoted(cluster), "a warm pod", timeout_s=120)
    names = {pod["metadata"]["name"] for pod in warm(cluster)}
    began = time.monotonic()
    answer = cluster.platform.post("packed/model")
    took_s = time.monotonic() - began
    assert answer.status_code == 200, answer.text + cluster.story()
    pod, said = answer.json()
    assert said == "small 1.0"
    kind = answer.headers["pilotlight-start"]
    print(f"{kind} in {pod}: {took_s:.3f} s, {answer.headers.get('server-timing')}")
    return kind if pod in names else f"{kind} in a pod of its own"


def _answer_of(cluster: ClusterUnderTest) -> int:
    try:
        return call(cluster).status_code
    except httpx.TransportError:
        return 0
