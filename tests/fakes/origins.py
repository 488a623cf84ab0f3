"""An origin in memory whose faults are chosen: what it loses, damages or holds back."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

from weight_cache.errors import OriginUnavailable


class MemoryOrigin:
    """Blobs in a dictionary.

    Attributes:
        asked: set once anything was read.
        gate: an unset Event here holds reads back.
        gates: as `gate`, for single blobs.
        damaged: blobs whose bytes arrive wrong, and how many times still.
        lost: ranges (blob, offset) that cannot be read.
        reads, ranges, read_bytes: how many ranges were asked for, which, and the bytes that were delivered.
        at_once, most_at_once: reads under way now, and at most.
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
