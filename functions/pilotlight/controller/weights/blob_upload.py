"""A blob on its way in: a local file that becomes an object, or nothing, when its bytes are all
there and its hash was compared."""

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
"""After which asking an object store again makes sense that did not answer: its own retries took
tens of seconds."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


class BlobUpload:
    """One blob on its way in; every call blocks. Owner: the request that receives it."""

    def __init__(
        self, temporary: Path, chunked: bool, floor: DiskFloor, announced_bytes: int = 0
    ) -> None:
        """Raises StorageFull, OSError: also when so many bytes would leave less free disk than the
        floor."""
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
        """The next bytes. Raises StorageFull, OSError."""
        self._hash.update(data)
        self.size_bytes += len(data)
        view = memoryview(data)
        with disk_errors():
            self._floor.require(len(data))
            while view:
                view = view[os.write(self._descriptor, view) :]

    def finish(self, data: bytes, digest: str) -> None:
        """The last bytes, and what all of them are called. Raises InvalidInput, StorageFull,
        OSError."""
        self.add(data)
        if (actual := self._hash.hexdigest()) != digest:
            raise InvalidInput(
                f"the body's digest is {actual}, not {digest}: it was damaged on the way, or "
                f"named wrongly",
                actual=actual,
            )

    def discard(self) -> None:
        """Close and remove the file, if it was not taken."""
        os.close(self._descriptor)
        self._temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def disk_errors() -> Iterator[None]:
    """A full disk as StorageFull; other errors of the disk as they are."""
    try:
        yield
    except OSError as e:
        if e.errno in _FULL:
            raise _full(e) from e
        raise


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """What an object store refuses as StorageFull or Unavailable; what it lacks stays
    ObjectNotFound."""
    try:
        yield
    except ObjectNotFound:
        raise
    except ObjectStoreError as e:
        if isinstance(e.__cause__, OSError) and e.__cause__.errno in _FULL:
            raise _full(e.__cause__) from e
        raise Unavailable(f"the blob store does not do it: {e}", retry_after_s=STORE_RETRY_S) from e


def _full(error: OSError) -> StorageFull:
    if isinstance(error, BelowFloor):
        return StorageFull(f"{error.strerror}; nothing was kept")
    return StorageFull(
        f"the blob store's disk is full ({error.strerror}). Free some space in <home>/blobs; "
        f"nothing was kept."
    )
