"""Batch files: their rows, and their objects in the blob store.

A file is objects of at most PART_BYTES, numbered from 0. An object is written under the next number
before its row counts it, so a kill between the two leaves an object that the next write replaces,
or that the deletion of the file finds. Files count in their tenant's `stored_bytes` until their
objects are deleted, after `expires_at`."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import anyio.to_thread
import sqlalchemy as sa

from pilotlight.controller.context import Context
from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.database.transactions import in_read, in_write
from pilotlight.controller.identity import stored_bytes
from pilotlight.controller.identity.access_control import Principal
from pilotlight.controller.weights import storage_usage
from pilotlight.controller.weights.blob_upload import disk_errors, store_errors
from pilotlight.core.object_store.errors import ObjectNotFound
from pilotlight.errors import Conflict, NotFound, StorageQuotaExceeded

MAX_FILE_BYTES: Final = 200_000_000
"""Of an uploaded file, as OpenAI's."""
PART_BYTES: Final = 1024**2
"""Of one object of an uploaded file: all but the last one have this size."""
MAX_PART_BYTES: Final = 64 * 1024**2
"""Of one object of an output file: some answers, of which one has 4 MiB at most."""
MAX_FILES: Final = 1000
"""Files of a tenant."""
KEEP_S: Final = 30 * 86_400.0
MIN_KEEP_S: Final = 3600
UPLOAD_S: Final = 3600.0
"""How long an upload may take."""
INPUT, OUTPUT = "batch", "batch_output"
UPLOADING, PROCESSED = "uploading", "processed"
EXPIRE_BATCH: Final = 20
_C = tables.batch_files.c


