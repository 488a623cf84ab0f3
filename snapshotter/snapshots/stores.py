"""Where copies of snapshots lie for other nodes: bytes by key, in a directory or in an object store.

Keys are relative paths of plain names. A value appears whole; what is there may be replaced, but only by equal bytes: chunks are
named by their content, records by the id of what they describe.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from pathlib import Path
from typing import Protocol

_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")


class RemoteError(Exception):
    """Raised when a copy cannot be written, read or believed; the message names the object and the reason."""


class ObjectMissing(RemoteError):
    """Raised when there is no object of that key."""


class SnapshotStore(Protocol):
    """Raises RemoteError when the store does not answer or refuses; `get` raises ObjectMissing. Several calls at once are fine."""

    async def put(self, key: str, data: bytes) -> None:
        """Store `data`, whole or not at all."""

    async def get(self, key: str, *, max_bytes: int) -> bytes:
        """The value; RemoteError, before much is read, when it is longer than `max_bytes`."""

    async def size(self, key: str) -> int | None:
        """Of the value in bytes; None when there is none."""

    async def keys(self, prefix: str) -> list[str]:
        """Keys that begin with `prefix`, sorted."""

    async def delete(self, key: str) -> None:
        """Idempotent."""

    async def aclose(self) -> None:
        """Let connections go."""


def open_store(where: str) -> SnapshotStore:
    """The store that the setting `snapshotter.snapshot_store` names: `s3://bucket/prefix` or a directory. Raises ValueError."""
    if where.startswith("s3://"):
        from snapshotter.snapshots.s3 import S3Store

        bucket, _, prefix = where.removeprefix("s3://").partition("/")
        return S3Store(bucket=bucket, prefix=prefix.strip("/"))
    if "://" in where:
        raise ValueError(f"snapshot_store = {where!r}: must be a directory, s3://bucket/prefix, or null")
    return DirectoryStore(Path(where))


def is_key(name: str) -> bool:
    """Whether a store may be asked for it."""
    return _KEY.fullmatch(name) is not None


def checked(key: str) -> str:
    """Raises ValueError for a key that would leave its store."""
    if not is_key(key):
        raise ValueError(f"{key!r} is no key: plain names with / between them")
    return key


class DirectoryStore:
    """A directory that several nodes see, as over NFS, or one for tests."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __repr__(self) -> str:
        return f"<DirectoryStore {self._root}>"

    async def put(self, key: str, data: bytes) -> None:
        """See SnapshotStore."""
        path = self._root / checked(key)
        try:
            await asyncio.to_thread(_write, path, data)
        except OSError as e:
            raise RemoteError(f"{path} cannot be written: {e}") from e

    async def get(self, key: str, *, max_bytes: int) -> bytes:
        """See SnapshotStore."""
        path = self._root / checked(key)
        try:
            data = await asyncio.to_thread(_read, path, max_bytes + 1)
        except FileNotFoundError as e:
            raise ObjectMissing(f"{path} is missing") from e
        except OSError as e:
            raise RemoteError(f"{path} cannot be read: {e}") from e
        if len(data) > max_bytes:
            raise RemoteError(f"{path} is longer than {max_bytes} bytes")
        return data

    async def size(self, key: str) -> int | None:
        """See SnapshotStore."""
        try:
            return (await asyncio.to_thread((self._root / checked(key)).stat)).st_size
        except FileNotFoundError:
            return None
        except OSError as e:
            raise RemoteError(f"{key} cannot be looked at: {e}") from e

    async def keys(self, prefix: str) -> list[str]:
        """See SnapshotStore."""
        try:
            return await asyncio.to_thread(self._walk, prefix)
        except OSError as e:
            raise RemoteError(f"{self._root} cannot be listed: {e}") from e

    async def delete(self, key: str) -> None:
        """See SnapshotStore."""
        try:
            await asyncio.to_thread((self._root / checked(key)).unlink, missing_ok=True)
        except OSError as e:
            raise RemoteError(f"{key} cannot be removed: {e}") from e

    async def aclose(self) -> None:
        """See SnapshotStore."""

    def _walk(self, prefix: str) -> list[str]:
        top = self._root / prefix.rpartition("/")[0]
        keys = [os.path.relpath(os.path.join(folder, name), self._root) for folder, _, names in os.walk(top) for name in names]
        return sorted(key for key in keys if key.startswith(prefix) and is_key(key))


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        fresh.rename(path)
    finally:
        fresh.unlink(missing_ok=True)


def _read(path: Path, limit: int) -> bytes:
    with path.open("rb") as f:
        return f.read(limit)
