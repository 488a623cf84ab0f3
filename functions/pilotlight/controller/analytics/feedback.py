"""Feedback: outcomes that callers report for their calls, at most once per call and metric, within
the feedback window.

A call's record reaches the ledger about a second after its response. Earlier feedback is stored as
pending (`called_at` 0) until `join_to_calls` assigns it to the record; feedback on a call that
never existed is dropped then. A `label` is a metric too: `label=good` is 1 for calls that were
labelled `good` and 0 for those with another label."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import sqlalchemy as sa

from pilotlight.controller.billing.usage_aggregation import CALL, DAY_S
from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.identity.access_control import Principal
from pilotlight.errors import Conflict, InvalidInput, NotFound
from pilotlight.spec.record_json import canonical_json

LABEL = "label"
MAX_METRICS = 16
"""Per call, so that its feedback fits into one page of the database."""
MAX_LABEL_LENGTH = 64
MAX_VALUE = 1e15
"""Above it, sums of squares overflow: the database rejects them, and the metric cannot be read."""
EXPECTED_S = 900.0
"""How long after the creation of a call's id its record is awaited, in seconds: activators store
and resend records that the controller missed."""
MAX_WAITING = 10_000
"""Pending feedback per tenant: a one-minute outage of record shipping at 150 per second."""
JOIN_BATCH = 500
_FOREIGN_ATTEMPTS = 8
"""Attempts that are looked up for a call to another tenant's function, by the record's id,
`<call>/<attempt>`."""
_METRIC = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}\Z")
_OWN_ID = re.compile(r"req-([0-9a-f]{12})[0-9a-f]{20}\Z")
_UNKNOWN = ("", "", "", "", "")


class FeedbackWindow(NamedTuple):
    """Feedback on one metric over some calls: count, mean and sample variance. n = 0: no data, mean
    is NaN."""

    n: int
    mean: float
    variance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedbackResult:
    """The result of storing feedback.

    Attributes:
        is_replayed: all of it was stored before.
        is_waiting: the call's record has not arrived yet; the feedback is joined when it does.
    """

    is_replayed: bool
    is_waiting: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """One metric or label of one call."""

    metric: str
    value: float | None = None
    label: str = ""

    def matches(self, row: sa.Row[*tuple[Any, ...]]) -> bool:
        """Whether the stored row has the same value and label."""
        return (row.value, row.label) == (self.value, self.label)


def parse_feedback(label: str | None, metrics: Mapping[str, float]) -> list[Feedback]:
    """Validate feedback. Raises InvalidInput."""
    items = [Feedback(metric=name, value=_number(name, value)) for name, value in metrics.items()]
    if label is not None:
        if not 1 <= len(label) <= MAX_LABEL_LENGTH or not label.isprintable():
            raise InvalidInput(
                f"a label must have 1 to {MAX_LABEL_LENGTH} printable characters", parameter=LABEL
            )
        items.append(Feedback(metric=LABEL, label=label))
    if not 1 <= len(items) <= MAX_METRICS:
        raise InvalidInput(
            f"feedback has {len(items)} items: send a label, or 1 to {MAX_METRICS} metrics",
            parameter="metrics",
        )
    return items


def record_feedback(
    write: Write, caller: Principal, *, call: str, feedback: Sequence[Feedback], window_days: int
) -> FeedbackResult:
    """Store a caller's feedback on one of its calls.

    Raises NotFound for a call that is unknown, or another tenant's; Forbidden for a call that the
    key may not access; Conflict when the call is older than the window, or has different feedback.
    """
    record = _record(write.sql, tenant=caller.tenant, call=call)
    if record is None:
        return _store_pending(write, caller, call=call, feedback=feedback)
    _require_access(caller, record)
    if write.now - record.started_at > window_days * DAY_S:
        raise Conflict(
            f"call {call} began more than {window_days} days ago: feedback is accepted only within "
            f"that window",
            window_days=window_days,
        )
    new = _insert(write, _row_of(record, write.now), feedback)
    return FeedbackResult(is_replayed=not new, is_waiting=False)


def join_to_calls(write: Write, *, limit: int = JOIN_BATCH) -> int:
    """Join pending feedback to the calls whose records have arrived, and drop what has expired.
    Returns how many were joined."""
    table = tables.feedback
    waiting = table.c.function_id == "", table.c.called_at == 0
    rows = write.sql.execute(
        sa.select(table).where(*waiting, _has_record()).order_by(table.c.at).limit(limit)
    ).all()
    for row in rows:
        record = _record(write.sql, tenant=row.tenant, call=row.call)
        this = table.c.tenant == row.tenant, table.c.call == row.call, table.c.metric == row.metric
        write.sql.execute(sa.delete(table).where(*this))
        if record is not None and _is_within(json.loads(row.reach), record):
            values = {
                **_row_of(record, row.at),
                "metric": row.metric,
                "value": row.value,
                "label": row.label,
            }
            write.sql.execute(write.insert(table).values(**values).on_conflict_do_nothing())
    write.sql.execute(sa.delete(table).where(*waiting, table.c.at < write.now - EXPECTED_S))
    return len(rows)


def is_anything_waiting(sql: sa.Connection) -> bool:
    """Whether there is pending feedback: one lookup, to avoid acquiring the write lock
    needlessly."""
    table = tables.feedback
    return (
        sql.execute(
            sa.select(table.c.call)
            .where(table.c.function_id == "", table.c.called_at == 0)
            .limit(1)
        ).first()
        is not None
    )


def window(
    sql: sa.Connection,
    *,
    function_id: str,
    revision: str | None,
    metric: str,
    since_s: float,
    until_s: float,
) -> FeedbackWindow:
    """Return the feedback on `metric` (or `label=<text>`) for calls that began in [`since_s`,
    `until_s`); `revision` None = all."""
    table = tables.feedback
    name, value = column_of(metric)
    where = [
        table.c.function_id == function_id,
        table.c.metric == name,
        table.c.called_at >= since_s,
        table.c.called_at < until_s,
    ]
    if revision is not None:
        where.append(table.c.revision == revision)
    n, mean = sql.execute(sa.select(sa.func.count(), sa.func.avg(value)).where(*where)).one()
    if not n:
        return FeedbackWindow(0, math.nan, 0.0)
    squares = sql.execute(
        sa.select(sa.func.sum((value - float(mean)) * (value - float(mean)))).where(*where)
    ).scalar_one()
    return FeedbackWindow(int(n), float(mean), float(squares) / (n - 1) if n > 1 else 0.0)


def column_of(metric: str) -> tuple[str, sa.ColumnElement[float]]:
    """Return a metric's name in the table, and the expression for its value."""
    name, _, label = metric.partition("=")
    if name == LABEL and label:
        return LABEL, sa.case((tables.feedback.c.label == label, 1.0), else_=0.0)
    return metric, tables.feedback.c.value


