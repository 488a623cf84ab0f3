"""Rows of archives, and the sums of records that were removed from `usage`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa

from pilotlight.controller.billing.ledger_totals import HALF, picos_of
from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.usage_archive.archive_file import GENESIS, DayKey, DaySum

WRITTEN, REMOVED = "written", "removed"
"""States: the file is stored, and its records are being removed from `usage`; they are removed."""
_ARCHIVES, _DAYS = tables.usage_archives, tables.usage_archive_days
_KEYS: Final = ("tenant", "day", "month", "currency", "has_customer")


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageArchive:
    """An archive; `previous` is the hash of the one before."""

    number: int
    sha256: str
    previous: str
    state: str
    records: int
    created_at: float
    removed_at: float | None


def newest(sql: sa.Connection) -> UsageArchive | None:
    """The last archive; None = there is none."""
    return next(iter(_read(sql, sa.true(), is_newest_first=True, limit=1)), None)


def listing(sql: sa.Connection, *, after: int, limit: int) -> list[UsageArchive]:
    """Archives after that number, in their order."""
    return _read(sql, _ARCHIVES.c.number > after, limit=limit)


def find(sql: sa.Connection, number: int) -> UsageArchive | None:
    """One archive; None = there is no such."""
    return next(iter(_read(sql, _ARCHIVES.c.number == number, limit=1)), None)


def hash_before(sql: sa.Connection, number: int) -> str | None:
    """The hash that archive `number` must name; None: the archive before is missing."""
    if number == 1:
        return GENESIS
    before = find(sql, number - 1)
    return None if before is None else before.sha256


def insert(write: Write, *, number: int, sha256: str, previous: str, records: int) -> None:
    """Record an archive whose file is stored."""
    row = {"number": number, "sha256": sha256, "previous": previous, "records": records}
    write.sql.execute(
        sa.insert(_ARCHIVES).values(**row, state=WRITTEN, created_at=write.now, removed_at=None)
    )


def finish(write: Write, number: int) -> None:
    """Record that the records of an archive are removed."""
    write.sql.execute(
        sa.update(_ARCHIVES)
        .where(_ARCHIVES.c.number == number)
        .values(state=REMOVED, removed_at=write.now)
    )


def add_sums(write: Write, number: int, sums: Mapping[DayKey, DaySum]) -> None:
    """Add sums of records, in the transaction that removes them."""
    for key, one in sums.items():
        high, low = divmod(one.picos, HALF)
        insert = write.insert(_DAYS).values(
            archive=number, **key._asdict(), records=one.records, high=high, low=low
        )
        grown = {name: _DAYS.c[name] + insert.excluded[name] for name in ("records", "high", "low")}
        write.sql.execute(
            insert.on_conflict_do_update(index_elements=["archive", *_KEYS], set_=grown)
        )


def sums_of(sql: sa.Connection, number: int) -> dict[DayKey, DaySum]:
    """Sums of the records of one archive that were removed."""
    return dict(_sums(sql, _DAYS.c.archive == number))


def _sums(sql: sa.Connection, where: sa.ColumnElement[bool]) -> Iterator[tuple[DayKey, DaySum]]:
    columns = [_DAYS.c[name] for name in _KEYS]
    query = sa.select(*columns, _DAYS.c.records, _DAYS.c.high, _DAYS.c.low).where(where)
    for *key, records, high, low in sql.execute(query):
        yield DayKey(*key), DaySum(records, picos_of(high, low))


def _read(
    sql: sa.Connection,
    where: sa.ColumnElement[bool],
    *,
    limit: int,
    is_newest_first: bool = False,
) -> list[UsageArchive]:
    order = _ARCHIVES.c.number.desc() if is_newest_first else _ARCHIVES.c.number
    query = sa.select(_ARCHIVES).where(where).order_by(order).limit(limit)
    return [UsageArchive(**row) for row in sql.execute(query).mappings()]
