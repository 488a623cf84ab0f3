"""The interface of all object stores."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One version of an object.

    Attributes:
        size_bytes: its length.
        etag: identifies the version; "" if the store has no entity tags (reads are then not tied to
            one version).
    """

    size_bytes: int
    etag: str


class ObjectStore(Protocol):
    """Bytes by key. Keys are relative paths of plain names (`keys.check_key`; ValueError
    otherwise).

    All other errors are ObjectStoreErrors: ObjectNotFound and ObjectChanged where stated,
    ObjectStoreUnavailable if a retry may succeed. Calls may run concurrently; a cancelled call
    leaves nothing that could be mistaken for a complete object."""

    async def put(self, key: str, data: bytes) -> None:
        """Store `data` atomically, replacing an existing object."""

    async def put_file(self, key: str, path: Path, *, may_move: bool = False) -> None:
        """Store the file's content atomically. With `may_move` the store may move the file instead
        of copying it."""

    async def get(self, key: str, *, max_bytes: int) -> bytes:
        """Read the whole object. ObjectNotFound; ObjectStoreError, before it is read, if it is
        longer than `max_bytes`."""

    async def read(
        self, key: str, *, offset_bytes: int, length_bytes: int, etag: str | None = None
    ) -> bytes | memoryview:
        """Read up to `length_bytes` from `offset_bytes`; shorter only at the end of the object.
        ObjectNotFound.

        With an `etag` (of `info`) only of that version: ObjectChanged if the object has another
        version."""

    async def fetch(self, key: str, path: Path) -> ObjectInfo:
        """Copy one version of the object to the new file `path`, which is removed on failure.

        Does not verify or sync: the caller knows the expected bytes. ObjectNotFound,
        ObjectChanged."""

    async def info(self, key: str) -> ObjectInfo | None:
        """The object's current version; None if there is none."""

    async def keys(self, prefix: str) -> list[str]:
        """Keys that begin with `prefix`, sorted."""

    async def delete(self, key: str) -> None:
        """Delete the object. Idempotent."""

    def local_path(self, key: str) -> Path | None:
        """The object's path as a file of this machine, whether it exists or not; None if objects
        are not files."""

    async def aclose(self) -> None:
        """Close connections and threads. Running calls fail."""