def _number(name: str, value: float) -> float:
    if not _METRIC.match(name) or name == LABEL:
        raise InvalidInput(
            f"metric {name!r} is invalid: use a letter, then letters, digits, '_', '.' or '-', at "
            f"most 64 characters, and not 'label'",
            parameter="metrics",
        )
    if not math.isfinite(value):
        raise InvalidInput(f"metric {name!r} = {value!r} is not a number", parameter="metrics")
    if abs(value) > MAX_VALUE:
        raise InvalidInput(
            f"metric {name!r} = {value!r}: must be between {-MAX_VALUE:g} and {MAX_VALUE:g}",
            parameter="metrics",
        )
    return float(value)


def _record(sql: sa.Connection, *, tenant: str, call: str) -> sa.Row[*tuple[Any, ...]] | None:
    """Return the last attempt of a call that the tenant owns, or made to another tenant's
    function."""
    table = tables.usage
    query = sa.select(table).where(table.c.kind == CALL).order_by(table.c.attempt.desc()).limit(1)
    if (
        own := sql.execute(query.where(table.c.tenant == tenant, table.c.call == call)).first()
    ) is not None:
        return own
    ids = [f"{call}/{attempt}" for attempt in range(1, _FOREIGN_ATTEMPTS + 1)]
    return sql.execute(query.where(table.c.id.in_(ids), table.c.caller == tenant)).first()


def _has_record() -> sa.ColumnElement[bool]:
    """Condition: `_record` would find a record for a row of the table."""
    table, usage = tables.feedback, tables.usage
    own = sa.exists().where(
        usage.c.tenant == table.c.tenant, usage.c.call == table.c.call, usage.c.kind == CALL
    )
    ids = [table.c.call.concat(f"/{attempt}") for attempt in range(1, _FOREIGN_ATTEMPTS + 1)]
    foreign = sa.exists().where(
        usage.c.id.in_(ids), usage.c.caller == table.c.tenant, usage.c.kind == CALL
    )
    return own | foreign


