"""A whole platform on a cluster with Knative: deploy, call, scale up, down to zero, and call again;
and what goes wrong in clusters. Marked `cluster`: also on a real one."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from pilotlight.protocol import HEADER_REQUEST_ID
from snapshotter.images.images import RUNTIME_PACKAGES
from tests.e2e.clustered import ClusterUnderTest, RealCluster, cluster_up, pods_that_answer
from tests.e2e.harness import wait_for
from tests.e2e.test_calls_by_functions import N, expect_everything
from tests.fakes.image_registry import ImageRegistry, make_layout
from tests.fakes.wheels import make_wheel, repack_installed

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(180)]

PULL_SECRET = "registry"
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

TURNING = """
import pilotlight

app = pilotlight.App("turning")


@app.function(cpu=0.1, scaledown_window=2)
def say() -> str:
    return "ANSWER"
"""


LASTING = """
import os

import pilotlight

app = pilotlight.App("lasting")


@app.function(cpu=0.1, max_instances=1, scaledown_window=60MORE)
def say(ends: bool = False) -> int:
    if ends:
        os._exit(1)
    return 1
"""


PACKED = """
import pilotlight

image = pilotlight.Image.python("VERSION").pip_install("plmodel==1.0").env({"MODEL": "small"})
app = pilotlight.App("packed")


@app.function(image=image, cpu=0.1, scaledown_window=2)
def model() -> str:
    import os

    import plmodel

    return f"{os.environ['MODEL']} {plmodel.version}"
"""


@pytest.fixture(scope="module")
def cluster(
    real_cluster: RealCluster | None, image_registry: ImageRegistry
) -> Iterator[ClusterUnderTest]:
    """One cluster, autoscaled by Knative's own class, with the app deployed."""
    registry = f"{image_registry.host}/functions"
    with cluster_up(
        real_cluster,
        unschedulable_grace_s=1.0,
        registry=registry,
        image_pull_secrets=[PULL_SECRET],
    ) as running:
        running.platform.deploy("podded.py")
        yield running


@pytest.mark.cluster
def test_from_zero_up_down_to_zero_and_up_again(cluster: ClusterUnderTest) -> None:
    platform = cluster.platform
    assert not cluster.pods("where")
    first = platform.post("podded/where")
    assert (first.status_code, first.headers["pilotlight-start"]) == (200, "COLD")
    pods = pods_that_answer(platform)
    assert 2 <= len(pods) <= 3
    cluster.wait_zero("where")
    again = platform.post("podded/where")
    assert (again.status_code, again.headers["pilotlight-start"]) == (200, "COLD")
    assert again.json() not in pods


@pytest.mark.cluster
def test_a_web_server_of_user_code_answers_in_its_pod(cluster: ClusterUnderTest) -> None:
    platform = cluster.platform
    platform.deploy("serving.py")
    for path, status in (("", 200), ("/none", 404)):
        url = f"{platform.url}/fn/serving/site{path}"
        answer = httpx.get(url, headers=platform.headers, timeout=120)
        assert answer.status_code == status
        assert ("a page" in answer.text) == (status == 200)


@pytest.mark.cluster
def test_what_ran_is_billed_and_its_logs_are_read(cluster: ClusterUnderTest) -> None:
    platform = cluster.platform
    name = platform.result("podded/stays", {"seconds": 0.25})
    (pod,) = wait_for(lambda: cluster.ready("stays"), "its pod to be ready")
    assert pod["metadata"]["name"][:63] == name
    assert "waits 0.25 s" in wait_for(lambda: platform.cli("logs", "podded").stdout, "its logs")
    (instance,) = platform.instances("podded", "stays")
    assert pod["metadata"]["name"] in str(instance)
    assert wait_for(lambda: platform.usage("function = ?", "stays"), "the call to be billed")


@pytest.mark.cluster
def test_queue_proxy_does_not_hold_a_deleted_pod_in_which_no_call_runs(
    cluster: ClusterUnderTest,
) -> None:
    platform = cluster.platform
    platform.result("podded/stays")
    (pod,) = wait_for(lambda: cluster.ready("stays"), "its pod to be ready")
    uid, where = pod["metadata"]["uid"], pod["metadata"]["namespace"]
    deleted_at = time.monotonic()
    path = f"/api/v1/namespaces/{where}/pods/{pod['metadata']['name']}"
    cluster.api.delete(path).raise_for_status()
    wait_for(
        lambda: uid not in {one["metadata"]["uid"] for one in cluster.pods("stays", ending=True)},
        "the pod to be gone",
        timeout_s=cluster.patience_s,
    )
    assert time.monotonic() - deleted_at < 15  # queue-proxy alone takes 30 s
    log = (platform.local.logs / "snapshotter.log").read_text()
    assert f"pod={uid} count=1" in log


