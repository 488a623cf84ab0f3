"""The object store for copies of snapshots, with its errors translated to RemoteError."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pilotlight.core.object_store import ObjectStore
from pilotlight.core.object_store.errors import ObjectNotFound, ObjectStoreError


class RemoteError(Exception):
    """Raised when a copy cannot be written, read or verified; the message names the object and the
    reason."""


class CopyMissing(RemoteError):
    """Raised when no object has that key."""


class RemoteObjects:
    """Values by key in an ObjectStore. All methods raise RemoteError; `get` raises CopyMissing."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def __repr__(self) -> str:
        return repr(self._store)

    async def put(self, key: str, data: bytes) -> None:
        """Write atomically."""
        with _translated():
            await self._store.put(key, data)

    async def get(self, key: str, *, max_bytes: int) -> bytes:
        """The value. Raises RemoteError, before reading much, if it is longer than `max_bytes`."""
        with _translated():
            return await self._store.get(key, max_bytes=max_bytes)

    async def size(self, key: str) -> int | None:
        """Size of the value in bytes; None if there is none."""
        with _translated():
            info = await self._store.info(key)
        return None if info is None else info.size_bytes

    async def keys(self, prefix: str) -> list[str]:
        """Keys that begin with `prefix`, sorted."""
        with _translated():
            return await self._store.keys(prefix)

    async def delete(self, key: str) -> None:
        """Delete the value. Idempotent."""
        with _translated():
            await self._store.delete(key)

    async def aclose(self) -> None:
        """Close connections."""
        await self._store.aclose()


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except ObjectNotFound as e:
        raise CopyMissing(str(e)) from e
    except ObjectStoreError as e:
        raise RemoteError(str(e)) from e
