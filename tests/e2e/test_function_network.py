"""Functions in a network of their own (`snapshotter.function_network: own`): what they reach,
however they were started."""

from __future__ import annotations

import os
import shutil
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pilotlight.protocol import HEADER_START
from tests.conftest import RequireOrSkip
from tests.e2e.frozen import DEPLOYED_S, why_no_criu
from tests.e2e.harness import APPS, PlatformUnderTest, platform_up, wait_for
from tests.fakes.host_address import host_address

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(DEPLOYED_S)]


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    """A server on all addresses of the host; its port."""
    with socket.create_server(("0.0.0.0", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"here")

        thread = threading.Thread(target=serve, name="server of the host", daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def templates_of(platform: PlatformUnderTest, function: str) -> list[dict[str, Any]]:
    return [
        template for template in platform.templates() if template["labels"]["function"] == function
    ]


def tell_apart(
    platform: PlatformUnderTest, function: str, addresses: list[tuple[str, int]]
) -> dict[str, list[str]]:
    """What is reached, by how the instance was started: as a fork or after a boot, and from its
    snapshot."""
    found = {}
    for _ in range(2):
        answer = platform.post(
            f"reaching/{function}.reach", {"addresses": addresses}, timeout=DEPLOYED_S
        )
        assert answer.status_code == 200, answer.text
        found[answer.headers[HEADER_START]] = answer.json()
        wait_for(lambda: not platform.instances("reaching", function), "scale to zero")
        for template in templates_of(platform, function):
            os.kill(template["pid"], 9)
        wait_for(lambda: not templates_of(platform, function), "the Template to be gone")
    assert "RESTORE" in found, found
    assert len(found) == 2, found
    return found


@pytest.fixture(scope="module")
def platform(require_or_skip: RequireOrSkip) -> Iterator[PlatformUnderTest]:
    """One with the default network of functions, which lets them ask for the host's address."""
    why = why_no_criu() or (None if shutil.which("nft") else "nft is not installed")
    if why is not None:
        require_or_skip(why)
    with (
        platform_up(snapshotter={"egress_on_request": [host_address()]}) as platform,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("REACHABLE", host_address())
        platform.cli(
            "secret", "set", "platform-key", "PILOTLIGHT_API_KEY", input=platform.profile.api_key
        )
        platform.cli("deploy", str(APPS / "reaching.py"))
        yield platform


@pytest.mark.parametrize(
    "function, expected",
    [("Caller", "ConnectionRefusedError"), ("Asking", "here")],
    ids=["as all do", "where it asked for the address"],
)
def test_a_function_reaches_nothing_of_the_host_but_what_it_may_ask_for(
    platform: PlatformUnderTest, server: int, function: str, expected: str
) -> None:
    for reached in tell_apart(
        platform, function, [("127.0.0.1", server), (host_address(), server)]
    ).values():
        assert reached == ["ConnectionRefusedError", expected]


def test_a_function_calls_another_through_the_platforms_socket(platform: PlatformUnderTest) -> None:
    answer = platform.post("reaching/asks", timeout=DEPLOYED_S)
    assert answer.status_code == 200, answer.text
    assert answer.json() != os.stat("/proc/self/ns/net").st_ino, "of a network of its own"


def test_a_closed_function_reaches_neither_the_host_nor_the_platform(
    platform: PlatformUnderTest, server: int
) -> None:
    found = platform.result(
        "reaching/closed", {"addresses": [("127.0.0.1", server), (host_address(), server)]}
    )
    assert found == ["ConnectionRefusedError", "OSError", "True", "True"]


def test_what_the_operator_does_not_open_is_refused_at_deploy(
    platform: PlatformUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REACHABLE", "10.9.8.7")
    refused = platform.cli("deploy", str(APPS / "reaching.py"), check=False)
    assert refused.returncode
    assert (
        f"egress: 10.9.8.7/32 is not available to functions; snapshotter.egress_on_request allows "
        f"{host_address()}/32" in refused.stderr
    )