@pytest.mark.cluster
def test_functions_in_pods_call_others_and_the_records_name_them(
    cluster: ClusterUnderTest,
) -> None:
    platform = cluster.platform
    platform.deploy("calling.py")
    answer = platform.post("calling/Caller.everything", {"n": N})
    assert answer.status_code == 200, answer.text
    expect_everything(answer.json())
    parent = f"{answer.headers[HEADER_REQUEST_ID]}/1"
    wait_for(lambda: len(platform.usage("parent = ?", parent)) == 7, "records of its calls")
    made = platform.usage("parent = ?", parent)
    assert {row["key"].partition("/")[2] for row in made} == {"main/calling/Caller"}
    (pod,) = cluster.ready("Caller")
    assert answer.json()["instance"] == pod["metadata"]["name"][:63]

    route = httpx.get(f"{platform.url}/fn/calling/web/", headers=platform.headers, timeout=60)
    assert route.status_code == 202, route.text
    with platform.client() as client:
        record = client.call(route.text, wait_s=20)
    assert (record.state, record.labels["caller"]) == ("SUCCEEDED", "calling/web")

    for process in ("snapshotter", "activator"):
        platform.wait_restarted(process, platform.kill(process))
        answer = platform.post("calling/Caller.everything", {"n": N})
        assert answer.status_code == 200, answer.text
        expect_everything(answer.json())
    platform.cli("app", "delete", "calling", "--yes")
    for function in ("Caller", "web"):  # a node has room for few pods
        cluster.wait_zero(function)


@pytest.mark.cluster
def test_a_new_version_takes_over_a_rollback_brings_the_old_one_back_and_a_delete_leaves_nothing(
    cluster: ClusterUnderTest, tmp_path: Path
) -> None:
    platform, app = cluster.platform, tmp_path / "turning.py"

    def said(answer: str) -> None:
        wait_for(
            lambda: platform.result("turning/say") == answer,
            f"{answer} to be said",
            timeout_s=cluster.patience_s,
        )

    for answer in ("one", "two"):
        app.write_text(TURNING.replace("ANSWER", answer))
        platform.cli("deploy", str(app), "--no-wait")
        said(answer)

    def revisions() -> set[str]:
        return {
            pod["metadata"]["labels"]["serving.knative.dev/revision"].split("-")[2]
            for pod in cluster.pods("say")
        }

    wait_for(
        lambda: "v1" not in revisions(),
        "the first version's pods to be gone",
        timeout_s=cluster.patience_s,
    )
    platform.cli("app", "rollback", "turning/say", "--yes")
    said("one")
    platform.cli("app", "delete", "turning", "--yes")
    assert platform.post("turning/say").status_code == 404
    path = "/apis/serving.knative.dev/v1/services"
    wait_for(
        lambda: not cluster.items(path, "pilotlight.dev/app=turning") and not cluster.pods("say"),
        "its objects and pods to be gone",
        timeout_s=cluster.patience_s,
    )


