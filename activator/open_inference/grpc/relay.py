"""Accepts connections of gRPC clients within bounds, and passes their bytes on to the gRPC server
of this process, which has no bound on connections of an address.

The server sees the name of the relay's end of each connection, which says whose it is."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections import Counter
from typing import Final, cast

from activator.http.trusted_proxies import network_of

MAX_CONNECTIONS: Final = 2048
"""Most connections of all addresses: each takes three descriptors, and 256 KiB for what is not read
yet."""
MAX_OF_ADDRESS: Final = MAX_CONNECTIONS // 8
"""Most connections of one, each of which can have a hundred calls."""
BUFFERED_BYTES: Final = 256 * 1024
"""Bytes that wait for a peer before reading from the other one pauses."""
ABSTRACT: Final = "unix-abstract:"


class Relay:
    """The connections. Owner: the event loop; every method but `accept` is synchronous."""

    def __init__(self, server: str, *, max_per_address: int) -> None:
        """`server`: name of the gRPC server's abstract Unix socket."""
        self._server = server
        self._max_per_address = min(max_per_address, MAX_OF_ADDRESS)
        self._by_address: Counter[str] = Counter()
        self._callers: dict[str, tuple[str, _ClientSide]] = {}
        self._numbers = itertools.count()
        self._prefix = f"pilotlight-grpc-{os.getpid()}-{os.urandom(8).hex()}-"
        self.refused = 0

    def __repr__(self) -> str:
        return f"<Relay {len(self._callers)} connections, {self.refused} refused>"

    async def accept(self, listener: socket.socket) -> asyncio.Server:
        """Accept connections at a listening socket."""
        loop = asyncio.get_running_loop()
        return await loop.create_server(lambda: _ClientSide(self), sock=listener, backlog=1024)

    def caller_of(self, peer: str) -> str | None:
        """Return the address of a caller, by the name of the server's peer; None for a connection
        that is not the relay's."""
        found = self._callers.get(peer.removeprefix(ABSTRACT))
        return None if found is None else found[0]

    def disconnect(self, peer: str) -> None:
        """End the connection of a caller, by the name of the server's peer."""
        found = self._callers.get(peer.removeprefix(ABSTRACT))
        if found is not None:
            found[1].abort()

    def enter(self, address: str, client: _ClientSide) -> str:
        """Count a connection; return its name, or "" where there are too many."""
        network = network_of(address)
        if (
            len(self._callers) >= MAX_CONNECTIONS
            or self._by_address[network] >= self._max_per_address
        ):
            self.refused += 1
            return ""
        self._by_address[network] += 1
        name = f"{self._prefix}{next(self._numbers)}"
        self._callers[name] = address, client
        return name

    def leave(self, name: str) -> None:
        """A connection has ended."""
        network = network_of(self._callers.pop(name)[0])
        self._by_address[network] -= 1
        if not self._by_address[network]:
            del self._by_address[network]

    async def connect(self, name: str, client: _ClientSide) -> _ServerSide:
        """Connect to the server under this name. Raises OSError."""
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            end.setblocking(False)
            end.bind(f"\0{name}")
            end.connect(f"\0{self._server}")
            loop = asyncio.get_running_loop()
            _, protocol = await loop.create_unix_connection(lambda: _ServerSide(client), sock=end)
        except BaseException:
            end.close()
            raise
        return protocol


class _Side(asyncio.Protocol):
    """One of the two sides of a connection. What one receives, the other sends; reading pauses
    while the other cannot send."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: _Side | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=BUFFERED_BYTES)

    def data_received(self, data: bytes) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None  # the other side may receive some more
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()


class _ServerSide(_Side):
    """The connection to the gRPC server."""

    def __init__(self, client: _ClientSide) -> None:
        super().__init__()
        self.other = client


class _ClientSide(_Side):
    """The connection of a client."""

    def __init__(self, relay: Relay) -> None:
        super().__init__()
        self._relay = relay
        self._name = ""
        self._connecting: asyncio.Task[None] | None = None
        self._early = b""  # what arrives before there is a server side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self.transport is not None
        peer = transport.get_extra_info("peername") or ("",)
        self._name = self._relay.enter(str(peer[0]), self)
        if not self._name:
            self.transport.abort()
            return
        self._connecting = asyncio.get_running_loop().create_task(self._connect(), name="relay")

    def abort(self) -> None:
        """End the connection, whatever is left to send."""
        if self.transport is not None:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._connecting is not None:
            self._connecting.cancel()
        if self._name:
            self._relay.leave(self._name)

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            super().data_received(data)
            return
        self._early += data
        if self.transport is not None and len(self._early) > BUFFERED_BYTES:
            self.transport.abort()

    async def _connect(self) -> None:
        try:
            self.other = await self._relay.connect(self._name, self)
        except OSError:
            if self.transport is not None:
                self.transport.abort()
            return
        self._connecting = None
        early, self._early = self._early, b""
        super().data_received(early)
