"""Objects as files: a local directory, or one shared by several nodes, for example over NFS.

A file appears under its name only when it is complete and durable: it is written next to it under a
hidden name, synced and renamed. An entity tag is the file's inode, size and modification time.
Calls block in threads; a thread runs to its end, and is waited for before its files are closed. A
reader may have more privileges than the writer, so symbolic links below the directory are not
followed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from pilotlight.core.durability import sync_directory
from pilotlight.core.object_store.errors import ObjectChanged, ObjectNotFound, ObjectStoreError
from pilotlight.core.object_store.interface import ObjectInfo
from pilotlight.core.object_store.keys import check_key, is_key
from pilotlight.core.openat2 import open_file_beneath
from pilotlight.core.threads import wait_finished

T = TypeVar("T")
_PIECE_BYTES = 16 * 1024 * 1024
"""Bytes per copy step; a copy can be stopped between two steps."""


class DirectoryStore:
    """An ObjectStore in a directory, which is created by the first `put`."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __repr__(self) -> str:
        return f"<DirectoryStore {self._root}>"

    async def put(self, key: str, data: bytes) -> None:
        """Store `data` atomically."""
        path = self._root / check_key(key)
        with _translated(path, "written"):
            await _run_to_completion(lambda _: _put(path, data))

    async def put_file(self, key: str, path: Path, *, may_move: bool = False) -> None:
        """Store a file atomically; moves it within a file system if `may_move`."""
        target = self._root / check_key(key)
        with _translated(target, "written"):
            await _run_to_completion(lambda stop: _put_file(path, target, may_move, stop))

    async def get(self, key: str, *, max_bytes: int) -> bytes:
        """Read a whole object of at most `max_bytes`."""
        path = self._root / check_key(key)
        with _translated(path, "read"):
            data = await asyncio.to_thread(_get, self._root, key, max_bytes)
        if data is None:
            raise ObjectStoreError(f"{path} is longer than {max_bytes} bytes")
        return data

    async def read(
        self, key: str, *, offset_bytes: int, length_bytes: int, etag: str | None = None
    ) -> bytes:
        """Read a range, of version `etag` if given."""
        path = self._root / check_key(key)
        with _translated(path, "read"):
            return await asyncio.to_thread(_read, self._root, key, offset_bytes, length_bytes, etag)

    async def fetch(self, key: str, path: Path) -> ObjectInfo:
        """Copy an object to the new file `path`."""
        source = self._root / check_key(key)
        with _translated(source, f"copied to {path}"):
            return await _run_to_completion(
                lambda stop: _fetch(self._root, key, path, stop), undo=path.unlink
            )

    async def info(self, key: str) -> ObjectInfo | None:
        """The object's current version; None if there is none."""
        path = self._root / check_key(key)
        with _translated(path, "looked at"):
            return await asyncio.to_thread(_info_of, self._root, key)

    async def keys(self, prefix: str) -> list[str]:
        """Keys that begin with `prefix`, sorted."""
        with _translated(self._root, "listed"):
            return await asyncio.to_thread(self._walk, prefix)

    async def delete(self, key: str) -> None:
        """Delete an object. Idempotent."""
        path = self._root / check_key(key)
        with _translated(path, "removed"):
            await asyncio.to_thread(_remove, path)

    def local_path(self, key: str) -> Path:
        """The object's path; does not access the disk."""
        return self._root / check_key(key)

    async def aclose(self) -> None:
        """Do nothing: no resources are held."""

    def _walk(self, prefix: str) -> list[str]:
        top = self._root / prefix.rpartition("/")[0]
        walk = os.walk(top, onerror=_unless_missing)
        keys = [
            os.path.relpath(os.path.join(folder, name), self._root)
            for folder, _, names in walk
            for name in names
        ]
        return sorted(key for key in keys if key.startswith(prefix) and is_key(key))


