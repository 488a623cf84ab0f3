"""The floor of free disk space, reserved for journals.

The journal of calls and the ledger must be able to grow when everything else has filled the disk:
what cannot be recorded cannot be billed. So all other writers (uploads, image builds, snapshots,
weights, logs) check first, and are refused, or free space, below the floor.

A file system can run out of bytes or of inodes; a floor of bytes implies one of inodes."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
GUARD_INTERVAL_S = 0.5
"""Interval between two checks during a write of unknown size: a build writes about 100 MB in that
time."""


FLOOR_INODES = 65_536
"""More files than a build creates between two checks: about 100,000 per second."""
FLOOR_INODES_SHARE = 10
"""On a file system with fewer than 655,360 inodes the floor is this fraction of them."""
DEFAULT_FLOOR_BYTES = 1024**3
DEFAULT_FLOOR_SHARE = 50
"""On a file system smaller than 50 GiB the floor is this fraction of it."""


def free_bytes(path: Path) -> int:
    """Bytes available in the file system of `path`, or of its nearest existing parent."""
    return shutil.disk_usage(_existing(path)).free


def inodes(path: Path) -> tuple[int, int]:
    """Available and total inodes of the file system of `path`; (0, 0) if it has no fixed number
    (btrfs)."""
    found = os.statvfs(_existing(path))
    return found.f_favail, found.f_files


def default_floor(path: Path) -> int:
    """The floor without a setting: 1 GiB, or 1/50 of a small file system."""
    return min(DEFAULT_FLOOR_BYTES, shutil.disk_usage(_existing(path)).total // DEFAULT_FLOOR_SHARE)


def _existing(path: Path) -> Path:
    return next((one for one in (path, *path.parents) if one.exists()), Path(os.sep))


class BelowFloor(OSError):
    """Raised when a write would leave less free disk than the floor; has the errno of a full
    disk."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.ENOSPC, message)


class DiskFloor:
    """The floor of one file system. Checks the disk on each call; caches nothing."""

    def __init__(
        self,
        path: Path,
        floor_bytes: int | None,
        *,
        free: Callable[[Path], int] = free_bytes,
        inodes: Callable[[Path], tuple[int, int]] = inodes,
    ) -> None:
        """`floor_bytes`: as `platform.disk_floor_bytes`; None: `default_floor`, 0: no floor, also
        of inodes."""
        self._path = path
        self._free = free
        self._inodes = inodes
        self.floor_bytes = default_floor(path) if floor_bytes is None else floor_bytes

    def __repr__(self) -> str:
        return f"<DiskFloor {self._path} {self.floor_bytes} bytes>"

    def missing_bytes(self, more_bytes: int = 0) -> int:
        """Bytes to free before `more_bytes` can be written; 0 if they fit. Blocking, some
        microseconds."""
        if not self.floor_bytes:
            return 0
        return max(0, self.floor_bytes + more_bytes - self._free(self._path))

    def missing_inodes(self, more_files: int = 0) -> int:
        """Inodes to free before `more_files` can be created. Blocking, some microseconds."""
        free, total = self._inodes(self._path) if self.floor_bytes else (0, 0)
        return max(0, self._floor_inodes(total) + more_files - free) if total else 0

    def missing(self, more_bytes: int = 0, more_files: int = 0) -> tuple[int, int]:
        """Bytes and inodes to free before that much can be written."""
        return self.missing_bytes(more_bytes), self.missing_inodes(more_files)

    def require(self, more_bytes: int = 0) -> None:
        """Raise BelowFloor unless `more_bytes` can be written and files can be created."""
        if any(self.missing(more_bytes)):
            raise BelowFloor(self.describe(more_bytes))

    def _floor_inodes(self, total: int) -> int:
        return min(FLOOR_INODES, total // FLOOR_INODES_SHARE)

    def describe(self, more_bytes: int = 0) -> str:
        """Explain why writing `more_bytes` is refused, and what to do."""
        if not self.missing_bytes(more_bytes) and self.missing_inodes():
            free, total = self._inodes(self._path)
            return (
                f"the disk has no room for files: only {free} of {total} inodes are free in "
                f"{self._path}, and {self._floor_inodes(total)} are kept for the journals: remove "
                f"directories with many small files"
            )
        return (
            f"the disk has no room: only {self._free(self._path)} bytes are free in {self._path}, "
            f"and platform.disk_floor_bytes keeps "
            f"{self.floor_bytes} for the journals: free some space"
        )

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work`; cancel it when free bytes or inodes fall below the floor. Raises BelowFloor,
        and what `work` raises."""
        try:
            self.require()
        except BelowFloor:
            work.close()
            raise
        running = asyncio.create_task(work)
        try:
            while not (await asyncio.wait([running], timeout=GUARD_INTERVAL_S))[0]:
                self.require()
            return running.result()
        finally:
            if not running.done():
                running.cancel()
                await asyncio.wait([running])


def no_floor() -> DiskFloor:
    """A floor of 0, for a file system without a limit."""
    return DiskFloor(Path(os.sep), 0)