class ContentLost(NotFound):
    """Raised when objects of a file are no longer in the blob store."""

    type = "content-lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFile:
    """A file."""

    id: str
    tenant: str
    environment: str
    key: str
    filename: str
    purpose: str
    status: str
    size_bytes: int
    parts: int
    created_at: float
    expires_at: float

    def part(self, number: int) -> str:
        """Return the key of an object."""
        return f"batch-files/{self.tenant}/{self.id}.{number}"

    def to_json(self) -> dict[str, Any]:
        """Return it as OpenAI's clients read it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size_bytes,
            "created_at": int(self.created_at),
            "expires_at": int(self.expires_at),
            "filename": self.filename,
            "purpose": self.purpose,
            "status": self.status,
            "status_details": None,
        }


def create(
    write: Write,
    *,
    tenant: str,
    environment: str,
    key: str,
    filename: str,
    purpose: str,
    expires_at: float,
    is_bounded: bool = True,
) -> BatchFile:
    """Create an empty file. Raises StorageQuotaExceeded for a tenant that has MAX_FILES, if
    `is_bounded`: output files exist for each batch, which is bounded."""
    if is_bounded:
        query = sa.select(sa.func.count()).select_from(tables.batch_files)
        count = int(write.sql.execute(query.where(_C.tenant == tenant)).scalar_one())
        if count >= MAX_FILES:
            raise StorageQuotaExceeded(
                f"this tenant has {count} batch files, the maximum is {MAX_FILES}: delete some "
                f"(DELETE /v1/files/{{id}})",
                quota="batch_files",
                limit=MAX_FILES,
                used=count,
            )
    file = BatchFile(
        id=f"file-{uuid.uuid4().hex[:24]}",
        tenant=tenant,
        environment=environment,
        key=key,
        filename=filename,
        purpose=purpose,
        status=UPLOADING,
        size_bytes=0,
        parts=0,
        created_at=write.now,
        expires_at=expires_at,
    )
    values = {name: getattr(file, name) for name in BatchFile.__dataclass_fields__}
    write.sql.execute(sa.insert(tables.batch_files).values(**values))
    return file


def get(sql: sa.Connection, file_id: str) -> BatchFile | None:
    """Return a file of any tenant, also one that has expired."""
    row = sql.execute(sa.select(tables.batch_files).where(_C.id == file_id)).mappings().first()
    return None if row is None else BatchFile(**row)


def visible(caller: Principal, now: float) -> tuple[sa.ColumnElement[bool], ...]:
    """Conditions: complete files of the caller's tenant and environment; for a key that is bound to
    an app, those that it made itself."""
    theirs = (_C.tenant == caller.tenant, _C.environment == caller.environment)
    mine = (_C.key == caller.key,) if caller.bound_app is not None else ()
    return (*theirs, *mine, _C.status == PROCESSED, _C.expires_at > now)


def find(sql: sa.Connection, caller: Principal, file_id: str, *, now: float) -> BatchFile:
    """Return a file that the caller may read. Raises NotFound."""
    query = sa.select(tables.batch_files).where(_C.id == file_id, *visible(caller, now))
    row = sql.execute(query).mappings().first()
    if row is None:
        raise NotFound(
            f"no file {file_id[:80]!r}: it does not exist, has expired, or belongs to another key"
        )
    return BatchFile(**row)


def listing(
    sql: sa.Connection,
    caller: Principal,
    *,
    now: float,
    after: str | None,
    limit: int,
    is_ascending: bool,
    purpose: str | None,
) -> list[BatchFile]:
    """Return up to `limit` files. Raises NotFound for an unknown `after`."""
    query = sa.select(tables.batch_files).where(*visible(caller, now))
    if purpose is not None:
        query = query.where(_C.purpose == purpose)
    if after is not None:
        last = find(sql, caller, after, now=now)
        place = sa.tuple_(_C.created_at, _C.id)
        here = sa.tuple_(sa.literal(last.created_at), sa.literal(last.id))
        query = query.where(place > here if is_ascending else place < here)
    order = (_C.created_at, _C.id) if is_ascending else (_C.created_at.desc(), _C.id.desc())
    rows = sql.execute(query.order_by(*order).limit(limit)).mappings()
    return [BatchFile(**row) for row in rows]


async def append(context: Context, file_id: str, data: bytes) -> BatchFile:
    """Append a part to a file. Raises Conflict for a file that has expired, StorageQuotaExceeded,
    StorageFull, Unavailable."""
    file = await prepare(context, file_id, data, is_forced=False)
    return await anyio.to_thread.run_sync(partial(_count_part, context, file, len(data)))


def counted(write: Write, file: BatchFile, size_bytes: int) -> BatchFile:
    """Count a part that was stored. Raises Conflict when its file has ended meanwhile."""
    row = (
        write.sql.execute(
            sa.update(tables.batch_files)
            .where(_C.id == file.id, _C.parts == file.parts, _C.expires_at > write.now)
            .values(parts=_C.parts + 1, size_bytes=_C.size_bytes + size_bytes)
            .returning(tables.batch_files)
        )
        .mappings()
        .first()
    )
    if row is None:
        raise Conflict(f"file {file.id} has ended meanwhile")
    stored_bytes.count(write, tenant=file.tenant, more_bytes=size_bytes)
    return BatchFile(**row)


def _count_part(context: Context, file: BatchFile, size_bytes: int) -> BatchFile:
    with context.store.write() as write:
        return counted(write, file, size_bytes)


async def prepare(context: Context, file_id: str, data: bytes, *, is_forced: bool) -> BatchFile:
    """Store a part without counting it (`counted`). `is_forced`: whatever the plan allows. Raises
    what `append` raises."""
    file = await anyio.to_thread.run_sync(
        partial(_require_room, context, file_id, len(data), is_forced=is_forced)
    )
    with store_errors():
        await context.files.objects.put(file.part(file.parts), data)
    return file


def _require_room(context: Context, file_id: str, more_bytes: int, *, is_forced: bool) -> BatchFile:
    with disk_errors():
        context.files.floor.require(more_bytes)
    with context.store.read() as sql:
        file = get(sql, file_id)
        if file is None or file.expires_at <= context.clock():
            raise Conflict(f"file {file_id} has ended meanwhile")
        if not is_forced:
            plan = storage_usage.plan_of(sql, context.config.plans, tenant=file.tenant)
            storage_usage.require_room(sql, plan, tenant=file.tenant, more_bytes=more_bytes)
    return file


def finish(write: Write, file_id: str, *, purpose: str, expires_at: float) -> BatchFile:
    """Make a file complete. Raises Conflict for one that has expired."""
    row = (
        write.sql.execute(
            sa.update(tables.batch_files)
            .where(_C.id == file_id, _C.expires_at > write.now)
            .values(status=PROCESSED, purpose=purpose, expires_at=expires_at)
            .returning(tables.batch_files)
        )
        .mappings()
        .first()
    )
    if row is None:
        raise Conflict(f"file {file_id} has expired: an upload may take {UPLOAD_S:g} s")
    return BatchFile(**row)


def end(write: Write, file_id: str) -> None:
    """End a file: it is read no longer, and its objects are deleted soon."""
    write.sql.execute(
        sa.update(tables.batch_files).where(_C.id == file_id).values(expires_at=write.now)
    )


async def pieces(context: Context, file: BatchFile) -> AsyncIterator[bytes]:
    """Yield the content; each of the few downloads of a tenant has a part in memory. Raises
    ContentLost, Unavailable."""
    async with context.downloads.share(file.tenant):
        for number in range(file.parts):
            with store_errors():
                yield await context.files.objects.get(file.part(number), max_bytes=MAX_PART_BYTES)


async def read(context: Context, file: BatchFile, *, offset: int, length: int) -> bytes:
    """Return up to `length` bytes of an uploaded file. Raises ContentLost, Unavailable."""
    found = bytearray()
    offset_end = min(offset + length, file.size_bytes)
    while offset < offset_end:
        number, begin = divmod(offset, PART_BYTES)
        more = min(offset_end - offset, PART_BYTES - begin)
        try:
            with store_errors():
                data = await context.files.objects.read(
                    file.part(number), offset_bytes=begin, length_bytes=more
                )
        except ObjectNotFound as e:
            raise ContentLost(f"the content of file {file.id} is gone") from e
        if not data:
            raise ContentLost(f"file {file.id} is shorter than it was")
        found += data
        offset += len(data)
    return bytes(found)


async def delete_expired(context: Context) -> int:
    """Delete some files whose time is over; returns their number. Raises StorageFull,
    Unavailable."""
    found = await in_read(context.store, partial(_expired, now=context.clock()))
    for file in found:
        with store_errors():
            for number in range(file.parts + 1):
                await context.files.objects.delete(file.part(number))
        await in_write(context.store, partial(_forget, file=file))
    return len(found)


def _expired(sql: sa.Connection, *, now: float) -> Sequence[BatchFile]:
    query = sa.select(tables.batch_files).where(_C.expires_at <= now).limit(EXPIRE_BATCH)
    return [BatchFile(**row) for row in sql.execute(query).mappings()]


def _forget(write: Write, *, file: BatchFile) -> None:
    gone = sa.delete(tables.batch_files).where(_C.id == file.id).returning(_C.size_bytes)
    for size_bytes in write.sql.execute(gone).scalars().all():
        stored_bytes.count(write, tenant=file.tenant, more_bytes=-size_bytes)
