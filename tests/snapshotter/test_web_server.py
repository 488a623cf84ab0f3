"""A web server that user code starts, in a slot: cold, checkpointed with its process, restored; and
every way in which it fails."""

from __future__ import annotations

import asyncio
import http.client
import socket
import textwrap
import time
from pathlib import Path

import pytest

from pilotlight.protocol import WORKER_ASGI
from pilotlight.spec.function import Clocks, FunctionKind, FunctionSpec, MethodSpec
from pilotlight.spec.record_json import to_json
from pilotlight.spec.web_servers import WebServerSpec
from snapshotter.agent.app import own_runtime
from snapshotter.client import AgentClient
from snapshotter.errors import SnapshotRefused, StartFailed
from snapshotter.types import InstanceInfo, LaunchSpec, SnapshotState, StartKind
from tests.fakes.agent_home import MIB, AgentHome, instance_id
from tests.snapshotter.test_server_snapshot import bundled

pytestmark = [
    pytest.mark.root,
    pytest.mark.e2e,
    pytest.mark.usefixtures("criu", "patient_restores"),
    pytest.mark.timeout(120),
]

PORT = 8000
SLOW_S = 1.5
"""How long the server takes to start: a model to load."""
SITE = textwrap.dedent(
    """
    import subprocess, sys

    SERVER = '''
    import http.server, os, sys, time
    time.sleep(float(sys.argv[2]))
    asked = 0

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            global asked
            asked += 1
            if self.path == "/crash":
                print("out of patience", flush=True)
                os._exit(3)
            body = f"{asked} {self.path} {os.getpid()} {os.environ.get('TOKEN', '-')}".encode()
            self.send_response(200)  # HTTP/1.0, without a length: it ends with the connection
            self.end_headers()
            self.wfile.write(body)

    print("listens soon", flush=True)
    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
    '''

    def serve():
        subprocess.Popen([sys.executable, "-c", SERVER, "PORT", "SLOW"])
    """
)


@pytest.fixture
def home(short_tmp: Path) -> AgentHome:
    home = AgentHome(short_tmp)
    home.runtime = dict(own_runtime())
    return home


def site(
    home: AgentHome,
    *,
    slow_s: float = 0.0,
    port: int = PORT,
    startup_s: float = 40.0,
    secrets: tuple[str, ...] = (),
) -> LaunchSpec:
    """A function whose server listens at `port`; PORT is what it declares."""
    code = SITE.replace('"PORT"', f'"{port}"').replace('"SLOW"', f'"{slow_s}"')
    bundle = bundled(home, code)
    spec = FunctionSpec(
        name="site",
        kind=FunctionKind.ASGI,
        module="site_app",
        qualname="serve",
        bundle=bundle,
        methods=(MethodSpec(),),
        web_server=WebServerSpec(port=PORT, startup_s=startup_s),
        clocks=Clocks(startup_s=60.0),
    )
    return home.launch(
        "f-site@v1-abc",
        bundle=bundle,
        entry=to_json(spec),
        memory_bytes=512 * MIB,
        startup_timeout_s=60.0,
        secret_variables=secrets,
    )


async def start(
    client: AgentClient, launch: LaunchSpec, **secret_env: str
) -> tuple[InstanceInfo, float]:
    """An instance, and the seconds that its start took."""
    began = time.monotonic()
    info = await client.start(launch, instance_id=instance_id(), lessee="me", secret_env=secret_env)
    return info, time.monotonic() - began


def ask(info: InstanceInfo, path: str, method: str = "GET") -> tuple[int, str]:
    """Status and body."""
    connection = http.client.HTTPConnection("instance", timeout=20)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(20)
    try:
        connection.sock.connect(info.socket)
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


async def gone(client: AgentClient, info: InstanceInfo) -> str:
    """Why the instance ended."""
    async with asyncio.timeout(20):
        async for event in client.watch():
            if event.kind == "instance_gone" and event.subject == info.id:
                return event.reason
    raise AssertionError("the events ended")


async def test_a_restored_server_goes_on_where_it_was_without_its_start(
    client: AgentClient, home: AgentHome
) -> None:
    launch = site(home, slow_s=SLOW_S)
    cold, cold_s = await start(client, launch)
    _, first = await asyncio.to_thread(ask, cold, f"{WORKER_ASGI}/a?b=c")
    assert first.split()[:2] == ["2", "/a?b=c"]  # the first was the warm-up's
    snapshot = await client.checkpoint(launch)
    assert (snapshot.state, snapshot.in_place) == (SnapshotState.READY, True)

    clones = [await start(client, launch)]
    while not await client.templates():
        await asyncio.sleep(0.01)
    clones.append(await start(client, launch))

    assert [i.start_kind for i, _ in clones] == [StartKind.RESTORE, StartKind.WAKE]
    answers = [(await asyncio.to_thread(ask, info, WORKER_ASGI))[1].split() for info, _ in clones]
    assert [answer[:2] for answer in answers] == [["3", "/"]] * 2  # warm-up, check, and this one
    assert cold_s > SLOW_S > max(took for _, took in clones)
    status, problem = await asyncio.to_thread(ask, clones[0][0], "/invoke/", "POST")
    assert (status, "no method" in problem) == (404, True)
    await client.stop(clones[0][0].id, grace_s=5)  # no connection holds it up


async def test_the_death_of_the_server_ends_its_instance_and_shows_its_last_lines(
    client: AgentClient, home: AgentHome
) -> None:
    info, _ = await start(client, site(home))
    waiting = asyncio.create_task(gone(client, info))
    await asyncio.sleep(0)
    await client.templates()  # frames of one connection are served in order: we are subscribed

    with pytest.raises((http.client.HTTPException, OSError)):
        await asyncio.to_thread(ask, info, f"{WORKER_ASGI}/crash")

    assert await waiting == "server_died"
    log = (home.paths.home / "node/logs" / f"{info.id}.log").read_text()
    assert "the web server died" in log
    assert log.count("out of patience") == 2  # when it was printed, and as a last line


async def test_a_server_that_listens_elsewhere_fails_its_start_with_port_and_last_lines(
    client: AgentClient, home: AgentHome
) -> None:
    with pytest.raises(
        StartFailed,
        match=r"(?s)did not listen at port 8000 of 127\.0\.0\.1 or ::1; it listens at "
        r"127\.0\.0\.1:8001\. Raise startup_timeout=.*listens soon",
    ):
        await start(client, site(home, port=8001, startup_s=1.0))


async def test_a_server_that_ends_fails_its_start_at_once(
    client: AgentClient, home: AgentHome
) -> None:
    began = time.monotonic()
    with pytest.raises(StartFailed, match=r"(?s)web server ended with exit status 1.*Overflow"):
        await start(client, site(home, port=99999))
    assert time.monotonic() - began < 20


async def test_a_server_with_secrets_is_started_when_its_instance_wakes(
    client: AgentClient, home: AgentHome
) -> None:
    launch = site(home, secrets=("TOKEN",))
    info, _ = await start(client, launch, TOKEN="t0p")
    assert (await asyncio.to_thread(ask, info, WORKER_ASGI))[1].endswith(" t0p")
    with pytest.raises(SnapshotRefused, match=r"has secrets \(TOKEN\)"):
        await client.checkpoint(launch)
