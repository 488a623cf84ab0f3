"""Observations of calls, as activators counted them: summed by minute, then by hour, and read back
over any window.

Posts are numbered, so a repeated post counts once. The controller's clock defines the current time:
a minute in the future, or older than any that activators keep, comes from a wrong clock and counts
as the current one. Sums by minute are kept for `controller.observations_days`, sums by hour for
`HOURS_DAYS`; an hour is summed up once nothing can be added to it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Write
from pilotlight.errors import InvalidInput
from pilotlight.spec.observations import (
    CLOCKS,
    COUNTS,
    UNCOUNTED_ARMS,
    Observation,
    add_observation,
    latency_bucket,
)
from pilotlight.spec.policies import STAGES

log = logging.getLogger(__name__)

MAX_POST = 5000
"""Observations per post: several times what an activator sends."""
LATE_MINUTES = 20
"""Activators keep what they could not post for 15 minutes; an older minute comes from a wrong
clock."""
SETTLED_MINUTES = LATE_MINUTES + 5
"""How long after its end an hour is summed up."""
HOURS_DAYS = 100
PRUNE_MINUTES = 120
"""Minutes deleted in one transaction, during which usage waits for the write lock."""
FUNCTIONS_AT_ONCE = 50
"""Functions per transaction when an hour is summed up, for the same reason."""
_OVER = "over:"
_MARK = "~hours"
"""Stands for an activator's id in `observers`: `sequence` is the last hour that was summed up."""
_MAX_COUNT = 2**53
_MAX_BUCKET = latency_bucket(1e12)
"""Thirty years. A much higher bucket has no finite length in milliseconds, so reading it would
fail."""
ObservationSeries = tuple[str, str]
"""A revision, and an arm ("" = none)."""


