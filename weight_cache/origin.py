"""Where bytes come from: content-addressed blobs, read by range.

What an origin delivers is not believed; the store hashes every chunk.
"""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Protocol

from weight_cache.errors import OriginUnavailable

_HEX = re.compile(r"[0-9a-f]{64}\Z")


class Origin(Protocol):
    """Blobs by their sha256 (hex). Many reads run at once; cancelling one abandons it."""

    async def size(self, digest: str) -> int:
        """Length of blob `digest` in bytes. Raises OriginUnavailable."""
        ...

    async def read(self, digest: str, *, offset_bytes: int, length_bytes: int) -> bytes:
        """Up to `length_bytes` from `offset_bytes`; shorter only where the blob ends. Raises OriginUnavailable."""
        ...


class DirectoryOrigin:
    """The controller's blob directory, `<blobs>/<first two hex digits>/<sha256>`."""

    def __init__(self, blobs: Path) -> None:
        self._blobs = blobs

    def __repr__(self) -> str:
        return f"<DirectoryOrigin {self._blobs}>"

    async def size(self, digest: str) -> int:
        """Length of blob `digest` in bytes. Raises OriginUnavailable."""
        return await asyncio.to_thread(self._size, self._path(digest))

    async def read(self, digest: str, *, offset_bytes: int, length_bytes: int) -> bytes:
        """Up to `length_bytes` from `offset_bytes`; shorter only where the blob ends. Raises OriginUnavailable."""
        return await asyncio.to_thread(self._read, self._path(digest), offset_bytes, length_bytes)

    def _path(self, digest: str) -> Path:
        if not _HEX.match(digest):
            raise OriginUnavailable(f"{digest!r} does not name a blob: expected the 64 hex digits of a sha256")
        return self._blobs / digest[:2] / digest

    def _size(self, path: Path) -> int:
        try:
            return path.stat().st_size
        except OSError as e:
            raise _unavailable(path, e) from e

    def _read(self, path: Path, offset: int, length: int) -> bytes:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as e:
            raise _unavailable(path, e) from e
        try:
            parts = []
            while length and (part := os.pread(descriptor, length, offset)):
                parts.append(part)
                offset, length = offset + len(part), length - len(part)
            return b"".join(parts) if len(parts) != 1 else parts[0]
        except OSError as e:
            raise _unavailable(path, e) from e
        finally:
            os.close(descriptor)


def _unavailable(path: Path, error: OSError) -> OriginUnavailable:
    return OriginUnavailable(f"blob {path.name[:12]} cannot be read from {path.parent}: {error.strerror}. Deploy again to upload it")
