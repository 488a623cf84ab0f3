"""Schedules of functions, and the calls that they create when due.

They are those of the revision that receives most calls (`publishing` determines it), stored by
number within their function. Each due time becomes one row of `due_calls` in the transaction that
advances the schedule, under an id derived from the schedule and the time: a controller killed at
any point has either created the call or not, and never creates it twice. After a time without a
controller, due times of the last GRACE_S are caught up; older ones are skipped, or with `catch_up`
result in a single call."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.database import audit_trail, tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.scheduling import dispatch_queue
from pilotlight.errors import Conflict, InvalidInput, NotFound
from pilotlight.protocol import CallRecord
from pilotlight.schedules import cron
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.policies import MissedRunPolicy, Schedule
from pilotlight.spec.record_json import canonical_json, from_json, to_json

log = logging.getLogger(__name__)

GRACE_S = 60.0
"""A restart of the controller, or a short outage of the database, skips no due time."""
MAX_AT_ONCE = 64
"""Due times of one schedule that become calls in one round: more than GRACE_S of the shortest
period."""
BATCH = 100
"""Schedules per round."""
BROKEN_S = 3600.0
"""When a schedule whose next time cannot be computed is tried again; it does not delay others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleEntry:
    """A schedule of an existing function.

    Attributes:
        next_at: when it is due next; None: it is paused, or its function is stopped.
        last_at: the last due time that became a call.
    """

    function_id: str
    number: int
    tenant: str
    environment: str
    app: str
    function: str
    schedule: Schedule
    is_paused: bool
    next_at: float | None
    last_at: float | None
    updated_at: float

    @property
    def id(self) -> str:
        """`<function id>/<number>`."""
        return f"{self.function_id}/{self.number}"


def sync_schedules(write: Write, function_id: str, spec: FunctionSpec | None) -> None:
    """Replace a function's schedules by those of `spec`; None: it is stopped or removed, so nothing
    is due, but paused schedules are remembered.

    An unchanged schedule continues, and stays paused if it was. Raises InvalidInput for an invalid
    one."""
    table = tables.schedules
    known = {
        row.number: row
        for row in write.sql.execute(sa.select(table).where(table.c.function == function_id))
    }
    if spec is None:
        if known:
            write.sql.execute(
                sa.update(table).where(table.c.function == function_id).values(next_at=None)
            )
        return
    for number, schedule in enumerate(spec.schedules):
        _check(spec, schedule)
        _put(write, function_id, number, schedule, known.get(number))
    if beyond := [number for number in known if number >= len(spec.schedules)]:
        write.sql.execute(
            sa.delete(table).where(table.c.function == function_id, table.c.number.in_(beyond))
        )
    if spec.schedules:
        # rings the notifier after the commit, which wakes the scheduler
        write.fed = True


def check_schedules(specs: Sequence[FunctionSpec]) -> None:
    """Raise InvalidInput if one of these functions has an invalid schedule, of calls or of
    scaling."""
    for spec in specs:
        for schedule in spec.schedules:
            _check(spec, schedule)
        for scaling in spec.scaling.schedules:
            cron.check_schedule(scaling.begins, "scaling_schedule")


def fire_due(write: Write) -> int:
    """Create calls for all due times; return how many."""
    rows = write.sql.execute(
        _due()
        .where(tables.schedules.c.next_at <= write.now)
        .order_by(tables.schedules.c.next_at)
        .limit(BATCH)
    ).mappings()
    made = 0
    for planned in [_planned(row) for row in rows]:
        assert planned.next_at is not None
        try:
            at = _at(planned.schedule, planned.next_at, now=write.now)
            following = cron.next_after(planned.schedule, write.now, previous=planned.next_at)
        except (ValueError, LookupError) as e:
            # for example a time zone that this machine no longer knows
            log.error("event=schedule_broken schedule=%s error=%r", planned.id, e)
            at, following = [], write.now + BROKEN_S
        else:
            if not at:
                log.warning(
                    "event=schedule_missed schedule=%s due_at=%.0f policy=skip",
                    planned.id,
                    planned.next_at,
                )
        for due_at in at:
            made += dispatch_queue.enqueue_call(write, _call(planned, due_at)[1], due_at=due_at)
        last = {"last_at": at[-1]} if at else {}
        write.sql.execute(
            sa.update(tables.schedules).where(*_is(planned)).values(next_at=following, **last)
        )
    return made