def _row_of(record: sa.Row[*tuple[Any, ...]], at: float) -> dict[str, Any]:
    names = ("tenant", "call", "function_id", "revision", "experiment", "arm", "unit")
    return {
        **{name: getattr(record, name) for name in names},
        "called_at": record.started_at,
        "at": at,
        "reach": "{}",
    }


def _insert(write: Write, row: Mapping[str, Any], feedback: Sequence[Feedback]) -> int:
    """Insert feedback; return how many items are new. Raises Conflict, and inserts nothing, when an
    item differs from what is stored, or there are too many."""
    table = tables.feedback
    query = sa.select(table.c.metric, table.c.value, table.c.label).where(
        table.c.tenant == row["tenant"], table.c.call == row["call"]
    )
    known = {found.metric: found for found in write.sql.execute(query)}
    for one in feedback:
        if one.metric in known and not one.matches(known[one.metric]):
            before = known[one.metric].label or known[one.metric].value
            raise Conflict(
                f"call {row['call']} already has feedback on {one.metric!r}: {before!r}; it cannot "
                f"be changed",
                metric=one.metric,
            )
    fresh = [one for one in feedback if one.metric not in known]
    if len(known) + len(fresh) > MAX_METRICS:
        raise Conflict(
            f"call {row['call']} has feedback on {len(known)} metrics; the maximum is {MAX_METRICS}"
        )
    if fresh:
        rows = [
            {**row, "metric": one.metric, "value": one.value, "label": one.label} for one in fresh
        ]
        write.sql.execute(sa.insert(table), rows)
    return len(fresh)


def _store_pending(
    write: Write, caller: Principal, *, call: str, feedback: Sequence[Feedback]
) -> FeedbackResult:
    if not _is_expected(call, write.now):
        hint = (
            "A call's record arrives about a second after its response; its id is the response's "
            "X-Request-Id."
        )
        raise NotFound(f"this tenant has no call {call!r}", call=call, hint=hint)
    table = tables.feedback
    waiting = sa.select(sa.func.count()).where(
        table.c.function_id == "", table.c.called_at == 0, table.c.tenant == caller.tenant
    )
    if write.sql.execute(waiting).scalar_one() >= MAX_WAITING:
        raise NotFound(
            f"the record of call {call} has not arrived yet, and feedback on {MAX_WAITING} others "
            f"is pending: try again",
            retry_after_s=5.0,
        )
    reach = {
        "environment": caller.bound_environment,
        "app": caller.bound_app,
        "function": caller.bound_function,
    }
    names = ("function_id", "revision", "experiment", "arm", "unit")
    row = {
        "tenant": caller.tenant,
        "call": call,
        "called_at": 0.0,
        "at": write.now,
        **dict(zip(names, _UNKNOWN, strict=True)),
    }
    new = _insert(write, {**row, "reach": canonical_json(reach).decode()}, feedback)
    return FeedbackResult(is_replayed=not new, is_waiting=True)


def _is_expected(call: str, now: float) -> bool:
    """Whether the record of a call with this id, which contains its creation time, may still be on
    its way to the ledger."""
    found = _OWN_ID.match(call)
    return found is not None and abs(now - int(found[1], 16) / 1000) < EXPECTED_S


def _require_access(caller: Principal, record: sa.Row[*tuple[Any, ...]]) -> None:
    """Raise NotFound or Forbidden unless the key may access the call. A bound key may access only
    calls of its environment, app or function; another tenant's functions are never among them."""
    is_own = record.tenant == caller.tenant
    if caller.bound_environment not in (None, record.environment) or (
        caller.bound_app is not None and not is_own
    ):
        raise NotFound(
            f"there is no call {record.call!r} that key {caller.key} may access", call=record.call
        )
    if is_own:
        caller.require_function(record.app, record.function)


def _is_within(reach: Mapping[str, str | None], record: sa.Row[*tuple[Any, ...]]) -> bool:
    pairs = (
        (reach.get(name), getattr(record, name)) for name in ("environment", "app", "function")
    )
    return all(mine in (None, other) for mine, other in pairs)
