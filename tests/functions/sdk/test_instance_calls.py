"""Handles in an instance: the same calls through its own socket, with nothing but what every worker
has."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

import pilotlight
from pilotlight import profile
from pilotlight.client import sessions
from pilotlight.client.socket_http import ConnectionFailed, SocketClient
from pilotlight.current_call.context import CURRENT_CALL, Context
from pilotlight.errors import Conflict, Forbidden, Unavailable
from pilotlight.profile import Profile
from tests.fakes.fake_platform import API_KEY, FakePlatform
from tests.functions.sdk.conftest import Write
from tests.functions.sdk.test_calls import SOURCE

ROOT = Path(__file__).parents[3]


@pytest.fixture(name="seen")
def _seen() -> list[bytes]:
    """What came at the socket, the beginning of each request."""
    return []


@pytest.fixture(name="path")
def _path(platform: FakePlatform, short_tmp: Path, seen: list[bytes]) -> Iterator[Path]:
    """A socket before the platform that knows who calls, as an activator's; each connection has one
    request."""
    path = short_tmp / "i-1.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen(64)
        threads: list[threading.Thread] = []

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threads.append(threading.Thread(target=_relay, args=(connection, platform, seen)))
                threads[-1].start()

        accepting = threading.Thread(target=serve)
        accepting.start()
        yield path
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join()
        for thread in threads:
            thread.join()


def _relay(caller: socket.socket, platform: FakePlatform, seen: list[bytes]) -> None:
    host, port = platform.url.removeprefix("http://").split(":")
    with caller, socket.create_connection((host, int(port))) as server:
        seen.append(caller.recv(65536))
        head, _, rest = seen[-1].partition(b"\r\n")
        server.sendall(head + f"\r\nauthorization: Bearer {API_KEY}\r\n".encode() + rest)

        def forward() -> None:
            with contextlib.suppress(OSError):  # either end may be closed already
                while data := caller.recv(65536):
                    server.sendall(data)
                server.shutdown(socket.SHUT_WR)

        forwarding = threading.Thread(target=forward)
        forwarding.start()
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                caller.sendall(data)
        with contextlib.suppress(OSError):
            caller.shutdown(socket.SHUT_RDWR)
        forwarding.join()


@pytest.fixture(name="shop")
def _shop(platform: FakePlatform, path: Path, module: Write) -> Iterator[ModuleType]:
    found = module(SOURCE)
    found.app.deploy()
    with sessions.use_profile(Profile(url=f"calls://{path}")):
        yield found


def test_every_way_to_call_works_through_the_socket(shop: ModuleType) -> None:
    assert shop.double.remote(20, plus=2) == 42
    assert list(shop.double.map([1, 2, 3])) == [2, 4, 6]
    assert list(shop.count.remote_gen(2)) == [0, 1]
    with pytest.raises(shop.OutOfStock, match="after three"):
        list(shop.count.remote_gen(3))
    with pytest.raises(shop.OutOfStock, match="tea"):
        shop.buy.remote("tea")
    assert shop.double.spawn(4).get(timeout=10) == 8
    assert list(shop.count.spawn(2).stream()) == [0, 1]


def test_every_asynchronous_way_works_in_a_loop_and_leaves_nothing_open(shop: ModuleType) -> None:
    async def everything() -> None:
        assert await shop.double.remote.aio(21) == 42
        assert [value async for value in shop.double.map.aio([1, 2, 3])] == [2, 4, 6]
        assert [item async for item in shop.count.remote_gen.aio(2)] == [0, 1]
        spawned = await shop.double.spawn.aio(4)
        assert await spawned.get.aio(timeout=10) == 8

    asyncio.run(everything())


def test_refusals_with_retry_after_are_waited_for(shop: ModuleType, platform: FakePlatform) -> None:
    platform.refuse(Unavailable("not yet", retry_after_s=0.01), times=2)
    assert shop.double.remote(1) == 2
    platform.refuse(Conflict("no"))
    with pytest.raises(Conflict, match="no"):
        shop.double.remote(1)


def test_a_call_whose_connection_is_lost_is_not_sent_again(
    shop: ModuleType, platform: FakePlatform
) -> None:
    platform.refuse(None)
    with pytest.raises(Unavailable, match="was lost before the response arrived"):
        shop.double.remote(1)


def test_a_socket_that_is_not_there_is_no_reason_to_wait(tmp_path: Path) -> None:
    called = pilotlight.Function.from_name("shop", "double")
    with sessions.use_profile(Profile(url=f"calls://{tmp_path}/i-2.sock")):
        with pytest.raises(Forbidden, match=r"not in enter\(snap=False\)"):
            called.remote(1)
        with pytest.raises(Forbidden, match=r"not in enter\(snap=False\)"):
            list(called.map([1]))


def test_a_pod_waits_for_its_node_agent_and_is_told_where_that_serves_no_calls(
    tmp_path: Path,
) -> None:
    client = SocketClient(str(tmp_path / "calls.sock"), dict)
    request = client.build_request("POST", "/v1/functions/shop/double:invoke")
    with pytest.raises(ConnectionFailed, match="the node agent is not listening") as failed:
        client.send(request, stream=True)
    assert not failed.value.was_sent, "so that it is sent again"
    (tmp_path / "agent.sock").touch()
    with pytest.raises(Forbidden, match=r"snapshotter\.activators.* PILOTLIGHT_API_KEY"):
        client.send(request, stream=True)


@pytest.mark.parametrize(
    "environ, found",
    [
        ({}, "http://127.0.0.1:8700"),
        (
            {"PILOTLIGHT_CALLS": "/slot/calls", "PILOTLIGHT_INSTANCE": "i-1"},
            "calls:///slot/calls/i-1.sock",
        ),
        (
            {"PILOTLIGHT_CALLS": "/pilotlight/calls.sock", "PILOTLIGHT_INSTANCE": "pod-1"},
            "calls:///pilotlight/calls.sock",
        ),
        (
            {
                "PILOTLIGHT_CALLS": "/slot/calls",
                "PILOTLIGHT_INSTANCE": "i-1",
                "PILOTLIGHT_URL": "unix:///slot/platform/http.sock",
            },
            "calls:///slot/calls/i-1.sock",
        ),
        (
            {
                "PILOTLIGHT_CALLS": "/slot/calls",
                "PILOTLIGHT_INSTANCE": "i-1",
                "PILOTLIGHT_URL": "unix:///slot/platform/http.sock",
                "PILOTLIGHT_API_KEY": "pl_mine",
            },
            "unix:///slot/platform/http.sock",
        ),
    ],
    ids=["outside", "in an instance", "in a pod", "in a slot", "with a key of its own"],
)
def test_an_instance_without_a_key_uses_its_own_socket(
    environ: dict[str, str], found: str, tmp_path: Path
) -> None:
    assert profile.load({"HOME": str(tmp_path), **environ}).url == found


@pytest.mark.parametrize(
    "environ, says",
    [
        ({"PILOTLIGHT_CALLS": "/slot/calls"}, r"not in enter\(\) before the snapshot"),
        ({"PILOTLIGHT_INSTANCE": "pod-1"}, "PILOTLIGHT_API_KEY, and PILOTLIGHT_URL"),
    ],
    ids=["before the snapshot", "without a network"],
)
def test_a_worker_that_cannot_call_says_why_and_what_to_do(
    environ: dict[str, str], says: str, tmp_path: Path
) -> None:
    with pytest.raises(Forbidden, match=says):
        profile.load({"HOME": str(tmp_path), **environ})


CALLER = """
import asyncio, json, sys

sys.path[:] = [p for p in sys.path if "site-packages" not in p] + [{site!r}, {functions!r}]
import pilotlight

double = pilotlight.Function.from_name("shop", "double")

async def awaited():
    return await double.remote.aio(4)

print(json.dumps([double.remote(3), list(double.map([1, 2])), asyncio.run(awaited())]))
assert not {{"httpx", "yaml", "rich", "typer"}} & set(sys.modules), sorted(sys.modules)
"""


def test_it_needs_only_the_packages_that_every_worker_has(
    shop: ModuleType, path: Path, tmp_path: Path
) -> None:
    import cloudpickle
    import httptools

    site = tmp_path / "site"
    site.mkdir()
    for package in (cloudpickle, httptools):
        directory = Path(str(package.__file__)).parent
        (site / directory.name).symlink_to(directory)
    script = CALLER.format(site=str(site), functions=str(ROOT / "functions"))
    environ = {"PILOTLIGHT_CALLS": str(path.parent), "PILOTLIGHT_INSTANCE": "i-1"}
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script],
        env={**environ, "HOME": str(tmp_path), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [6, [2, 4], 8]


@dataclass
class Running:
    """A call that runs in this process."""

    left_s: float = float("inf")
    members: tuple[str, ...] = ()

    def context(self) -> Context:
        """Its context."""
        return Context(
            call_id="req-1",
            attempt=1,
            deadline=None,
            arm="",
            revision="v1",
            function="outer",
            traceparent=f"00-{'a' * 32}-{'b' * 16}-01",
            members=self.members,
            _ends_at=time.monotonic() + self.left_s,
        )


@pytest.mark.parametrize("members, named", [((), "req-1"), (("req-1", "req-2"), "req-1,req-2")])
def test_a_call_names_the_call_and_the_span_in_which_it_is_made(
    shop: ModuleType, seen: list[bytes], members: tuple[str, ...], named: str
) -> None:
    token = CURRENT_CALL.set(Running(members=members))
    try:
        shop.double.remote(1)
        list(shop.double.map([1]))
    finally:
        CURRENT_CALL.reset(token)
    shop.double.remote(1)
    inside, mapped, outside = seen
    for head in (inside, mapped):
        assert f"\r\npilotlight-parent: {named}\r\n".encode() in head
        assert f"\r\ntraceparent: 00-{'a' * 32}-{'b' * 16}-01\r\n".encode() in head
    assert b"pilotlight-parent" not in outside


def test_no_refusal_is_waited_for_beyond_the_deadline_of_the_call(
    shop: ModuleType, platform: FakePlatform
) -> None:
    platform.refuse(Unavailable("not yet", retry_after_s=5))
    token = CURRENT_CALL.set(Running(left_s=1))
    try:
        with pytest.raises(Unavailable, match="not yet"):
            shop.double.remote(1)
    finally:
        CURRENT_CALL.reset(token)
