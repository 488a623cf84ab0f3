"""Functions in pods that call functions: from the pod's socket on its node, through the node agent
and over mutual TLS, to the activator that claimed the pod. All in one event loop, over real
connections; only which process is in which pod is told by the test."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from activator.gateway import pod_connections
from activator.gateway.pod_connections import PodConnections
from activator.knative.agent_addresses import AgentAddresses
from activator.knative.pod_statements import PodStatements
from pilotlight.core.transport.endpoint import Endpoint, TlsCredentials
from pilotlight.core.transport.listeners import open_tcp_listener
from pilotlight.core.transport.pod_calls import MAX_LINE_BYTES, Answer, PodAnswer, PodStatement
from pilotlight.kubernetes.kinds import POD
from pilotlight.protocol import HEADER_PARENT
from pilotlight.spec.function import FunctionNetwork
from snapshotter.errors import Unsupported
from snapshotter.pods import pod_calls
from snapshotter.pods.activator_search import ActivatorSearch
from snapshotter.pods.pod_calls import PodCalls
from tests.activator.knative.test_data_plane import Site, site_of
from tests.activator.test_gateway import until
from tests.fakes.authority import Authority
from tests.fakes.fake_worker import WorkerAnswer, WorkerRequest
from tests.fakes.plain_http import NO_TLS
from tests.fakes.pod_maker import FakePod
from tests.fakes.routes import TENANT
from tests.fakes.small_cluster import World

STRANGER = "00000000-0000-4000-8000-000000000000"
NODE = "node-a"
HOST, OTHER_HOST = "127.0.0.1", "127.0.0.2"


@dataclass(eq=False)
class Node:
    """The node of the pods, its agent, and the activator's side of it.

    Attributes:
        speaks: uid of the pod whose process connects next; None = it is in no pod.
        addresses: those of the activators.
    """

    site: Site
    directory: Path
    credentials: TlsCredentials
    agents: AgentAddresses
    port: int = 0
    speaks: str | None = None
    addresses: list[str] = field(default_factory=lambda: [HOST])
    agent: PodCalls | None = None
    served: PodConnections | None = None
    activator: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    @contextlib.asynccontextmanager
    async def listening(self, site: Site, host: str = HOST) -> AsyncIterator[int]:
        """An activator's listener; its port."""
        listener = open_tcp_listener("x", f"{host}:{self.port}")
        statements = PodStatements(site.fleet.owned, self.agents)
        served = PodConnections(
            site.edge.sockets, statements, listener=listener, credentials=self.credentials
        )
        task = asyncio.create_task(served.run())
        self.served = self.served or served
        try:
            yield served.port
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until(lambda: repr(served) == "<PodConnections 0 open>")

    @contextlib.asynccontextmanager
    async def serving(self, *tenants: str) -> AsyncIterator[PodCalls]:
        """The node's agent."""
        endpoint = Endpoint(host=HOST, port=self.port, credentials=self.credentials)
        agent = PodCalls(ActivatorSearch(endpoint, resolve=self._resolve), identify=self._identify)
        servers = []
        for tenant in tenants or (TENANT,):
            (self.directory / tenant).mkdir(exist_ok=True)
            servers.append(agent.listen(self.directory / tenant / "calls.sock", tenant))
        try:
            self.agent = self.agent or agent
            yield agent
        finally:
            for server in servers:
                server.close()
            await agent.aclose()

    def _identify(self, _: object) -> str:
        if self.speaks is None:
            raise Unsupported("the process that connected is in no pod of this node")
        return self.speaks

    async def _resolve(self, _: Endpoint) -> list[str]:
        return self.addresses

    async def pod(self, name: str, **spec: Any) -> FakePod:
        """A pod of a new function on this node. It speaks from now on."""
        pod = await self.site.world.maker.up(self.site.deploy(name, **spec))
        self.speaks = pod.uid
        return pod

    async def ask(
        self, path: str, *, tenant: str = TENANT, method: str = "POST", **more: Any
    ) -> httpx.Response:
        """A request of the process that speaks."""
        uds = str(self.directory / tenant / "calls.sock")
        transport = httpx.AsyncHTTPTransport(uds=uds, verify=NO_TLS)
        async with httpx.AsyncClient(transport=transport, timeout=30) as client:
            return await client.request(method, f"http://platform{path}", **more)

    async def call(self, function: str, **more: Any) -> httpx.Response:
        """Call a function."""
        return await self.ask(f"/v1/functions/shop/{function}:invoke", **{"json": {}, **more})

    async def from_pod(
        self, pod: FakePod, act: Callable[[str], Any], site: Site | None = None
    ) -> Any:
        """Call the function `outer` in a pod, whose code is `act`; what that returned."""

        async def behave(request: WorkerRequest) -> WorkerAnswer:
            found = await act(request.headers["pilotlight-call"])
            return WorkerAnswer(body=json.dumps(found).encode())

        pod.behaviour = behave
        answer = await (site or self.site).call("outer")
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def agent_at(self, address: str, node: str = NODE) -> None:
        """Kubernetes says that there is one agent: on that node, with this address."""
        world = self.site.world
        await world.cluster.delete(POD, f"agent-{NODE}", "pilotlight", grace_s=0)
        world.server.put(agent_pod(address, node))


