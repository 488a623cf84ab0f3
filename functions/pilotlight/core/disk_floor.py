"""The floor of free disk: what only journals may use.

The journal of calls and the ledger must grow when everything else has filled the disk: what cannot
be written down cannot be billed. So every other writer (uploads, image builds, snapshots, weights,
logs) asks first, and is refused, or makes room, below the floor.

A file system ends in two ways, for want of bytes and for want of inodes; a floor of bytes has one
of inodes with it."""

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
"""Between two looks at the disk while something is written that nobody can count: a build writes
some 100 MB in that time."""


FLOOR_INODES = 65_536
"""More than a build makes files between two looks: some 100,000 in a second."""
FLOOR_INODES_SHARE = 10
"""Of a file system with fewer than 655,360 inodes the floor is this part of them."""
DEFAULT_FLOOR_BYTES = 1024**3
DEFAULT_FLOOR_SHARE = 50
"""Of a file system that is smaller than 50 GiB the floor is this part of it."""


def free_bytes(path: Path) -> int:
    """Bytes that may still be written to the file system of `path`, or of its nearest parent that
    is there."""
    return shutil.disk_usage(_existing(path)).free


def inodes(path: Path) -> tuple[int, int]:
    """Inodes of the file system of `path` that are free to us, and all of them; (0, 0) where it
    does not count them (btrfs)."""
    found = os.statvfs(_existing(path))
    return found.f_favail, found.f_files


def default_floor(path: Path) -> int:
    """The floor where the settings name none: a gibibyte, of a small file system a fiftieth."""
    return min(DEFAULT_FLOOR_BYTES, shutil.disk_usage(_existing(path)).total // DEFAULT_FLOOR_SHARE)


def _existing(path: Path) -> Path:
    return next((one for one in (path, *path.parents) if one.exists()), Path(os.sep))


class BelowFloor(OSError):
    """Raised where a write would leave less free disk than the floor; a full disk to whoever knows
    no better."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.ENOSPC, message)


class DiskFloor:
    """The floor of one file system. Looks anew each time; keeps nothing."""

    def __init__(
        self,
        path: Path,
        floor_bytes: int | None,
        *,
        free: Callable[[Path], int] = free_bytes,
        inodes: Callable[[Path], tuple[int, int]] = inodes,
    ) -> None:
        """`floor_bytes`: as `platform.disk_floor_bytes`; None: `default_floor`, 0: none, of inodes
        either."""
        self._path = path
        self._free = free
        self._inodes = inodes
        self.floor_bytes = default_floor(path) if floor_bytes is None else floor_bytes

    def __repr__(self) -> str:
        return f"<DiskFloor {self._path} {self.floor_bytes} bytes>"

    def missing_bytes(self, more_bytes: int = 0) -> int:
        """What has to go before `more_bytes` may be written; 0 where they fit. Blocking, some
        microseconds."""
        if not self.floor_bytes:
            return 0
        return max(0, self.floor_bytes + more_bytes - self._free(self._path))

    def missing_inodes(self, more_files: int = 0) -> int:
        """How many inodes have to go before `more_files` may be made. Blocking, some
        microseconds."""
        free, total = self._inodes(self._path) if self.floor_bytes else (0, 0)
        return max(0, self._floor_inodes(total) + more_files - free) if total else 0

    def missing(self, more_bytes: int = 0, more_files: int = 0) -> tuple[int, int]:
        """What has to go before so much more may come: bytes, inodes."""
        return self.missing_bytes(more_bytes), self.missing_inodes(more_files)

    def require(self, more_bytes: int = 0) -> None:
        """Raise BelowFloor unless `more_bytes` may be written, and files may be made."""
        if any(self.missing(more_bytes)):
            raise BelowFloor(self.describe(more_bytes))

    def _floor_inodes(self, total: int) -> int:
        return min(FLOOR_INODES, total // FLOOR_INODES_SHARE)

    def describe(self, more_bytes: int = 0) -> str:
        """Why writing `more_bytes` is refused, and what to do."""
        if not self.missing_bytes(more_bytes) and self.missing_inodes():
            free, total = self._inodes(self._path)
            return (
                f"the disk has no room for files: only {free} of {total} inodes are free in "
                f"{self._path}, and "
                f"{self._floor_inodes(total)} are kept for the journals: remove directories with "
                f"many small files"
            )
        return (
            f"the disk has no room: only {self._free(self._path)} bytes are free in {self._path}, "
            f"and platform.disk_floor_bytes keeps "
            f"{self.floor_bytes} for the journals: free some space"
        )

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work`, and cancel it when free bytes or inodes fall below the floor. Raises
        BelowFloor, and what `work` raises."""
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
    """Of a file system on which everything may be written."""
    return DiskFloor(Path(os.sep), 0)
