"""Packed archives of the blob store, as local files.

If the store is a directory, the archive is read in place; otherwise it is fetched into a temporary
directory, which is deleted after use. The content is not verified here: the code that unpacks it
compares the hash."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pilotlight.core.disk_floor import DiskFloor
from pilotlight.core.object_store import ObjectStore, blob_key
from pilotlight.core.object_store.errors import ObjectNotFound, ObjectStoreError
from pilotlight.core.openat2 import open_file_beneath
from snapshotter.errors import BundleUnavailable
from snapshotter.linux.atomic_directory import staging_directory


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """A packed archive: its `path`, valid while in use (the file may be missing), and its origin,
    for error messages.

    Attributes:
        root: the store's directory that contains it, which the controller writes to; None: it is a
            private file.
    """

    path: Path
    origin: str
    root: Path | None = None

    def open(self) -> IO[bytes]:
        """Open it for reading. Raises OSError, also if its path in the store contains a symlink."""
        if self.root is None:
            return self.path.open("rb")
        return os.fdopen(open_file_beneath(self.root, str(self.path.relative_to(self.root))), "rb")


@contextlib.asynccontextmanager
async def local_archive(
    blobs: ObjectStore, digest: str, *, beside: Path, floor: DiskFloor
) -> AsyncIterator[Archive]:
    """Provide the archive as a file, which may be missing if the store is a directory; fetched
    below `beside`. Raises BundleUnavailable, BelowFloor, OSError."""
    key = blob_key(digest)
    if (there := blobs.local_path(key)) is not None:
        yield Archive(path=there, origin=str(there), root=there.parents[key.count("/")])
        return
    with staging_directory(beside, label=f"packed-{digest[:12]}") as work:
        fetched = work.directory / "archive"
        try:
            await floor.guard(blobs.fetch(key, fetched))
        except ObjectNotFound as e:
            raise missing(digest, repr(blobs)) from e
        except ObjectStoreError as e:
            raise BundleUnavailable(f"cannot fetch bundle {digest[:12]}: {e}") from e
        yield Archive(path=fetched, origin=f"{key} of {blobs!r}")


async def is_there(blobs: ObjectStore, digest: str) -> bool:
    """Whether the store has the archive. Raises BundleUnavailable if the store does not answer."""
    try:
        return await blobs.info(blob_key(digest)) is not None
    except ObjectStoreError as e:
        raise BundleUnavailable(f"cannot look up bundle {digest[:12]}: {e}") from e


def missing(digest: str, where: str) -> BundleUnavailable:
    """The error for an archive that the store at `where` does not have."""
    return BundleUnavailable(
        f"bundle {digest[:12]} is not in the blob store ({where}): deploy again to upload it"
    )
