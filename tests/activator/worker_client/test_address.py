"""Where workers are reached: a path of this machine, or a pod's address."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from activator.worker_client.address import SILENT_MS, connect, host_and_port, is_tcp, tcp_address
from activator.worker_client.connection import (
    ConnectionPool,
    WorkerConnection,
    WorkerConnectionLost,
)
from tests.fakes.fake_worker import FakeWorker
from tests.fakes.pod_maker import TcpWorker
from tests.fakes.ports import free_port

GET = b"GET /x HTTP/1.1\r\nhost: worker\r\n\r\n"


@pytest.mark.parametrize(
    "host, port, text",
    [
        ("10.0.0.7", 8012, "tcp:10.0.0.7:8012"),
        ("fd00::7", 8080, "tcp:[fd00::7]:8080"),
        ("a.b", 1, "tcp:a.b:1"),
    ],
)
def test_an_address_is_written_and_read(host: str, port: int, text: str) -> None:
    assert tcp_address(host, port) == text
    assert is_tcp(text)
    assert host_and_port(text) == (host, port)


@pytest.mark.parametrize(
    "text", ["/run/pilotlight/i.sock", "tcp:", "tcp:10.0.0.7", "tcp::80", "tcp:10.0.0.7:http"]
)
def test_what_is_no_address_is_said_so(text: str) -> None:
    with pytest.raises(ValueError, match="not tcp"):
        host_and_port(text)


async def test_both_kinds_are_asked_alike(short_tmp: Path) -> None:
    near = await FakeWorker(short_tmp / "w.sock").start()
    far = await TcpWorker("127.0.0.1", 0).start()
    loop = asyncio.get_running_loop()
    for where in (str(near.path), tcp_address("127.0.0.1", far.port)):
        pool = ConnectionPool(where)
        connection = await pool.open(loop)
        assert (await connection.request(GET, loop=loop)).status == 200
        pool.release(connection, loop.time())
        assert pool.acquire_nowait(loop.time()) is connection
        connection.close()
    await near.aclose()
    await far.aclose()


class _Opened(WorkerConnection):
    """Shows its socket."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.socket: socket.socket = transport.get_extra_info("socket")


async def test_a_pods_connection_sends_small_pieces_at_once_and_notices_a_node_that_vanished() -> (
    None
):
    worker = await TcpWorker("127.0.0.1", 0).start()
    connection = await connect(
        asyncio.get_running_loop(), _Opened, tcp_address("127.0.0.1", worker.port)
    )
    own = connection.socket
    assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == SILENT_MS
    connection.close()
    await worker.aclose()


async def test_where_nobody_listens_nothing_was_sent() -> None:
    with pytest.raises(WorkerConnectionLost, match="cannot connect to the worker") as gone:
        await ConnectionPool(tcp_address("127.0.0.1", free_port())).open(asyncio.get_running_loop())
    assert not gone.value.sent
