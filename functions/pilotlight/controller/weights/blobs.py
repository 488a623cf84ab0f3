"""Content-addressed blobs: bundles, manifests, files of weights. Nodes read from this origin.

A blob is the object `<aa>/<digest>` of the platform's blob store (a directory, or S3). It is either
complete or absent: it is received into a local file, verified, and only then stored. Its rows say
which tenants may refer to it: knowing a digest does not grant access to the bytes, so every tenant
uploads them once. Until the bytes have arrived, the response time does not depend on whether
another tenant has a blob with that digest.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio
import anyio.from_thread
import anyio.to_thread
import sqlalchemy as sa

from pilotlight.controller.database import audit_trail, tables
from pilotlight.controller.database.store import Store, Write
from pilotlight.controller.identity import stored_bytes
from pilotlight.controller.weights import storage_usage
from pilotlight.controller.weights.blob_upload import BlobUpload, store_errors
from pilotlight.controller.weights.storage_reservations import Reservation, StorageReservations
from pilotlight.core.disk_floor import DiskFloor, no_floor
from pilotlight.core.object_store import ObjectStore, blob_key, blob_store
from pilotlight.core.object_store.errors import ObjectNotFound
from pilotlight.core.settings import Paths, PlatformSettings
from pilotlight.errors import InvalidInput, NotFound, StorageQuotaExceeded, TooLarge
from pilotlight.spec.quotas import UNLIMITED, Plan

WRITE_BYTES = 1024 * 1024
"""Received pieces are buffered up to this size before a thread hashes and writes them: handing over
to a thread costs more than sha256 of 64 KiB."""
READ_BYTES = 4 * 1024 * 1024
"""A request to S3 takes about 30 ms regardless of its size; a download holds two pieces of this
size in memory."""
RESERVE_BYTES = 64 * 1024 * 1024
"""An upload of unknown length reserves its tenant's storage in steps of this size."""
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")