@pytest.mark.cluster
@pytest.mark.slow  # compiles and compresses an interpreter's library
@pytest.mark.timeout(600)
def test_an_image_is_pushed_by_the_deploy_pulled_by_the_node_and_run(
    cluster: ClusterUnderTest,
    image_registry: ImageRegistry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    repack_installed(tmp_path, [*RUNTIME_PACKAGES, "click", "h11"])
    make_wheel(tmp_path, "plmodel", "1.0")  # which only the image has
    (app := tmp_path / "packed.py").write_text(PACKED.replace("VERSION", PYTHON))
    user = {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    for name, value in user.items():
        monkeypatch.setenv(name, value)
    platform = cluster.platform
    refused = platform.cli("deploy", str(app), "--no-wait", check=False)
    assert f"not logged in to registry {image_registry.host}" in refused.stderr

    monkeypatch.setenv("DOCKER_CONFIG", str(image_registry.login))
    platform.cli("deploy", str(app), "--no-wait")
    without = platform.post("packed/model")
    assert without.status_code == 503, without.text
    assert "401 Unauthorized" in without.text  # the namespace has no secret yet
    (pod,) = cluster.pods("model")
    reference = next(
        one["image"] for one in pod["spec"]["containers"] if image_registry.host in one["image"]
    )
    assert reference.startswith(f"{image_registry.host}/functions/default@sha256:")
    cluster.add_pull_secret(
        pod["metadata"]["namespace"], PULL_SECRET, image_registry.login / "config.json"
    )

    def said(answer: str) -> None:
        wait_for(
            lambda: platform.post("packed/model").text == f'"{answer}"',
            f"{answer} to be said",
            timeout_s=cluster.patience_s,
        )

    said("small 1.0")
    layers = image_registry.manifest(reference)["layers"]
    assert isinstance(layers, list)
    assert len(layers) == 4  # libraries, interpreter, packages, runtime
    sent = image_registry.uploads("functions/default")
    app.write_text(app.read_text().replace("{plmodel", "er {plmodel"))
    platform.cli("deploy", str(app), "--no-wait")  # a change of code pushes nothing
    said("small er 1.0")
    assert image_registry.uploads("functions/default") == sent

    make_layout(tmp_path / "base", "", name=f"usr/local/bin/python{PYTHON}")
    printed = platform.cli("image", "push", str(app), "--base", str(tmp_path / "base"))
    (pushed,) = printed.stdout.split()[1:]
    assert pushed != reference
    assert image_registry.manifest(pushed)["schemaVersion"] == 2
    platform.cli("app", "delete", "packed", "--yes")
    cluster.wait_zero("model")


@pytest.mark.cluster
def test_a_restarted_activator_goes_on_with_a_cutover_and_a_crash_fails_no_other_call(
    cluster: ClusterUnderTest, tmp_path: Path
) -> None:
    platform, app = cluster.platform, tmp_path / "lasting.py"
    app.write_text(LASTING.replace("MORE", ""))
    platform.cli("deploy", str(app), "--no-wait")
    assert platform.result("lasting/say") == 1
    assert platform.post("lasting/say", {"ends": True}).status_code == 502
    assert platform.result("lasting/say") == 1
    wait_for(lambda: platform.usage("function = ?", "say"), "the first version to be billed")
    app.write_text(LASTING.replace("MORE", ', gpu="H100"').replace("return 1", "return 2"))
    platform.cli("deploy", str(app), "--no-wait")  # no node has that GPU
    assert [platform.result("lasting/say") for _ in range(3)] == [1] * 3
    platform.wait_restarted("activator", platform.kill("activator"))
    assert [platform.result("lasting/say") for _ in range(10)] == [1] * 10
    platform.cli("app", "delete", "lasting", "--yes")


@pytest.mark.cluster
def test_a_function_that_no_node_can_take_says_so(cluster: ClusterUnderTest) -> None:
    answer = cluster.platform.post("podded/on_a_gpu")
    assert answer.status_code == 503
    assert "no node" in answer.text


@pytest.mark.usefixtures("chooses_faults")
def test_an_image_that_cannot_be_pulled_ends_the_call_with_the_reason(
    cluster: ClusterUnderTest,
) -> None:
    cluster.wait_zero("add")
    with cluster.without_images("manifest unknown"):
        answer = cluster.platform.post("podded/add", {"a": 1, "b": 1})
    assert answer.status_code == 503
    assert "manifest unknown" in answer.text
    wait_for(
        lambda: cluster.platform.post("podded/add", {"a": 1, "b": 1}).status_code == 200,
        "the function to come back",
    )


@pytest.mark.cluster
@pytest.mark.parametrize(
    "is_silent", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["cut", "silent"]
)
def test_while_the_api_server_is_away_pods_serve_and_calls_that_need_one_are_told_why(
    cluster: ClusterUnderTest, is_silent: bool
) -> None:
    platform = cluster.platform
    cluster.wait_zero("where")
    assert platform.result("podded/add", {"a": 1, "b": 2}) == 3
    with cluster.outage(is_silent=is_silent):
        answers = [platform.post("podded/add", {"a": n, "b": n}).json() for n in range(20)]
        since = time.monotonic()
        refused = platform.post("podded/where")
        noticed_s = time.monotonic() - since
    assert answers == [2 * n for n in range(20)]
    assert refused.status_code == 503, refused.text
    assert "API server has not answered" in refused.text
    assert int(refused.headers["retry-after"]) > 0
    assert noticed_s < 30
    wait_for(
        lambda: platform.post("podded/where").status_code == 200,
        "pods to be made again",
        timeout_s=cluster.patience_s,
    )
    cluster.wait_zero("where")
    platform.result("podded/where")  # at once


@pytest.mark.usefixtures("chooses_faults")
def test_a_pod_that_is_evicted_with_a_call_in_it(cluster: ClusterUnderTest) -> None:
    platform = cluster.platform
    platform.result("podded/stays")
    (pod,) = cluster.ready("stays")
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(platform.post, "podded/stays", {"seconds": 4.0})
        wait_for(lambda: "waits 4.0 s" in cluster.log(pod), "the call to run")
        cluster.evict(pod, "The node was low on resource: memory.")
        answer = call.result()
    assert answer.status_code in (200, 502), answer.text
    assert platform.result("podded/stays") != pod["metadata"]["name"][:63]
