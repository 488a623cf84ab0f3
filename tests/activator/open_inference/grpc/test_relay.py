"""The relay before the gRPC server: bytes pass both ways, bounds hold, and the server knows whose a
connection is."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from activator.open_inference.grpc.relay import Relay


class Echo(asyncio.Protocol):
    """A server that echoes, and keeps the names of its peers."""

    peers: list[str]

    def __init__(self, peers: list[str]) -> None:
        self.peers = peers
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        name = transport.get_extra_info("socket").getpeername()
        self.peers.append(name.decode().removeprefix("\0"))

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)


@asynccontextmanager
async def relaying(*, most: int) -> AsyncIterator[tuple[Relay, int, list[str]]]:
    """A relay, its port, and the peers of the server behind it."""
    name, peers = f"test-{os.getpid()}-{os.urandom(4).hex()}", list[str]()
    loop = asyncio.get_running_loop()
    server = await loop.create_unix_server(lambda: Echo(peers), path=f"\0{name}")
    relay = Relay(name, max_per_address=most)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    accepting = await relay.accept(listener)
    try:
        yield relay, listener.getsockname()[1], peers
    finally:
        accepting.close()
        server.close()


async def test_bytes_pass_both_ways_and_the_caller_is_known_while_it_is_there() -> None:
    async with relaying(most=2) as (relay, port, peers):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        data = os.urandom(2_000_000)
        writer.write(data)
        assert await reader.readexactly(len(data)) == data
        (peer,) = peers
        assert relay.caller_of(f"unix-abstract:{peer}") == "127.0.0.1"
        assert relay.caller_of("unix:") is None
        writer.close()
        while relay.caller_of(peer) is not None:
            await asyncio.sleep(0)


async def test_an_address_has_so_many_connections() -> None:
    async with relaying(most=2) as (relay, port, _):
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for _, writer in opened:
            writer.write(b"x")
        for reader, _ in opened:
            assert await reader.readexactly(1) == b"x"
        refused, third = await asyncio.open_connection("127.0.0.1", port)
        try:
            assert await refused.read() == b""
        except ConnectionResetError:
            pass
        assert relay.refused == 1
        third.close()
        opened[0][1].close()
        while "1 connections" not in repr(relay):
            await asyncio.sleep(0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"y")
        assert await reader.readexactly(1) == b"y"
        for each in (writer, opened[1][1]):
            each.close()
        while "<Relay 0 " not in repr(relay):
            await asyncio.sleep(0)


async def test_without_a_server_a_caller_is_disconnected() -> None:
    relay = Relay(f"missing-{os.urandom(4).hex()}", max_per_address=9)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    accepting = await relay.accept(listener)
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    try:
        assert await reader.read() == b""
    except ConnectionResetError:
        pass
    writer.close()
    accepting.close()
