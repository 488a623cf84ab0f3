"""The object store that copies of snapshots go to, with what it refuses told as errors of
snapshots."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pilotlight.core.object_store import ObjectStore
from pilotlight.core.object_store.errors import ObjectNotFound, ObjectStoreError


class RemoteError(Exception):
    """Raised when a copy cannot be written, read or believed; the message names the object and the
    reason."""


class CopyMissing(RemoteError):
    """Raised when there is no object of that key."""


class RemoteObjects:
    """Bytes by key; see ObjectStore. Everything raises RemoteError; `get` raises CopyMissing."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def __repr__(self) -> str:
        return repr(self._store)

    async def put(self, key: str, data: bytes) -> None:
        """Whole or not at all."""
        with _translated():
            await self._store.put(key, data)

    async def get(self, key: str, *, max_bytes: int) -> bytes:
        """The value; RemoteError, before much is read, when it is longer than `max_bytes`."""
        with _translated():
            return await self._store.get(key, max_bytes=max_bytes)

    async def size(self, key: str) -> int | None:
        """Of the value in bytes; None when there is none."""
        with _translated():
            info = await self._store.info(key)
        return None if info is None else info.size_bytes

    async def keys(self, prefix: str) -> list[str]:
        """Keys that begin with `prefix`, sorted."""
        with _translated():
            return await self._store.keys(prefix)

    async def delete(self, key: str) -> None:
        """Idempotent."""
        with _translated():
            await self._store.delete(key)

    async def aclose(self) -> None:
        """Let connections go."""
        await self._store.aclose()


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except ObjectNotFound as e:
        raise CopyMissing(str(e)) from e
    except ObjectStoreError as e:
        raise RemoteError(str(e)) from e
