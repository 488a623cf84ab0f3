"""Checks an archive: that its file is the one that was written, follows the one before, and has the
records whose sums the ledger counts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

import sqlalchemy as sa

from pilotlight.controller.database.store import Store
from pilotlight.controller.database.transactions import in_read
from pilotlight.controller.usage_archive import archive_file, archives
from pilotlight.controller.usage_archive.archive_file import (
    MAX_FILE_BYTES,
    ArchiveDamaged,
    DayKey,
    DaySum,
)
from pilotlight.controller.usage_archive.archives import REMOVED, UsageArchive
from pilotlight.core.object_store import ObjectStore
from pilotlight.core.object_store.errors import (
    ObjectNotFound,
    ObjectStoreError,
    ObjectStoreUnavailable,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveCheck:
    """The result for one archive; `problem`: what is wrong, "" = nothing."""

    number: int
    records: int = 0
    sha256: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What the database has of an archive; `before`: the hash of the one before."""

    archive: UsageArchive | None
    before: str | None
    sums: dict[DayKey, DaySum]


async def check_archive(store: Store, objects: ObjectStore, number: int) -> ArchiveCheck:
    """Check archive `number`. Raises ObjectStoreError while the blob store does not answer."""
    known = await in_read(store, partial(_known, number=number))
    if known.archive is None:
        return ArchiveCheck(number=number, problem=f"archive {number} is missing in the database")
    archive = known.archive
    try:
        if known.before != archive.previous:
            raise ArchiveDamaged(f"archive {number} does not follow archive {number - 1}")
        data = await objects.get(archive_file.object_key(number), max_bytes=MAX_FILE_BYTES)
        await asyncio.to_thread(_check, known, data)
    except ObjectNotFound:
        problem = f"archive {number} is missing: there is no {archive_file.object_key(number)}"
    except ObjectStoreUnavailable:
        raise
    except (ArchiveDamaged, ObjectStoreError) as e:  # also of a file that is too long
        problem = str(e)
    else:
        problem = ""
    return ArchiveCheck(
        number=number, records=archive.records, sha256=archive.sha256, problem=problem
    )


def _check(known: _Known, data: bytes) -> None:
    assert known.archive is not None
    archive = known.archive
    found = archive_file.unpack(
        data, number=archive.number, digest=archive.sha256, previous=archive.previous
    )
    if len(found.rows) != archive.records:
        raise ArchiveDamaged(
            f"archive {archive.number} has {len(found.rows)} records instead of {archive.records}"
        )
    if archive.state == REMOVED and archive_file.day_sums(found.rows) != known.sums:
        raise ArchiveDamaged(
            f"archive {archive.number}: its records add up to other sums than the ledger counts"
        )


def _known(sql: sa.Connection, *, number: int) -> _Known:
    return _Known(
        archive=archives.find(sql, number),
        before=archives.hash_before(sql, number),
        sums=archives.sums_of(sql, number),
    )
