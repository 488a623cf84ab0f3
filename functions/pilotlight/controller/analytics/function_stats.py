"""The functions of an environment: what is deployed, and each function's figures over a span."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import sqlalchemy as sa

from pilotlight.controller.analytics.environment_usage import EnvironmentUsage
from pilotlight.controller.analytics.latency_histograms import (
    Histogram,
    LatencyHistogram,
    by_function,
)
from pilotlight.controller.analytics.rollup_queries import UsageSums
from pilotlight.controller.database import tables

MAX_ROWS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployedFunctionInfo:
    """A function as deployed now: its newest revision with traffic, and the resources of one
    instance.

    Attributes:
        waiting_cost: of `scaledown_window="auto"`; None = a fixed window.
    """

    id: str
    app: str
    name: str
    revision: str
    stopped: bool
    cpu: float = 1.0
    memory_bytes: int = 0
    gpu: tuple[str, ...] = ()
    gpu_count: int = 0
    min_instances: int = 0
    max_instances: int = 0
    waiting_cost: float | None = None
    access: tuple[str, ...] = ()
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class FunctionStats:
    """One function over a span.

    Attributes:
        deployed: None if the function has been removed since.
        calls: sums of its calls.
        whole: sums of all its records, including idle time.
        starts: calls by start kind of their instance.
        units: calls per hour or day, oldest first.
        latency: from the request's arrival to its last byte, over the last day.
    """

    id: str
    app: str
    name: str
    deployed: DeployedFunctionInfo | None = None
    calls: UsageSums = field(default_factory=UsageSums)
    whole: UsageSums = field(default_factory=UsageSums)
    starts: dict[str, int] = field(default_factory=dict)
    units: list[int] = field(default_factory=list)
    latency: Histogram = field(default_factory=Histogram)
    instances: int = 0

    @property
    def title(self) -> str:
        """`app/function`."""
        return f"{self.app}/{self.name}"


def table(
    sql: sa.Connection,
    *,
    tenant: str,
    environment: str,
    usage: EnvironmentUsage,
    parts: Sequence[LatencyHistogram],
) -> list[FunctionStats]:
    """Return the most active functions, then deployed functions without activity; at most MAX_ROWS
    together."""
    found = _active(usage)
    for identity, deployed in _deployed(
        sql, tenant=tenant, environment=environment, ids=list(found)
    ).items():
        row = found.setdefault(
            identity,
            FunctionStats(id=identity, app=deployed.app, name=deployed.name, units=_zeros(usage)),
        )
        row.deployed = deployed
    histograms = by_function(part for part in parts if part.clock == "total")
    for row in found.values():
        row.latency = histograms.get(row.id, row.latency)
    return list(found.values())[:MAX_ROWS]


def _active(usage: EnvironmentUsage) -> dict[str, FunctionStats]:
    rows: dict[str, FunctionStats] = {}
    for cell in usage.cells:
        if not cell.function_id:
            continue
        row = rows.get(cell.function_id)
        if row is None:
            row = rows[cell.function_id] = FunctionStats(
                id=cell.function_id, app=cell.app, name=cell.function, units=_zeros(usage)
            )
        row.whole.add(cell.sums)
        if cell.kind == "CALL":
            row.calls.add(cell.sums)
            row.starts[cell.start_kind] = row.starts.get(cell.start_kind, 0) + cell.sums.records
            row.units[cell.unit - usage.span.first] += cell.sums.records
    ranked = sorted(
        rows.values(), key=lambda row: (-row.calls.records, -row.whole.picos, row.title)
    )
    return {row.id: row for row in ranked[:MAX_ROWS]}


def _zeros(usage: EnvironmentUsage) -> list[int]:
    return [0] * usage.span.count


def count(sql: sa.Connection, *, tenant: str, environment: str) -> int:
    """Return the number of functions deployed in an environment."""
    table = tables.functions
    where = (
        table.c.tenant == tenant,
        table.c.environment == environment,
        table.c.removed_at.is_(None),
    )
    return int(
        sql.execute(sa.select(sa.func.count()).select_from(table).where(*where)).scalar_one()
    )


def names(sql: sa.Connection, *, tenant: str, environment: str) -> list[str]:
    """Return `app/function` of the deployed functions, by name; at most MAX_ROWS."""
    table = tables.functions
    query = (
        sa.select(table.c.app, table.c.name)
        .where(
            table.c.tenant == tenant,
            table.c.environment == environment,
            table.c.removed_at.is_(None),
        )
        .order_by(table.c.app, table.c.name)
        .limit(MAX_ROWS)
    )
    return [f"{row.app}/{row.name}" for row in sql.execute(query)]


def one(
    sql: sa.Connection, *, tenant: str, environment: str, app: str, name: str
) -> DeployedFunctionInfo | None:
    """Find a deployed function by its name."""
    table = tables.functions
    rows = sql.execute(
        _query(tenant, environment).where(table.c.app == app, table.c.name == name).limit(1)
    )
    return next((_details(row) for row in rows), None)


def _deployed(
    sql: sa.Connection, *, tenant: str, environment: str, ids: Collection[str]
) -> dict[str, DeployedFunctionInfo]:
    """Return the functions in `ids`, then others by name, up to MAX_ROWS."""
    table = tables.functions
    query = _query(tenant, environment).order_by(table.c.app, table.c.name)
    rows = list(sql.execute(query.where(table.c.id.in_(ids))))
    if room := MAX_ROWS - len(ids):
        rows += sql.execute(query.where(table.c.id.not_in(ids)).limit(room))
    return {row.id: _details(row) for row in rows}


def _query(tenant: str, environment: str) -> sa.Select[tuple[str, str, str, str, bool, str]]:
    table, apps, traffic, revisions = (
        tables.functions,
        tables.apps,
        tables.traffic,
        tables.revisions,
    )
    newest = (
        sa.select(traffic.c.function, sa.func.max(revisions.c.ordinal).label("ordinal"))
        .join(
            revisions,
            (revisions.c.function == traffic.c.function) & (revisions.c.name == traffic.c.revision),
        )
        .group_by(traffic.c.function)
        .subquery()
    )
    same_app = (
        (apps.c.tenant == table.c.tenant)
        & (apps.c.environment == table.c.environment)
        & (apps.c.name == table.c.app)
    )
    return (
        sa.select(
            table.c.id,
            table.c.app,
            table.c.name,
            revisions.c.name.label("revision"),
            apps.c.stopped,
            revisions.c.spec,
        )
        .join(apps, same_app)
        .join(newest, newest.c.function == table.c.id)
        .join(
            revisions,
            (revisions.c.function == table.c.id) & (revisions.c.ordinal == newest.c.ordinal),
        )
        .where(
            table.c.tenant == tenant,
            table.c.environment == environment,
            table.c.removed_at.is_(None),
        )
    )


def _details(row: sa.Row[tuple[str, str, str, str, bool, str]]) -> DeployedFunctionInfo:
    spec = json.loads(row.spec)
    resources, scaling = spec.get("resources", {}), spec.get("scaling", {})
    return DeployedFunctionInfo(
        id=row.id,
        app=row.app,
        name=row.name,
        revision=row.revision,
        stopped=row.stopped,
        cpu=resources.get("cpu", 1.0),
        memory_bytes=resources.get("memory_bytes", 0),
        gpu=tuple(resources.get("gpu", ())),
        gpu_count=resources.get("gpu_count", 0),
        min_instances=scaling.get("min_instances", 0),
        max_instances=scaling.get("max_instances", 0),
        waiting_cost=scaling.get("waiting_cost"),
        access=tuple(spec.get("access", ())),
        tags=spec.get("tags", {}),
    )
