"""Each tenant's share of the platform, for the operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sqlalchemy as sa

from pilotlight.controller.analytics import entitlements, rollup_queries
from pilotlight.controller.analytics.gpu_time import GpuTime, gpu_time
from pilotlight.controller.analytics.rollup_queries import UsageCell, UsageSums
from pilotlight.controller.analytics.time_range import TimeRange
from pilotlight.controller.database import tables
from pilotlight.spec.quotas import Plan

MAX_TENANTS = 500
_PAID_IDLE = ("IDLE", "RESERVED")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTime:
    """Paid time, of running calls and of waiting for them; and all time of granted GPUs."""

    busy_s: float
    idle_s: float
    gpus: GpuTime

    @property
    def busy(self) -> float | None:
        """The share of time that ran calls: of all time of granted GPUs if there is any, else of
        paid instance time. None without either."""
        if self.gpus.held_s:
            return self.gpus.utilisation
        whole = self.busy_s + self.idle_s
        return self.busy_s / whole if whole else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantShare:
    """One tenant over a span."""

    id: str
    name: str
    plan: Plan
    suspended: bool
    deleted: bool
    whole: UsageSums
    calls: UsageSums
    utilisation: HeldTime


def read(
    sql: sa.Connection, *, span: TimeRange, plans: Mapping[str, Plan], currency: str
) -> list[TenantShare]:
    """Return all tenants, most usage first. Costs include only `currency`."""
    table = span.table
    by_tenant: dict[str, list[UsageCell]] = {}
    for tenant, cell in _cells(sql, table, span):
        if cell.currency != currency:
            cell.sums.picos = 0
        by_tenant.setdefault(tenant, []).append(cell)
    rows = sql.execute(
        sa.select(tables.tenants).order_by(tables.tenants.c.created_at).limit(MAX_TENANTS)
    )
    shares = [_share(row, by_tenant.get(row.id, []), plans) for row in rows]
    return sorted(shares, key=lambda share: (-share.whole.billed_ns, share.name))


def _cells(sql: sa.Connection, table: sa.Table, span: TimeRange) -> list[tuple[str, UsageCell]]:
    groups = (table.c.tenant, table.c.kind, table.c.currency)
    read = (
        sa.select(*groups, *rollup_queries.summed(table))
        .where(span.covers(table))
        .group_by(*groups)
    )
    return [
        (
            row[0],
            UsageCell(
                unit=0,
                app="",
                function="",
                function_id="",
                kind=row[1],
                start_kind="",
                currency=row[2],
                sums=rollup_queries.sums_of_row(row[3:]),
            ),
        )
        for row in sql.execute(read)
    ]


def _share(
    row: sa.Row[tuple[object, ...]], cells: list[UsageCell], plans: Mapping[str, Plan]
) -> TenantShare:
    busy, idle = (
        rollup_queries.total(c for c in cells if c.kind == "CALL"),
        rollup_queries.total(c for c in cells if c.kind in _PAID_IDLE),
    )
    utilisation = HeldTime(
        busy_s=busy.billed_s,
        idle_s=idle.billed_s,
        gpus=gpu_time(cells),
    )
    return TenantShare(
        id=row.id,
        name=row.name,
        plan=entitlements.plan_from(row.plan, row.overrides, plans),
        suspended=row.suspended_at is not None,
        deleted=row.deleted_at is not None,
        whole=rollup_queries.total(cells),
        calls=busy,
        utilisation=utilisation,
    )


def names(sql: sa.Connection) -> dict[str, str]:
    """Return tenants' names by id."""
    table = tables.tenants
    return {row.id: row.name for row in sql.execute(sa.select(table.c.id, table.c.name))}


def models(sql: sa.Connection) -> dict[str, str]:
    """Return model names (`tenant/environment/name`) by manifest; the first name of each."""
    table, tenants = tables.weights, tables.tenants
    query = sa.select(
        table.c.manifest, tenants.c.name.label("tenant"), table.c.environment, table.c.name
    )
    found: dict[str, str] = {}
    for row in sql.execute(
        query.join(tenants, tenants.c.id == table.c.tenant).order_by(table.c.created_at)
    ):
        found.setdefault(row.manifest, f"{row.tenant}/{row.environment}/{row.name}")
    return found
