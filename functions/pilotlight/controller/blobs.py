"""Content-addressed blobs: bundles, manifests, files of weights. This is the origin that nodes read from.

A blob is a file `<home>/blobs/<aa>/<sha256>`, complete or absent: written beside, checked, synced, renamed. Its row says
who may name it: knowing a digest is not owning the bytes, so every tenant uploads once (a known blob is only hashed again).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import uuid
from collections.abc import AsyncIterator, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import anyio.to_thread
import sqlalchemy as sa

from pilotlight.controller import tables
from pilotlight.controller.store import Store, Write
from pilotlight.errors import InvalidInput, StorageFull, TooLarge
from weight_cache.manifest import FileHash

WRITE_BYTES = 1024 * 1024
"""Received pieces are gathered to this size before a thread hashes and writes them: a hop costs more than 64 KiB of sha256."""
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")


def check_digest(digest: str, where: str = "digest") -> str:
    """Return `digest` if it is 64 lower-case hex digits. Raises InvalidInput."""
    if not _DIGEST.match(digest):
        raise InvalidInput(f"{where} = {digest[:80]!r}: expected a sha256 as 64 lower-case hex digits", parameter=where)
    return digest


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobFiles:
    """The directory of blobs. `limit_bytes` bounds one blob."""

    root: Path
    limit_bytes: int

    def path(self, digest: str) -> Path:
        """Where the blob is, or would be."""
        return self.root / digest[:2] / digest

    def sweep(self) -> None:
        """Remove what uploads left behind that a crash cut off. Call before serving."""
        for leftover in self._incoming().glob("*"):
            leftover.unlink(missing_ok=True)

    async def receive(self, digest: str, pieces: AsyncIterator[bytes], *, chunked: bool, announced_bytes: int | None, keep: bool) -> int:
        """Read a blob to its end, check it, and (with `keep`) put it in place; returns its size in bytes.

        Raises TooLarge, InvalidInput (wrong hash) or StorageFull; then nothing is left behind.
        """
        if announced_bytes is not None and announced_bytes > self.limit_bytes:
            raise self._too_large(announced_bytes)
        upload = await anyio.to_thread.run_sync(_Upload, self._incoming() / uuid.uuid4().hex if keep else None, chunked)
        try:
            gathered = bytearray()
            async for piece in pieces:
                gathered += piece
                if upload.size_bytes + len(gathered) > self.limit_bytes:
                    raise self._too_large(upload.size_bytes + len(gathered))
                if len(gathered) >= WRITE_BYTES:
                    await anyio.to_thread.run_sync(upload.add, bytes(gathered))
                    gathered.clear()
            await anyio.to_thread.run_sync(upload.add, bytes(gathered))
            await anyio.to_thread.run_sync(upload.publish, digest, self.path(digest))
            return upload.size_bytes
        finally:
            upload.discard()

    def _incoming(self) -> Path:
        directory = self.root / "incoming"
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        return directory

    def _too_large(self, size: int) -> TooLarge:
        return TooLarge(f"a blob of {size} bytes or more: at most {self.limit_bytes}", limit_bytes=self.limit_bytes)


class _Upload:
    """One blob on its way in. Owner: the request that receives it. Without a file it only checks the hash."""

    def __init__(self, temporary: Path | None, chunked: bool) -> None:
        self._temporary = temporary
        self._hash = FileHash() if chunked else hashlib.sha256()
        with _disk_errors():
            self._descriptor = -1 if temporary is None else os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self.size_bytes = 0

    def add(self, data: bytes) -> None:
        self._hash.update(data)
        self.size_bytes += len(data)
        view = memoryview(data)
        with _disk_errors():
            while self._descriptor >= 0 and view:
                view = view[os.write(self._descriptor, view) :]

    def publish(self, digest: str, target: Path) -> None:
        if (actual := self._hash.hexdigest()) != digest:
            raise InvalidInput(f"the body's digest is {actual}, not {digest}: it was damaged on the way, or named wrongly", actual=actual)
        if self._temporary is None:
            return
        with _disk_errors():
            os.fsync(self._descriptor)
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._temporary.rename(target)
            directory = os.open(target.parent, os.O_RDONLY)
            try:
                os.fsync(directory)  # the name must survive a power cut as surely as the bytes
            finally:
                os.close(directory)

    def discard(self) -> None:
        if self._temporary is not None:
            os.close(self._descriptor)
            self._temporary.unlink(missing_ok=True)
            self._temporary = None


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            message = f"the blob store's disk is full ({e.strerror}). Free some space in <home>/blobs; nothing was kept."
            raise StorageFull(message) from e
        raise


def register(write: Write, *, tenant: str, digest: str, size_bytes: int) -> None:
    """Note that the blob is there and that `tenant` may name it. Idempotent."""
    blob = write.insert(tables.blobs).values(digest=digest, size_bytes=size_bytes, created_at=write.now)
    write.sql.execute(blob.on_conflict_do_nothing())
    owner = write.insert(tables.blob_owners).values(tenant=tenant, digest=digest, created_at=write.now)
    write.sql.execute(owner.on_conflict_do_nothing())


def sizes(sql: sa.Connection, *, tenant: str, digests: Collection[str]) -> dict[str, int]:
    """Sizes (bytes) of those blobs of `digests` that `tenant` may name."""
    blobs, owners = tables.blobs, tables.blob_owners
    query = sa.select(blobs.c.digest, blobs.c.size_bytes).join(owners, owners.c.digest == blobs.c.digest)
    return {row.digest: row.size_bytes for row in sql.execute(query.where(owners.c.tenant == tenant, blobs.c.digest.in_(digests)))}


async def store_blob(
    files: BlobFiles,
    store: Store,
    *,
    tenant: str,
    digest: str,
    chunked: bool = False,
    pieces: AsyncIterator[bytes],
    announced_bytes: int | None,
) -> tuple[int, bool]:
    """Take a blob in; returns (size in bytes, whether it is new to this tenant)."""
    known = await anyio.to_thread.run_sync(lambda: owned_size(store, tenant=tenant, digest=digest))
    there = await anyio.to_thread.run_sync(files.path(digest).exists)
    if known is not None and there:
        async for _ in pieces:
            pass  # nothing to do with it, but a connection is only usable again when its request was read
        return known, False
    size = await files.receive(digest, pieces, chunked=chunked, announced_bytes=announced_bytes, keep=not there)

    def note() -> None:
        with store.write() as write:
            register(write, tenant=tenant, digest=digest, size_bytes=size)

    await anyio.to_thread.run_sync(note)
    return size, True


def owned_size(store: Store, *, tenant: str, digest: str) -> int | None:
    """Size in bytes of one blob that `tenant` may name, or None."""
    with store.read() as sql:
        return sizes(sql, tenant=tenant, digests=[digest]).get(digest)
