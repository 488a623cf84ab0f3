"""A server with threads, a subprocess and TCP of its own: its whole tree is checkpointed after its
first call, and restored one to one."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import socket
import subprocess
import tarfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pilotlight.protocol import WORKER_ASGI
from pilotlight.spec.function import FunctionKind, FunctionSpec, MethodSpec
from pilotlight.spec.record_json import to_json
from snapshotter.agent.app import own_runtime
from snapshotter.client import AgentClient
from snapshotter.linux import host_network
from snapshotter.linux.cgroups import Cgroups
from snapshotter.types import InstanceInfo, LaunchSpec, SnapshotState, StartKind
from tests.fakes.agent_home import MIB, AgentHome, get, instance_id
from tests.fakes.host_address import host_address

pytestmark = [
    pytest.mark.root,
    pytest.mark.e2e,
    pytest.mark.usefixtures("criu", "patient_restores"),
    pytest.mark.timeout(120),
]

CLONES = 4
SITE = textwrap.dedent(
    """
    import asyncio, json, os, socket, subprocess, sys, threading

    import pilotlight

    TALKER = '''
    import os, socket, sys
    server = socket.create_connection(("127.0.0.1", int(sys.argv[1]))).makefile("rw")
    for line in sys.stdin:
        print(line, end="", file=server, flush=True)
        print(server.readline().strip(), os.getpid(), flush=True)
    '''


    class Site:
        '''One listener on 127.0.0.1, a thread that serves it, and a subprocess that holds a connection to it.'''

        @pilotlight.enter()
        def begin(self):
            self.listener = socket.create_server(("127.0.0.1", 0))
            threading.Thread(target=self.serve, daemon=True, name="server").start()
            port = str(self.listener.getsockname()[1])
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
            self.talker = subprocess.Popen([sys.executable, "-c", TALKER, port], **pipes)
            self.turn = threading.Lock()

        def serve(self):
            connection, _ = self.listener.accept()
            for n, line in enumerate(connection.makefile()):
                connection.sendall(f"{n} {line}".encode())

        def talk(self, word):
            with self.turn:
                self.talker.stdin.write(word + "\\n")
                return self.talker.stdout.readline().split()

        def fetch(self, host, port):
            with socket.create_connection((host, int(port)), timeout=30) as server:
                return server.makefile().readline().strip()

        def answer(self, path):
            match path.strip("/").split("/"):
                case ["fetch", host, port]:
                    return self.fetch(host, port)
                case [word]:
                    count, said, talker = self.talk(word)
                    me = {"pid": os.getpid(), "host": socket.gethostname(), "port": self.listener.getsockname()[1]}
                    return {"count": int(count), "said": said, "talker": int(talker), **me}

        @pilotlight.asgi_app(example="/first")
        def web(self):
            async def app(scope, receive, send):
                assert scope["type"] == "http"
                body = await asyncio.get_running_loop().run_in_executor(None, self.answer, scope["path"])
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": json.dumps(body).encode()})

            return app
    """
)


@pytest.fixture
def home(short_tmp: Path) -> AgentHome:
    home = AgentHome(short_tmp)
    home.runtime = dict(own_runtime())
    return home


def site(home: AgentHome) -> LaunchSpec:
    bundle = bundled(home, SITE)
    spec = FunctionSpec(
        name="site",
        kind=FunctionKind.ASGI,
        module="site_app",
        qualname="Site",
        bundle=bundle,
        methods=(MethodSpec(),),
    )
    return home.launch(
        "f-site@v1-abc",
        bundle=bundle,
        entry=to_json(spec),
        memory_bytes=512 * MIB,
        startup_timeout_s=60.0,
    )


def bundled(home: AgentHome, code: str) -> str:
    """The digest of an archive with this module, put where the controller would put it."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as archive:
        info = tarfile.TarInfo("site_app.py")
        info.size = len(code.encode())
        archive.addfile(info, io.BytesIO(code.encode()))
    digest = hashlib.sha256(raw.getvalue()).hexdigest()
    blob = home.paths.home / "blobs" / digest[:2] / digest
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(raw.getvalue())
    return digest


