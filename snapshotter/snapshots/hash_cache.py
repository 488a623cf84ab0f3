"""A cache of file hashes, valid while stat(2) reports that a file is unchanged.

Reading 300 MB takes 0.2 s, a stat(2) takes a microsecond. A file is identified by its inode, size,
mtime and ctime: only the kernel sets a ctime, so a file modified after it was hashed is hashed
again. The kernel's clock has a coarse resolution; a file changed within the last tick is not
cached, because the next change could have the same time. The cache is stored on disk, signed, and
valid only for the current boot: after a power failure everything is read again."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
import time
from collections.abc import Iterable
from pathlib import Path

from pilotlight.core.pid_file import boot_id
from snapshotter.snapshots import manifest
from snapshotter.snapshots.manifest import FileMark, SnapshotInvalid

TICK_S = 0.02
"""Longer than one tick of any kernel (100 Hz and up)."""
_CHUNK_BYTES = 1024 * 1024
_MAX_REMEMBERED = 20_000

Stamp = tuple[int, int, int, int, int]
"""Device, inode, size, mtime in ns, ctime in ns."""


class HashCache:
    """Hashes of files by their stat(2) results. Owner: the event loop; threads only read files."""

    def __init__(self, *, threads: int | None = None) -> None:
        self._known: dict[Stamp, str] = {}
        self._at_once = asyncio.Semaphore(threads or os.cpu_count() or 1)

    def __repr__(self) -> str:
        return f"<HashCache {len(self._known)} files>"

    def knows(self, path: str, mark: FileMark, *, follow: bool = False) -> bool:
        """True if `path` is known to have this content and has not changed since: one stat(2)."""
        try:
            status = os.stat(path, follow_symlinks=follow)
        except OSError:
            return False
        return status.st_size == mark.bytes and self._known.get(_stamp(status)) == mark.sha256

    async def marks(
        self, paths: Iterable[Path], *, settle: bool = False, follow: bool = False
    ) -> dict[Path, FileMark]:
        """Size and hash of each file, read in threads if unknown.

        `settle` first waits out the clock's tick, so that files just written are cached too. Raises
        OSError, and SnapshotInvalid for a file that is not regular or changes while it is read.
        """
        wanted = list(paths)
        if settle:
            await asyncio.to_thread(_wait_out_tick, wanted)
        return dict(
            zip(wanted, await asyncio.gather(*(self._mark(p, follow) for p in wanted)), strict=True)
        )

    async def _mark(self, path: Path, follow: bool) -> FileMark:
        status = os.stat(path, follow_symlinks=follow)
        known = self._known.get(_stamp(status))
        if known is not None:
            return FileMark(bytes=status.st_size, sha256=known)
        async with self._at_once:
            began = time.time()
            digest, status = await asyncio.to_thread(hash_file, path, follow=follow)
        if began - status.st_ctime_ns / 1e9 > TICK_S:
            if len(self._known) >= _MAX_REMEMBERED:
                del self._known[next(iter(self._known))]
            self._known[_stamp(status)] = digest
        return FileMark(bytes=status.st_size, sha256=digest)

    def dump(self, key: bytes) -> bytes:
        """Serialize for `load`, after a restart of the agent."""
        known = [[*stamp, digest] for stamp, digest in self._known.items()]
        return manifest.sealed({"boot": boot_id(), "known": known}, key)

    def load(self, data: bytes, key: bytes) -> None:
        """Load the hashes of an agent that ran since this machine booted. Raises SnapshotInvalid if
        they were altered."""
        body = manifest.opened(data, key, max_bytes=len(data))
        if body.get("boot") == boot_id():
            self._known.update(
                {
                    (dev, ino, size, mtime, ctime): digest
                    for dev, ino, size, mtime, ctime, digest in body["known"]
                }
            )


def hash_file(path: Path, *, follow: bool) -> tuple[str, os.stat_result]:
    """sha256 (hex) of a regular file, and its stat after reading. Blocking. Raises OSError,
    SnapshotInvalid."""
    total = hashlib.sha256()
    descriptor = os.open(
        path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    )
    with os.fdopen(descriptor, "rb", buffering=0) as f:
        before = os.fstat(f.fileno())
        if not stat.S_ISREG(before.st_mode):
            raise SnapshotInvalid(f"{path} is not a regular file")
        buffer = bytearray(_CHUNK_BYTES)
        view = memoryview(buffer)
        while count := f.readinto(buffer):
            total.update(view[:count])
        after = os.fstat(f.fileno())
    if _stamp(before) != _stamp(after):
        raise SnapshotInvalid(f"{path} changed while it was being read")
    return total.hexdigest(), after


def _wait_out_tick(paths: Iterable[Path]) -> None:
    newest = max((os.lstat(p).st_ctime_ns for p in paths), default=0) / 1e9
    time.sleep(min(2 * TICK_S, max(0.0, newest + 1.1 * TICK_S - time.time())))


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
