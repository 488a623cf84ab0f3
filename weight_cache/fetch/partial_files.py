"""Partial files: incomplete downloads that can be resumed, with their verified chunks.

    partial/<digest>        a sparse file that contains only verified chunks
    partial/<digest>.done   one bit per chunk on the disk (the data is flushed before its bits are written)

A file of one chunk has no bits. After a restart chunks are read and verified before their bits are
trusted; chunks written by this process are trusted unless the file was modified since.

Blocking: called in threads, except for `remove`.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from weight_cache.manifest import CHUNK_BYTES, ManifestFile
from weight_cache.types import Chunk

FLUSHED_EVERY_CHUNKS = 16
"""256 MiB: the most that is fetched again after a kill, traded against a commit of the file
system's journal each time."""
_DONE = ".done"
_SYNC_FILE_RANGE_WRITE = 2  # <linux/fs.h>
_libc = ctypes.CDLL(None, use_errno=True)

_log = logging.getLogger(__name__)


class PartialFile:
    """One incomplete file. Owner: its download, whose threads write chunks concurrently; the lock
    guards the counters.

    Attributes:
        verified: indices of the chunks that are in the file and correct.
        claimed: chunks written by an earlier process; `check` them before use.
    """

    def __init__(
        self,
        path: Path,
        file: ManifestFile,
        *,
        verified: set[int],
        claimed: set[int],
        flushed_every: int,
    ) -> None:
        self.path = path
        self.verified = verified
        self.claimed = claimed - verified
        self._size = file.size_bytes
        self._bits_path = path.with_name(path.name + _DONE)
        self._count = len(file.chunk_sha256s)
        self._lock = threading.Lock()
        self._flushing = threading.Lock()
        self._flushed_every = flushed_every
        self._unflushed = 0
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._descriptor, self._size)

    def __repr__(self) -> str:
        return f"<PartialFile {self.path.name[:12]} {len(self.verified)}/{self._count} chunks>"

    @property
    def missing_bytes(self) -> int:
        """Bytes of the chunks that are neither verified nor claimed."""
        with self._lock:
            return self._size - _bytes_of(self.verified | self.claimed, self._size)

    def check(self, index: int, chunk: Chunk) -> bool:
        """Read and verify a claimed chunk; True if it is correct. Raises OSError."""
        block = os.pread(self._descriptor, chunk.length_bytes, chunk.offset_bytes)
        is_right = hashlib.sha256(block).hexdigest() == chunk.sha256
        with self._lock:
            self.claimed.discard(index)
            if is_right:
                self.verified.add(index)
        return is_right

    def write(self, index: int, chunk: Chunk, block: bytes | memoryview) -> bool:
        """Write a chunk if its hash matches; otherwise return False. Raises OSError."""
        if len(block) != chunk.length_bytes or hashlib.sha256(block).hexdigest() != chunk.sha256:
            return False
        view, offset = memoryview(block), chunk.offset_bytes
        while view:
            written = os.pwrite(self._descriptor, view, offset)
            view, offset = view[written:], offset + written
        _begin_writeback(self._descriptor, chunk)
        with self._lock:
            self.verified.add(index)
            self._unflushed += 1
            is_due = self._unflushed >= self._flushed_every
        if is_due:
            self.flush()
        return True

    def flush(self) -> None:
        """Flush the data, then write the bits. Raises OSError."""
        if self._count <= 1:
            return
        with self._flushing:
            with self._lock:
                done, self._unflushed = self.verified | self.claimed, 0
            os.fdatasync(self._descriptor)
            bits = bytearray(-(-self._count // 8))
            for index in done:
                bits[index // 8] |= 1 << index % 8
            _overwrite(self._bits_path, bits)

    def seal(self) -> None:
        """Make the complete file durable and read-only. Raises OSError."""
        os.fchmod(self._descriptor, 0o444)
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


class PartialFiles:
    """The directory of partial files. Owner: the store's event loop; at most one open `PartialFile`
    per digest (single flight)."""

    def __init__(self, folder: Path, *, flushed_every: int = FLUSHED_EVERY_CHUNKS) -> None:
        self._folder = folder
        self._flushed_every = flushed_every
        # digest → modification time and verified chunks when this process closed the file
        self._known: dict[str, tuple[int, set[int]]] = {}

    def stock(self, complete: set[str]) -> dict[str, int]:
        """List partial files: digest → bytes. Useless ones (without bits, or `complete` in the
        store) are removed."""
        found = {}
        for name in {entry.name.removesuffix(_DONE) for entry in self._folder.iterdir()}:
            size = _bytes_of(self._bits(name), self._size(name))
            if size and name not in complete:
                found[name] = size
            else:
                self.remove(name)
        return found

    def open(self, file: ManifestFile) -> PartialFile:
        """Open the partial file of `file`, new or existing. Raises OSError."""
        digest, path = file.digest, self._folder / file.digest
        left_at, known = self._known.pop(digest, (0, set()))
        if not path.exists():
            self.remove(digest)  # bits without a file
        else:
            # a different time: written by another process, or modified
            known = known if path.stat().st_mtime_ns == left_at else set()
            path.chmod(0o600)  # read-only if the last owner died between seal and rename
        claimed = {i for i in self._bits(digest) if i < len(file.chunk_sha256s)}
        return PartialFile(
            path, file, verified=known, claimed=claimed, flushed_every=self._flushed_every
        )

    def leave(self, partial: PartialFile) -> None:
        """Close a partial file, complete (and renamed) or not; verified chunks are kept for the
        next attempt."""
        digest = partial.path.name
        try:
            if partial.path.exists():
                partial.flush()
                self._known[digest] = (partial.path.stat().st_mtime_ns, partial.verified)
        except OSError as e:  # full or broken disk: the bits of the last flush remain valid
            _log.warning("partial file not flushed digest=%s error=%s", digest[:12], e)
        finally:
            partial.close()
        if not self.kept_bytes(digest):
            self.remove(digest)

    def kept_bytes(self, digest: str) -> int:
        """Bytes of the chunks kept for the next attempt."""
        return _bytes_of(self._bits(digest), self._size(digest))

    def finish(self, digest: str) -> None:
        """Remove the bits of a file that has its final name."""
        self._bits_path(digest).unlink(missing_ok=True)

    def remove(self, digest: str) -> None:
        """Remove a partial file and its bits."""
        self._known.pop(digest, None)
        self._bits_path(digest).unlink(missing_ok=True)
        (self._folder / digest).unlink(missing_ok=True)

    def _bits_path(self, digest: str) -> Path:
        return self._folder / (digest + _DONE)

    def _size(self, digest: str) -> int:
        with contextlib.suppress(OSError):
            return (self._folder / digest).stat().st_size
        return 0

    def _bits(self, digest: str) -> set[int]:
        try:
            return set(_set_bits(self._bits_path(digest).read_bytes()))
        except OSError:
            return set()


def _set_bits(bits: bytes) -> Iterator[int]:
    for at, byte in enumerate(bits):
        yield from (at * 8 + bit for bit in range(8) if byte >> bit & 1)


def _bytes_of(chunks: set[int], size_bytes: int) -> int:
    return sum(max(0, min(CHUNK_BYTES, size_bytes - index * CHUNK_BYTES)) for index in chunks)


def _overwrite(path: Path, content: bytes | bytearray) -> None:
    """Overwrite without truncation, so that no bits are lost at any moment."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(descriptor, content, 0)
    finally:
        os.close(descriptor)


def _begin_writeback(descriptor: int, chunk: Chunk) -> None:
    """Start writing to the disk now (sync_file_range(2)) to shorten the final flush. Errors are
    ignored: the flush then writes everything."""
    _libc.sync_file_range(
        ctypes.c_int(descriptor),
        ctypes.c_int64(chunk.offset_bytes),
        ctypes.c_int64(chunk.length_bytes),
        ctypes.c_uint(_SYNC_FILE_RANGE_WRITE),
    )