def check_digest(digest: str, where: str = "digest") -> str:
    """Return `digest` if it is 64 lower-case hex digits. Raises InvalidInput."""
    if not _DIGEST.match(digest):
        raise InvalidInput(
            f"{where} = {digest[:80]!r}: expected a sha256 as 64 lower-case hex digits",
            parameter=where,
        )
    return digest


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobStore:
    """The bytes of blobs.

    Attributes:
        objects: the object store.
        incoming: directory for incomplete uploads; on the store's own file system if the store is a
        directory.
        limit_bytes: maximum size of a blob.
        read_bytes: size of a read from the store for a download, which reads one piece ahead.
        gate: which blobs are in use or being deleted.
        floor: free disk space that uploads must leave.
    """

    objects: ObjectStore
    incoming: Path
    limit_bytes: int
    read_bytes: int = READ_BYTES
    gate: StorageReservations = field(default_factory=StorageReservations)
    floor: DiskFloor = field(default_factory=no_floor)

    @classmethod
    def of(cls, platform: PlatformSettings, paths: Paths, *, limit_bytes: int) -> BlobStore:
        """Create it from the settings. Raises SettingsInvalid."""
        objects = blob_store(platform, paths)
        incoming = objects.local_path("incoming") or paths.home / "blobs" / "incoming"
        floor = DiskFloor(incoming, platform.disk_floor_bytes)
        return cls(objects=objects, incoming=incoming, limit_bytes=limit_bytes, floor=floor)

    def sweep(self) -> None:
        """Remove the files of uploads that a crash interrupted. Call before serving."""
        for leftover in self._incoming().glob("*"):
            leftover.unlink(missing_ok=True)

    async def size(self, digest: str) -> int | None:
        """Return the size in bytes of the stored blob; None if there is none. Raises
        Unavailable."""
        with store_errors():
            info = await self.objects.info(blob_key(digest))
        return None if info is None else info.size_bytes

    def load(self, digest: str, *, max_bytes: int) -> bytes:
        """Return a whole blob; call from an anyio worker thread. Raises InvalidInput (the blob does
        not exist), Unavailable."""
        with store_errors():
            try:
                return anyio.from_thread.run(
                    partial(self.objects.get, blob_key(digest), max_bytes=max_bytes)
                )
            except ObjectNotFound as e:
                raise InvalidInput(
                    f"blob {digest} is not in the blob store: deploy again to upload it",
                    missing={"blob": digest},
                ) from e

    async def pieces(
        self, digest: str, *, begin: int, end: int
    ) -> AsyncGenerator[bytes | memoryview, None]:
        """Yield the bytes in [`begin`, `end`), reading each piece while the previous one is sent.
        Raises ObjectStoreError."""
        key = blob_key(digest)
        ahead: asyncio.Task[bytes | memoryview] | None = None
        try:
            while begin < end:
                read = self.objects.read(
                    key, offset_bytes=begin, length_bytes=min(self.read_bytes, end - begin)
                )
                following = asyncio.create_task(read, name=f"read blob {digest[:12]}")
                ahead, ready = following, ahead
                begin = min(begin + self.read_bytes, end)
                if ready is not None:
                    yield await ready
            if ahead is not None:
                yield await ahead
        finally:
            if ahead is not None and not ahead.cancel() and not ahead.cancelled():
                # mark it as retrieved: the piece after a failed one may have failed as well
                ahead.exception()

    async def receive(
        self,
        digest: str,
        pieces: AsyncIterator[bytes],
        *,
        chunked: bool,
        announced_bytes: int | None,
        recorded_bytes: int | None,
        admit: Callable[[int], Awaitable[None]],
    ) -> int:
        """Receive a blob, verify it, and store it unless it is stored already. Returns its size in
        bytes.

        `recorded_bytes`: the size of a blob that was uploaded before; None: an object in the store,
        if any, may be incomplete. `admit` is called with the total size before more bytes are
        written, and raises when there is no room for them. Raises TooLarge, InvalidInput (wrong
        hash), StorageFull or Unavailable, and then leaves no files behind."""
        if announced_bytes is not None and announced_bytes > self.limit_bytes:
            raise _too_large(announced_bytes, self.limit_bytes)
        await admit(announced_bytes or 1)
        async with self.received(
            digest,
            pieces,
            chunked=chunked,
            announced_bytes=announced_bytes,
            limit_bytes=self.limit_bytes,
            admit=admit,
        ) as (temporary, size):
            if recorded_bytes is None or await self.size(digest) != recorded_bytes:
                with store_errors():
                    await self.objects.put_file(blob_key(digest), temporary, may_move=True)
            return size

    @contextlib.asynccontextmanager
    async def received(
        self,
        digest: str,
        pieces: AsyncIterator[bytes],
        *,
        limit_bytes: int,
        chunked: bool = False,
        announced_bytes: int | None = None,
        admit: Callable[[int], Awaitable[None]] | None = None,
    ) -> AsyncIterator[tuple[Path, int]]:
        """Receive bytes into a local file, which the block may move, and verify them; yields the
        file and its size. `admit`: as for `receive`; None: nothing is asked. Raises TooLarge,
        InvalidInput, StorageFull."""
        temporary = self._incoming() / uuid.uuid4().hex
        upload = await anyio.to_thread.run_sync(
            BlobUpload, temporary, chunked, self.floor, announced_bytes or 0
        )
        try:
            buffered = bytearray()
            async for piece in pieces:
                buffered += piece
                size = upload.size_bytes + len(buffered)
                if size > limit_bytes:
                    raise _too_large(size, limit_bytes)
                if len(buffered) >= WRITE_BYTES:
                    if admit is not None:
                        await admit(size)
                    await anyio.to_thread.run_sync(upload.add, bytes(buffered))
                    buffered.clear()
            if admit is not None:
                await admit(upload.size_bytes + len(buffered))
            await anyio.to_thread.run_sync(upload.finish, bytes(buffered), digest)
            yield temporary, upload.size_bytes
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(upload.discard)

    def _incoming(self) -> Path:
        self.incoming.mkdir(parents=True, exist_ok=True, mode=0o700)
        return self.incoming


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobStatus:
    """The status of a blob for a tenant.

    Attributes:
        size_bytes: the recorded size; None: the blob was never uploaded.
        is_owned: the tenant may refer to it.
        is_here: the store has it, with the recorded size; not checked unless the tenant owns it.
    """

    size_bytes: int | None
    is_owned: bool
    is_here: bool


