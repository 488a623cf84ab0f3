"""Server of verified chunks for authenticated peers, limited in bandwidth and concurrency.

    GET /v1/holdings                         complete files and models of this node; its id
    GET /v1/chunks/<digest>/<index>[?…]      200 the chunk · 202 being fetched · 303 another node has it · 404 · 503 busy
    GET /v1/manifests/<sha256>[?…]           the same for a manifest

Query: `wait=<s>` waits for a chunk that is being fetched; `owner=1` this node owns the chunk: it
records which node fetches it (404: the caller should), and redirects later callers to that node;
`without=<node>,…` these nodes do not have it. Files are read in pieces by low-priority threads."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import ssl
import time
import urllib.parse
from dataclasses import dataclass, field

from pilotlight.core.threads import LowPriorityThreads
from weight_cache.peers import http1
from weight_cache.peers.auth_tokens import TokenRejected, TokenVerifier
from weight_cache.peers.bandwidth_limit import BandwidthLimiter
from weight_cache.peers.fetch_coordination import FetchAssignments, InFlightChunks
from weight_cache.peers.fetcher import AT_HEADER, WAIT_S
from weight_cache.peers.membership import HOLDINGS_PATH, NODE_HEADER, PeerMembership
from weight_cache.store.verified_chunks import ChunkLocation, VerifiedChunks

_PIECE_BYTES = 1024 * 1024
_IDLE_S = 60.0
_SEND_S = 30.0
"""A client that does not read a piece within this time is disconnected, since it holds an upload
slot."""
_TURN_S = 0.4
"""How long a request waits for an upload slot before it is refused as busy: less than the caller's
timeout."""
_CONNECTIONS = 256
_PATH = re.compile(r"/v1/(?:chunks/([0-9a-f]{64})/(\d{1,6})|manifests/([0-9a-f]{64}))\Z")
_NUMBER = re.compile(r"\d{1,6}(\.\d{1,6})?\Z")


@dataclass(slots=True, kw_only=True)
class PeerServerCounters:
    """Counters of served data. Owner: the event loop."""

    bytes: int = 0
    busy: int = 0
    refused: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RequestedChunk:
    digest: str
    index: int | None
    query: dict[str, str]

    @property
    def key(self) -> str:
        return self.digest if self.index is None else f"{self.digest}/{self.index}"


class PeerServer:
    """Serves peers. Owner: the store's event loop."""

    def __init__(
        self,
        verified_chunks: VerifiedChunks,
        membership: PeerMembership,
        gate: TokenVerifier,
        *,
        assignments: FetchAssignments,
        under_way: InFlightChunks,
        pace: BandwidthLimiter,
        at_once: int,
    ) -> None:
        self._verified_chunks = verified_chunks
        self._membership = membership
        self._gate = gate
        self._assignments = assignments
        self._under_way = under_way
        self._pace = pace
        self._turns = asyncio.Semaphore(at_once)
        self._threads = LowPriorityThreads(2)
        self._open: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}
        self._server: asyncio.Server | None = None
        self.served = PeerServerCounters()

    def __repr__(self) -> str:
        return f"<PeerServer connections={len(self._open)} served={self.served.bytes}>"

    async def listen(self, host: str, port: int, *, tls: ssl.SSLContext | None = None) -> int:
        """Serve until `aclose`; return the port. Raises OSError if the address is in use."""
        self._server = await asyncio.start_server(
            self._on_connection, host, port, ssl=tls, limit=http1.MAX_HEAD_BYTES
        )
        return int(self._server.sockets[0].getsockname()[1])

    async def aclose(self) -> None:
        """Abort all connections; the peers ask other nodes."""
        if self._server is not None:
            self._server.close()
        for writer, task in list(self._open.items()):
            writer.transport.abort()
            task.cancel()
        await asyncio.gather(*self._open.values(), return_exceptions=True)
        self._threads.close()

    async def _on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if len(self._open) >= _CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._open[writer] = task
        try:
            while True:
                async with asyncio.timeout(_IDLE_S):
                    request = await http1.read_request(reader)
                if request is None:
                    return
                await self._answer(request, writer)
        except (http1.ProtocolViolation, OSError, TimeoutError):
            writer.transport.abort()  # disconnected, or not one of our nodes
        finally:
            del self._open[writer]
            writer.close()

    async def _answer(self, request: http1.Request, writer: asyncio.StreamWriter) -> None:
        path, _, query = request.target.partition("?")
        try:
            node = self._gate.admit(
                request.headers.get("authorization"),
                request.method,
                request.target,
                now=time.time(),
                anybody=path == HOLDINGS_PATH,
            )
        except TokenRejected as e:
            self.served.refused[e.reason] = self.served.refused.get(e.reason, 0) + 1
            await self._send_text(writer, 401, str(e))
            return
        self._membership.met(node)
        if request.method != "GET":
            await self._send_text(writer, 405, "only GET is allowed")
        elif path == HOLDINGS_PATH:
            await self._send_holdings(writer, request.headers.get("if-none-match"))
        elif (match := _PATH.match(path)) is not None:
            index = int(match[2]) if match[2] is not None else None
            await self._give(
                writer,
                _RequestedChunk(
                    digest=match[1] or match[3],
                    index=index,
                    query=dict(urllib.parse.parse_qsl(query)),
                ),
                node,
            )
        else:
            await self._send_text(writer, 404, "unknown path")

    async def _send_holdings(self, writer: asyncio.StreamWriter, known: str | None) -> None:
        body = json.dumps(
            {"files": self._verified_chunks.files(), "models": self._verified_chunks.models()},
            separators=(",", ":"),
        ).encode()
        etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        headers = {NODE_HEADER: self._membership.own_id, "ETag": etag}
        writer.write(
            http1.response_head(304, 0, headers)
            if known == etag
            else http1.response_head(200, len(body), headers) + body
        )
        await self._drain(writer)

    async def _give(self, writer: asyncio.StreamWriter, piece: _RequestedChunk, node: str) -> None:
        # check before and after: it may arrive while a thread looks for it
        is_coming = self._under_way.is_coming(piece.key)
        found = await self._find(piece)
        if found is None and (is_coming or self._under_way.is_coming(piece.key)):
            if "wait" not in piece.query:
                return await self._send_text(writer, 202, "being fetched")
            await self._under_way.wait(piece.key, timeout_s=_seconds(piece.query["wait"]))
            found = await self._find(piece)
        if found is None:
            return await self._send_owner(writer, piece, node)
        try:
            async with asyncio.timeout(_TURN_S):
                await self._turns.acquire()
        except TimeoutError:
            self.served.busy += 1
            return await self._send_text(writer, 503, "busy")
        try:
            await self._send(writer, found)
        finally:
            self._turns.release()

    async def _send_owner(
        self, writer: asyncio.StreamWriter, piece: _RequestedChunk, node: str
    ) -> None:
        if "owner" in piece.query:
            # this node answered already that it does not have it
            without = {*piece.query.get("without", "").split(","), self._membership.own_id}
            nodes = self._membership.nodes() | {node}
            if (
                at := self._assignments.fetcher(piece.key, asker=node, without=without, nodes=nodes)
            ) != node:
                await self._send_text(writer, 303, "", {AT_HEADER: at})
                return
        await self._send_text(writer, 404, "not found")

    async def _find(self, piece: _RequestedChunk) -> ChunkLocation | bytes | None:
        if piece.index is None:
            return await self._threads.run(self._verified_chunks.manifest, piece.digest)
        return self._verified_chunks.chunk(piece.digest, piece.index)

    async def _send(self, writer: asyncio.StreamWriter, found: ChunkLocation | bytes) -> None:
        if isinstance(found, bytes):
            await self._pace.take(len(found))
            writer.write(http1.response_head(200, len(found)) + found)
            await self._drain(writer)
            self.served.bytes += len(found)
            return None
        try:
            descriptor = found.open()
        except OSError:
            return await self._send_text(writer, 404, "evicted")
        try:
            writer.write(http1.response_head(200, found.length_bytes))
            for at in range(0, found.length_bytes, _PIECE_BYTES):
                length = min(_PIECE_BYTES, found.length_bytes - at)
                await self._pace.take(length)
                block = await self._threads.run(
                    os.pread, descriptor, length, found.offset_bytes + at
                )
                if len(block) != length:
                    raise http1.ProtocolViolation(f"{found.paths[-1].name} is shorter than it was")
                writer.write(block)
                await self._drain(writer)
                self.served.bytes += length
        finally:
            os.close(descriptor)

    async def _send_text(
        self,
        writer: asyncio.StreamWriter,
        status: int,
        text: str,
        headers: dict[str, str] | None = None,
    ) -> None:
        body = text.encode()
        writer.write(http1.response_head(status, len(body), headers) + body)
        await self._drain(writer)

    async def _drain(self, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_SEND_S):
            await writer.drain()


def _seconds(text: str) -> float:
    return min(WAIT_S, float(text)) if _NUMBER.match(text) else 0.0
