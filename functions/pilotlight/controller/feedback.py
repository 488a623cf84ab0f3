"""Outcomes that callers tell of their calls: at most once per call and metric, as late as the
window allows.

A call's record reaches the ledger about a second after its answer. Feedback that is quicker waits
(`called_at` 0) and is joined by `join`; what is told of a call that never was is dropped then. A
`label` is a metric, too: `label=good` reads as 1 for the calls that were labelled `good` and as 0
for those with another label."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import sqlalchemy as sa

from pilotlight.controller import tables
from pilotlight.controller.access import Principal
from pilotlight.controller.aggregation import CALL, DAY_S
from pilotlight.controller.store import Write
from pilotlight.errors import Conflict, InvalidInput, NotFound
from pilotlight.spec import canonical_json

LABEL = "label"
MAX_METRICS = 16
"""Per call: what is told of it lies in one page of the database."""
MAX_LABEL_LENGTH = 64
MAX_VALUE = 1e15
"""Beyond it squares do not add up any more: a database refuses them, and whoever reads the metric
sees nothing but that."""
EXPECTED_S = 900.0
"""A call's record is waited for that long after the call's id was made: activators keep and repeat
what the controller missed."""
MAX_WAITING = 10_000
"""Feedback per tenant that waits for its record: what a minute's outage of shipping leaves at 150 a
second."""
JOIN_BATCH = 500
_FOREIGN_ATTEMPTS = 8
"""A record of a call to another tenant's function is found by its id, `<call>/<attempt>`."""
_METRIC = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}\Z")
_OWN_ID = re.compile(r"req-([0-9a-f]{12})[0-9a-f]{20}\Z")
_NOBODY = ("", "", "", "", "")


class Window(NamedTuple):
    """Feedback of one metric over some calls: how many told, their mean, and the sample variance. n
    = 0: no data, mean is NaN."""

    n: int
    mean: float
    variance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What became of feedback.

    Attributes:
        is_replayed: all of it was known.
        is_waiting: the call's record is not there yet; it is joined when it comes.
    """

    is_replayed: bool
    is_waiting: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One metric or label of one call."""

    metric: str
    value: float | None = None
    label: str = ""

    def is_in(self, row: sa.Row[*tuple[Any, ...]]) -> bool:
        """Whether the table has the same."""
        return (row.value, row.label) == (self.value, self.label)


def parse(label: str | None, metrics: Mapping[str, float]) -> list[Told]:
    """What is told, checked. Raises InvalidInput."""
    told = [Told(metric=name, value=_number(name, value)) for name, value in metrics.items()]
    if label is not None:
        if not 1 <= len(label) <= MAX_LABEL_LENGTH or not label.isprintable():
            raise InvalidInput(
                f"a label has 1 to {MAX_LABEL_LENGTH} printable characters", parameter=LABEL
            )
        told.append(Told(metric=LABEL, label=label))
    if not 1 <= len(told) <= MAX_METRICS:
        raise InvalidInput(
            f"tell a label, or 1 to {MAX_METRICS} metrics, of a call; not {len(told)}",
            parameter="metrics",
        )
    return told


def give(
    write: Write, caller: Principal, *, call: str, told: Sequence[Told], window_days: int
) -> Given:
    """Keep what a caller tells of a call of its own.

    Raises NotFound for a call that is unknown, or another tenant's; Forbidden for one out of the
    key's reach; Conflict when the call is older than the window, or was told of otherwise before.
    """
    record = _record(write.sql, tenant=caller.tenant, call=call)
    if record is None:
        return _wait(write, caller, call=call, told=told)
    _demand_reach(caller, record)
    if write.now - record.started_at > window_days * DAY_S:
        raise Conflict(
            f"call {call} began more than {window_days} days ago: feedback comes within that "
            f"window",
            window_days=window_days,
        )
    return Given(is_replayed=not _insert(write, _row_of(record, write.now), told), is_waiting=False)


def join(write: Write, *, limit: int = JOIN_BATCH) -> int:
    """Give feedback that waits to the calls whose records have come, and drop what waited in vain;
    returns how many found theirs."""
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
    """Whether there is feedback whose record has not come: one look-up, so that nobody takes the
    write lock for nothing."""
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
) -> Window:
    """Feedback of `metric` (or `label=<text>`) on calls that began from `since_s` to before
    `until_s`; of all revisions for None."""
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
        return Window(0, math.nan, 0.0)
    squares = sql.execute(
        sa.select(sa.func.sum((value - float(mean)) * (value - float(mean)))).where(*where)
    ).scalar_one()
    return Window(int(n), float(mean), float(squares) / (n - 1) if n > 1 else 0.0)


def column_of(metric: str) -> tuple[str, sa.ColumnElement[float]]:
    """The name that rows of a metric have, and what they read as."""
    name, _, label = metric.partition("=")
    if name == LABEL and label:
        return LABEL, sa.case((tables.feedback.c.label == label, 1.0), else_=0.0)
    return metric, tables.feedback.c.value


