"""Functions in a network of their own (`snapshotter.function_network: own`): what they reach, however they were started."""

from __future__ import annotations

import os
import shutil
import socket
import threading
from collections.abc import Iterator

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


def tell_apart(platform: PlatformUnderTest, addresses: list[tuple[str, int]]) -> dict[str, list[str]]:
    """What is reached, by how the instance was started: as a fork or after a boot, and from its snapshot."""
    found = {}
    for _ in range(2):
        answer = platform.post("reaching/Caller.reach", {"addresses": addresses}, timeout=DEPLOYED_S)
        assert answer.status_code == 200, answer.text
        found[answer.headers[HEADER_START]] = answer.json()
        wait_for(lambda: not platform.instances("reaching", "Caller"), "scale to zero")
        for template in platform.templates():
            os.kill(template["pid"], 9)
        wait_for(lambda: not platform.templates(), "the Template to be gone")
    return found


@pytest.mark.parametrize("allowed", [False, True])
def test_a_function_reaches_nothing_of_the_host_but_what_is_allowed(require_or_skip: RequireOrSkip, server: int, allowed: bool) -> None:
    why = why_no_criu() or (None if shutil.which("nft") else "nft is not installed")
    if why is not None:
        require_or_skip(why)
    here = host_address()
    opened = {"egress_denied": [], "egress_allowed": [here]} if allowed else {}
    with platform_up(snapshotter={"function_network": "own", **opened}) as platform:
        platform.cli("deploy", str(APPS / "reaching.py"))
        found = tell_apart(platform, [("127.0.0.1", server), (here, server)])
        expected = ["ConnectionRefusedError", "here" if allowed else "ConnectionRefusedError"]
        assert "RESTORE" in found, found
        assert len(found) == 2, found
        for reached in found.values():
            assert reached == expected, found
        assert platform.result("reaching/Caller.namespace") != os.stat("/proc/self/ns/net").st_ino
