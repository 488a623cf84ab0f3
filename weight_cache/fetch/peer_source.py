"""Interface to peers: other nodes that may have verified chunks, tried before the origin.

Data from peers is trusted as little as data from the origin: every byte is hashed before it is
written. `weight_cache.peers` implements the interface; on a lone node there are no peers, and all
data comes from the origin."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from weight_cache.manifest import ManifestFile


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRequest:
    """A request for chunk `index` of file `digest`, or for the manifest `digest` if `index` is
    None.

    `length_bytes`: exact for a chunk, a maximum for a manifest. `sha256`: hex, of these bytes.
    """

    digest: str
    index: int | None
    length_bytes: int
    sha256: str

    @property
    def key(self) -> str:
        """Name of the chunk or manifest in peer requests."""
        return self.digest if self.index is None else f"{self.digest}/{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerChunk:
    """Unverified bytes from a peer, and the address of that peer (`peer`)."""

    block: bytes
    peer: str


class PeerSource(Protocol):
    """The peers of this node. Owner: the store's event loop."""

    def asked(self, wanted: ChunkRequest) -> AbstractAsyncContextManager[PeerChunk | None]:
        """Request bytes from peers; None: the caller reads them from the origin, and peers that
        want the same bytes wait for the duration of the context. Raises no errors of its own."""

    def used(self, given: PeerChunk) -> None:
        """Report that a peer's bytes were correct and are stored."""

    def report_corrupt(self, given: PeerChunk) -> None:
        """Report that a peer's bytes do not match their hash."""

    def in_turn(self, file: ManifestFile) -> Iterable[int]:
        """The file's chunks (indices) in the order in which this node should fetch them."""
