"""Upload of one blob: a local file that becomes an object only after all bytes have arrived and the
hash has been verified."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from pilotlight.core.disk_floor import BelowFloor, DiskFloor
from pilotlight.core.object_store.errors import ObjectNotFound, ObjectStoreError
from pilotlight.errors import InvalidInput, StorageFull, Unavailable
from weight_cache.manifest import FileHash

STORE_RETRY_S = 5.0
"""Retry delay after the object store did not answer; its own retries took tens of seconds
already."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


class BlobUpload:
    """One blob that is being received; every method blocks. Owner: the request that receives it."""

    def __init__(
        self, temporary: Path, chunked: bool, floor: DiskFloor, announced_bytes: int = 0
    ) -> None:
        """Open the file. Raises StorageFull (also when the announced bytes would leave less free
        disk space than the floor), OSError."""
        self._temporary = temporary
        self._floor = floor
        with disk_errors():
            floor.require(announced_bytes)
        self._hash = FileHash() if chunked else hashlib.sha256()
        with disk_errors():
            self._descriptor = os.open(
                temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
            )
        self.size_bytes = 0

    def add(self, data: bytes) -> None:
        """Write the next bytes. Raises StorageFull, OSError."""
        self._hash.update(data)
        self.size_bytes += len(data)
        view = memoryview(data)
        with disk_errors():
            self._floor.require(len(data))
            while view:
                view = view[os.write(self._descriptor, view) :]

    def finish(self, data: bytes, digest: str) -> None:
        """Write the last bytes and verify the digest of all of them. Raises InvalidInput,
        StorageFull, OSError."""
        self.add(data)
        if (actual := self._hash.hexdigest()) != digest:
            raise InvalidInput(
                f"the body's digest is {actual}, not {digest}: it was damaged in transit, or the "
                f"digest is wrong; upload it again",
                actual=actual,
            )

    def discard(self) -> None:
        """Close the file, and remove it unless it became an object."""
        os.close(self._descriptor)
        self._temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def disk_errors() -> Iterator[None]:
    """Translate a full disk to StorageFull; other disk errors are raised unchanged."""
    try:
        yield
    except OSError as e:
        if e.errno in _FULL:
            raise _full(e) from e
        raise


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """Translate object store errors to StorageFull or Unavailable; ObjectNotFound is raised
    unchanged."""
    try:
        yield
    except ObjectNotFound:
        raise
    except ObjectStoreError as e:
        if isinstance(e.__cause__, OSError) and e.__cause__.errno in _FULL:
            raise _full(e.__cause__) from e
        raise Unavailable(
            f"the blob store failed the request: {e}", retry_after_s=STORE_RETRY_S
        ) from e


def _full(error: OSError) -> StorageFull:
    if isinstance(error, BelowFloor):
        return StorageFull(f"{error.strerror}; nothing was stored")
    return StorageFull(
        f"the blob store's disk is full ({error.strerror}). Free some space in <home>/blobs; "
        f"nothing was stored."
    )
