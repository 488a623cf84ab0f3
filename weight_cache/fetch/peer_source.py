"""What the store asks of other nodes: chunks that one of them has verified, before the origin is
asked.

The store believes them as little as the origin: every byte is hashed before it is written.
`weight_cache.peers` is who answers; without it (a lone node) there are no neighbours, and
everything comes from the origin."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from weight_cache.manifest import ManifestFile


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRequest:
    """A piece that somebody needs: chunk `index` of file `digest`, or the manifest `digest` where
    `index` is None.

    `length_bytes`: of the chunk exactly, of a manifest at most. `sha256`: hex, of just these bytes.
    """

    digest: str
    index: int | None
    length_bytes: int
    sha256: str

    @property
    def key(self) -> str:
        """The piece's name among nodes."""
        return self.digest if self.index is None else f"{self.digest}/{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerChunk:
    """Bytes from a neighbour, not verified yet, and which one they came from (`giver`: its
    address)."""

    block: bytes
    giver: str


class PeerSource(Protocol):
    """Other nodes of this platform. Owner: the store's event loop."""

    def asked(self, wanted: ChunkRequest) -> AbstractAsyncContextManager[PeerChunk | None]:
        """A neighbour's bytes, or None: then the caller reads them from the origin, and while the
        context lasts neighbours who want the same wait for that. Raises nothing of its own."""
        ...

    def used(self, given: PeerChunk) -> None:
        """What a neighbour gave was right, and is kept."""
        ...

    def report_corrupt(self, given: PeerChunk) -> None:
        """What a neighbour gave is not what its hash says."""
        ...

    def in_turn(self, file: ManifestFile) -> Iterable[int]:
        """The file's chunks (indices) in the order in which this node shall want them."""
        ...
