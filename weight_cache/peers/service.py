"""Assembles the exchange between nodes from its settings, for the lifetime of the process."""

from __future__ import annotations

import asyncio
import secrets
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pilotlight.core.background_tasks import cancel_all
from pilotlight.core.settings import SettingsInvalid
from weight_cache.peers.auth_tokens import PeerKeyMissing, TokenSigner, TokenVerifier
from weight_cache.peers.bandwidth_limit import BandwidthLimiter
from weight_cache.peers.client import PeerClient
from weight_cache.peers.discovery import PeerDiscovery
from weight_cache.peers.fetch_coordination import FetchAssignments, InFlightChunks
from weight_cache.peers.fetcher import PeerFetcher
from weight_cache.peers.membership import PeerMembership
from weight_cache.peers.metrics import PeerCollector
from weight_cache.peers.server import PeerServer
from weight_cache.store.verified_chunks import VerifiedChunks


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """The settings `peers` and `peer_*` of `WeightCacheSettings`."""

    peers: Sequence[str] | str
    listen: str | None
    answer_s: float
    uploads_at_once: int
    upload_bytes_per_s: int
    distrust_s: float


class PeerService:
    """The exchange of this node: `exchange` is passed to the store, then `open` is called with the
    store's chunks. Owner: one event loop."""

    def __init__(
        self, terms: PeerSettings, key: TokenSigner, *, client_tls: ssl.SSLContext | None = None
    ) -> None:
        self.terms = terms
        self._key = key
        members = PeerDiscovery(terms.peers)
        self._lines = PeerClient(tls=client_tls, tls_name=members.name)
        self._assignments, self._under_way = FetchAssignments(), InFlightChunks()
        self.membership = PeerMembership(
            members,
            self._lines,
            key,
            own_id=secrets.token_hex(16),
            answer_s=terms.answer_s,
            distrust_s=terms.distrust_s,
        )
        self.exchange = PeerFetcher(
            self.membership,
            self._lines,
            key,
            assignments=self._assignments,
            under_way=self._under_way,
            answer_s=terms.answer_s,
        )
        self.server: PeerServer | None = None
        self.port: int | None = None
        self._looking: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return (
            f"<PeerService {self.membership!r} {self._under_way!r} {self.server!r} "
            f"port={self.port}>"
        )

    @classmethod
    def of(
        cls, terms: PeerSettings, key_file: Path, *, client_tls: ssl.SSLContext | None = None
    ) -> PeerService | None:
        """Create the service; None if no peers are configured. Raises SettingsInvalid without a
        valid platform key, which authentication needs."""
        if not terms.peers and terms.listen is None:
            return None
        try:
            return cls(terms, TokenSigner.load(key_file), client_tls=client_tls)
        except PeerKeyMissing as e:
            raise SettingsInvalid(f"weight_cache.peers, weight_cache.peer_listen: {e}") from e

    async def open(
        self, verified_chunks: VerifiedChunks, *, tls: ssl.SSLContext | None = None
    ) -> None:
        """Start the server and the discovery. Raises OSError if the address is in use."""
        if self.terms.listen is not None:
            self.server = PeerServer(
                verified_chunks,
                self.membership,
                TokenVerifier(self._key, own_id=self.membership.own_id),
                assignments=self._assignments,
                under_way=self._under_way,
                pace=BandwidthLimiter(self.terms.upload_bytes_per_s, clock=time.monotonic),
                at_once=self.terms.uploads_at_once,
            )
            host, _, port = self.terms.listen.rpartition(":")
            self.port = await self.server.listen(host.strip("[]"), int(port), tls=tls)
        self._looking = asyncio.create_task(self.membership.run(), name="look for peers")

    def collector(self) -> PeerCollector:
        """A collector of its metrics."""
        return PeerCollector(membership=self.membership, exchange=self.exchange, server=self.server)

    async def aclose(self) -> None:
        """Stop the server first, so that peers ask other nodes, then close the connections."""
        if self.server is not None:
            await self.server.aclose()
        if self._looking is not None:
            await cancel_all([self._looking])
        self._lines.close()