def agent_pod(address: str, node: str) -> dict[str, Any]:
    labels = {
        "app.kubernetes.io/component": "node",
        "app.kubernetes.io/part-of": "pilotlight",
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"agent-{node}", "namespace": "pilotlight", "labels": labels},
        "spec": {"nodeName": node, "containers": [{"name": "snapshotter", "image": "x"}]},
        "status": {"phase": "Running", "podIP": address},
    }


@pytest.fixture(name="node")
async def _node(world: World, short_tmp: Path) -> AsyncIterator[Node]:
    """An activator and a node, whose agent Kubernetes knows."""
    credentials = TlsCredentials(Authority().issue(short_tmp / "tls", HOST))
    agents = AgentAddresses("pilotlight")
    async with site_of(world, short_tmp / "a") as site:
        node = Node(site, short_tmp, credentials, agents)
        await node.agent_at(HOST)
        following = asyncio.create_task(agents.follow(world.cluster))
        await until(lambda: "1 agents" in repr(agents))
        async with node.activator:
            node.port = await node.activator.enter_async_context(node.listening(site))
            async with node.serving():
                yield node
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


def said(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, str(answer.json()["detail"])


async def called_inner(node: Node, call: str) -> Any:
    answer = await node.call("inner", headers={HEADER_PARENT: call}, json={"x": 2})
    return [answer.status_code, answer.json()]


async def test_a_function_in_a_pod_calls_another_and_the_record_names_it(node: Node) -> None:
    await node.pod("inner")
    outer = await node.pod("outer")
    made = await node.from_pod(outer, lambda call: called_inner(node, call))
    assert made == [200, {"x": 2}]
    records = (await node.site.edge.settle()).values()
    (inner,) = [record for record in records if record.function == "inner"]
    (own,) = [record for record in records if record.function == "outer"]
    assert (inner.key, inner.parent) == (f"function:{TENANT}/main/shop/outer", own.id)


async def test_calls_one_after_the_other_share_a_connection(node: Node) -> None:
    await node.pod("inner")
    outer = await node.pod("outer")

    async def several(call: str) -> Any:
        return [(await called_inner(node, call))[0] for _ in range(5)]

    assert await node.from_pod(outer, several) == [200] * 5
    assert repr(node.served) == "<PodConnections 1 open>"


async def test_only_a_running_call_of_the_pod_may_be_named(node: Node) -> None:
    await node.pod("inner")
    outer = await node.pod("outer")
    await node.from_pod(outer, lambda call: called_inner(node, call))
    status, text = said(await node.call("inner", headers={HEADER_PARENT: "c-1"}))
    assert status == 403
    assert "does not run on instance" in text


async def test_a_pod_that_no_activator_has_claimed_is_told_what_to_do(node: Node) -> None:
    await node.pod("outer")
    status, text = said(await node.call("outer"))
    assert status == 403
    assert "no activator has claimed this pod" in text
    assert "PILOTLIGHT_API_KEY" in text


async def test_a_process_in_no_pod_is_refused(node: Node) -> None:
    status, text = said(await node.call("outer"))
    assert status == 403
    assert "in no pod of this node" in text


async def test_a_pod_is_believed_only_in_the_directory_of_its_tenant(node: Node) -> None:
    outer = await node.pod("outer")
    other = "t-000000000002"

    async def ask(call: str) -> Any:
        return said(await node.call("outer", tenant=other, headers={HEADER_PARENT: call}))

    async with node.serving(other):
        status, text = await node.from_pod(outer, ask)
    assert status == 403
    assert f"is not of the tenant {other}" in text


@pytest.mark.parametrize(
    "address, of_node", [(HOST, "node-b"), ("127.0.0.9", NODE)], ids=["another node", "no agent"]
)
async def test_an_agent_does_not_speak_for_pods_of_another_node(
    node: Node, address: str, of_node: str, caplog: pytest.LogCaptureFixture
) -> None:
    outer = await node.pod("outer")
    await node.agent_at(address, of_node)
    (pod,) = node.site.fleet.pods.of(outer.body["metadata"]["annotations"]["pilotlight.dev/key"])
    await until(lambda: not node.agents.is_agent_of(HOST, pod))
    status, text = await node.from_pod(outer, lambda call: refused(node, call))
    assert status == 503, "it may be known in a moment"
    assert "does not know the agent of this node" in text
    assert NODE not in text, "a function learns nothing of the cluster"
    logged = f"runs on node {NODE}, and {HOST} is not an address of the node agent there"
    assert logged in caplog.text


async def refused(node: Node, call: str, **more: Any) -> Any:
    return said(await node.call("outer", headers={HEADER_PARENT: call}, **more))


async def test_an_agent_in_the_nodes_own_network_speaks_for_its_pods(node: Node) -> None:
    await node.pod("inner")
    outer = await node.pod("outer")
    await node.agent_at("127.0.0.9")
    for pod in node.site.world.maker.pods.values():
        pod.body["status"]["hostIP"] = f"::ffff:{HOST}"
        node.site.world.maker.called_ready(pod)
    await until(lambda: node.site.fleet.pods.find(outer.uid).node_addresses)  # type: ignore[union-attr]
    made = await node.from_pod(outer, lambda call: called_inner(node, call))
    assert made == [200, {"x": 2}]


async def test_a_function_without_a_network_calls_none(node: Node) -> None:
    outer = await node.pod("outer", network=FunctionNetwork.NONE)
    status, text = await node.from_pod(outer, lambda call: refused(node, call))
    assert status == 403
    assert "network='none'" in text


async def test_a_pod_that_has_ended_is_heard_no_more(node: Node) -> None:
    await node.pod("inner")
    outer = await node.pod("outer")
    await node.from_pod(outer, lambda call: called_inner(node, call))
    await node.site.world.maker.evicted(outer)
    await until(lambda: node.site.fleet.owned(outer.uid) is None)
    status, text = said(await node.call("inner"))
    assert status == 403
    assert "no activator has claimed this pod" in text


async def test_a_restarted_agent_serves_again(node: Node) -> None:
    await node.pod("inner")
    outer = await node.pod("outer")

    async def through(call: str) -> Any:
        first = await called_inner(node, call)
        async with node.serving():  # in the place of the one before
            return [first, await called_inner(node, call)]

    assert await node.from_pod(outer, through) == [[200, {"x": 2}]] * 2


async def test_of_several_activators_the_one_that_claimed_the_pod_is_found_again(
    node: Node, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await node.pod("inner")
    outer = await node.pod("outer")
    async with (
        site_of(world, node.directory / "b", "a-1") as other,
        node.listening(other, OTHER_HOST),
    ):
        for name in ("inner", "outer"):
            other.deploy(name)
        node.addresses = [OTHER_HOST, HOST]
        made = await node.from_pod(outer, lambda call: called_inner(node, call))
        assert made == [200, {"x": 2}], "the first that is asked has not claimed it"
        await node.activator.aclose()
        made = await node.from_pod(outer, lambda call: called_inner(node, call), other)
        assert made == [200, {"x": 2}], "the one that had claimed it is gone"
    answer = await node.call("inner")
    status, text = said(answer)
    assert (status, answer.headers["retry-after"]) == (503, "1")
    assert "no activator that answers has claimed this pod" in text
    assert f"the activator at {HOST} does not answer" in caplog.text


# -- bounds ----------------------------------------------------------------------------------------
async def test_connections_of_a_pod_are_bounded_and_another_pod_has_its_own(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_calls, "MAX_OF_POD", 2)
    await node.pod("inner")
    outer = await node.pod("outer")
    path = str(node.directory / TENANT / "calls.sock")

    async def many(call: str) -> Any:
        held = [await asyncio.open_unix_connection(path) for _ in range(2)]
        status, text = await refused(node, call)
        node.speaks = STRANGER
        other = said(await node.call("outer"))
        for _, writer in held:
            writer.close()
        return [status, text, other]

    status, text, other = await node.from_pod(outer, many)
    assert status == 503
    assert "it may have 2 at once" in text
    assert "no activator has claimed this pod" in other[1]
    node.speaks = outer.uid
    await until(lambda: "0 connections of 0 pods" in repr(node.agent))


async def test_a_pod_that_sends_rubbish_or_reads_nothing_costs_its_own_connection(
    node: Node,
) -> None:
    await node.pod("inner")
    outer = await node.pod("outer")
    path = str(node.directory / TENANT / "calls.sock")
    large = "x" * (4 << 20)

    async def misbehave(call: str) -> Any:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"\x00rubbish\r\n\r\n")
        answered = (await reader.read(64)).partition(b"\r\n")[0].decode()
        body = json.dumps({"x": large}).encode()
        head = (
            "POST /v1/functions/shop/inner:invoke HTTP/1.1\r\nhost: platform\r\n"
            f"content-type: application/json\r\n{HEADER_PARENT}: {call}\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        _, idle = await asyncio.open_unix_connection(path, limit=1024)
        idle.write(head.encode() + body)  # and never reads the answer of 4 MiB
        await idle.drain()
        writer.close()
        made = await called_inner(node, call)
        idle.transport.abort()
        return [answered, made]

    answered, made = await node.from_pod(outer, misbehave)
    assert answered == "HTTP/1.1 400 Bad Request"
    assert made == [200, {"x": 2}]
    await until(lambda: "0 connections of 0 pods" in repr(node.agent))


async def test_a_call_ends_when_the_pod_hangs_up(node: Node) -> None:
    inner = await node.pod("inner")
    outer = await node.pod("outer")
    began, ended = asyncio.Event(), asyncio.Event()

    async def forever(_: WorkerRequest) -> WorkerAnswer:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    inner.behaviour = forever

    async def leave(call: str) -> Any:
        calling = asyncio.create_task(called_inner(node, call))
        await began.wait()
        calling.cancel()
        await ended.wait()
        return "left"

    assert await node.from_pod(outer, leave) == "left"
    assert repr(node.served) == "<PodConnections 1 open>", "kept for the next one"


# -- the activator's listener ----------------------------------------------------------------------
async def dial(node: Node, context: ssl.SSLContext) -> tuple[Any, Any]:
    return await asyncio.open_connection(HOST, node.port, ssl=context, server_hostname=HOST)


async def test_nobody_is_heard_without_a_certificate_of_the_platform(node: Node) -> None:
    stranger = TlsCredentials(
        Authority("another").issue(node.directory / "stranger", HOST)
    ).client_context()
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await dial(node, stranger)
    nobody = ssl.create_default_context(cafile=str(node.credentials.files.ca))
    reader, writer = await dial(node, nobody)
    writer.write(PodStatement(TENANT, STRANGER).to_line())
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
        await reader.read(1)
    writer.close()


@pytest.mark.parametrize(
    "line",
    [
        b"rubbish\n",
        b"[]\n",
        b'{"tenant": "t-1", "pod": "../x"}\n',
        b'{"tenant": "a/b", "pod": "00000000-0000-4000-8000-000000000000"}\n',
        b"x" * (MAX_LINE_BYTES + 1),
        b"",
    ],
    ids=["no JSON", "no object", "no uid", "no tenant", "too long", "silence"],
)
async def test_a_statement_that_is_none_ends_the_connection(
    node: Node, line: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_connections, "OPENING_TIMEOUT_S", 20.0 if line else 0.05)
    reader, writer = await dial(node, node.credentials.client_context())
    writer.write(line)
    with contextlib.suppress(ConnectionError):
        assert await reader.read(64) == b""
    writer.close()


async def test_a_statement_about_an_unclaimed_pod_is_answered_without_a_reason(node: Node) -> None:
    pod = await node.pod("outer")
    for uid in (pod.uid, STRANGER):
        reader, writer = await dial(node, node.credentials.client_context())
        writer.write(PodStatement(TENANT, uid).to_line())
        assert PodAnswer.parse(await reader.readline()) == PodAnswer(Answer.NOT_LEASED)
        writer.close()
