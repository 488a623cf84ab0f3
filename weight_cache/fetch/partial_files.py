"""Files on their way in, so that nothing is fetched twice: what is half here, and which chunks of
it are right.

    partial/<digest>        a sparse file; only verified chunks were ever written to it
    partial/<digest>.done   a bit per chunk: these are on the disk (the data is flushed before its bits are written)

A file of one chunk has no bits: it is here or it is not. After a restart chunks are read again
before their bits are believed; what this process wrote itself it knows, unless somebody touched the
file since.

Blocking; called in threads, except for `remove`.
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
"""256 MiB: what is fetched again at most after a kill, against a commit of the file system's
journal each time."""
_DONE = ".done"
_SYNC_FILE_RANGE_WRITE = 2  # <linux/fs.h>
_libc = ctypes.CDLL(None, use_errno=True)

_log = logging.getLogger(__name__)


class PartialFile:
    """One file on its way. Owner: its fetch, whose threads write chunks side by side; the lock
    guards the figures.

    Attributes:
        verified: indices of the chunks that are in the file and right.
        claimed: those that an earlier process says it wrote; `check` them before they are believed.
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
        """Bytes of the chunks that nobody says are here."""
        with self._lock:
            return self._size - _bytes_of(self.verified | self.claimed, self._size)

    def check(self, index: int, chunk: Chunk) -> bool:
        """Read a claimed chunk; True if it is right, and verified from now on. Raises OSError."""
        block = os.pread(self._descriptor, chunk.length_bytes, chunk.offset_bytes)
        is_right = hashlib.sha256(block).hexdigest() == chunk.sha256
        with self._lock:
            self.claimed.discard(index)
            if is_right:
                self.verified.add(index)
        return is_right

    def write(self, index: int, chunk: Chunk, block: bytes | memoryview) -> bool:
        """Write a chunk if it is right; False if it is not. Raises OSError."""
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
        """Data to the disk, then the bits that say so. Raises OSError."""
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
        """Everything is here: make it durable and read-only. Raises OSError."""
        os.fchmod(self._descriptor, 0o444)
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


class PartialFiles:
    """The directory of partial files. Owner: the store's event loop; one `PartialFile` per digest
    at a time (single flight)."""

    def __init__(self, folder: Path, *, flushed_every: int = FLUSHED_EVERY_CHUNKS) -> None:
        self._folder = folder
        self._flushed_every = flushed_every
        # digest → modification time and chunks, as this process left them
        self._known: dict[str, tuple[int, set[int]]] = {}

    def stock(self, complete: set[str]) -> dict[str, int]:
        """What is half here: digest → bytes. What is of no use (no bits, or the file is `complete`
        elsewhere) is removed."""
        found = {}
        for name in {entry.name.removesuffix(_DONE) for entry in self._folder.iterdir()}:
            size = _bytes_of(self._bits(name), self._size(name))
            if size and name not in complete:
                found[name] = size
            else:
                self.remove(name)
        return found

    def open(self, file: ManifestFile) -> PartialFile:
        """Begin `file`, or go on where it was left. Raises OSError."""
        digest, path = file.digest, self._folder / file.digest
        left_at, known = self._known.pop(digest, (0, set()))
        if not path.exists():
            self.remove(digest)  # bits of a file that is gone
        else:
            # else not ours, or somebody wrote to it
            known = known if path.stat().st_mtime_ns == left_at else set()
            path.chmod(0o600)  # sealed already, when its last owner died before it had its name
        claimed = {i for i in self._bits(digest) if i < len(file.chunk_sha256s)}
        return PartialFile(
            path, file, verified=known, claimed=claimed, flushed_every=self._flushed_every
        )

    def leave(self, partial: PartialFile) -> None:
        """Close a partial, complete (and renamed) or not; what is verified stays for the next
        try."""
        digest = partial.path.name
        try:
            if partial.path.exists():
                partial.flush()
                self._known[digest] = (partial.path.stat().st_mtime_ns, partial.verified)
        except OSError as e:  # a full or a broken disk: what the last flush said is still true
            _log.warning("partial file not flushed digest=%s error=%s", digest[:12], e)
        finally:
            partial.close()
        if not self.kept_bytes(digest):
            self.remove(digest)

    def kept_bytes(self, digest: str) -> int:
        """Bytes of the chunks that are here for the next try."""
        return _bytes_of(self._bits(digest), self._size(digest))

    def finish(self, digest: str) -> None:
        """The file has its final name: forget the bits."""
        self._bits_path(digest).unlink(missing_ok=True)

    def remove(self, digest: str) -> None:
        """Remove a partial and its bits."""
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
    """Not truncated first: at no moment are there fewer bits than before."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(descriptor, content, 0)
    finally:
        os.close(descriptor)


def _begin_writeback(descriptor: int, chunk: Chunk) -> None:
    """Let the disk begin now (sync_file_range(2)), so that the flush at the end is short. Where it
    cannot, the flush does it all."""
    _libc.sync_file_range(
        ctypes.c_int(descriptor),
        ctypes.c_int64(chunk.offset_bytes),
        ctypes.c_int64(chunk.length_bytes),
        ctypes.c_uint(_SYNC_FILE_RANGE_WRITE),
    )
