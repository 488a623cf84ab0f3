"""An origin in memory whose faults are chosen: what it loses, damages or holds back."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

from weight_cache.errors import OriginUnavailable
from weight_cache.manifest import CHUNK_BYTES, Manifest, ManifestFile

_ZERO_CHUNK = hashlib.sha256(bytes(CHUNK_BYTES)).hexdigest()


class MemoryOrigin:
    """Blobs in a dictionary.

    Attributes:
        asked: set once anything was read. gate: an unset Event here holds reads back. gates: as
        `gate`, for single blobs. damaged: blobs whose bytes arrive wrong, and how many times still.
        lost: ranges (blob, offset) that cannot be read. reads, ranges, read_bytes: how many ranges
        were asked for, which, and the bytes that were delivered. at_once, most_at_once: reads under
        way now, and at most.
    """

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.damaged: dict[str, int] = {}
        self.lost: set[tuple[str, int]] = set()
        self.reads = 0
        self.ranges: list[tuple[str, int]] = []
        self.read_bytes = 0
        self.at_once = self.most_at_once = 0
        self.asked = asyncio.Event()
        self.gate: asyncio.Event | None = None
        self.gates: dict[str, asyncio.Event] = {}

    def put(self, content: bytes) -> str:
        """Keep a blob; returns its name."""
        digest = hashlib.sha256(content).hexdigest()
        self.blobs[digest] = content
        return digest

    async def size(self, digest: str) -> int:
        """Length of blob `digest` in bytes. Raises OriginUnavailable."""
        return len(self._blob(digest))

    async def read(self, digest: str, *, offset_bytes: int, length_bytes: int) -> bytes:
        """Up to `length_bytes` from `offset_bytes`. Raises OriginUnavailable."""
        self.reads += 1
        self.ranges.append((digest, offset_bytes))
        self.asked.set()
        content = self._blob(digest)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            gate = self.gates.get(digest, self.gate)
            await (gate.wait() if gate is not None else asyncio.sleep(0))
        finally:
            self.at_once -= 1
        if (digest, offset_bytes) in self.lost:
            raise OriginUnavailable(f"blob {digest[:12]} cannot be read from byte {offset_bytes}")
        part = content[offset_bytes : offset_bytes + length_bytes]
        if self.damaged.get(digest, 0) > 0:
            self.damaged[digest] -= 1
            return bytes(b ^ 1 for b in part[:64]) + part[64:]
        self.read_bytes += len(part)
        return part

    def _blob(self, digest: str) -> bytes:
        try:
            return self.blobs[digest]
        except KeyError:
            raise OriginUnavailable(f"no blob {digest[:12]} here") from None


class FolderOrigin:
    """Blobs as files of one folder, read again at every call: for processes that are killed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def size(self, digest: str) -> int:
        """Length of blob `digest` in bytes. Raises OriginUnavailable."""
        return self._path(digest).stat().st_size

    async def read(self, digest: str, *, offset_bytes: int, length_bytes: int) -> bytes:
        """Up to `length_bytes` from `offset_bytes`. Raises OriginUnavailable."""
        with self._path(digest).open("rb") as stream:
            stream.seek(offset_bytes)
            return stream.read(length_bytes)

    def _path(self, digest: str) -> Path:
        path = self._folder / digest
        if not path.is_file():
            raise OriginUnavailable(f"no blob {digest[:12]} here")
        return path


class ZeroOrigin:
    """Files of zeros of any size, made when they are read.

    `at_once`, `most_at_once`: reads under way now, and at most.
    """

    def __init__(self) -> None:
        self._manifests: dict[str, bytes] = {}
        self._sizes: dict[str, int] = {}
        self.at_once = self.most_at_once = 0

    def put_model(self, size_bytes: int) -> tuple[str, int]:
        """A model of one file `zeros`; its manifest's name, and its size."""
        full, rest = divmod(size_bytes, CHUNK_BYTES)
        hashes = [_ZERO_CHUNK] * full + ([hashlib.sha256(bytes(rest)).hexdigest()] if rest else [])
        file = ManifestFile(path="zeros", size_bytes=size_bytes, chunk_sha256s=tuple(hashes))
        manifest = Manifest(files=(file,))
        self._manifests[manifest.digest] = manifest.to_bytes()
        self._sizes[file.digest] = size_bytes
        return manifest.digest, size_bytes

    async def size(self, digest: str) -> int:
        """Length of blob `digest` in bytes."""
        return len(self._manifests[digest]) if digest in self._manifests else self._sizes[digest]

    async def read(self, digest: str, *, offset_bytes: int, length_bytes: int) -> bytes:
        """Up to `length_bytes` from `offset_bytes`."""
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        if digest in self._manifests:
            return self._manifests[digest][offset_bytes : offset_bytes + length_bytes]
        return bytes(max(0, min(length_bytes, self._sizes[digest] - offset_bytes)))
