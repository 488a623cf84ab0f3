"""Files of prediction logs: one row here and one object for each, partitioned by function and hour.

A row is written before its object, so that every object is found and deleted: a reader skips a row
whose object has not arrived. A name is stored once, however often it is sent. Files count in their
tenant's `stored_bytes` until their retention window ends."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.identity import stored_bytes
from pilotlight.controller.weights import storage_usage
from pilotlight.errors import InvalidInput, TooLarge
from pilotlight.spec.prediction_log import HOUR_S, MAX_KEEP_S
from pilotlight.spec.quotas import Plan

MAX_FILE_BYTES: Final = 16 * 1024**2
MAX_READ_BYTES: Final = 1024**3
"""Of one read: the caller has to store them."""
MAX_READ_FILES: Final = 20_000
_ID = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_NAME: Final = re.compile(
    rf"(?P<tenant>{_ID})~(?P<function>{_ID})~(?P<hour>[0-9]{{1,7}})~(?P<keep_s>[0-9]{{1,9}})"
    r"~(?P<id>[0-9a-f]{20,48})~(?P<rows>[0-9]{1,7})\.(?:parquet|sketch)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionFile:
    """A file of rows of one function and hour.

    Attributes:
        id: unique.
        hour: of its rows: seconds since the epoch, a whole hour.
        keep_s: retention window, from the end of the hour.
        rows: their number.
    """

    id: str
    tenant: str
    function: str
    hour: int
    keep_s: int
    rows: int

    @classmethod
    def parse(cls, name: str) -> PredictionFile:
        """Parse the name that an activator gave it. Raises InvalidInput."""
        found = _NAME.fullmatch(name)
        if found is None or not HOUR_S <= int(found["keep_s"]) <= MAX_KEEP_S:
            raise InvalidInput(f"predictions: {name[:200]!r} is not the name of a file of rows")
        return cls(
            id=found["id"],
            tenant=found["tenant"],
            function=found["function"],
            hour=int(found["hour"]) * HOUR_S,
            keep_s=int(found["keep_s"]),
            rows=int(found["rows"]),
        )

    @property
    def key(self) -> str:
        """Its object: `predictions/<tenant>/<function>/<hour>/<id>.parquet`."""
        return object_key(self.tenant, self.function, self.hour, self.id)

    @property
    def expires_at(self) -> float:
        """When its window ends."""
        return float(self.hour + HOUR_S + self.keep_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileQuery:
    """Files of one function, by its name: since <= time of the rows < until, in whole hours."""

    tenant: str
    environment: str
    app: str
    function: str
    since: float
    until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A stored file: its object and the name for readers, `<hour>/<id>.parquet`."""

    key: str
    name: str
    rows: int
    size_bytes: int


def object_key(tenant: str, function: str, hour: float, id: str) -> str:
    """Return the key of a file's object."""
    return f"predictions/{tenant}/{function}/{hour_name(hour)}/{id}.parquet"


def hour_name(hour: float) -> str:
    """Return an hour as text: `2026-11-30T14`, in UTC."""
    return time.strftime("%Y-%m-%dT%H", time.gmtime(hour))


def register(
    write: Write, file: PredictionFile, *, size_bytes: int, plans: Mapping[str, Plan]
) -> bool:
    """Record a file that arrives. Returns False if it is not to be stored: its function is deleted,
    or its window is over. Raises StorageQuotaExceeded, unless it was recorded before."""
    table, functions = tables.prediction_files, tables.functions
    place = write.sql.execute(
        sa.select(functions.c.environment, functions.c.app, functions.c.name).where(
            functions.c.id == file.function, functions.c.tenant == file.tenant
        )
    ).first()
    if place is None or file.expires_at <= write.now:
        return False
    known = sa.select(table.c.expires_at).where(table.c.id == file.id)
    expires_at = write.sql.execute(known).scalar()
    if expires_at is not None:
        return bool(expires_at > write.now)
    plan = storage_usage.plan_of(write.sql, plans, tenant=file.tenant)
    storage_usage.require_room(write.sql, plan, tenant=file.tenant, more_bytes=size_bytes)
    stored_bytes.count(write, tenant=file.tenant, more_bytes=size_bytes)
    write.sql.execute(
        sa.insert(table).values(
            id=file.id,
            tenant=file.tenant,
            environment=place.environment,
            app=place.app,
            function=place.name,
            function_id=file.function,
            hour=float(file.hour),
            rows=file.rows,
            size_bytes=size_bytes,
            created_at=write.now,
            expires_at=file.expires_at,
        )
    )
    return True


def find(sql: sa.Connection, query: FileQuery, *, now: float) -> list[StoredFile]:
    """Return the files, oldest hour first. Raises TooLarge."""
    table = tables.prediction_files
    rows = sql.execute(
        sa.select(table)
        .where(*_inside(query), table.c.expires_at > now)
        .order_by(table.c.hour, table.c.id)
        .limit(MAX_READ_FILES + 1)
    ).all()
    size = sum(row.size_bytes for row in rows)
    if len(rows) > MAX_READ_FILES or size > MAX_READ_BYTES:
        raise TooLarge(
            f"this time has {size} bytes in {len(rows)} files or more of the prediction log; one "
            f"read has at most {MAX_READ_BYTES} bytes in {MAX_READ_FILES} files: choose a later "
            f"`since` or an earlier `until`",
            limit_bytes=MAX_READ_BYTES,
        )
    return [
        StoredFile(
            key=object_key(row.tenant, row.function_id, row.hour, row.id),
            name=f"{hour_name(row.hour)}/{row.id}.parquet",
            rows=row.rows,
            size_bytes=row.size_bytes,
        )
        for row in rows
    ]


def delete(write: Write, query: FileQuery) -> tuple[int, int]:
    """End the window of these files: they are read no longer, and `expired` returns them.
    Returns their number and that of their rows."""
    table = tables.prediction_files
    changed = (
        write.sql.execute(
            sa.update(table)
            .where(*_inside(query), table.c.expires_at > write.now)
            .values(expires_at=write.now)
            .returning(table.c.rows)
        )
        .scalars()
        .all()
    )
    return len(changed), sum(changed)


def expired(sql: sa.Connection, *, now: float, limit: int) -> list[tuple[str, str]]:
    """Return (id, key) of files whose window is over."""
    table = tables.prediction_files
    rows = sql.execute(sa.select(table).where(table.c.expires_at <= now).limit(limit))
    return [(row.id, object_key(row.tenant, row.function_id, row.hour, row.id)) for row in rows]


def forget(write: Write, ids: Sequence[str]) -> None:
    """Delete the rows of files whose objects are deleted."""
    table = tables.prediction_files
    gone = write.sql.execute(
        sa.delete(table).where(table.c.id.in_(ids)).returning(table.c.tenant, table.c.size_bytes)
    ).all()
    for row in gone:
        stored_bytes.count(write, tenant=row.tenant, more_bytes=-row.size_bytes)


def _inside(query: FileQuery) -> tuple[sa.ColumnElement[bool], ...]:
    c = tables.prediction_files.c
    return (
        c.tenant == query.tenant,
        c.environment == query.environment,
        c.app == query.app,
        c.function == query.function,
        c.hour > query.since - HOUR_S,
        c.hour < query.until,
    )
