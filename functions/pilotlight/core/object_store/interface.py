"""What every object store does, wherever its bytes lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One version of an object.

    Attributes:
        size_bytes: its length. etag: names the version; "" where the store has no such name (what
        is read is then not tied to one version).
    """

    size_bytes: int
    etag: str


class ObjectStore(Protocol):
    """Bytes by key. Keys are relative paths of plain names (`keys.checked`; ValueError otherwise).

    Everything else that goes wrong is an ObjectStoreError: ObjectNotFound and ObjectChanged where
    said, ObjectStoreUnavailable where asking again may help. Many calls run at once; a cancelled
    one leaves nothing behind that anybody could take for whole."""

    async def put(self, key: str, data: bytes) -> None:
        """Store `data`, whole or not at all; what was there is replaced."""

    async def put_file(self, key: str, path: Path, *, may_move: bool = False) -> None:
        """Store the file's content, whole or not at all. With `may_move` the store may take the
        file away instead of copying it."""

    async def get(self, key: str, *, max_bytes: int) -> bytes:
        """The whole object. ObjectNotFound; ObjectStoreError, before it is read, when it is longer
        than `max_bytes`."""

    async def read(
        self, key: str, *, offset_bytes: int, length_bytes: int, etag: str | None = None
    ) -> bytes | memoryview:
        """Up to `length_bytes` from `offset_bytes`; shorter only where the object ends.
        ObjectNotFound.

        With an `etag` (of `info`) only of that version: ObjectChanged when the object is another
        one by now."""

    async def fetch(self, key: str, path: Path) -> ObjectInfo:
        """One version of the whole object into the new file `path`, which is removed again if that
        fails.

        Nothing is verified and nothing synced: the caller knows what the bytes must be.
        ObjectNotFound, ObjectChanged."""

    async def info(self, key: str) -> ObjectInfo | None:
        """Of the object's current version; None when there is none."""

    async def keys(self, prefix: str) -> list[str]:
        """Keys that begin with `prefix`, sorted."""

    async def delete(self, key: str) -> None:
        """Idempotent."""

    def local_path(self, key: str) -> Path | None:
        """Where the object is, or would be, as a file of this machine; None where objects are no
        files. Looks at nothing."""

    async def aclose(self) -> None:
        """Let connections and threads go. Calls that still run fail."""
