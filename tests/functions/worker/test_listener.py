"""A worker serves an inherited listener without a look at its path, which is the node agent's."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import uvloop

from pilotlight.worker.http.listener import serve_listener


class Echo(asyncio.Protocol):
    """Sends back what it gets, and closes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)
        self.transport.close()


def exchange(client: socket.socket) -> bytes:
    client.settimeout(30)
    client.sendall(b"hello")
    return client.recv(16)


@pytest.mark.parametrize(
    "make_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
def test_the_path_of_a_unix_listener_is_neither_read_nor_removed(
    make_loop: Callable[[], asyncio.AbstractEventLoop], short_tmp: Path
) -> None:
    directory, path = short_tmp / "run", short_tmp / "run" / "s.sock"
    directory.mkdir()
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(str(path))
        listener.listen()
        client.connect(str(path))  # waits in the backlog
        directory.rename(short_tmp / "elsewhere")
        # stat(2) of the path fails with ENOTDIR, as it does with EACCES for a worker's uid
        directory.write_text("")

        async def story() -> bytes:
            server = await serve_listener(asyncio.get_running_loop(), Echo, listener, backlog=8)
            try:
                return await asyncio.to_thread(exchange, client)
            finally:
                server.close()

        with asyncio.Runner(loop_factory=make_loop) as runner:
            assert runner.run(story()) == b"hello"
    assert (short_tmp / "elsewhere" / "s.sock").is_socket()


def test_a_tcp_listener_is_served(short_tmp: Path) -> None:
    async def story() -> bytes:
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.create_connection(listener.getsockname()) as client,
        ):
            server = await serve_listener(asyncio.get_running_loop(), Echo, listener, backlog=8)
            try:
                return await asyncio.to_thread(exchange, client)
            finally:
                server.close()

    assert asyncio.run(story()) == b"hello"


async def test_commands_do_not_inherit_the_listener(short_tmp: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(short_tmp / "s.sock"))
        listener.listen()
        listener.set_inheritable(True)  # as one that the process was started with
        server = await serve_listener(asyncio.get_running_loop(), Echo, listener, backlog=8)
        try:
            assert not listener.get_inheritable()
        finally:
            server.close()
