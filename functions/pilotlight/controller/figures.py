"""What the dashboard shows, computed by the database: one row per function, and its calls by hour."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal

import sqlalchemy as sa

from pilotlight.controller import tables
from pilotlight.pricing import COST_QUANTUM

HOUR_S = 3600
HOURS = 24
MAX_ROWS = 200
_HALF = 10**9
START_KINDS = ("WARM", "WAKE", "FORK", "RESTORE", "COLD")


@dataclass(slots=True, kw_only=True)
class FunctionFigures:
    """One function over the last day.

    Attributes:
        p50_ms, p99_ms: from the request's arrival to its last byte; None without calls.
        starts: calls by how their instance came up.
        hourly: calls per hour, oldest first.
        cost: of everything it caused, idle time included.
    """

    app: str
    name: str
    revision: str
    stopped: bool
    calls: int = 0
    errors: int = 0
    p50_ms: int | None = None
    p99_ms: int | None = None
    starts: dict[str, int] = field(default_factory=dict)
    hourly: list[int] = field(default_factory=lambda: [0] * HOURS)
    cost: Decimal = Decimal(0)
    instances: int = 0

    @property
    def cold_starts(self) -> int:
        """Calls that had to wait for an instance, by whatever rung."""
        return sum(count for kind, count in self.starts.items() if kind != "WARM")


def functions(sql: sa.Connection, *, tenant: str, environment: str, now: float) -> list[FunctionFigures]:
    """The functions of an environment, those with most calls first, at most MAX_ROWS."""
    since = now - HOURS * HOUR_S
    here = _usage_since(tenant, environment, since)
    busiest = _busiest(sql, tenant=tenant, environment=environment, here=here)
    shown = here & tables.usage.c.function_id.in_(busiest)
    _add_latency(sql, busiest, shown)
    _add_starts(sql, busiest, shown, since)
    _add_cost(sql, busiest, shown)
    return list(busiest.values())


def count(sql: sa.Connection, *, tenant: str, environment: str) -> int:
    """How many functions are deployed in an environment."""
    table = tables.functions
    where = (table.c.tenant == tenant, table.c.environment == environment, table.c.removed_at.is_(None))
    return int(sql.execute(sa.select(sa.func.count()).select_from(table).where(*where)).scalar_one())


def _usage_since(tenant: str, environment: str, since: float) -> sa.ColumnElement[bool]:
    table = tables.usage
    return (table.c.tenant == tenant) & (table.c.started_at >= since) & (table.c.environment == environment)


def _busiest(sql: sa.Connection, *, tenant: str, environment: str, here: sa.ColumnElement[bool]) -> dict[str, FunctionFigures]:
    table, apps, traffic, usage = tables.functions, tables.apps, tables.traffic, tables.usage
    calls = sa.select(usage.c.function_id, sa.func.count().label("n")).where(here, usage.c.kind == "CALL").group_by(usage.c.function_id)
    counted = calls.subquery()
    same_app = (apps.c.tenant == table.c.tenant) & (apps.c.environment == table.c.environment) & (apps.c.name == table.c.app)
    query = (
        sa.select(table.c.id, table.c.app, table.c.name, sa.func.max(traffic.c.revision).label("revision"), apps.c.stopped)
        .join(apps, same_app)
        .join(traffic, traffic.c.function == table.c.id)
        .outerjoin(counted, counted.c.function_id == table.c.id)
        .where(table.c.tenant == tenant, table.c.environment == environment, table.c.removed_at.is_(None))
        .group_by(table.c.id, table.c.app, table.c.name, apps.c.stopped, counted.c.n)
        .order_by(sa.func.coalesce(counted.c.n, 0).desc(), table.c.app, table.c.name)
        .limit(MAX_ROWS)
    )
    found = sql.execute(query)
    return {row.id: FunctionFigures(app=row.app, name=row.name, revision=row.revision, stopped=row.stopped) for row in found}


def _add_latency(sql: sa.Connection, rows: dict[str, FunctionFigures], shown: sa.ColumnElement[bool]) -> None:
    usage = tables.usage
    latency = usage.c.queued_ms + usage.c.start_ms + usage.c.exec_ms
    ranked = (
        sa.select(
            usage.c.function_id,
            usage.c.status,
            latency.label("ms"),
            sa.func.row_number().over(partition_by=usage.c.function_id, order_by=latency).label("rank"),
            sa.func.count().over(partition_by=usage.c.function_id).label("n"),
        )
        .where(shown, usage.c.kind == "CALL")
        .subquery()
    )

    def percentile(percent: int) -> sa.Label[int]:
        nearest = (ranked.c.n * percent + 99) // 100  # the nearest-rank definition: the smallest value that covers the share
        return sa.func.max(sa.case((ranked.c.rank == nearest, ranked.c.ms))).label(f"p{percent}")

    errors = sa.func.sum(sa.case((ranked.c.status >= 500, 1), else_=0)).label("errors")
    query = sa.select(ranked.c.function_id, sa.func.count().label("calls"), errors, percentile(50), percentile(99))
    for row in sql.execute(query.group_by(ranked.c.function_id)):
        found = rows[row.function_id]
        found.calls, found.errors, found.p50_ms, found.p99_ms = row.calls, int(row.errors), row.p50, row.p99


def _add_starts(sql: sa.Connection, rows: dict[str, FunctionFigures], shown: sa.ColumnElement[bool], since: float) -> None:
    usage = tables.usage
    # Whole seconds first: half a second does not matter here, and casts of halves differ between databases.
    hour = (sa.cast(usage.c.started_at, sa.BigInteger) // HOUR_S - int(since // HOUR_S)).label("hour")
    query = sa.select(usage.c.function_id, usage.c.start_kind, hour, sa.func.count().label("n")).where(shown, usage.c.kind == "CALL")
    for row in sql.execute(query.group_by(usage.c.function_id, usage.c.start_kind, hour)):
        found = rows[row.function_id]
        found.starts[row.start_kind] = found.starts.get(row.start_kind, 0) + row.n
        found.hourly[min(HOURS - 1, max(0, row.hour))] += row.n


def _add_cost(sql: sa.Connection, rows: dict[str, FunctionFigures], shown: sa.ColumnElement[bool]) -> None:
    usage = tables.usage
    high, low = sa.func.sum(usage.c.cost_picos // _HALF).label("high"), sa.func.sum(usage.c.cost_picos % _HALF).label("low")
    for row in sql.execute(sa.select(usage.c.function_id, high, low).where(shown).group_by(usage.c.function_id)):
        rows[row.function_id].cost = COST_QUANTUM * (int(row.high) * _HALF + int(row.low))
