"""Deployments outside of Knative on the tests' cluster: ReplicaSets, rolling updates, pods that are
released; and pods that are resized in place."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.cluster.test_fake_knative import Json, until
from tests.fakes.knative.cluster import FakeKnative
from tests.fakes.knative.controllers import condition_of
from tests.fakes.knative.pod_group import limits_memory
from tests.fakes.kubernetes.raw import MERGE, RawClient
from tests.fakes.plain_http import NO_TLS

DEPLOYMENTS, PODS = "/apis/apps/v1/namespaces/t/deployments", "/api/v1/namespaces/t/pods"
PROGRAM = """
import http.server, json, os, signal
def limit():
    for line in open("/proc/self/cgroup"):
        _, controllers, path = line.strip().split(":", 2)
        is_v1 = "memory" in controllers.split(",")
        file = f"/sys/fs/cgroup{path}/memory.max"
        if is_v1: file = f"/sys/fs/cgroup/memory{path}/memory.limit_in_bytes"
        if os.path.exists(file): return open(file).read().strip()
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *words): pass
    def do_GET(self):
        is_sick = self.path == "/ready" and os.path.exists("/scratch/sick")
        if self.path == "/sick": open("/scratch/sick", "w").close()
        if self.path == "/end": os._exit(3)
        if self.path == "/fill": bytearray(256 << 20).replace(b"0", b"1")
        more = {"node": sorted(os.listdir("/pilotlight")), "limit": limit()}
        body = json.dumps({**os.environ, **more}).encode()
        self.send_response(503 if is_sick else 200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
host = os.environ["PILOTLIGHT_LISTEN"].rpartition(":")[0]
http.server.ThreadingHTTPServer((host, 8079), Handler).serve_forever()
"""
PROGRAM_IMAGE = "registry.example/warm:1"


def deployment(
    *, replicas: int = 2, image: str = "registry.example/a:1", surge: int | str = 1, lost: int = 0
) -> Json:
    """Two pods, selected by `warm-shape`."""
    container = {
        "name": "user",
        "image": image,
        "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "1Gi"}},
    }
    rolling = {"maxSurge": surge, "maxUnavailable": lost}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "warm-small", "namespace": "t"},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"warm-shape": "small"}},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": rolling},
            "template": {
                "metadata": {"labels": {"warm-shape": "small", "managed": "yes"}},
                "spec": {"containers": [container]},
            },
        },
    }


@pytest.fixture
async def knative(short_tmp: Path, real_kubeconfig: Path | None) -> AsyncIterator[FakeKnative]:
    """Without nodes."""
    if real_kubeconfig is not None:
        pytest.skip("tests of the tests' own cluster")
    async with FakeKnative(short_tmp, nodes=0) as running:
        running.api.add_namespace("t")
        yield running


@pytest.fixture
async def raw(knative: FakeKnative) -> AsyncIterator[RawClient]:
    """Any path."""
    async with RawClient(knative.kubeconfig) as client:
        yield client


def _names(knative: FakeKnative, **labels: str) -> list[str]:
    return [
        pod["metadata"]["name"]
        for pod in knative.pods("t")
        if labels.items() <= pod["metadata"]["labels"].items()
    ]


async def _two(knative: FakeKnative, raw: RawClient) -> list[str]:
    await raw.ask("POST", DEPLOYMENTS, deployment())
    return await until(lambda: _names(knative) if len(_names(knative)) == 2 else None)


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_pod_that_loses_the_label_is_released_and_replaced(
    knative: FakeKnative, raw: RawClient, leaves: bool
) -> None:
    """`leaves`: it loses its owner in the same write."""
    first, second = await _two(knative, raw)
    claim = [
        {"op": "test", "path": "/metadata/labels/warm-shape", "value": "small"},
        {"op": "remove", "path": "/metadata/labels/warm-shape"},
        {"op": "add", "path": "/metadata/labels/promoted", "value": "small"},
        *([{"op": "remove", "path": "/metadata/ownerReferences"}] * leaves),
    ]
    media = "application/json-patch+json"
    answer = await raw.ask("PATCH", f"{PODS}/{first}", claim, media=media)
    again = await raw.ask("PATCH", f"{PODS}/{first}", claim, media=media)
    assert (answer.status, again.status) == (200, 422)

    await until(lambda: len(_names(knative, **{"warm-shape": "small"})) == 2)
    released = await until(
        lambda: next(
            (
                pod
                for pod in knative.pods("t")
                if pod["metadata"]["name"] == first and not pod["metadata"].get("ownerReferences")
            ),
            None,
        )
    )
    assert released["metadata"]["labels"]["promoted"] == "small"
    assert second in _names(knative, **{"warm-shape": "small"})
    # what is not owned stays when the Deployment goes
    await raw.ask("DELETE", f"{DEPLOYMENTS}/warm-small")
    await until(lambda: _names(knative) == [first])


async def test_an_orphan_with_the_labels_is_adopted(knative: FakeKnative, raw: RawClient) -> None:
    first, _ = await _two(knative, raw)
    label: Json = {"metadata": {"labels": {"warm-shape": None}}}
    await raw.ask("PATCH", f"{PODS}/{first}", label, media=MERGE)
    await until(lambda: len(_names(knative)) == 3)
    label = {"metadata": {"labels": {"warm-shape": "small"}}}
    await raw.ask("PATCH", f"{PODS}/{first}", label, media=MERGE)
    await until(lambda: len(_names(knative)) == 2)  # one too many: the newest goes


@pytest.mark.parametrize("surge, lost, counts", [(1, 0, (2, 1)), (0, 1, (1, 1))])
async def test_a_changed_template_is_rolled_within_its_bounds(
    knative: FakeKnative, raw: RawClient, surge: int, lost: int, counts: tuple[int, int]
) -> None:
    await raw.ask("POST", DEPLOYMENTS, deployment(surge=surge, lost=lost))
    await until(lambda: len(_names(knative)) == 2)
    while _status(knative).get("availableReplicas") != 2:
        await _make_all_ready(knative, raw)
    changed = deployment(image="registry.example/a:2", surge=surge, lost=lost)["spec"]["template"]
    body = {"spec": {"template": changed}}
    await raw.ask("PATCH", f"{DEPLOYMENTS}/warm-small", body, media=MERGE)
    await until(lambda: _by_image(knative) == counts)
    while _by_image(knative) != (0, 2):
        await _make_all_ready(knative, raw)
    progress = condition_of(
        knative.api.get("apps/v1", "Deployment", "warm-small", "t"), "Progressing"
    )
    assert progress["status"] == "True"


def _status(knative: FakeKnative) -> Json:
    found = knative.api.get("apps/v1", "Deployment", "warm-small", "t") or {}
    return dict(found.get("status") or {})


def _by_image(knative: FakeKnative) -> tuple[int, int]:
    images = [pod["spec"]["containers"][0]["image"][-1] for pod in knative.pods("t")]
    return images.count("1"), images.count("2")


async def _make_all_ready(knative: FakeKnative, raw: RawClient) -> None:
    """There is no node; what it would say, beside what the scheduler says."""
    status = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    media = "application/strategic-merge-patch+json"
    for name in _names(knative):
        await raw.ask("PATCH", f"{PODS}/{name}/status", status, media=media)
    await asyncio.sleep(0.01)


async def test_a_pod_is_resized_by_its_subresource_only(
    knative: FakeKnative, raw: RawClient
) -> None:
    name, _ = await _two(knative, raw)

    def body(**resources: object) -> Json:
        return {"spec": {"containers": [{"name": "user", "resources": resources}]}}

    grown = body(requests={"cpu": "2", "memory": "2Gi"}, limits={"memory": "2Gi"})
    media = "application/strategic-merge-patch+json"
    plain = await raw.ask("PATCH", f"{PODS}/{name}", grown, media=media)
    assert plain.status == 422
    done = await raw.ask("PATCH", f"{PODS}/{name}/resize", grown, media=media)
    assert done.status == 200
    (container,) = done.body["spec"]["containers"]
    assert container["resources"]["requests"] == {"cpu": "2", "memory": "2Gi"}
    for wrong in (
        body(limits={"cpu": "2", "memory": "2Gi"}),  # Guaranteed
        body(requests={"nvidia.com/gpu": "1"}),
        {"spec": {"containers": [{"name": "other", "image": "a"}]}},
    ):
        refused = await raw.ask("PATCH", f"{PODS}/{name}/resize", wrong, media=media)
        assert refused.status == 422, refused.body


# -- on a node -------------------------------------------------------------------------------------


@pytest.fixture
async def node(short_tmp: Path, real_kubeconfig: Path | None) -> AsyncIterator[FakeKnative]:
    """With one node of 4 GiB, whose warm pods answer on their control port."""
    if real_kubeconfig is not None:
        pytest.skip("tests of the tests' own cluster")
    async with FakeKnative(short_tmp, capacity={"memory": "4Gi"}) as running:
        running.api.add_namespace("t")
        entrypoints = running.kubelets[0].images.entrypoints
        entrypoints[PROGRAM_IMAGE] = [sys.executable, "-c", PROGRAM]
        (short_tmp / "warm").mkdir()
        (short_tmp / "warm" / "agent.sock").touch()
        manifest = deployment(replicas=1, image=PROGRAM_IMAGE)
        pod = manifest["spec"]["template"]["spec"]
        pod["volumes"] = [
            {"name": "node", "hostPath": {"path": str(short_tmp / "warm"), "type": "Directory"}},
            {"name": "scratch", "emptyDir": {}},
        ]
        pod["containers"][0] |= {
            "ports": [
                {"name": "control", "containerPort": 8079},
                {"name": "http1", "containerPort": 8080},
            ],
            "env": [
                {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
                {
                    "name": "SHAPE",
                    "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['warm-shape']"}},
                },
                {
                    "name": "MEMORY",
                    "valueFrom": {"resourceFieldRef": {"resource": "limits.memory"}},
                },
            ],
            "readinessProbe": {
                "httpGet": {"path": "/ready", "port": "control"},
                "periodSeconds": 1,
                "failureThreshold": 1,
            },
            "volumeMounts": [
                {"name": "node", "mountPath": "/pilotlight", "readOnly": True},
                {"name": "scratch", "mountPath": "/scratch"},
            ],
        }
        async with RawClient(running.kubeconfig) as raw:
            answer = await raw.ask("POST", DEPLOYMENTS, manifest)
            assert answer.status == 201, answer.body
        yield running


async def _ask(pod: Json, path: str) -> tuple[int, Json]:
    async with httpx.AsyncClient(verify=NO_TLS, timeout=10) as client:
        answer = await client.get(f"http://{pod['status']['podIP']}:8079{path}")
        return answer.status_code, answer.json()


async def _resize(node: FakeKnative, pod: Json, size: str) -> None:
    resources = {"requests": {"memory": size}, "limits": {"memory": size}}
    body = {"spec": {"containers": [{"name": "user", "resources": resources}]}}
    media = "application/strategic-merge-patch+json"
    async with RawClient(node.kubeconfig) as raw:
        path = f"{PODS}/{pod['metadata']['name']}/resize"
        answer = await raw.ask("PATCH", path, body, media=media)
        assert answer.status == 200, answer.body


async def _limit(pod: Json) -> int:
    """The memory limit of a pod, as its own process sees it."""
    _, said = await _ask(pod, "/")
    return int(said["limit"])


@pytest.mark.root
@pytest.mark.slow  # a container that is killed is missed at the next look
async def test_a_container_that_uses_more_than_its_limit_is_killed(node: FakeKnative) -> None:
    if not limits_memory():
        pytest.skip("this machine does not let us limit memory")
    (pod,) = await until(lambda: node.pods("t", ready=True))
    await _resize(node, pod, "100Mi")
    async with asyncio.timeout(20):
        while await _limit(pod) != 100 << 20:
            await asyncio.sleep(0.02)
    with contextlib.suppress(httpx.TransportError):
        await _ask(pod, "/fill")

    def last() -> Json:
        (now,) = node.pods("t")
        return dict(now["status"]["containerStatuses"][0]["lastState"].get("terminated", {}))

    await until(lambda: last().get("reason") == "OOMKilled")
    assert last()["exitCode"] == 137


@pytest.mark.root
async def test_a_pod_of_a_deployment_has_its_volumes_variables_and_probes(
    node: FakeKnative,
) -> None:
    (pod,) = await until(lambda: node.pods("t", ready=True))
    assert [one["name"] for one in pod["status"]["containerStatuses"]] == ["user"]
    _, said = await _ask(pod, "/")
    assert said["node"] == ["agent.sock"]
    assert (said["POD"], said["SHAPE"]) == (pod["metadata"]["uid"], "small")
    assert said["MEMORY"] == str(1 << 30)
    assert said["PILOTLIGHT_LISTEN"] == f"{pod['status']['podIP']}:8080"
    await _ask(pod, "/sick")
    await until(lambda: not node.pods("t", ready=True))


@pytest.mark.root
async def test_a_deleted_pod_of_a_deployment_is_told_at_once(node: FakeKnative) -> None:
    (pod,) = await until(lambda: node.pods("t", ready=True))
    async with RawClient(node.kubeconfig) as raw:
        await raw.ask("DELETE", f"{PODS}/{pod['metadata']['name']}")
        # no queue-proxy holds it: 30 s would be the test's time-out
        await until(lambda: pod["metadata"]["name"] not in _names(node))
        await until(lambda: node.pods("t", ready=True))


@pytest.mark.root
async def test_a_node_resizes_a_pod_or_says_why_not(node: FakeKnative) -> None:
    (pod,) = await until(lambda: node.pods("t", ready=True))

    async def resize(size: str) -> None:
        await _resize(node, pod, size)

    def given() -> str:
        (now,) = node.pods("t")
        return str(now["status"]["containerStatuses"][0]["resources"]["limits"]["memory"])

    def pending() -> str:
        (now,) = node.pods("t")
        return str(condition_of(now, "PodResizePending").get("reason", ""))

    def in_progress() -> str:
        (now,) = node.pods("t")
        return str(condition_of(now, "PodResizeInProgress").get("reason", ""))

    assert not limits_memory() or await _limit(pod) == 1 << 30
    await resize("2Gi")
    await until(lambda: given() == "2Gi")
    assert pending() == ""
    assert not limits_memory() or await _limit(pod) == 2 << 30
    await resize("8Gi")
    await until(lambda: pending() == "Infeasible")
    assert given() == "2Gi"
    await resize("3Gi")
    await until(lambda: given() == "3Gi" and not pending())
    if limits_memory():
        await resize("4Mi")  # less than it uses
        await until(lambda: in_progress() == "Error")
        assert given() == "3Gi"
        await resize("1Gi")
        await until(lambda: given() == "1Gi" and not in_progress())
