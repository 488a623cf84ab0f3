"""All parts of the exchange between nodes, put together from settings for the life of a process."""

from __future__ import annotations

import asyncio
import secrets
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weight_cache.peers.agreement import Notebook, UnderWay
from weight_cache.peers.asking import Lines
from weight_cache.peers.exchange import Exchange
from weight_cache.peers.figures import PeerCollector
from weight_cache.peers.members import Members
from weight_cache.peers.neighbourhood import Neighbourhood
from weight_cache.peers.pace import Pace
from weight_cache.peers.serving import PeerServer
from weight_cache.peers.tickets import Gate, KeyMissing, PeerKey
from weight_cache.settings import SettingsInvalid
from weight_cache.shelf import Shelf


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a node takes part: the fields `peers` and `peer_*` of `WeightCacheSettings`."""

    peers: Sequence[str] | str
    listen: str | None
    answer_s: float
    uploads_at_once: int
    upload_bytes_per_s: int
    distrust_s: float


class Station:
    """This node among the others: `exchange` is given to the store, then `open` with what the store
    has. Owner: one event loop."""

    def __init__(
        self, terms: Terms, key: PeerKey, *, client_tls: ssl.SSLContext | None = None
    ) -> None:
        self._terms = terms
        self._key = key
        members = Members(terms.peers)
        self._lines = Lines(tls=client_tls, tls_name=members.name)
        self._notebook, self._under_way = Notebook(), UnderWay()
        self.neighbourhood = Neighbourhood(
            members,
            self._lines,
            key,
            own_id=secrets.token_hex(16),
            answer_s=terms.answer_s,
            distrust_s=terms.distrust_s,
        )
        self.exchange = Exchange(
            self.neighbourhood,
            self._lines,
            key,
            notebook=self._notebook,
            under_way=self._under_way,
            answer_s=terms.answer_s,
        )
        self.server: PeerServer | None = None
        self.port: int | None = None
        self._looking: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Station {self.neighbourhood!r} {self.server!r} port={self.port}>"

    @classmethod
    def of(
        cls, terms: Terms, key_file: Path, *, client_tls: ssl.SSLContext | None = None
    ) -> Station | None:
        """None where a node is to know no others. Raises SettingsInvalid: without the platform's
        key nobody would know it."""
        if not terms.peers and terms.listen is None:
            return None
        try:
            return cls(terms, PeerKey.load(key_file), client_tls=client_tls)
        except KeyMissing as e:
            raise SettingsInvalid(f"weight_cache.peers, weight_cache.peer_listen: {e}") from e

    async def open(self, shelf: Shelf, *, tls: ssl.SSLContext | None = None) -> None:
        """Begin to serve and to look around. Raises OSError (an address in use)."""
        if self._terms.listen is not None:
            self.server = PeerServer(
                shelf,
                self.neighbourhood,
                Gate(self._key, own_id=self.neighbourhood.own_id),
                notebook=self._notebook,
                under_way=self._under_way,
                pace=Pace(self._terms.upload_bytes_per_s, clock=time.monotonic),
                at_once=self._terms.uploads_at_once,
            )
            host, _, port = self._terms.listen.rpartition(":")
            self.port = await self.server.listen(host.strip("[]"), int(port), tls=tls)
        self._looking = asyncio.create_task(self.neighbourhood.run(), name="look for peers")

    def collector(self) -> PeerCollector:
        """Its metrics."""
        return PeerCollector(
            neighbourhood=self.neighbourhood, exchange=self.exchange, server=self.server
        )

    async def aclose(self) -> None:
        """Serve nobody any more first (they ask elsewhere), then let go of the others."""
        if self.server is not None:
            await self.server.aclose()
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        self._lines.close()