async def blob_status(files: BlobStore, store: Store, *, tenant: str, digest: str) -> BlobStatus:
    """Return the status of `digest` for `tenant`. Raises Unavailable when the store does not
    answer."""
    local = files.objects.local_path(blob_key(digest))

    # in one thread call: handing over to a thread costs as much as all of this work
    def read_status() -> tuple[int | None, bool, int | None]:
        with store.read() as sql:
            size, is_owned = _recorded(sql, tenant=tenant, digest=digest)
        return size, is_owned, _length(local) if is_owned and local is not None else None

    size, is_owned, stored = await anyio.to_thread.run_sync(read_status)
    if is_owned and local is None:
        stored = await files.size(digest)
    return BlobStatus(
        size_bytes=size, is_owned=is_owned, is_here=size is not None and stored == size
    )


async def require_owned(files: BlobStore, store: Store, *, tenant: str, digest: str) -> int:
    """Return the size in bytes of an existing blob that `tenant` may refer to. Raises InvalidInput,
    NotFound, Unavailable."""
    status = await blob_status(files, store, tenant=tenant, digest=check_digest(digest))
    if status.size_bytes is None or not status.is_here:
        raise NotFound(f"there is no blob {digest}")
    return status.size_bytes


async def touch(store: Store, *, tenant: str, digest: str, before: float = float("inf")) -> bool:
    """Record that the tenant used a blob, which it is about to refer to, if its last use was before
    `before`. Returns False if the tenant does not own the blob (any longer)."""
    owners = tables.blob_owners
    same = (owners.c.tenant == tenant, owners.c.digest == digest)

    def record_use() -> bool:
        with store.read() as sql:
            used_at = sql.execute(sa.select(owners.c.used_at).where(*same)).scalar()
        if used_at is None or used_at >= before:
            return used_at is not None
        with store.write() as write:
            return (
                write.sql.execute(sa.update(owners).where(*same).values(used_at=write.now)).rowcount
                == 1
            )

    return await anyio.to_thread.run_sync(record_use)


async def store_blob(
    files: BlobStore,
    store: Store,
    *,
    tenant: str,
    digest: str,
    chunked: bool = False,
    pieces: AsyncIterator[bytes],
    announced_bytes: int | None,
    actor: str,
    plan: Plan = UNLIMITED,
    request: str = "",
) -> tuple[int, bool]:
    """Store an uploaded blob. Returns (size in bytes, whether it is new to this tenant). `actor`
    and `request` are for the audit log.

    Raises StorageQuotaExceeded before it writes anything that `plan` does not allow, and what
    `BlobStore.receive` raises."""
    async with files.gate.using(digest):
        status = await blob_status(files, store, tenant=tenant, digest=digest)
        if (
            status.is_here
            and status.size_bytes is not None
            and await touch(store, tenant=tenant, digest=digest)
        ):
            async for _ in pieces:
                # discard the body: the connection can be reused only after its request was read
                pass
            return status.size_bytes, False
        require = partial(_require_room, store, plan, tenant=tenant)

        async def check(more_bytes: int, coming_bytes: int) -> None:
            await anyio.to_thread.run_sync(
                partial(require, more_bytes=more_bytes, coming_bytes=coming_bytes)
            )

        room = files.gate.reserve(tenant, check)
        admit = partial(
            _admit,
            room,
            counted_bytes=status.size_bytes if status.is_owned else None,
            announced_bytes=announced_bytes,
            in_steps=plan.stored_bytes is not None,
            limit_bytes=files.limit_bytes,
        )
        try:
            size = await files.receive(
                digest,
                pieces,
                chunked=chunked,
                announced_bytes=announced_bytes,
                recorded_bytes=status.size_bytes,
                admit=admit,
            )

            record = partial(
                _record_upload,
                store,
                tenant=tenant,
                digest=digest,
                size_bytes=size,
                actor=actor,
                request=request,
            )
            await room.settle(partial(anyio.to_thread.run_sync, record))
        finally:
            room.release()
        return size, True