@contextlib.contextmanager
def _translated(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise ObjectStoreError(f"{path} cannot be {what}: {e.strerror or e}") from e


@contextlib.contextmanager
def _open_object(root: Path, key: str) -> Iterator[int]:
    """Open an object's file. Raises ObjectNotFound, OSError."""
    try:
        descriptor = open_file_beneath(root, key)
    except (FileNotFoundError, NotADirectoryError) as e:
        raise ObjectNotFound(f"{root / key} is missing") from e
    try:
        yield descriptor
    finally:
        os.close(descriptor)


async def _run_to_completion(
    work: Callable[[threading.Event], T], *, undo: Callable[[], None] | None = None
) -> T:
    """Run in a thread; if the caller is cancelled, signal it to stop, wait for it, and `undo` its
    result if it finished."""
    stop = threading.Event()
    job = asyncio.ensure_future(asyncio.to_thread(work, stop))
    try:
        return await asyncio.shield(job)
    except asyncio.CancelledError:
        stop.set()
        with contextlib.suppress(asyncio.CancelledError):  # also if cancelled repeatedly
            await wait_finished([job])
        if not job.cancelled() and job.exception() is None and undo is not None:
            undo()
        raise


def _unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _info(status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(
        size_bytes=status.st_size,
        etag=f"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}",
    )


def _info_of(root: Path, key: str) -> ObjectInfo | None:
    try:
        descriptor = open_file_beneath(root, key)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return _info(os.fstat(descriptor))
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    with contextlib.suppress(NotADirectoryError):
        path.unlink(missing_ok=True)


def _get(root: Path, key: str, max_bytes: int) -> bytes | None:
    with _open_object(root, key) as source:
        if os.fstat(source).st_size > max_bytes:
            return None
        return _pread(source, 0, max_bytes)


def _read(root: Path, key: str, offset: int, length: int, etag: str | None) -> bytes:
    with _open_object(root, key) as source:
        if etag and _info(os.fstat(source)).etag != etag:
            raise ObjectChanged(f"{root / key} was replaced by another version")
        return _pread(source, offset, length)


def _pread(source: int, offset: int, length: int) -> bytes:
    parts = []
    end = min(offset + length, os.fstat(source).st_size)
    while offset < end and (part := os.pread(source, end - offset, offset)):
        parts.append(part)
        offset += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _fetch(root: Path, key: str, path: Path, stop: threading.Event) -> ObjectInfo:
    with _open_object(root, key) as origin, _new_file(path) as target:
        before = _info(os.fstat(origin))
        _copy(origin, target, before.size_bytes, stop)
        if _info(os.fstat(origin)) != before:
            raise ObjectChanged(f"{root / key} changed while it was read")
    return before


def _put(path: Path, data: bytes) -> None:
    with _published(path) as target, os.fdopen(target, "wb", closefd=False) as f:
        f.write(data)


def _put_file(path: Path, target: Path, may_move: bool, stop: threading.Event) -> None:
    with path.open("rb", buffering=0) as f:
        if may_move and path.stat().st_dev == _made(target.parent).stat().st_dev:
            os.fsync(f.fileno())
            path.rename(target)
            sync_directory(target.parent)
            return
        with _published(target) as fresh:
            _copy(f.fileno(), fresh, os.fstat(f.fileno()).st_size, stop)


def _copy(source: int, target: int, size: int, stop: threading.Event) -> None:
    """Copy in the kernel if possible (which may share blocks), else through memory."""
    done = 0
    while done < size:
        if stop.is_set():
            raise ObjectStoreError("stopped")
        try:
            moved = os.copy_file_range(source, target, min(_PIECE_BYTES, size - done), done, done)
        except OSError:
            moved = _copy_range(source, target, min(_PIECE_BYTES, size - done), done)
        if not moved:
            raise ObjectChanged(f"ends after {done} of {size} bytes")
        done += moved


def _copy_range(source: int, target: int, length: int, offset: int) -> int:
    return os.pwrite(target, os.pread(source, length, offset), offset)


@contextlib.contextmanager
def _published(path: Path) -> Iterator[int]:
    """A descriptor to write to; its content appears durably as `path` at the end, or not at all."""
    fresh = _made(path.parent) / f".{path.name}.{secrets.token_hex(4)}"
    with _new_file(fresh) as target:
        yield target
        os.fsync(target)
        fresh.rename(path)
    sync_directory(path.parent)


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[int]:
    """A new file, removed on failure."""
    target = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        yield target
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(target)


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory
