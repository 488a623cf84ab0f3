"""The tests' kubelet, autoscaler, activator and queue-proxy, with a container that is a small HTTP
server."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.cluster.test_fake_knative import SERVICES, Json, service, until
from tests.fakes.knative.cluster import FakeKnative
from tests.fakes.knative.controllers import condition_of
from tests.fakes.knative.queue_proxy import PORT
from tests.fakes.kubernetes.raw import RawClient
from tests.fakes.plain_http import NO_TLS

pytestmark = pytest.mark.root
PROGRAM = """
import http.server, os, signal, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *words): pass
    def do_GET(self):
        if self.path == "/held":
            while not os.path.exists("/tmp/go"): time.sleep(0.01)
        if self.path == "/go": open("/tmp/go", "w").close()
        body = f"{os.getuid()} {os.getpid()} {os.uname().nodename}".encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
def end(number, frame):
    print("told to end", flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, end)
host, port = os.environ["PILOTLIGHT_LISTEN"].split(":")
print("listens", flush=True)
http.server.ThreadingHTTPServer((host, int(port)), Handler).serve_forever()
"""


@pytest.fixture
async def knative(short_tmp: Path, real_kubeconfig: Path | None) -> AsyncIterator[FakeKnative]:
    """With one node."""
    if real_kubeconfig is not None:
        pytest.skip("tests of the tests' own Knative")
    async with FakeKnative(short_tmp, speed=8, grace_s=1, quiet_s=4) as running:
        running.api.add_namespace("t")
        running.kubelets[0].images.entrypoints["registry.example/a:1"] = [
            sys.executable,
            "-c",
            PROGRAM,
        ]
        yield running


@pytest.fixture
async def http(knative: FakeKnative) -> AsyncIterator[httpx.AsyncClient]:
    """A client for pods and the activator."""
    async with httpx.AsyncClient(verify=NO_TLS, timeout=30) as client:
        yield client


async def _deploy(knative: FakeKnative, *, least: int = 1) -> None:
    """`least` 1: there is a pod at any time, however slow the machine is; 0: only while it is
    called."""
    body = service(initial="0")
    template = body["spec"]["template"]
    template["metadata"]["annotations"]["autoscaling.knative.dev/min-scale"] = str(least)
    template["spec"]["containers"][0]["securityContext"] = {"runAsUser": 12345, "runAsGroup": 12345}
    async with RawClient(knative.kubeconfig) as raw:
        await raw.apply(f"{SERVICES}/f", body)
    await until(
        lambda: (
            condition_of(
                knative.api.get("serving.knative.dev/v1", "Service", "f", "t"), "Ready"
            ).get("status")
            == "True"
        )
    )


async def _wake(knative: FakeKnative, http: httpx.AsyncClient) -> httpx.Response:
    headers = {"Knative-Serving-Namespace": "t", "Knative-Serving-Revision": "f-1"}
    return await http.get(f"{knative.wake_url}/", headers=headers)


async def _one_pod(knative: FakeKnative) -> Json:
    await _deploy(knative)
    found = await until(lambda: knative.pods("t", ready=True))
    return found[0]


def _user(knative: FakeKnative) -> Json:
    (pod,) = knative.pods("t")
    found: Json = next(one for one in pod["status"]["containerStatuses"] if one["name"] == "user")
    return found


@pytest.mark.slow  # waits out Knative's windows
async def test_a_wake_starts_a_pod_and_silence_ends_it(
    knative: FakeKnative, http: httpx.AsyncClient
) -> None:
    await _deploy(knative, least=0)
    answer = await _wake(knative, http)
    assert answer.text.startswith("12345 1 f-1-deployment-")
    await until(lambda: not knative.pods("t"))


async def test_a_pod_has_endpoints_and_a_log(knative: FakeKnative) -> None:
    pod = await _one_pod(knative)

    def known() -> list[str]:
        slices = knative.api.list("discovery.k8s.io/v1", "EndpointSlice", "t")
        return [
            endpoint["targetRef"]["uid"]
            for one in slices
            for endpoint in one["endpoints"]
            if endpoint["conditions"]["ready"]
        ]

    assert await until(known) == [pod["metadata"]["uid"]]
    path, stamped = (
        f"/api/v1/namespaces/t/pods/{pod['metadata']['name']}/log",
        [("timestamps", "true")],
    )
    async with RawClient(knative.kubeconfig) as raw:
        answer = await raw.api.call_api(path, "GET", query_params=stamped, _preload_content=False)
        assert (await answer.text()).split(" ", 1)[1] == "listens\n"


async def test_a_revision_that_is_not_there_is_not_woken(
    knative: FakeKnative, http: httpx.AsyncClient
) -> None:
    headers = {"Knative-Serving-Namespace": "t", "Knative-Serving-Revision": "f-9"}
    assert (await http.get(f"{knative.wake_url}/", headers=headers)).status_code == 404


@pytest.mark.slow  # waits out Knative's windows
async def test_queue_proxy_lets_one_in_and_load_brings_more_pods(
    knative: FakeKnative, http: httpx.AsyncClient
) -> None:
    pod = await _one_pod(knative)
    base = f"http://{pod['status']['podIP']}"
    held = [asyncio.create_task(http.get(f"{base}:8012/held")) for _ in range(4)]
    await until(lambda: len(knative.pods("t", ready=True)) >= 2)
    assert not any(task.done() for task in held)
    assert (await http.get(f"{base}:8012/", headers={"K-Network-Probe": "queue"})).text == "queue"
    await http.get(f"{base}:8080/go")
    assert [answer.status_code for answer in await asyncio.gather(*held)] == [200] * 4


async def test_a_full_queue_refuses(knative: FakeKnative, http: httpx.AsyncClient) -> None:
    pod = await _one_pod(knative)
    base = f"http://{pod['status']['podIP']}"
    held = [asyncio.create_task(http.get(f"{base}:8012/held")) for _ in range(12)]
    done, _ = await asyncio.wait(held, return_when=asyncio.FIRST_COMPLETED)
    assert [(task.result().status_code, task.result().text) for task in done] == [
        (503, "pending request queue full")
    ]
    await http.get(f"{base}:8080/go")
    assert sorted(answer.status_code for answer in await asyncio.gather(*held)) == [200] * 11 + [
        503
    ]


async def test_a_deleted_pod_finishes_what_is_in_it(
    knative: FakeKnative, http: httpx.AsyncClient
) -> None:
    pod = await _one_pod(knative)
    name, base = pod["metadata"]["name"], f"http://{pod['status']['podIP']}"
    held = asyncio.create_task(http.get(f"{base}:8012/held"))
    proxy = knative.kubelets[0].runner("t", name).proxy
    await until(lambda: proxy.load.inside)
    async with RawClient(knative.kubeconfig) as raw:
        await raw.ask("DELETE", f"/api/v1/namespaces/t/pods/{name}")
    await until(
        lambda: (
            not [one for one in knative.pods("t", ready=True) if one["metadata"]["name"] == name]
        )
    )
    assert not held.done()
    await http.get(f"{base}:8080/go")
    assert (await held).status_code == 200
    await until(lambda: name not in [one["metadata"]["name"] for one in knative.pods("t")])


async def test_out_of_memory_is_another_life_of_the_pod(
    knative: FakeKnative, http: httpx.AsyncClient
) -> None:
    pod = await _one_pod(knative)
    knative.kubelets[0].runner("t", pod["metadata"]["name"]).run_out_of_memory()
    await until(lambda: knative.pods("t") and _user(knative)["restartCount"] == 1)
    assert _user(knative)["lastState"]["terminated"]["reason"] == "OOMKilled"
    assert _user(knative)["lastState"]["terminated"]["exitCode"] == 137


async def test_an_evicted_pod_stays_behind_as_failed(
    knative: FakeKnative, http: httpx.AsyncClient
) -> None:
    pod = await _one_pod(knative)
    knative.kubelets[0].runner("t", pod["metadata"]["name"]).evict(
        "The node was low on resource: memory."
    )
    failed = await until(
        lambda: [one for one in knative.pods("t") if one["status"]["phase"] == "Failed"]
    )
    assert failed[0]["status"]["reason"] == "Evicted"
    assert condition_of(failed[0], "DisruptionTarget")["reason"] == "TerminationByKubelet"


async def test_a_pod_that_is_cut_off_while_it_ends_leaves_no_socket(
    knative: FakeKnative, http: httpx.AsyncClient
) -> None:
    pod = await _one_pod(knative)
    name = pod["metadata"]["name"]
    runner = knative.kubelets[0].runner("t", name)
    ending = next(task for task in asyncio.all_tasks() if task.get_name() == f"pod {name}")
    while not ending.done():
        ending.cancel()
        await asyncio.sleep(0)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((pod["status"]["podIP"], PORT))
        taken.listen()
    await runner.reaped()


async def test_an_image_that_cannot_be_pulled(
    knative: FakeKnative, http: httpx.AsyncClient
) -> None:
    await _deploy(knative, least=0)
    missing = knative.kubelets[0].images.missing
    missing["registry.example/a:1"] = "manifest unknown"
    waking = asyncio.create_task(_wake(knative, http))
    await until(lambda: knative.pods("t"))

    def reason() -> str:
        (pod,) = knative.pods("t")
        states = [
            one["state"].get("waiting", {}).get("reason", "")
            for one in pod["status"].get("containerStatuses", ())
        ]
        return states[0] if states else ""

    await until(lambda: reason() == "ImagePullBackOff")
    assert "manifest unknown" in _user(knative)["state"]["waiting"]["message"]
    missing.clear()
    assert (await waking).status_code == 200