async def _admit(
    room: Reservation,
    size_bytes: int,
    *,
    counted_bytes: int | None,
    announced_bytes: int | None,
    in_steps: bool,
    limit_bytes: int,
) -> None:
    """Reserve room for an upload that has `size_bytes` so far, beyond what was announced in steps.
    `counted_bytes`: those that the quota counts already. Raises StorageQuotaExceeded."""
    if counted_bytes is not None and size_bytes <= counted_bytes:
        return  # lost bytes are uploaded again: they still count towards the quota
    is_announced = announced_bytes is not None and size_bytes <= announced_bytes
    step = (
        -(-size_bytes // RESERVE_BYTES) * RESERVE_BYTES
        if in_steps and not is_announced
        else size_bytes
    )
    try:
        await room.grow(min(step, limit_bytes))
    except StorageQuotaExceeded:
        await room.grow(size_bytes)


def _record_upload(
    store: Store, *, tenant: str, digest: str, size_bytes: int, actor: str, request: str
) -> None:
    with store.write() as write:
        register(write, tenant=tenant, digest=digest, size_bytes=size_bytes)
        audit_trail.record(
            write,
            tenant=tenant,
            actor=actor,
            action="blob.put",
            subject=digest,
            after={"size_bytes": size_bytes},
            request=request,
        )


def register(write: Write, *, tenant: str, digest: str, size_bytes: int) -> None:
    """Record that the blob exists and that `tenant` may refer to it. Cancels a pending deletion.
    Idempotent."""
    blob = write.insert(tables.blobs).values(
        digest=digest, size_bytes=size_bytes, created_at=write.now
    )
    write.sql.execute(
        blob.on_conflict_do_update(index_elements=["digest"], set_={"deleting_at": None})
    )
    table = tables.blob_owners
    theirs = (table.c.tenant == tenant, table.c.digest == digest)
    if write.sql.execute(sa.select(table.c.digest).where(*theirs)).first() is None:
        stored_bytes.count(write, tenant=tenant, more_bytes=size_bytes)
    owner = write.insert(table).values(
        tenant=tenant, digest=digest, created_at=write.now, used_at=write.now
    )
    write.sql.execute(
        owner.on_conflict_do_update(
            index_elements=["tenant", "digest"], set_={"used_at": write.now}
        )
    )


def sizes(sql: sa.Connection, *, tenant: str, digests: Collection[str]) -> dict[str, int]:
    """Return the sizes in bytes of those blobs of `digests` that `tenant` may refer to."""
    blobs, owners = tables.blobs, tables.blob_owners
    query = sa.select(blobs.c.digest, blobs.c.size_bytes).join(
        owners, owners.c.digest == blobs.c.digest
    )
    return {
        row.digest: row.size_bytes
        for row in sql.execute(query.where(owners.c.tenant == tenant, blobs.c.digest.in_(digests)))
    }


def _recorded(sql: sa.Connection, *, tenant: str, digest: str) -> tuple[int | None, bool]:
    blobs, owners = tables.blobs, tables.blob_owners
    mine = sa.and_(owners.c.digest == blobs.c.digest, owners.c.tenant == tenant)
    query = (
        sa.select(blobs.c.size_bytes, owners.c.tenant)
        .join_from(blobs, owners, mine, isouter=True)
        .where(blobs.c.digest == digest)
    )
    row = sql.execute(query).one_or_none()
    return (None, False) if row is None else (row.size_bytes, row.tenant is not None)


def _require_room(
    store: Store, plan: Plan, *, tenant: str, more_bytes: int, coming_bytes: int
) -> None:
    with store.read() as sql:
        storage_usage.require_room(
            sql, plan, tenant=tenant, more_bytes=more_bytes, coming_bytes=coming_bytes
        )


def _too_large(size: int, limit_bytes: int) -> TooLarge:
    return TooLarge(
        f"the upload has {size} bytes or more; the maximum is {limit_bytes}",
        limit_bytes=limit_bytes,
    )


def _length(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
