"""Limits of what a tenant's plan lets it store; `identity.stored_bytes` says what counts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import sqlalchemy as sa

from pilotlight.controller.database import retention, tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.identity import stored_bytes
from pilotlight.controller.identity.stored_bytes import StorageUsage
from pilotlight.controller.identity.tenant_plan import tenant_plan_of
from pilotlight.errors import StorageQuotaExceeded
from pilotlight.spec.quotas import Plan

HINT = (
    "See what counts: `pilotlight tenant show`, `weights list`, `image list`. Delete with "
    "`pilotlight weights delete NAME`, `volume rm NAME PATH`, `dict delete NAME`, `image delete "
    "DIGEST`, `app prune APP` or `app delete APP`; `storage collect` frees unreferenced data."
)
PIN_HINT = (
    "See what is pinned: `pilotlight weights list`. Unpin with `pilotlight weights unpin NAME`."
)


def pinned_bytes(sql: sa.Connection, *, tenant: str) -> int:
    """Size in bytes of the tenant's pinned weights; each manifest counts once, however many names
    pin it."""
    return sum(_pinned(sql, tenant=tenant).values())


def plan_of(sql: sa.Connection, plans: Mapping[str, Plan], *, tenant: str) -> Plan:
    """The tenant's plan with its overrides."""
    return tenant_plan_of(
        sql.execute(sa.select(tables.tenants).where(tables.tenants.c.id == tenant)).one(), plans
    ).resolve()


def require_room(
    sql: sa.Connection, plan: Plan, *, tenant: str, more_bytes: int, coming_bytes: int = 0
) -> None:
    """Raise StorageQuotaExceeded when `more_bytes` do not fit; `coming_bytes` belong to uploads in
    progress."""
    if plan.stored_bytes is not None:
        usage = stored_bytes.usage_of_tenant(sql, tenant=tenant)
        require_fitting(plan, usage, more_bytes=more_bytes, coming_bytes=coming_bytes)


def require_fitting(
    plan: Plan, usage: StorageUsage, *, more_bytes: int, coming_bytes: int = 0
) -> None:
    """Like `require_room`, for a tenant with this usage."""
    used = usage.total_bytes + coming_bytes
    if plan.stored_bytes is not None and used + more_bytes > plan.stored_bytes:
        raise StorageQuotaExceeded(
            f"{more_bytes} more bytes do not fit: this tenant stores {used} bytes "
            f"({usage.collection_bytes} in dicts and queues, {coming_bytes} in running uploads), "
            f"and its plan allows stored_bytes = {plan.stored_bytes}; nothing was stored",
            quota="stored_bytes",
            limit=plan.stored_bytes,
            used=used,
            hint=HINT,
        )


def count_functions(sql: sa.Connection, *, tenant: str) -> int:
    """Number of functions that `tenant` has deployed."""
    table = tables.functions
    query = sa.select(sa.func.count()).where(table.c.tenant == tenant, table.c.removed_at.is_(None))
    return int(sql.execute(query).scalar_one())


@contextlib.contextmanager
def enforce_deploy_limits(
    write: Write, plans: Mapping[str, Plan], *, tenant: str
) -> Iterator[None]:
    """Enforce the plan around a deploy: delete the oldest revisions and history entries beyond it.
    Raises StorageQuotaExceeded when the tenant would have too many functions."""
    before, revisions = (
        count_functions(write.sql, tenant=tenant),
        retention.count_revisions(write.sql, tenant=tenant),
    )
    yield
    plan = plan_of(write.sql, plans, tenant=tenant)
    if plan.functions is not None and (now := count_functions(write.sql, tenant=tenant)) > max(
        plan.functions, before
    ):
        raise StorageQuotaExceeded(
            f"this tenant would have {now} functions, and its plan allows functions = "
            f"{plan.functions}; nothing was deployed",
            quota="functions",
            limit=plan.functions,
            used=before,
            hint="Delete apps that are not needed: `pilotlight app delete APP`.",
        )
    retention.enforce_retention(write, plan, tenant=tenant, before=revisions)


def require_room_for_pin(
    sql: sa.Connection, plan: Plan, *, tenant: str, manifest: str, size_bytes: int
) -> None:
    """Raise StorageQuotaExceeded when pinning `manifest` would exceed `pinned_bytes`. A manifest
    that is pinned already fits."""
    if plan.pinned_bytes is None:
        return
    pinned = _pinned(sql, tenant=tenant)
    used = sum(pinned.values())
    if manifest not in pinned and used + size_bytes > plan.pinned_bytes:
        raise StorageQuotaExceeded(
            f"cannot pin {size_bytes} more bytes: this tenant has {used} bytes pinned, "
            f"and its plan allows pinned_bytes = "
            f"{plan.pinned_bytes}",
            quota="pinned_bytes",
            limit=plan.pinned_bytes,
            used=used,
            hint=PIN_HINT,
        )


def _pinned(sql: sa.Connection, *, tenant: str) -> dict[str, int]:
    table = tables.weights
    query = sa.select(table.c.manifest, sa.func.max(table.c.size_bytes).label("size_bytes"))
    rows = sql.execute(
        query.where(table.c.tenant == tenant, table.c.is_pinned).group_by(table.c.manifest)
    )
    return {row.manifest: int(row.size_bytes) for row in rows}