async def begin(client: AgentClient, launch: LaunchSpec) -> InstanceInfo:
    """With nothing of the revision in memory."""
    await client.drop_template(launch.revision)
    return await client.start(launch, instance_id=instance_id(), lessee="act-1", secret_env={})


async def ask(info: InstanceInfo, path: str) -> Any:
    return await asyncio.to_thread(get, info.socket, f"{WORKER_ASGI}{path}")


def namespaces(info: InstanceInfo) -> dict[str, str]:
    return {
        kind: os.readlink(f"/proc/{info.pid}/ns/{kind}") for kind in ("pid", "mnt", "ipc", "net")
    }


async def test_clones_of_a_server_each_go_on_where_its_first_call_ended(
    home: AgentHome, client: AgentClient
) -> None:
    launch = site(home)
    made = await client.checkpoint(launch)
    assert (made.state, made.in_place) == (SnapshotState.READY, True)

    clones = await asyncio.gather(*(begin(client, launch) for _ in range(CLONES)))
    assert [clone.start_kind for clone in clones] == [StartKind.RESTORE] * CLONES

    answers = [await ask(clone, "/again") for clone in clones]
    assert {(a["count"], a["said"]) for a in answers} == {(1, "again")}  # the example was 0
    # one image, and nobody collides
    assert len({(a["pid"], a["talker"], a["port"]) for a in answers}) == 1
    assert len({a["host"] for a in answers}) == CLONES
    assert (await ask(clones[0], "/more"))["count"] == 2
    assert (await ask(clones[1], "/more"))["count"] == 2  # each has a state of its own

    assert all(
        len({namespaces(clone)[kind] for clone in clones}) == CLONES
        for kind in ("pid", "mnt", "ipc", "net")
    )
    assert os.readlink("/proc/self/ns/net") not in {namespaces(clone)["net"] for clone in clones}


@contextlib.contextmanager
def host_server() -> Iterator[int]:
    """A server on all of the host's addresses that greets once per connection; its port."""
    with socket.create_server(("0.0.0.0", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.sendall(b"hello from the host")

        thread = threading.Thread(target=serve, name="server on the host")
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


async def test_a_restored_server_reaches_a_server_on_the_host_where_it_is_allowed(
    home: AgentHome,
) -> None:
    launch = site(home)
    async with home.agent(snapshots=True, egress_allowed=[host_address()]), home.client() as client:
        await client.checkpoint(launch)
        clone = await begin(client, launch)
        assert clone.start_kind is StartKind.RESTORE
        with host_server() as port:
            assert await ask(clone, f"/fetch/{host_address()}/{port}") == "hello from the host"


def host_end(pid: int) -> str:
    """The host's end of the virtual Ethernet pair (veth(4)) of a process's network."""
    command = ["nsenter", f"--net=/proc/{pid}/ns/net", "ip", "-j", "link", "show", "type", "veth"]
    [link] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return socket.if_indextoname(link["link_index"])


async def test_nothing_is_left_of_a_server_and_its_clones(home: AgentHome) -> None:
    launch = site(home)
    async with home.agent(snapshots=True), home.client() as client:
        await client.checkpoint(launch)
        clones = await asyncio.gather(*(begin(client, launch) for _ in range(CLONES)))
        pids = [clone.pid for clone in clones]
        ends = {host_end(pid) for pid in pids}
        assert len(ends) == CLONES
        assert ends <= set(host_network.interfaces())
        for clone in clones:
            await client.stop(clone.id, grace_s=5)
        assert not await client.instances()
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    async with asyncio.timeout(30):
        while ends & set(host_network.interfaces()):  # the kernel ends namespaces in its own time
            await asyncio.sleep(0.01)
    assert list((home.paths.run / "slots").iterdir()) == []
    assert Cgroups.find(home.paths.run).names() == set()
