"""Fetches a chunk from peers: first from nodes that have the file, then from the chunk's owner,
then from the node that the owner names; otherwise from the origin."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass

from weight_cache.fetch.peer_source import ChunkRequest, PeerChunk
from weight_cache.manifest import ManifestFile
from weight_cache.peers.auth_tokens import TokenSigner
from weight_cache.peers.client import PeerClient, PeerRequestFailed, PeerResponse
from weight_cache.peers.fetch_coordination import FetchAssignments, InFlightChunks
from weight_cache.peers.membership import Peer, PeerMembership
from weight_cache.peers.peer_health import PeerFailure
from weight_cache.peers.rendezvous import owner

WAIT_S = 5.0
"""How long to wait for a peer that is fetching the chunk: 16 MiB at 3.2 MiB/s."""
AT_HEADER = "Pilotlight-At"
_SLOWEST_BYTES_PER_S = 8e6
"""A chunk that takes longer than two seconds is not worth waiting for: eight concurrent ones would
arrive faster over 1 Gbit/s."""
_HOLDERS_ASKED = 2
_OWNERS_ASKED = 2


@dataclass(slots=True, kw_only=True)
class PeerCounters:
    """Counters of received data. Owner: the event loop."""

    bytes: int = 0
    chunks: int = 0


class PeerFetcher:
    """Implements `weight_cache.fetch.peer_source.PeerSource` for the store. Owner: the store's
    event loop."""

    def __init__(
        self,
        membership: PeerMembership,
        lines: PeerClient,
        key: TokenSigner,
        *,
        assignments: FetchAssignments,
        under_way: InFlightChunks,
        answer_s: float,
    ) -> None:
        self._membership = membership
        self._lines = lines
        self._key = key
        self._assignments = assignments
        self._under_way = under_way
        self._answer_s = answer_s
        self.received = PeerCounters()

    def __repr__(self) -> str:
        return f"<PeerFetcher {self._membership!r} received={self.received.bytes}>"

    @contextlib.asynccontextmanager
    async def asked(self, wanted: ChunkRequest) -> AsyncIterator[PeerChunk | None]:
        """Request a chunk or manifest from peers; mark it as in flight for the duration of the
        context."""
        if not self._membership.holders(wanted.digest, wanted.key):
            await self._membership.wait_refreshed()
        with self._under_way.coming(wanted.key):
            yield await self._request_from_all(wanted)

    def used(self, given: PeerChunk) -> None:
        """Count received bytes and reset the peer's failures."""
        self.received.bytes += len(given.block)
        self.received.chunks += 1
        self._membership.well(given.peer)

    def report_corrupt(self, given: PeerChunk) -> None:
        """Exclude a peer that sent corrupt bytes."""
        self._membership.failed(given.peer, PeerFailure.WRONG, "its bytes do not match their hash")

    def in_turn(self, file: ManifestFile) -> Iterator[int]:
        """The chunks that this node owns first: by the time the others are requested, their owners
        have fetched them."""
        nodes = self._membership.nodes()
        count = range(len(file.chunk_sha256s))
        if len(nodes) == 1:
            yield from count
            return
        digest, others = file.digest, []
        for index in count:
            if owner(f"{digest}/{index}", nodes) == self._membership.own_id:
                yield index
            else:
                others.append(index)
        yield from others

    async def _request_from_all(self, wanted: ChunkRequest) -> PeerChunk | None:
        for holder in self._membership.holders(wanted.digest, wanted.key)[:_HOLDERS_ASKED]:
            if (given := _peer_chunk(holder, await self._request(holder, wanted))) is not None:
                return given
        absent: list[str] = []
        for _ in range(_OWNERS_ASKED):
            peer = self._membership.owner(wanted.key)
            if peer is None:
                fetcher = self._own_note(wanted, absent)
            else:
                answer, fetcher = await self._request_from_owner(peer, wanted, absent)
                if (given := _peer_chunk(peer, answer)) is not None:
                    return given
                if fetcher is None and self._membership.owner(wanted.key) is not peer:
                    continue  # the owner failed, and there is a new one
            if fetcher is None:
                return None  # this node has to fetch it
            if (given := _peer_chunk(fetcher, await self._request(fetcher, wanted))) is not None:
                return given
            absent.append(fetcher.id or "")
        return None

    def _own_note(self, wanted: ChunkRequest, absent: Iterable[str]) -> Peer | None:
        """For a chunk that this node owns: the other node that fetches it, if any."""
        nodes = self._membership
        own = nodes.own_id
        return nodes.named(
            self._assignments.fetcher(
                wanted.key, asker=own, without=tuple(absent), nodes=nodes.nodes()
            )
        )

    async def _request_from_owner(
        self, peer: Peer, wanted: ChunkRequest, absent: Iterable[str]
    ) -> tuple[PeerResponse | None, Peer | None]:
        """Ask the owner: its response, or the node that it names; neither if this node has to fetch
        the chunk or the owner failed."""
        without = ",".join(absent)
        answer = await self._request(
            peer, wanted, f"owner=1&without={without}" if without else "owner=1"
        )
        if answer is None or answer.head.status != 303:
            return answer, None
        return None, self._membership.named(answer.head.headers.get(AT_HEADER.lower(), ""))

    async def _request(
        self, peer: Peer, wanted: ChunkRequest, query: str = ""
    ) -> PeerResponse | None:
        """Request a chunk from a peer, waiting if the peer is fetching it; None if it does not have
        it."""
        answer = await self._get(peer, wanted, query, answer_s=self._answer_s)
        if answer is None or answer.head.status != 202:
            return answer
        answer = await self._get(peer, wanted, f"wait={WAIT_S}", answer_s=self._answer_s + WAIT_S)
        return answer if answer is not None and answer.head.status == 200 else None

    async def _get(
        self, peer: Peer, wanted: ChunkRequest, query: str, *, answer_s: float
    ) -> PeerResponse | None:
        path = (
            f"/v1/manifests/{wanted.digest}"
            if wanted.index is None
            else f"/v1/chunks/{wanted.digest}/{wanted.index}"
        )
        target = f"{path}?{query}" if query else path
        own = self._membership.own_id
        ticket = self._key.write("GET", target, sender=own, receiver=peer.id or "", now=time.time())
        try:
            return await self._lines.get(
                peer.address,
                target,
                ticket=ticket,
                answer_s=answer_s,
                bytes_per_s=_SLOWEST_BYTES_PER_S,
                most_bytes=wanted.length_bytes,
            )
        except PeerRequestFailed as e:
            self._membership.failed(peer.address, e.failure, str(e))
            return None


def _peer_chunk(peer: Peer, answer: PeerResponse | None) -> PeerChunk | None:
    if answer is None or answer.head.status != 200:
        return None
    return PeerChunk(block=answer.body, peer=peer.address)