def next_at(sql: sa.Connection) -> float | None:
    """Return when the next schedule is due (seconds since the epoch); None: none is."""
    at = tables.schedules.c.next_at
    found = sql.execute(sa.select(sa.func.min(at)).where(at.is_not(None))).scalar_one()
    return None if found is None else float(found)


def listing(
    sql: sa.Connection,
    *,
    tenant: str,
    environment: str,
    app: str | None = None,
    function: str | None = None,
) -> list[ScheduleEntry]:
    """Return the schedules of an environment's functions, by app, function and number."""
    functions = tables.functions
    query = _of_functions().where(
        functions.c.tenant == tenant, functions.c.environment == environment
    )
    if app is not None:
        query = query.where(functions.c.app == app)
    if function is not None:
        query = query.where(functions.c.name == function)
    query = query.order_by(functions.c.app, functions.c.name, tables.schedules.c.number)
    return [_planned(row) for row in sql.execute(query).mappings()]


def get(
    sql: sa.Connection, *, tenant: str, environment: str, app: str, function: str, number: int
) -> ScheduleEntry:
    """Return one schedule. Raises NotFound."""
    for planned in listing(sql, tenant=tenant, environment=environment, app=app, function=function):
        if planned.number == number:
            return planned
    raise NotFound(
        f"function {app}/{function} has no schedule {number} in environment {environment!r}",
        app=app,
        function=function,
    )


def pause(
    write: Write, planned: ScheduleEntry, *, is_paused: bool, actor: str, request: str = ""
) -> None:
    """Pause a schedule, or resume it with its next time; times that passed while it was paused are
    not caught up."""
    waits = is_paused or _is_stopped(write.sql, planned)
    following = (
        None if waits else cron.next_after(planned.schedule, write.now, previous=planned.last_at)
    )
    values = {"is_paused": is_paused, "next_at": following, "updated_at": write.now}
    write.sql.execute(sa.update(tables.schedules).where(*_is(planned)).values(**values))
    write.fed = True
    _record(
        write,
        planned,
        "schedule.pause" if is_paused else "schedule.resume",
        actor=actor,
        request=request,
    )


def run_now(write: Write, planned: ScheduleEntry, *, actor: str, request: str) -> str:
    """Create a call at once, outside the schedule; return its id. Raises Conflict while the app is
    stopped."""
    if _is_stopped(write.sql, planned):
        raise Conflict(f"app {planned.app!r} is stopped: deploy it again first", app=planned.app)
    call_id, held = _call(planned, write.now, salt=request)
    dispatch_queue.enqueue_call(write, held, due_at=write.now)
    _record(write, planned, "schedule.run", actor=actor, request=request)
    return call_id


def _put(
    write: Write, function_id: str, number: int, schedule: Schedule, known: sa.Row[Any] | None
) -> None:
    table, text = tables.schedules, canonical_json(to_json(schedule)).decode()
    if known is None:
        tenant = write.sql.execute(
            sa.select(tables.functions.c.tenant).where(tables.functions.c.id == function_id)
        ).scalar_one()
        first = cron.next_after(schedule, write.now)
        row = {
            "tenant": tenant,
            "document": text,
            "is_paused": False,
            "next_at": first,
            "last_at": None,
            "updated_at": write.now,
        }
        write.sql.execute(sa.insert(table).values(function=function_id, number=number, **row))
        return
    is_same = known.document == text
    if is_same and (known.next_at is not None or known.is_paused):
        return
    # After the clock was set back, a time that became a call must not become due again.
    after = max(write.now, known.last_at or 0.0)
    following = cron.next_after(schedule, after, previous=known.last_at if is_same else None)
    values = {
        "document": text,
        "next_at": None if known.is_paused else following,
        "updated_at": write.now,
    }
    write.sql.execute(
        sa.update(table)
        .where(table.c.function == function_id, table.c.number == number)
        .values(**values)
    )


