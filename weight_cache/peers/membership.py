"""The peers, the complete files that each has, and their health; refreshed every few seconds.

A peer is identified by the id that it generates at startup, not by its address: so all nodes rank
the same ids regardless of the addresses they use, and a node recognizes itself. A peer whose id is
unknown owns no chunks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from weight_cache.peers.auth_tokens import ANY_NODE, TokenSigner
from weight_cache.peers.client import PeerClient, PeerRequestFailed, PeerResponse
from weight_cache.peers.discovery import PeerDiscovery
from weight_cache.peers.peer_health import PeerFailure, PeerHealth
from weight_cache.peers.rendezvous import owner, ranked

REFRESH_INTERVAL_S = 10.0
NODE_HEADER = "Pilotlight-Node"
HOLDINGS_PATH = "/v1/holdings"
_MIN_REFRESH_INTERVAL_S = 1.0
"""Minimum interval between two refreshes, regardless of requests from unknown nodes."""
_MAX_CONCURRENT_REQUESTS = 16
_MAX_HOLDINGS_BYTES = 32 * 1024**2
_SLOWEST_BYTES_PER_S = 4e6
_MISSED = 2
"""Consecutive refreshes that a peer may miss before its data is discarded."""
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Peer:
    """One address. `id` is None until known; `holds`: complete files and manifests."""

    address: str
    id: str | None = None
    holds: frozenset[str] = frozenset()
    etag: str | None = None
    missed: int = 0
    standing: PeerHealth = field(default_factory=PeerHealth)


class PeerMembership:
    """The peers of this node. Owner: one event loop; `_peers` changes between awaits only."""

    def __init__(
        self,
        members: PeerDiscovery,
        lines: PeerClient,
        key: TokenSigner,
        *,
        own_id: str,
        answer_s: float,
        distrust_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._members = members
        self._lines = lines
        self._key = key
        self.own_id = own_id
        self._answer_s = answer_s
        self._distrust_s = distrust_s
        self._clock = clock
        self._peers: dict[str, Peer] = {}
        self._looked_at = -math.inf
        self._look: asyncio.Task[None] | None = None
        self._stranger = asyncio.Event()
        self.failures: dict[PeerFailure, int] = dict.fromkeys(PeerFailure, 0)

    def __repr__(self) -> str:
        known = sum(peer.id not in (None, self.own_id) for peer in self._peers.values())
        return f"<PeerMembership known={known} of {len(self._peers)}>"

    async def run(self) -> None:
        """Refresh periodically until cancelled."""
        while True:
            await self._refresh_once(everybody=True)
            await asyncio.sleep(_MIN_REFRESH_INTERVAL_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_INTERVAL_S - _MIN_REFRESH_INTERVAL_S):
                    await self._stranger.wait()

    async def refresh(self, *, everybody: bool = True) -> None:
        """Resolve the peers and request the holdings of each (or only of those that are not
        backing off)."""
        addresses = await self._members.addresses()
        for gone in self._peers.keys() - set(addresses):
            del self._peers[gone]
            self._lines.hang_up(gone)
        for address in addresses:
            self._peers.setdefault(address, Peer(address))
        turns = asyncio.Semaphore(_MAX_CONCURRENT_REQUESTS)

        async def visit(peer: Peer) -> None:
            async with turns:
                await self._visit(peer)

        now = self._clock()
        others = [
            peer
            for peer in self._peers.values()
            if peer.id != self.own_id and (everybody or peer.standing.is_asked(now))
        ]
        await asyncio.gather(*map(visit, others))
        self._looked_at = self._clock()

    async def wait_refreshed(self) -> None:
        """Refresh if the last refresh is more than a second old, or an unknown node sent a request.

        Waits at most as long as one peer may take to answer.
        """
        if self._stranger.is_set() or self._clock() - self._looked_at > _MIN_REFRESH_INTERVAL_S:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2 * self._answer_s):
                    await self._refresh_once(everybody=False)

    async def _refresh_once(self, *, everybody: bool) -> None:
        """Start a refresh, or join the one in progress."""
        if self._look is None or self._look.done():
            everybody = everybody or self._stranger.is_set()
            self._stranger.clear()
            self._look = asyncio.create_task(self.refresh(everybody=everybody), name="look around")
        await asyncio.shield(self._look)

    def met(self, node: str) -> None:
        """Record a request from a node; an unknown one triggers a refresh."""
        if all(peer.id != node for peer in self._peers.values()):
            self._stranger.set()

    def holders(self, digest: str, key: str) -> list[Peer]:
        """Available peers with the complete file, ranked for `key`, which spreads chunks over
        holders."""
        found = {peer.id: peer for peer in self._query_members() if digest in peer.holds}
        return [found[node] for node in ranked(key, [node for node in found if node is not None])]

    def owner(self, key: str, *, without: Collection[str] = ()) -> Peer | None:
        """The owner of `key` among this node and the available peers; None: this node."""
        found = {peer.id: peer for peer in self._query_members() if peer.id not in without}
        return found.get(owner(key, [self.own_id, *(node for node in found if node is not None)]))

    def named(self, node: str) -> Peer | None:
        """The available peer with that id."""
        return next((peer for peer in self._query_members() if peer.id == node), None)

    def nodes(self) -> set[str]:
        """Ids of this node and of the available peers."""
        return {self.own_id, *(peer.id for peer in self._query_members() if peer.id is not None)}

    def well(self, address: str) -> None:
        """Record a success of a peer."""
        if (peer := self._peers.get(address)) is not None:
            peer.standing = peer.standing.well()

    def failed(self, address: str, failure: PeerFailure, why: str) -> None:
        """Record a failure of a peer."""
        self.failures[failure] += 1
        if (peer := self._peers.get(address)) is None:
            return
        peer.standing = peer.standing.failed(
            failure, now=self._clock(), distrust_s=self._distrust_s
        )
        if failure is PeerFailure.WRONG:
            self._lines.hang_up(address)
            _log.error(
                "peer.distrusted address=%s for_s=%.0f reason=%s", address, self._distrust_s, why
            )
        elif failure not in (PeerFailure.ABSENT, PeerFailure.BUSY):
            _log.warning("peer.failed address=%s failure=%s reason=%s", address, failure, why)

    def states(self) -> Iterator[tuple[str, str]]:
        """(address, state) of each peer: asked, resting, distrusted, or silent."""
        now = self._clock()
        for peer in self._peers.values():
            if peer.id != self.own_id:
                trusted = "asked" if peer.standing.is_asked(now) else "resting"
                yield (
                    peer.address,
                    "distrusted"
                    if peer.standing.is_distrusted(now)
                    else "silent"
                    if peer.id is None
                    else trusted,
                )

    def _query_members(self) -> list[Peer]:
        now = self._clock()
        return [
            peer
            for peer in self._peers.values()
            if peer.id not in (None, self.own_id) and peer.standing.is_asked(now)
        ]

    async def _visit(self, peer: Peer) -> None:
        ticket = self._key.write(
            "GET", HOLDINGS_PATH, sender=self.own_id, receiver=ANY_NODE, now=time.time()
        )
        try:
            answer = await self._lines.get(
                peer.address,
                HOLDINGS_PATH,
                ticket=ticket,
                answer_s=self._answer_s,
                bytes_per_s=_SLOWEST_BYTES_PER_S,
                most_bytes=_MAX_HOLDINGS_BYTES,
                etag=peer.etag,
            )
            _update_holdings(peer, answer)
        except PeerRequestFailed as e:
            peer.missed += 1
            self.failed(peer.address, e.failure, str(e))
            if peer.missed >= _MISSED:
                peer.id, peer.holds, peer.etag = None, frozenset(), None


def _update_holdings(peer: Peer, answer: PeerResponse) -> None:
    node = answer.head.headers.get(NODE_HEADER.lower(), "")
    if answer.head.status == 200:
        try:
            body = json.loads(answer.body)
            holds = frozenset(str(digest) for digest in [*body["files"], *body["models"]])
        except (ValueError, KeyError, TypeError) as e:
            raise PeerRequestFailed(
                PeerFailure.BROKEN,
                f"{peer.address} sent holdings in an unknown format: {e!r}",
            ) from e
        peer.holds, peer.etag = holds, answer.head.headers.get("etag")
    if node != peer.id:
        peer.standing = PeerHealth(
            distrusted_until=peer.standing.distrusted_until
        )  # the peer was restarted
    peer.id, peer.missed = node or None, 0
