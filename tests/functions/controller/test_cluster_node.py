"""What the controller asks a node agent on one machine, asked of a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, Self

import pytest
from aiohttp import web

from pilotlight.controller.database.store import Store
from pilotlight.controller.kubernetes import pods
from pilotlight.controller.kubernetes.cluster_backend import ClusterBackend
from pilotlight.controller.kubernetes.node_reports import NodeReports
from pilotlight.controller.kubernetes.pod_logs import LogQuery, parse_line
from pilotlight.controller.node_snapshots.register import SnapshotRegister
from pilotlight.kubernetes import names
from pilotlight.kubernetes.cluster import CallDeadlines, Cluster
from pilotlight.kubernetes.exec import exit_status, parts
from pilotlight.kubernetes.retry_policy import RetryDelays
from pilotlight.kubernetes.settings import ClusterSettings
from snapshotter.errors import AgentUnavailable, InstanceUnknown, SnapshotUnknown, Unsupported
from snapshotter.node_reports import NodeReport, NodeSnapshot
from snapshotter.types import InstanceId, InstanceState, SnapshotState
from tests.fakes.kubernetes.server import ApiServer
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import snapshot

HASTY = CallDeadlines(
    call_s=5,
    pauses=RetryDelays(first_s=0.002, most_s=0.02),
    watch_pauses=RetryDelays(first_s=0.002, most_s=0.02),
)
SETTINGS = ClusterSettings()
QUERY = LogQuery()


async def hastily(settings: ClusterSettings) -> Cluster:
    async def soon(seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.005))

    return await Cluster.connect(settings, patience=HASTY, sleep=soon)


@asynccontextmanager
async def node_at(kubeconfig: str) -> AsyncIterator[ClusterBackend]:
    node = ClusterBackend(ClusterSettings(kubeconfig=kubeconfig), connect=hastily)
    try:
        yield node
    finally:
        await node.aclose()


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer() as server:
        yield server


@pytest.fixture
async def node(server: ApiServer, tmp_path: Path) -> AsyncIterator[ClusterBackend]:
    async with node_at(str(server.write_kubeconfig(tmp_path / "kubeconfig"))) as node:
        yield node


def pod(
    name: str,
    *,
    tenant: str = "t-1",
    app: str = "search",
    function: str = "embed",
    on: str | None = None,
    **status: Any,
) -> dict[str, Any]:
    """A pod of a function, as Knative makes it from our template."""
    labels = {
        names.MANAGED_BY: names.manager_of(SETTINGS),
        names.TENANT: tenant,
        names.ENVIRONMENT: "main",
        names.APP: app,
        names.FUNCTION: function,
        names.REVISION: "v1-abcdef",
        names.FUNCTION_ID: f"fn-{tenant}-{app}-{function}",
    }
    resources = {
        "requests": {"cpu": "500m", "memory": "2Gi"},
        "limits": {"memory": "2Gi", "nvidia.com/gpu": "1"},
    }
    running = {
        "name": "user",
        "state": {"running": {}},
        "ready": True,
        "restartCount": 0,
        "image": "",
        "imageID": "",
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": f"fn-{tenant}",
            "labels": labels,
            "annotations": {names.KEY: f"fn-{tenant}-{app}-{function}@v1-abcdef"},
        },
        "spec": {
            "containers": [
                {"name": "user", "image": "registry.example/a", "resources": resources},
                {"name": "queue-proxy", "image": "q"},
            ],
            **({"nodeName": on} if on else {}),
        },
        "status": {"phase": "Running", "containerStatuses": [running], **status},
    }


def condition(kind: str, at: str, status: str = "True") -> dict[str, str]:
    return {"type": kind, "status": status, "lastTransitionTime": f"2026-11-21T10:00:{at}Z"}


READY = [condition("PodScheduled", "01"), condition("Initialized", "03"), condition("Ready", "08")]


async def lines(source: AsyncIterator[Any]) -> list[tuple[str, str]]:
    return [(line["instance"], line["text"]) async for line in source]


# -- a pod as an instance --------------------------------------------------------------------------


def test_a_pod_is_an_instance() -> None:
    body = pod("a", podIP="10.0.0.7", startTime="2026-11-21T10:00:00Z", conditions=READY)
    body["metadata"]["creationTimestamp"] = "2026-11-21T10:00:00Z"
    found = pods.pod_to_instance(body, SETTINGS)
    assert found is not None
    assert (found.id, found.revision, found.state) == (
        "a",
        "fn-t-1-search-embed@v1-abcdef",
        InstanceState.READY,
    )
    assert (found.memory_bytes, found.cpu, found.gpu_count) == (2 << 30, 0.5, 1)
    assert found.phases_ms == {"schedule": 1000.0, "containers": 2000.0, "boot": 5000.0}
    assert found.labels == {
        "tenant": "t-1",
        "environment": "main",
        "app": "search",
        "function": "embed",
        "revision": "v1-abcdef",
    }


def test_states_of_pods() -> None:
    starting = pods.pod_to_instance(
        pod("a", phase="Pending", conditions=[condition("Ready", "08", "False")]), SETTINGS
    )
    assert starting is not None
    assert starting.state is InstanceState.STARTING
    going = pod("a", conditions=READY)
    going["metadata"]["deletionTimestamp"] = "2026-11-21T10:01:00Z"
    ending = pods.pod_to_instance(going, SETTINGS)
    assert ending is not None
    assert ending.state is InstanceState.DRAINING
    assert pods.pod_to_instance(pod("a", phase="Failed"), SETTINGS) is None
    stranger = pod("a")
    del stranger["metadata"]["annotations"]
    assert pods.pod_to_instance(stranger, SETTINGS) is None


@pytest.mark.parametrize(
    "text, value",
    [("500m", 0.5), ("2Gi", 2.0 * (1 << 30)), ("4", 4.0), ("1k", 1000.0), ("", 0.0), ("x", 0.0)],
)
def test_quantities(text: str, value: float) -> None:
    assert pods.quantity(text) == value


def test_lines_lose_their_stamp_and_their_calls_mark() -> None:
    assert parse_line("a", b"2026-11-21T10:00:00.5Z \x1ecall-1\x1fhello") == {
        "time": 1795255200.5,
        "instance": "a",
        "stream": "stdout",
        "call": "call-1",
        "text": "hello",
    }
    assert (parse_line("a", b"2026-11-21T10:00:00.123456789Z plain") or {})["call"] is None
    of_several = [
        parse_line("a", b"2026-11-21T10:00:00.5Z \x1e" + mark + b"\x1fhello") or {}
        for mark in (b"call-1@i-2", b"@i-2", b"call-1@not an id")
    ]
    assert [(line["call"], line["instance"]) for line in of_several] == [
        ("call-1", "i-2"),
        (None, "i-2"),
        ("call-1", "a"),
    ]
    assert parse_line("a", b"no stamp") is None


# -- asked of a server -----------------------------------------------------------------------------


async def test_tenants_see_their_own_pods_only(server: ApiServer, node: ClusterBackend) -> None:
    for body in (pod("a"), pod("b", app="other"), pod("c", tenant="t-2")):
        server.put(body)
    # none of the platform's
    server.put(
        {
            **pod("d"),
            "metadata": {"name": "d", "namespace": "fn-t-1", "labels": {names.TENANT: "t-1"}},
        }
    )
    assert [one.id for one in await node.instances({"tenant": "t-1", "environment": "main"})] == [
        "a",
        "b",
    ]
    assert [one.id for one in await node.instances({"tenant": "t-1", "app": "other"})] == ["b"]
    assert await node.instances({"tenant": "t-1", "environment": "staging"}) == []
    assert [one.id for one in await node.instances()] == ["a", "b", "c"]


async def test_stopping_waits_until_the_pod_is_gone(
    server: ApiServer, node: ClusterBackend
) -> None:
    server.put(pod("a"))
    await node.stop(InstanceId("a"), grace_s=0)
    assert server.get("v1", "Pod", "a", "fn-t-1") is None
    with pytest.raises(InstanceUnknown):
        await node.stop(InstanceId("a"), grace_s=0)


async def test_a_pod_that_takes_its_time_is_waited_for(
    server: ApiServer, node: ClusterBackend
) -> None:
    body = pod("a")
    body["metadata"]["finalizers"] = ["example.com/hold"]
    server.put(body)
    stopping = asyncio.create_task(node.stop(InstanceId("a"), grace_s=0))
    while not server.watches:
        await asyncio.sleep(0.002)
    assert not stopping.done()
    held = server.get("v1", "Pod", "a", "fn-t-1")
    assert held is not None
    bare = {key: value for key, value in held.items() if key != "status"}
    server.put({**bare, "metadata": {**held["metadata"], "finalizers": []}})
    await stopping


async def test_a_name_that_two_pods_have_names_neither(
    server: ApiServer, node: ClusterBackend
) -> None:
    server.put(pod("a"))
    server.put(pod("a", tenant="t-2"))
    with pytest.raises(InstanceUnknown, match="two pods"):
        await node.stop(InstanceId("a"), grace_s=0)


async def test_logs_of_many_pods_are_one_story(server: ApiServer, node: ClusterBackend) -> None:
    server.put(pod("a"))
    server.put(pod("b"))
    server.put(pod("c", tenant="t-2"))
    server.put(pod("waits", containerStatuses=[]))
    server.logs.texts["fn-t-1", "a", "user"] = (
        "2026-11-21T10:00:01Z one\n2026-11-21T10:00:03Z \x1ecall-1\x1fthree\n"
    )
    server.logs.texts["fn-t-1", "b", "user"] = "2026-11-21T10:00:02Z two\n2026-11-21T10:00:04Z four"
    server.logs.texts["fn-t-2", "c", "user"] = "2026-11-21T10:00:01Z secret\n"
    mine = {"tenant": "t-1", "environment": "main"}
    assert await lines(await node.logs(labels=mine)) == [
        ("a", "one"),
        ("b", "two"),
        ("a", "three"),
        ("b", "four"),
    ]
    assert await lines(await node.logs(labels=mine, tail=2)) == [("a", "three"), ("b", "four")]
    assert await lines(await node.logs(labels=mine, instance_id="b")) == [
        ("b", "two"),
        ("b", "four"),
    ]
    # another tenant's does not exist
    assert await lines(await node.logs(labels=mine, instance_id="c")) == []
    assert await lines(await node.logs(labels=mine, call_id="call-1")) == [("a", "three")]
    assert await lines(await node.logs(labels=mine, since=1795255203.0)) == [
        ("a", "three"),
        ("b", "four"),
    ]
    assert await lines(await node.logs(labels=mine, tail=0)) == []


class Kubelet:
    """Serves what containers print, as it is printed. `cut`: end all streams."""

    def __init__(self) -> None:
        self.printed: dict[str, list[str]] = {}
        self._more = asyncio.Event()
        self._cut = asyncio.Event()
        self._server: asyncio.Server | None = None

    def print(self, pod: str, line: str) -> None:
        self.printed.setdefault(pod, []).append(line)
        self._more.set()

    def cut(self) -> None:
        self._cut.set()
        self._more.set()
        self._cut = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        name, cut, at = head.split("/")[3], self._cut, 0
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n")
        while not cut.is_set():
            self._more.clear()
            news = self.printed.get(name, [])[at:]
            at += len(news)
            with contextlib.suppress(ConnectionError):
                writer.write("".join(f"{line}\n" for line in news).encode())
                await writer.drain()
            if "follow=true" not in head or reader.at_eof() or writer.is_closing():
                break
            waiting = [
                asyncio.ensure_future(self._more.wait()),
                asyncio.ensure_future(reader.read(1)),
            ]
            _, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def kubelet_node(port: int) -> dict[str, Any]:
    addresses = [{"type": "InternalIP", "address": "127.0.0.1"}]
    status = {"addresses": addresses, "daemonEndpoints": {"kubeletEndpoint": {"Port": port}}}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}, "status": status}


async def test_a_followed_log_has_later_lines_later_pods_and_no_line_twice(
    server: ApiServer, node: ClusterBackend
) -> None:
    async with Kubelet() as kubelet:
        server.put(kubelet_node(kubelet.port))
        server.put(pod("a", on="n1"))
        kubelet.print("a", "2026-11-21T10:00:01Z one")
        async with aclosing(await node.logs(labels={"tenant": "t-1"}, follow=True)) as coming:
            assert (await anext(coming))["text"] == "one"
            reading = asyncio.ensure_future(anext(coming))
            kubelet.print("a", "2026-11-21T10:00:02Z two")
            assert (await reading)["text"] == "two"
            kubelet.cut()  # the stream breaks: it goes on behind the last line
            kubelet.print("a", "2026-11-21T10:00:03Z three")
            assert (await anext(coming))["text"] == "three"
            server.put(pod("b", on="n1"))
            server.put(pod("c", tenant="t-2", on="n1"))
            kubelet.print("c", "2026-11-21T10:00:04Z secret")
            kubelet.print("b", "2026-11-21T10:00:05Z four")
            assert (await anext(coming)) == {
                **(parse_line("b", b"2026-11-21T10:00:05Z four") or {})
            }


async def test_what_a_cluster_has_not_is_said(node: ClusterBackend) -> None:
    assert (
        await node.templates(),
        await node.snapshots(),
        await node.delete_snapshots(function="x"),
    ) == ([], [], 0)
    with pytest.raises(SnapshotUnknown):
        await node.quarantine_snapshot("sn-1", reason="x")
    with pytest.raises(Unsupported, match="quarantine it"):
        await node.prove_snapshot("sn-1")
    with pytest.raises(Unsupported, match="pilotlight deploy"):
        await anext(node.build_image({}, uid=None))
    told = await node.capabilities()
    assert {one["name"]: one["on"] for one in told["features"]} == {
        "COLD": True,
        "FORK": False,
        "WAKE": False,
        "RESTORE": False,
    }
    assert told["node"]["fleet"] == "knative"


async def test_snapshots_of_nodes_are_listed_quarantined_and_deleted(
    server: ApiServer, node: ClusterBackend, store: Store
) -> None:
    server.put(pod("a", on="n1"))
    for wrong in (("fn-t-1-search-other", "t-1", "n1"), ("fn-t-1-search-embed", "t-2", "n1")):
        assert not await node.has_pod(*wrong)
    assert not await node.has_pod("fn-t-1-search-embed", "t-1", "n2")
    reports = NodeReports()
    node.register = SnapshotRegister(store, reports, node.has_pod, max_bytes=1000)
    info = snapshot("t-1", "fn-t-1-search-embed@v1-abcdef")
    found = NodeSnapshot(
        revision=info.revision, digest="1" * 64, copy="2" * 64, copy_bytes=5, info=info
    )
    report = NodeReport(node="n1", version="1", kind="k", snapshots=(found,))
    reports.take(report, now=time.time())
    answer = await node.register.take(report, now=time.time())
    assert [copy.snapshot for copy in answer.approved or ()] == ["sn-1"]
    (shown,) = await node.snapshots({"tenant": "t-1"})
    assert (shown.id, shown.node, shown.where) == ("sn-1", "n1", "disk, store")
    quarantined = await node.quarantine_snapshot("sn-1", reason="by key")
    assert quarantined.state is SnapshotState.QUARANTINED
    assert await node.delete_snapshots(function="fn-t-1-search-embed") == 1
    assert await node.snapshots() == []


async def test_a_cluster_that_is_away_is_an_agent_that_is_away(
    server: ApiServer, node: ClusterBackend, caplog: pytest.LogCaptureFixture
) -> None:
    server.rights.deny("list", "pods")
    with pytest.raises(AgentUnavailable) as caught:
        await node.instances({"tenant": "t-1"})
    assert "pods" not in str(caught.value)  # whoever asked is a tenant
    assert "Grant in all namespaces" in caplog.text
    with pytest.raises(AgentUnavailable):
        await lines(await node.logs(labels={"tenant": "t-1"}))
    absent = ClusterBackend(ClusterSettings(kubeconfig="/nowhere"))
    with pytest.raises(AgentUnavailable):
        await absent.capabilities()


async def test_the_control_api_shows_each_tenant_its_own(
    controller: Controller, server: ApiServer, node: ClusterBackend
) -> None:
    clustered = dataclasses.replace(
        controller, context=dataclasses.replace(controller.context, agent=node)
    )
    mine, theirs = await controller.tenant(), "t-other"
    server.put(pod("a", tenant=mine))
    server.put(pod("b", tenant=theirs))
    server.logs.texts[f"fn-{mine}", "a", "user"] = "2026-11-21T10:00:01Z hello\n"
    server.logs.texts[f"fn-{theirs}", "b", "user"] = "2026-11-21T10:00:01Z secret\n"
    async with clustered.client(controller.key) as http:
        assert [one["id"] for one in (await http.get("/v1/instances")).json()["instances"]] == ["a"]
        assert [
            json.loads(line)["text"] for line in (await http.get("/v1/logs")).text.splitlines()
        ] == ["hello"]
        for verb, body in (("stop", None), ("exec", {"argv": ["true"]})):
            assert (await http.post(f"/v1/instances/b:{verb}", json=body)).status_code == 404
        assert (await http.post("/v1/instances/a:stop?grace_s=0")).status_code == 204
        assert (await http.get("/v1/instances")).json() == {"instances": []}
        assert server.get("v1", "Pod", "b", f"fn-{theirs}") is not None
        server.rights.deny("list", "pods")
        assert (await http.get("/v1/instances")).status_code == 503


# -- commands --------------------------------------------------------------------------------------


def test_the_end_of_a_command_is_its_exit_status() -> None:
    failed = {"status": "Failure", "details": {"causes": [{"reason": "ExitCode", "message": "3"}]}}
    assert list(parts(b"\x03" + json.dumps(failed).encode())) == [{"exit_status": 3}]
    assert list(parts(b"\x03" + b'{"status":"Success"}')) == [{"exit_status": 0}]
    assert (exit_status(b"?"), exit_status(b'{"status":"Failure"}')) == (255, 255)
    assert list(parts(b"\x02oh")) == [{"stream": "stderr", "text": "oh"}]
    assert list(parts(b"\x01")) == []


@asynccontextmanager
async def exec_server(
    script: Callable[[web.WebSocketResponse, web.Request], Awaitable[None]], kubeconfig: Path
) -> AsyncIterator[list[Any]]:
    """An API server with one pod, that runs commands."""
    asked: list[Any] = []

    async def run(request: web.Request) -> web.StreamResponse:
        asked.append(
            (
                request.query.getall("command"),
                request.query["container"],
                request.headers["authorization"],
            )
        )
        socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await socket.prepare(request)
        await script(socket, request)
        await socket.close()
        return socket

    async def listed(request: web.Request) -> web.Response:
        items = [pod("a")] if request.query["fieldSelector"] == "metadata.name=a" else []
        return web.json_response(
            {"kind": "PodList", "metadata": {"resourceVersion": "1"}, "items": items}
        )

    application = web.Application()
    application.router.add_get("/api/v1/pods", listed)
    application.router.add_get("/api/v1/namespaces/fn-t-1/pods/a/exec", run)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        one = ApiServer(port=runner.addresses[0][1])
        one.write_kubeconfig(kubeconfig)
        yield asked
    finally:
        await runner.cleanup()


async def test_a_command_runs_in_the_pods_container(tmp_path: Path) -> None:
    async def script(socket: web.WebSocketResponse, request: web.Request) -> None:
        await socket.send_bytes(b"\x01hello ")
        await socket.send_bytes(b"\x02careful")
        await socket.send_bytes(b'\x03{"status":"Success"}')

    async with (
        exec_server(script, tmp_path / "kubeconfig") as asked,
        node_at(str(tmp_path / "kubeconfig")) as node,
    ):
        told = [part async for part in node.exec(InstanceId("a"), ["echo", "a b"])]
        assert told == [
            {"stream": "stdout", "text": "hello "},
            {"stream": "stderr", "text": "careful"},
            {"exit_status": 0},
        ]
        assert asked == [(["echo", "a b"], "user", "Bearer test-token")]
        with pytest.raises(InstanceUnknown):
            await anext(node.exec(InstanceId("b"), ["true"]))


async def test_a_connection_that_ends_without_a_word_is_a_failure(tmp_path: Path) -> None:
    async def script(socket: web.WebSocketResponse, request: web.Request) -> None:
        await socket.send_bytes(b"\x01half")

    async with (
        exec_server(script, tmp_path / "kubeconfig"),
        node_at(str(tmp_path / "kubeconfig")) as node,
    ):
        assert [part async for part in node.exec(InstanceId("a"), ["true"])] == [
            {"stream": "stdout", "text": "half"},
            {"exit_status": 255},
        ]


async def test_a_command_that_is_refused(server: ApiServer, node: ClusterBackend) -> None:
    server.put(pod("a"))
    with pytest.raises(InstanceUnknown):  # this server knows no such thing
        await anext(node.exec(InstanceId("a"), ["true"]))