def _check(spec: FunctionSpec, schedule: Schedule) -> None:
    cron.check_schedule(schedule)
    if spec.method(schedule.method) is None:
        there = ", ".join(repr(method.name) for method in spec.methods)
        raise InvalidInput(
            f"schedule of {spec.name!r}: there is no method {schedule.method!r}; available: "
            f"{there}",
            parameter="schedule",
        )


def _at(schedule: Schedule, first: float, *, now: float) -> list[float]:
    """Return the due times that become calls now; `first` is the oldest that has not yet."""
    if first > now - GRACE_S:
        return list(cron.occurrences(schedule, first, until=now, limit=MAX_AT_ONCE))
    recent = cron.next_after(schedule, now - GRACE_S, previous=first)
    found = list(cron.occurrences(schedule, recent, until=now, limit=MAX_AT_ONCE))
    return [first] if not found and schedule.missed is MissedRunPolicy.CATCH_UP else found


def _call(planned: ScheduleEntry, at: float, *, salt: str = "") -> tuple[str, dict[str, Any]]:
    """Return the id of a schedule's call at a time, and its document for `dispatch_queue`."""
    schedule = planned.schedule
    digest = hashlib.sha256(f"{planned.id}\0{at:.3f}\0{salt}".encode()).hexdigest()[:32]
    record = CallRecord(
        id=f"req-{digest}",
        tenant=planned.tenant,
        environment=planned.environment,
        app=planned.app,
        function=planned.function,
        method=schedule.method,
        state="QUEUED",
        sequence=1,
        submitted_at=at,
        expires_at=at + dispatch_queue.KEPT_S,
        schedule=planned.id,
    )
    return record.id, dispatch_queue.payload(
        record, body=canonical_json({} if schedule.arguments is None else schedule.arguments)
    )


def _of_functions() -> sa.Select[Any]:
    table, functions = tables.schedules, tables.functions
    columns = (functions.c.environment, functions.c.app, functions.c.name)
    return (
        sa.select(table, *columns)
        .join(functions, functions.c.id == table.c.function)
        .where(functions.c.removed_at.is_(None))
    )


def _due() -> sa.Select[Any]:
    return _of_functions().where(tables.schedules.c.is_paused.is_(False))


def _planned(row: sa.RowMapping) -> ScheduleEntry:
    named = {
        name: row[name]
        for name in (
            "number",
            "tenant",
            "environment",
            "app",
            "is_paused",
            "next_at",
            "last_at",
            "updated_at",
        )
    }
    schedule = from_json(Schedule, json.loads(row["document"]))
    return ScheduleEntry(
        function_id=row["function"], function=row["name"], schedule=schedule, **named
    )


def _is(planned: ScheduleEntry) -> tuple[sa.ColumnElement[bool], ...]:
    table = tables.schedules
    return (table.c.function == planned.function_id, table.c.number == planned.number)


def _is_stopped(sql: sa.Connection, planned: ScheduleEntry) -> bool:
    table = tables.apps
    which = (
        table.c.tenant == planned.tenant,
        table.c.environment == planned.environment,
        table.c.name == planned.app,
    )
    return bool(sql.execute(sa.select(table.c.stopped).where(*which)).scalar_one())


def _record(write: Write, planned: ScheduleEntry, action: str, *, actor: str, request: str) -> None:
    subject = f"{planned.environment}/{planned.app}/{planned.function}"
    audit_trail.record(
        write,
        tenant=planned.tenant,
        actor=actor,
        action=action,
        subject=subject,
        after={"number": planned.number},
        request=request,
    )
