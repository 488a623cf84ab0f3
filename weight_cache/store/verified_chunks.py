"""What peers may read from this store: complete files, verified chunks of partial files, and
manifests."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from weight_cache.fetch.partial_files import PartialFile
from weight_cache.manifest import CHUNK_BYTES, ManifestFile
from weight_cache.store.catalog import Catalog
from weight_cache.store.layout import StoreDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLocation:
    """A verified chunk on the disk. `paths`: candidates in order, since its file may be renamed
    meanwhile."""

    paths: tuple[Path, ...]
    offset_bytes: int
    length_bytes: int

    def open(self) -> int:
        """Open the file; the descriptor stays valid after an eviction. Raises
        FileNotFoundError."""
        for path in self.paths:
            with contextlib.suppress(FileNotFoundError):
                return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        raise FileNotFoundError(f"{self.paths[-1].name} was evicted")


class VerifiedChunks:
    """Finds verified chunks. Owner: the store's event loop; no method except `manifest` blocks
    longer than a stat(2)."""

    def __init__(self, directory: StoreDirectory, catalogue: Catalog) -> None:
        self._directory = directory
        self._catalogue = catalogue
        self._arriving: dict[str, tuple[ManifestFile, PartialFile]] = {}

    def __repr__(self) -> str:
        return (
            f"<VerifiedChunks files={len(self._catalogue.file_names())} "
            f"arriving={len(self._arriving)}>"
        )

    @contextlib.contextmanager
    def showing(self, file: ManifestFile, partial: PartialFile) -> Iterator[None]:
        """Make the verified chunks of `partial` available for the duration of the context."""
        self._arriving[file.digest] = (file, partial)
        try:
            yield
        finally:
            self._arriving.pop(file.digest, None)

    def chunk(self, digest: str, index: int) -> ChunkLocation | None:
        """Locate a chunk; None if it is not in the store, not verified, or its file was
        modified."""
        if self._catalogue.has_file(digest):
            return self._of_whole(digest, index)
        if digest not in self._arriving:
            return None
        file, partial = self._arriving[digest]
        paths = (partial.path, self._directory.file(digest))  # in the order of the rename
        return _chunk_location(paths, file.size_bytes, index) if index in partial.verified else None

    def manifest(self, name: str) -> bytes | None:
        """A manifest's bytes, verified against its hash. Blocking: some milliseconds for the
        longest."""
        return self._directory.notes.raw_manifest(name)

    def files(self) -> list[str]:
        """The digests of the complete files."""
        return sorted(self._catalogue.file_names())

    def models(self) -> list[str]:
        """The manifests of the complete models."""
        return sorted(model.manifest for model in self._catalogue.models())

    def _of_whole(self, digest: str, index: int) -> ChunkLocation | None:
        path = self._directory.file(digest)
        with contextlib.suppress(OSError):
            size = path.stat().st_size
            if self._directory.is_sealed(path, size):
                return _chunk_location((path,), size, index)
        return None


def _chunk_location(paths: tuple[Path, ...], size_bytes: int, index: int) -> ChunkLocation | None:
    offset = index * CHUNK_BYTES
    if not 0 <= offset < size_bytes:
        return None
    return ChunkLocation(
        paths=paths, offset_bytes=offset, length_bytes=min(CHUNK_BYTES, size_bytes - offset)
    )
