"""A worker on the host's network shares loopback addresses with the platform: what it reads there,
and what it gets to listen at."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.harness import PlatformUnderTest, platform_up
from tests.fakes.plain_http import NO_TLS
from tests.fakes.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(180)]


@pytest.fixture(name="alone", scope="module")
def _alone() -> Iterator[PlatformUnderTest]:
    listens: dict[str, object] = {"metrics_listen": f"127.0.0.1:{free_port()}"}
    with platform_up(controller=listens, snapshotter={"function_network": "host"}) as platform:
        platform.deploy("local_ports.py")
        yield platform


def port_of(platform: PlatformUnderTest) -> int:
    return int(platform.local.listen.rpartition(":")[2])


def listening(platform: PlatformUnderTest) -> dict[str, set[int]]:
    """TCP ports at which each process of the platform listens."""
    names = ("weight_cache", "snapshotter", "controller", "activator")
    found = {name: psutil.Process(platform.pid(name)).net_connections("tcp") for name in names}
    return {
        name: {int(one.laddr.port) for one in every if one.status == psutil.CONN_LISTEN}
        for name, every in found.items()
    }


def test_no_process_listens_on_tcp_that_was_not_asked_to(alone: PlatformUnderTest) -> None:
    found = listening(alone)
    assert len(found.pop("controller")) == 1
    assert found == {"weight_cache": set(), "snapshotter": set(), "activator": {port_of(alone)}}


def test_worker_reads_no_metrics(alone: PlatformUnderTest) -> None:
    (port,) = listening(alone)["controller"]
    (said,) = alone.result("local-ports/ask", {"ports": [port]}).values()
    assert said.startswith("HTTP/1.1 401 ")
    assert "pilotlight_" not in said


def test_operator_reads_the_metrics_of_every_process(alone: PlatformUnderTest) -> None:
    sockets = sorted(alone.local.paths.run.glob("metrics-*.sock"))
    assert [path.stem for path in sockets] == [
        f"metrics-{name}" for name in ("activator", "controller", "snapshotter", "weight_cache")
    ]
    for path in sockets:
        assert "pilotlight_" in _metrics(path)
    assert "local-ports/ask" in alone.cli("top", "--once").stdout


def _metrics(path: Path) -> str:
    with httpx.Client(
        transport=httpx.HTTPTransport(uds=str(path), verify=NO_TLS), timeout=60
    ) as client:
        return client.get("http://local/metrics").text


def test_both_loopback_addresses_are_the_platforms(alone: PlatformUnderTest) -> None:
    for host in ("127.0.0.1", "[::1]"):
        assert (
            httpx.get(
                f"http://{host}:{port_of(alone)}/healthz", verify=NO_TLS, timeout=60
            ).status_code
            == 200
        )


def test_worker_listens_at_no_address_of_the_platforms_port(alone: PlatformUnderTest) -> None:
    assert alone.result("local-ports/listen", {"port": port_of(alone)}) == []


def test_the_port_is_held_while_no_activator_runs(alone: PlatformUnderTest) -> None:
    pid = alone.kill("activator")
    refused = 0
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with socket.socket(family) as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                other.bind((host, port_of(alone)))
            except OSError:
                refused += 1
    assert refused == 2
    alone.wait_restarted("activator", pid)
