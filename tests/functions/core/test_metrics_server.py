"""Who may read a process's metrics, and what a scrape is answered."""

from __future__ import annotations

import asyncio
import gzip
import os
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter

from pilotlight.core.metrics_server import MetricsAddress, MetricsServer, metrics_token
from pilotlight.core.settings import SettingsInvalid
from tests.fakes.ports import free_port

OTHER_UID = 54321


def registry() -> CollectorRegistry:
    made = CollectorRegistry()
    Counter("spend", "Cost", ["tenant"], registry=made).labels("acme").inc(5)
    return made


@asynccontextmanager
async def serving(
    address: MetricsAddress, server: MetricsServer | None = None
) -> AsyncIterator[None]:
    servers = await (server or MetricsServer(registry=registry())).serve(address)
    try:
        yield
    finally:
        for one in servers:
            one.close()


async def ask(
    to: Path | int, target: str = "/metrics", *, method: str = "GET", **headers: str
) -> tuple[str, bytes]:
    """Status line and headers, and the body."""
    opening = (
        asyncio.open_connection("127.0.0.1", to)
        if isinstance(to, int)
        else asyncio.open_unix_connection(to)
    )
    reader, writer = await opening
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    writer.write(f"{method} {target} HTTP/1.1\r\nHost: x\r\n{lines}\r\n".encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    await asyncio.sleep(0)  # the other end closes in the loop's next turn
    return head.decode(), body


@pytest.fixture(name="tcp")
def _tcp(tmp_path: Path) -> MetricsAddress:
    return MetricsAddress(
        socket_path=tmp_path / "m.sock",
        listen=f"127.0.0.1:{free_port()}",
        token_file=tmp_path / "metrics.token",
    )


def port_of(address: MetricsAddress) -> int:
    assert address.listen is not None
    return int(address.listen.rpartition(":")[2])


async def test_nothing_listens_on_tcp_unless_an_address_is_given(tmp_path: Path) -> None:
    servers = await MetricsServer(registry=registry()).serve(
        MetricsAddress(socket_path=tmp_path / "m.sock")
    )
    assert [one.family for server in servers for one in server.sockets] == [socket.AF_UNIX]
    for server in servers:
        server.close()


async def test_the_socket_needs_no_token_and_only_its_owner_can_connect(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    async with serving(MetricsAddress(socket_path=tmp_path / "m.sock")):
        assert b'spend_total{tenant="acme"} 5.0' in (await ask(tmp_path / "m.sock"))[1]
        assert stat.S_IMODE((tmp_path / "m.sock").stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
async def test_another_user_cannot_connect_to_the_socket(short_tmp: Path) -> None:
    short_tmp.chmod(0o755)
    async with serving(MetricsAddress(socket_path=short_tmp / "m.sock")):
        program = (
            f"import socket; socket.socket(socket.AF_UNIX).connect({str(short_tmp / 'm.sock')!r})"
        )
        child = await asyncio.create_subprocess_exec(
            "/usr/bin/env",
            "python3",
            "-c",
            program,
            stderr=asyncio.subprocess.PIPE,
            user=OTHER_UID,
            group=OTHER_UID,
            extra_groups=[],
        )
        _, said = await child.communicate()
        assert child.returncode == 1
        assert b"PermissionError" in said


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Basic {token}",
        "{token}",
        "Bearer {token}x",
        "Bearer é",
    ],
)
async def test_over_tcp_nothing_is_told_without_the_token(
    tcp: MetricsAddress, authorization: str | None
) -> None:
    async with serving(tcp):
        assert tcp.token_file is not None
        given = (
            {}
            if authorization is None
            else {"authorization": authorization.format(token=metrics_token(tcp.token_file))}
        )
        head, body = await ask(port_of(tcp), **given)
        assert head.startswith("HTTP/1.1 401 ")
        assert "WWW-Authenticate: Bearer" in head
        assert b"acme" not in body


async def test_over_tcp_the_token_of_the_file_is_accepted(tcp: MetricsAddress) -> None:
    async with serving(tcp):
        assert tcp.token_file is not None
        assert stat.S_IMODE(tcp.token_file.stat().st_mode) == 0o600
        head, body = await ask(
            port_of(tcp), Authorization=f"Bearer {tcp.token_file.read_text().strip()}"
        )
        assert head.startswith("HTTP/1.1 200 ")
        assert b"acme" in body


async def test_probes_need_no_token_and_tell_nothing_of_tenants(tcp: MetricsAddress) -> None:
    async def probe(path: str) -> tuple[int, str] | None:
        return (503, "starting") if path == "/readyz" else None

    async with serving(tcp, MetricsServer(registry=registry(), probe=probe)):
        assert (await ask(port_of(tcp), "/healthz"))[1] == b"ok\n"
        head, body = await ask(port_of(tcp), "/readyz?verbose")
        assert (head.split(" ")[1], body) == ("503", b"starting\n")


@pytest.mark.parametrize(
    "target, method, status",
    [("/", "GET", 200), ("/metrics?x=1", "HEAD", 200), ("/x", "GET", 404), ("/", "PUT", 405)],
)
async def test_only_metrics_are_answered(
    tmp_path: Path, target: str, method: str, status: int
) -> None:
    async with serving(MetricsAddress(socket_path=tmp_path / "m")):
        head, body = await ask(tmp_path / "m", target, method=method)
        assert head.startswith(f"HTTP/1.1 {status} ")
        assert (b"acme" in body) == (status == 200 and method == "GET")


async def test_a_scraper_gets_the_format_and_the_compression_that_it_accepts(
    tmp_path: Path,
) -> None:
    async with serving(
        MetricsAddress(socket_path=tmp_path / "m"),
        MetricsServer(registry=registry(), in_thread=True),
    ):
        head, body = await ask(
            tmp_path / "m",
            Accept="application/openmetrics-text; version=1.0.0",
            Accept_Encoding="gzip",
        )
        assert "Content-Type: application/openmetrics-text" in head
        assert "Content-Encoding: gzip" in head
        assert gzip.decompress(body).endswith(b"# EOF\n")


async def test_gauges_are_refreshed_before_each_scrape(tmp_path: Path) -> None:
    counted = CollectorRegistry()
    scrapes = Counter("scrapes", "Scrapes", registry=counted)
    async with serving(
        MetricsAddress(socket_path=tmp_path / "m"),
        MetricsServer(registry=counted, refresh=scrapes.inc),
    ):
        assert b"scrapes_total 1.0" in (await ask(tmp_path / "m"))[1]
        assert b"scrapes_total 2.0" in (await ask(tmp_path / "m"))[1]


async def test_an_address_in_use_is_refused_by_the_name_of_its_setting(tcp: MetricsAddress) -> None:
    with (
        socket.create_server(("127.0.0.1", port_of(tcp))),
        pytest.raises(SettingsInvalid, match=r"metrics_listen = .*: cannot listen"),
    ):
        await MetricsServer(registry=registry()).serve(tcp)


@pytest.mark.parametrize("text", ["", "short", "two words of which none is long enough", "é" * 40])
def test_a_file_without_a_usable_token_is_refused_by_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    with pytest.raises(SettingsInvalid, match="no valid metrics token"):
        metrics_token(file)


def test_a_token_is_made_once(tmp_path: Path) -> None:
    assert metrics_token(tmp_path / "t") == metrics_token(tmp_path / "t")
    assert [file.name for file in tmp_path.iterdir()] == ["t"]
