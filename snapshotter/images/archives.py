"""Packed archives of the platform's blob store, as files of this machine.

Where the store is a directory the archive is read where it lies; else it is fetched into a
temporary directory, which goes when it was read. Nothing is believed here: whoever unpacks compares
the hash."""

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
    """A packed archive: `path` as long as it is needed (it may be missing), and where it came from,
    for errors.

    Attributes:
        root: directory of the store in which it lies, and in which the controller writes; None: it
        is a file of our own.
    """

    path: Path
    origin: str
    root: Path | None = None

    def open(self) -> IO[bytes]:
        """To read it. Raises OSError, also where a link leads to it from the store."""
        if self.root is None:
            return self.path.open("rb")
        return os.fdopen(open_file_beneath(self.root, str(self.path.relative_to(self.root))), "rb")


@contextlib.asynccontextmanager
async def local_archive(
    blobs: ObjectStore, digest: str, *, beside: Path, floor: DiskFloor
) -> AsyncIterator[Archive]:
    """The archive as a file, which a directory may lack; fetched below `beside`. Raises
    BundleUnavailable, BelowFloor, OSError."""
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
            raise BundleUnavailable(f"bundle {digest[:12]} cannot be fetched: {e}") from e
        yield Archive(path=fetched, origin=f"{key} of {blobs!r}")


async def is_there(blobs: ObjectStore, digest: str) -> bool:
    """Whether the store has it. Raises BundleUnavailable when it does not answer."""
    try:
        return await blobs.info(blob_key(digest)) is not None
    except ObjectStoreError as e:
        raise BundleUnavailable(f"bundle {digest[:12]} cannot be looked for: {e}") from e


def missing(digest: str, where: str) -> BundleUnavailable:
    """What is said of an archive that the store at `where` does not have."""
    return BundleUnavailable(
        f"bundle {digest[:12]} is not in the blob store ({where}): deploy again to upload it"
    )