# -- ingestion -------------------------------------------------------------------------------------
def ingest_observations(write: Write, body: Mapping[str, Any]) -> bool:
    """Add a post (`pilotlight.protocol.OBSERVATIONS_PATH`); return False if it was added before.
    Raises InvalidInput."""
    try:
        activator, life, sequence = str(body["activator"]), str(body["life"]), int(body["sequence"])
        observations = [_sound(Observation.from_json(one)) for one in body["observations"]]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as e:
        raise InvalidInput(f"observations: not a valid post of an activator: {e!r}") from e
    if not 0 <= sequence < _MAX_COUNT:
        raise InvalidInput(f"observations: sequence = {sequence}: must be at least 0")
    if len(observations) > MAX_POST or activator.startswith("~"):
        raise InvalidInput(
            f"observations: at most {MAX_POST} per post, from an activator; got "
            f"{len(observations)} from {activator!r}"
        )
    if not _is_new(write, activator, life, sequence):
        return False
    now_minute = int(write.now // 60)
    strange = sum(not now_minute - LATE_MINUTES <= one.minute <= now_minute for one in observations)
    for one in observations:
        if not now_minute - LATE_MINUTES <= one.minute <= now_minute:
            one.minute = now_minute
    if strange and any(one.minute == now_minute for one in observations):
        log.debug("event=observations_moved activator=%s count=%d", activator, strange)
    add(write, observations)
    return True


def _is_new(write: Write, activator: str, life: str, sequence: int) -> bool:
    table = tables.observers
    known = write.sql.execute(
        sa.select(table.c.life, table.c.sequence).where(table.c.activator == activator)
    ).first()
    if known is not None and known.life == life and sequence <= known.sequence:
        return False
    values = {"life": life, "sequence": sequence, "at": write.now}
    insert = write.insert(table).values(activator=activator, **values)
    write.sql.execute(insert.on_conflict_do_update(index_elements=["activator"], set_=values))
    return True


def _sound(one: Observation) -> Observation:
    """Return the observation if its counts, clocks and stages are valid. Raises ValueError,
    TypeError."""
    counts = [getattr(one, name) for name in COUNTS]
    counts += one.overruns.values()
    for buckets in one.latency.values():
        counts += buckets.values()
        if not all(type(bucket) is int and 0 <= bucket <= _MAX_BUCKET for bucket in buckets):
            raise ValueError("a bucket is out of range")
    if (
        not all(type(count) is int and 0 <= count < _MAX_COUNT for count in counts)
        or type(one.minute) is not int
    ):
        raise ValueError("a count is not an integer of at least 0")
    if not _KNOWN_CLOCKS.issuperset(one.latency) or not _KNOWN_STAGES.issuperset(one.overruns):
        raise ValueError("a clock or a stage is unknown")
    if not all(type(name) is str for name in (one.tenant, one.function_id, one.revision, one.arm)):
        raise TypeError("a name is not a string")
    return one


_KNOWN_CLOCKS = frozenset(CLOCKS)
_KNOWN_STAGES = frozenset(STAGES)


def add(write: Write, observations: Sequence[Observation]) -> None:
    """Add observations to the stored sums, each to its own minute."""
    counts = [
        (
            one.function_id,
            one.minute,
            one.revision,
            one.arm,
            one.tenant,
            *(getattr(one, name) for name in COUNTS),
        )
        for one in observations
    ]
    buckets = [
        (one.function_id, one.minute, one.revision, one.arm, clock, bucket, calls)
        for one in observations
        for clock, bucket, calls in _rows(one)
    ]
    _upsert(write, tables.observation_minutes, counts)
    _upsert(write, tables.observation_minute_buckets, buckets)


def _rows(one: Observation) -> Iterable[tuple[str, int, int]]:
    for clock, buckets in one.latency.items():
        for bucket, calls in buckets.items():
            yield clock, bucket, calls
    for stage, calls in one.overruns.items():
        yield _OVER + stage, 0, calls


def _upsert(write: Write, table: sa.Table, rows: Sequence[tuple[Any, ...]]) -> None:
    """Add rows to the stored sums, in plain SQL because there are thousands per second."""
    if not rows:
        return
    names = [column.name for column in table.columns]
    keys = [column.name for column in table.primary_key]
    places = ", ".join(["%s" if write.sql.dialect.name == "postgresql" else "?"] * len(names))
    sums = ", ".join(
        f'"{name}" = {table.name}."{name}" + excluded."{name}"'
        for name in names
        if name not in keys and name != "tenant"
    )
    statement = (
        f"INSERT INTO {table.name} ({_quoted(names)}) VALUES ({places}) ON CONFLICT "
        f"({_quoted(keys)}) DO UPDATE SET {sums}"
    )
    write.sql.exec_driver_sql(statement, list(rows))


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


# -- reading ---------------------------------------------------------------------------------------
def window(
    sql: sa.Connection,
    *,
    function_id: str,
    since_s: float,
    until_s: float,
    revision: str | None = None,
    arm: str | None = None,
) -> dict[ObservationSeries, Observation]:
    """Return sums over the minutes that begin in [since_s, until_s), by revision and arm; `minute`
    is the first one. Limited to `controller.observations_days`."""
    first, end = -int(-since_s // 60), -int(-until_s // 60)
    return _sums(
        sql, _MINUTES, function_id=function_id, first=first, end=end, revision=revision, arm=arm
    )


def long_window(
    sql: sa.Connection, *, function_id: str, since_s: float, until_s: float
) -> dict[ObservationSeries, Observation]:
    """Return `window` over up to HOURS_DAYS: whole hours from their sums, the rest by the
    minute."""
    first, end = -int(-since_s // 3600), min(summed_until(sql), int(until_s // 3600))
    if first >= end:
        return window(sql, function_id=function_id, since_s=since_s, until_s=until_s)
    found = _sums(sql, _HOURS, function_id=function_id, first=first, end=end)
    for begin_s, end_s in ((since_s, first * 3600), (end * 3600, until_s)):
        for series, one in window(
            sql, function_id=function_id, since_s=begin_s, until_s=end_s
        ).items():
            if series in found:
                add_observation(found[series], one)
            else:
                found[series] = one
    return found


_MINUTES = (tables.observation_minutes, tables.observation_minute_buckets, "minute", 1)
_HOURS = (tables.observation_hours, tables.observation_hour_buckets, "hour", 60)


def _sums(
    sql: sa.Connection,
    source: tuple[sa.Table, sa.Table, str, int],
    *,
    function_id: str,
    first: int,
    end: int,
    revision: str | None = None,
    arm: str | None = None,
) -> dict[ObservationSeries, Observation]:
    counted, histograms, unit, minutes = source

    def which(table: sa.Table) -> list[sa.ColumnElement[bool]]:
        where = [table.c.function_id == function_id, table.c[unit] >= first, table.c[unit] < end]
        where += [table.c.revision == revision] if revision is not None else []
        return where + ([table.c.arm == arm] if arm is not None else [])

    c = counted.c
    sums = [sa.func.sum(c[name]).label(name) for name in COUNTS]
    query = sa.select(
        c.revision,
        c.arm,
        sa.func.min(c.tenant).label("tenant"),
        sa.func.min(c[unit]).label("first"),
        *sums,
    )
    found = {}
    for row in sql.execute(query.where(*which(counted)).group_by(c.revision, c.arm)):
        found[row.revision, row.arm] = _observation(
            row, function_id, row.first * minutes, row.revision, row.arm
        )
    c = histograms.c
    keys = (c.revision, c.arm, c.clock, c.bucket)
    for row in sql.execute(
        sa.select(*keys, sa.func.sum(c.calls).label("calls"))
        .where(*which(histograms))
        .group_by(*keys)
    ):
        _put(found[row.revision, row.arm], row.clock, row.bucket, int(row.calls))
    return found


def _observation(
    row: Any, function_id: str, minute: int, revision: str = "", arm: str = ""
) -> Observation:
    counts: dict[str, Any] = {name: int(getattr(row, name)) for name in COUNTS}
    return Observation(
        tenant=row.tenant,
        function_id=function_id,
        revision=revision,
        arm=arm,
        minute=minute,
        **counts,
    )


def _put(one: Observation, clock: str, bucket: int, calls: int) -> None:
    if clock.startswith(_OVER):
        one.overruns[clock.removeprefix(_OVER)] = calls
    else:
        one.latency.setdefault(clock, {})[bucket] = calls


def units(
    sql: sa.Connection, *, function_id: str, since_s: float, until_s: float, minutes: int
) -> list[Observation]:
    """Return sums per `minutes` over all revisions and arms but UNCOUNTED_ARMS, oldest first, with
    the latencies of whole calls, for charts."""
    table, histograms = tables.observation_minutes, tables.observation_minute_buckets
    first, end = -int(-since_s // 60), -int(-until_s // 60)

    def which(c: Any) -> list[sa.ColumnElement[bool]]:
        return [
            c.function_id == function_id,
            c.minute >= first,
            c.minute < end,
            c.arm.not_in(UNCOUNTED_ARMS),
        ]

    c = table.c
    unit = (c.minute // minutes).label("unit")
    sums = [sa.func.sum(c[name]).label(name) for name in COUNTS]
    query = (
        sa.select(unit, sa.func.min(c.tenant).label("tenant"), *sums)
        .where(*which(c))
        .group_by(unit)
        .order_by(unit)
    )
    found = {
        int(row.unit): _observation(row, function_id, int(row.unit) * minutes)
        for row in sql.execute(query)
    }
    c = histograms.c
    keys = ((c.minute // minutes).label("unit"), c.clock, c.bucket)
    slow = sa.select(*keys, sa.func.sum(c.calls).label("calls")).where(
        *which(c), c.clock.in_(("warm", "cold", "first_byte"))
    )
    for row in sql.execute(slow.group_by(*keys)):
        _put(found[int(row.unit)], row.clock, row.bucket, int(row.calls))
    return list(found.values())


def seen(sql: sa.Connection, *, since_s: float) -> list[str]:
    """Return the functions with observations since then."""
    c = tables.observation_minutes.c
    query = (
        sa.select(c.function_id)
        .where(c.minute >= int(since_s // 60))
        .distinct()
        .order_by(c.function_id)
    )
    return [str(found) for found in sql.execute(query).scalars()]


# -- summing up hours and deletion -----------------------------------------------------------------
def summed_until(sql: sa.Connection) -> int:
    """Return the first hour since the epoch that is not summed up yet; 0: none was."""
    table = tables.observers
    last = sql.execute(
        sa.select(table.c.sequence).where(table.c.activator == _MARK)
    ).scalar_one_or_none()
    return 0 if last is None else int(last) + 1


def due_hour(sql: sa.Connection, *, now: float) -> int | None:
    """Return the oldest hour to sum up; None: there is none."""
    oldest = sql.execute(sa.select(sa.func.min(tables.observation_minutes.c.minute))).scalar_one()
    if oldest is None:
        return None
    hour = max(summed_until(sql), int(oldest) // 60)
    return hour if (hour + 1) * 60 + SETTLED_MINUTES <= now // 60 else None


def functions_of(sql: sa.Connection, hour: int) -> list[str]:
    """Return the functions with observations in that hour that are not summed up yet."""
    c, done = tables.observation_minutes.c, tables.observation_hours.c
    known = sa.select(done.function_id).where(done.hour == hour)
    query = (
        sa.select(c.function_id)
        .where(c.minute >= hour * 60, c.minute < (hour + 1) * 60, c.function_id.not_in(known))
        .distinct()
    )
    return sorted(str(found) for found in sql.execute(query).scalars())


def sum_up(write: Write, hour: int, function_ids: Sequence[str]) -> None:
    """Sum up an hour of these functions."""
    pairs = (
        (
            tables.observation_minutes,
            tables.observation_hours,
            ("function_id", "revision", "arm", "tenant"),
            COUNTS,
        ),
        (
            tables.observation_minute_buckets,
            tables.observation_hour_buckets,
            ("function_id", "revision", "arm", "clock", "bucket"),
            ("calls",),
        ),
    )
    for source, into, keys, counts in pairs:
        c = source.c
        query = (
            sa.select(
                sa.literal(hour),
                *(c[key] for key in keys),
                *(sa.cast(sa.func.sum(c[count]), sa.BigInteger) for count in counts),
            )
            .where(
                c.minute >= hour * 60,
                c.minute < (hour + 1) * 60,
                c.function_id.in_(list(function_ids)),
            )
            .group_by(*(c[key] for key in keys))
        )
        write.sql.execute(sa.insert(into).from_select(["hour", *keys, *counts], query))


def mark(write: Write, hour: int) -> None:
    """Record that this hour is summed up for all functions."""
    values = {"life": "", "sequence": hour, "at": write.now}
    insert = write.insert(tables.observers).values(activator=_MARK, **values)
    write.sql.execute(insert.on_conflict_do_update(index_elements=["activator"], set_=values))


def prune(write: Write, *, days: int) -> int:
    """Delete the oldest PRUNE_MINUTES of minutes older than `days`, and hours older than
    HOURS_DAYS; return how many minutes."""
    oldest = write.sql.execute(
        sa.select(sa.func.min(tables.observation_minutes.c.minute))
    ).scalar_one()
    ends = min(int(write.now // 60) - days * 1440, summed_until(write.sql) * 60)
    gone = 0
    if oldest is not None and oldest < ends:
        until = min(int(oldest) + PRUNE_MINUTES, ends)
        for table in (tables.observation_minutes, tables.observation_minute_buckets):
            write.sql.execute(sa.delete(table).where(table.c.minute < until))
        gone = until - int(oldest)
    for table in (tables.observation_hours, tables.observation_hour_buckets):
        write.sql.execute(
            sa.delete(table).where(table.c.hour < int(write.now // 3600) - HOURS_DAYS * 24)
        )
    return gone