def of_call(sql: sa.Connection, *, tenant: str, call: str) -> list[dict[str, Any]]:
    """What was told of a call: `metric`, `value`, `label`, `at`."""
    table = tables.feedback
    query = sa.select(table.c.metric, table.c.value, table.c.label, table.c.at).order_by(
        table.c.metric
    )
    return [
        dict(row)
        for row in sql.execute(
            query.where(table.c.tenant == tenant, table.c.call == call)
        ).mappings()
    ]


def _number(name: str, value: float) -> float:
    if not _METRIC.match(name) or name == LABEL:
        raise InvalidInput(
            f"metric {name!r}: a letter, then letters, digits, '_', '.' or '-', at most 64; not "
            f"'label'",
            parameter="metrics",
        )
    if not math.isfinite(value):
        raise InvalidInput(f"metric {name!r} = {value!r} is no number", parameter="metrics")
    if abs(value) > MAX_VALUE:
        raise InvalidInput(
            f"metric {name!r} = {value!r}: from {-MAX_VALUE:g} to {MAX_VALUE:g}",
            parameter="metrics",
        )
    return float(value)


def _record(sql: sa.Connection, *, tenant: str, call: str) -> sa.Row[*tuple[Any, ...]] | None:
    """The last attempt of a call that the tenant owns, or made of another's function."""
    table = tables.usage
    query = sa.select(table).where(table.c.kind == CALL).order_by(table.c.attempt.desc()).limit(1)
    if (
        own := sql.execute(query.where(table.c.tenant == tenant, table.c.call == call)).first()
    ) is not None:
        return own
    ids = [f"{call}/{attempt}" for attempt in range(1, _FOREIGN_ATTEMPTS + 1)]
    return sql.execute(query.where(table.c.id.in_(ids), table.c.caller == tenant)).first()


def _has_record() -> sa.ColumnElement[bool]:
    """A record has come that `_record` would find, for a row of the table."""
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


def _insert(write: Write, row: Mapping[str, Any], told: Sequence[Told]) -> int:
    """How many of them are new. Raises Conflict when one was told otherwise, or there are too many;
    then none is kept."""
    table = tables.feedback
    query = sa.select(table.c.metric, table.c.value, table.c.label).where(
        table.c.tenant == row["tenant"], table.c.call == row["call"]
    )
    known = {found.metric: found for found in write.sql.execute(query)}
    for one in told:
        if one.metric in known and not one.is_in(known[one.metric]):
            before = known[one.metric].label or known[one.metric].value
            raise Conflict(
                f"call {row['call']} has feedback on {one.metric!r} already: {before!r}; it "
                f"counts once",
                metric=one.metric,
            )
    fresh = [one for one in told if one.metric not in known]
    if len(known) + len(fresh) > MAX_METRICS:
        raise Conflict(
            f"call {row['call']} has feedback on {len(known)} metrics: at most {MAX_METRICS} are kept"
        )
    if fresh:
        rows = [
            {**row, "metric": one.metric, "value": one.value, "label": one.label} for one in fresh
        ]
        write.sql.execute(sa.insert(table), rows)
    return len(fresh)


def _wait(write: Write, caller: Principal, *, call: str, told: Sequence[Told]) -> Given:
    if not _is_expected(call, write.now):
        hint = (
            "A call's record arrives about a second after its answer; its id is the answer's "
            "X-Request-Id."
        )
        raise NotFound(f"there is no call {call!r} of yours", call=call, hint=hint)
    table = tables.feedback
    waiting = sa.select(sa.func.count()).where(
        table.c.function_id == "", table.c.called_at == 0, table.c.tenant == caller.tenant
    )
    if write.sql.execute(waiting).scalar_one() >= MAX_WAITING:
        raise NotFound(
            f"the record of call {call} is not there yet, and {MAX_WAITING} others wait: try again",
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
        **dict(zip(names, _NOBODY, strict=True)),
    }
    new = _insert(write, {**row, "reach": canonical_json(reach).decode()}, told)
    return Given(is_replayed=not new, is_waiting=True)


def _is_expected(call: str, now: float) -> bool:
    """Whether a call of that id, which begins with the time that it was made, may be on its way to
    the ledger still."""
    found = _OWN_ID.match(call)
    return found is not None and abs(now - int(found[1], 16) / 1000) < EXPECTED_S


def _demand_reach(caller: Principal, record: sa.Row[*tuple[Any, ...]]) -> None:
    """A bound key reaches calls of its environment, app or function only; another tenant's
    functions are none of these."""
    is_own = record.tenant == caller.tenant
    if caller.bound_environment not in (None, record.environment) or (
        caller.bound_app is not None and not is_own
    ):
        raise NotFound(
            f"there is no call {record.call!r} within reach of key {caller.key}", call=record.call
        )
    if is_own:
        caller.demand_function(record.app, record.function)


def _is_within(reach: Mapping[str, str | None], record: sa.Row[*tuple[Any, ...]]) -> bool:
    pairs = (
        (reach.get(name), getattr(record, name)) for name in ("environment", "app", "function")
    )
    return all(mine in (None, other) for mine, other in pairs)
