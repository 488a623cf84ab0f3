"""An origin in memory whose faults are chosen: what it loses, damages or holds back."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

from weight_cache.errors import OriginUnavailable


class MemoryOrigin:
    """Blobs in a dictionary. `reads` counts ranges asked for.

    Attributes:
        asked: set once anything was read.
        gate: an unset Event here holds reads back.
        damaged: blobs whose bytes arrive wrong, and how many times still.
    """

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.damaged: dict[str, int] = {}
        self.reads = 0
        self.asked = asyncio.Event()
        self.gate: asyncio.Event | None = None

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
        self.asked.set()
        content = self._blob(digest)
        if self.gate is not None:
            await self.gate.wait()
        part = content[offset_bytes : offset_bytes + length_bytes]
        if self.damaged.get(digest, 0) > 0:
            self.damaged[digest] -= 1
            return bytes(b ^ 1 for b in part)
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
