"""Stores that are each other's neighbours, in one loop, over real sockets; and a peer that
misbehaves as told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from tests.fakes.origins import MemoryOrigin
from weight_cache.peers import http1
from weight_cache.peers.auth_tokens import TokenSigner
from weight_cache.peers.membership import NODE_HEADER
from weight_cache.peers.service import PeerService, PeerSettings
from weight_cache.store.store import Store

KEY = TokenSigner(b"k" * 32)


class NeighbourNode:
    """One node: a store, its peer service, and a way to its own origin."""

    def __init__(
        self,
        root: Path,
        *,
        peers: list[str],
        origin: MemoryOrigin,
        uploads_at_once: int,
        answer_s: float,
    ) -> None:
        self.origin = origin
        self.peer_service = PeerService(
            PeerSettings(
                peers=peers,
                listen="127.0.0.1:0",
                answer_s=answer_s,
                uploads_at_once=uploads_at_once,
                upload_bytes_per_s=0,
                distrust_s=600,
            ),
            KEY,
        )
        self.store = Store.open(
            root,
            origin=origin,
            max_bytes=10**9,
            clock=lambda: 5.0,
            peer_source=self.peer_service.exchange,
        )

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.peer_service.port}"

    async def close(self) -> None:
        """As at SIGTERM."""
        await self.peer_service.aclose()
        self.store.close()


class Street:
    """Nodes that know each other. Owner: the test's loop. `origin`: what nodes share unless they
    have their own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.origin = MemoryOrigin()
        self.nodes: list[NeighbourNode] = []
        self.peers: list[str] = []

    async def node(
        self,
        *,
        origin: MemoryOrigin | None = None,
        uploads_at_once: int = 64,
        answer_s: float = 20.0,
    ) -> NeighbourNode:
        """One more; everybody looks around. A node whose uploads are all taken for 0.4 s refuses
        the next, and is not asked for 0.25 s: not with as many as all that these tests want."""
        node = NeighbourNode(
            self._folder / str(len(self.nodes)),
            peers=self.peers,
            origin=origin or self.origin,
            uploads_at_once=uploads_at_once,
            answer_s=answer_s,
        )
        await node.peer_service.open(node.store.verified_chunks)
        self.nodes.append(node)
        await self.join(node.address)
        return node

    async def join(self, address: str) -> None:
        """Everybody hears of an address."""
        self.peers.append(address)
        await self.refresh()

    async def refresh(self) -> None:
        """Everybody asks who is there, and who holds what."""
        for _ in range(2):
            await asyncio.gather(*(node.peer_service.membership.refresh() for node in self.nodes))


@contextlib.asynccontextmanager
async def street(folder: Path) -> AsyncIterator[Street]:
    """An empty one; its nodes are closed at the end."""
    made = Street(folder)
    try:
        yield made
    finally:
        for node in made.nodes:
            await node.close()
        await asyncio.sleep(0)


Behaviour = Callable[[http1.Request, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def bad_peer(behaviour: Behaviour, *, holds: list[str]) -> AsyncIterator[str]:
    """A peer that says it holds files, and treats whoever asks for a piece as `behaviour` says; its
    address."""
    body = ('{"files":[' + ",".join(f'"{digest}"' for digest in holds) + '],"models":[]}').encode()
    writers: set[asyncio.StreamWriter] = set()

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        with contextlib.suppress(OSError, http1.ProtocolViolation):
            while (request := await http1.read_request(reader)) is not None:
                if request.target == "/v1/holdings":
                    writer.write(
                        http1.response_head(200, len(body), {NODE_HEADER: "b" * 32}) + body
                    )
                else:
                    await behaviour(request, writer)
                if writer.is_closing():
                    break
        writer.close()

    server = await asyncio.start_server(on_connection, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0.01)
