"""Retention of deployed revisions: delete old entries of apps' histories, and retired revisions,
once a tenant exceeds its limit.

A plan with N `functions` allows KEPT_PER_FUNCTION * N revisions and entries. Revisions that can be
called are kept, and so are the newest entries of each existing app. A revision is retired when it
is pruned or its function is removed; revisions with tags stay for TAGS_KEPT_S after that, because
bills are grouped by tags. A function without revisions is deleted with all that belongs to it."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from pilotlight.controller.database import bulk, tables
from pilotlight.controller.database.store import Write
from pilotlight.errors import StorageQuotaExceeded
from pilotlight.spec.quotas import Plan

KEPT_PER_FUNCTION = 100
TAGS_KEPT_S = 400 * 86_400.0
"""Bills of the previous year can still be grouped by tags."""
_SLACK = 100
"""Deleted beyond the excess, so that not every deploy at the limit deletes again."""


def enforce_retention(write: Write, plan: Plan, *, tenant: str, before: int) -> None:
    """Delete the oldest after a deploy. `before`: number of revisions before it. Raises
    StorageQuotaExceeded when too many must stay."""
    if plan.functions is None:
        return
    limit = KEPT_PER_FUNCTION * plan.functions
    _delete_entries(write, tenant, limit)
    if (now := count_revisions(write.sql, tenant=tenant)) <= limit:
        return
    now -= _delete_revisions(write, tenant, at_most=now - limit + _SLACK)
    if now > max(limit, before):
        raise StorageQuotaExceeded(
            f"this tenant would have {now} revisions, and its plan allows {limit}: "
            f"{KEPT_PER_FUNCTION} for each of functions = {plan.functions}; nothing was deployed",
            quota="functions",
            limit=limit,
            used=before,
            hint="Prune some: `pilotlight app prune APP`. Revisions with tags that bills are "
            "grouped by stay for 400 days after that; the operator can raise `functions`.",
        )


def count_revisions(sql: sa.Connection, *, tenant: str) -> int:
    """Return how many revisions the tenant has, including those of removed functions."""
    table, functions = tables.revisions, tables.functions
    query = (
        sa.select(sa.func.count())
        .select_from(table)
        .join(functions, functions.c.id == table.c.function)
    )
    return int(sql.execute(query.where(functions.c.tenant == tenant)).scalar_one())


def delete_functions(sql: sa.Connection, ids: Sequence[str]) -> None:
    """Delete functions and all that belongs to them except their history and usage."""
    for part in bulk.parts(ids):
        _delete_part(sql, part)


def _delete_part(sql: sa.Connection, ids: Sequence[str]) -> None:
    for children, column, parents in (
        (tables.rollout_decisions, tables.rollout_decisions.c.rollout, tables.rollouts),
        (tables.exposures, tables.exposures.c.experiment, tables.experiments),
        (tables.exposure_latency, tables.exposure_latency.c.experiment, tables.experiments),
    ):
        sql.execute(
            sa.delete(children).where(
                column.in_(sa.select(parents.c.id).where(parents.c.function.in_(ids)))
            )
        )
    for table in (
        tables.rollouts,
        tables.experiments,
        tables.slo_alerts,
        tables.aliases,
        tables.approvals,
        tables.traffic,
        tables.schedules,
        tables.revisions,
    ):
        sql.execute(sa.delete(table).where(table.c.function.in_(ids)))
    for table in (tables.feedback, tables.drift_references, tables.drift_reports):
        sql.execute(sa.delete(table).where(table.c.function_id.in_(ids)))
    for table in (tables.drift_sketches, tables.drift_scores):  # the janitor deletes and uncounts
        sql.execute(sa.update(table).where(table.c.function_id.in_(ids)).values(expires_at=0.0))
    sql.execute(sa.delete(tables.functions).where(tables.functions.c.id.in_(ids)))


def _delete_entries(write: Write, tenant: str, limit: int) -> None:
    table, apps = tables.deployments, tables.apps
    count = sa.select(sa.func.count()).where(table.c.tenant == tenant)
    if (excess := int(write.sql.execute(count).scalar_one()) - limit) <= 0:
        return
    key = (table.c.tenant, table.c.environment, table.c.app, table.c.version)
    same_app = (
        (apps.c.tenant == table.c.tenant)
        & (apps.c.environment == table.c.environment)
        & (apps.c.name == table.c.app)
    )
    may_go = apps.c.deleted_at.is_not(None) | (
        table.c.version <= apps.c.version - KEPT_PER_FUNCTION
    )
    oldest = sa.select(*key).join(apps, same_app).where(table.c.tenant == tenant, may_go)
    oldest = oldest.order_by(table.c.created_at, table.c.version).limit(excess + _SLACK)
    write.sql.execute(sa.delete(table).where(sa.tuple_(*key).in_(oldest)))


def delete_retired(write: Write, *, before: float, at_most: int) -> int:
    """Delete revisions of any tenant that were retired before `before`, oldest first; return how
    many."""
    return _delete(write, _given_up_at() < before, at_most=at_most)


def _given_up_at() -> sa.ColumnElement[float]:
    return sa.func.coalesce(tables.functions.c.removed_at, tables.revisions.c.pruned_at)


def _delete_revisions(write: Write, tenant: str, *, at_most: int) -> int:
    """Delete retired revisions of a tenant, oldest first; return how many."""
    return _delete(write, tables.functions.c.tenant == tenant, at_most=at_most)


def _delete(write: Write, where: sa.ColumnElement[bool], *, at_most: int) -> int:
    table, functions = tables.revisions, tables.functions
    given_up_at = _given_up_at()
    may_go = given_up_at.is_not(None) & (
        ~table.c.has_tags | (given_up_at < write.now - TAGS_KEPT_S)
    )
    oldest = (
        sa.select(table.c.function, table.c.name, functions.c.tenant)
        .join(functions, functions.c.id == table.c.function)
        .where(where, may_go)
        .order_by(table.c.created_at)
        .limit(at_most)
    )
    gone = write.sql.execute(oldest).all()
    for row in gone:
        for of_it in (tables.approvals, tables.aliases):
            write.sql.execute(
                sa.delete(of_it).where(
                    of_it.c.function == row.function, of_it.c.revision == row.name
                )
            )
        write.sql.execute(
            sa.delete(table).where(table.c.function == row.function, table.c.name == row.name)
        )
    for tenant in {row.tenant for row in gone}:
        _delete_empty(write.sql, tenant)
    return len(gone)


def _delete_empty(sql: sa.Connection, tenant: str) -> None:
    """Delete removed functions without revisions, then deleted apps without functions; keep apps
    whose policy guards their releases."""
    functions, apps = tables.functions, tables.apps
    has_revisions = sa.exists().where(tables.revisions.c.function == functions.c.id)
    empty = sa.select(functions.c.id).where(
        functions.c.tenant == tenant, functions.c.removed_at.is_not(None), ~has_revisions
    )
    delete_functions(sql, sql.execute(empty).scalars().all())
    has_functions = sa.exists().where(
        functions.c.tenant == apps.c.tenant,
        functions.c.environment == apps.c.environment,
        functions.c.app == apps.c.name,
    )
    left = sa.select(apps.c.environment, apps.c.name).where(
        apps.c.tenant == tenant,
        apps.c.deleted_at.is_not(None),
        apps.c.policy == "{}",
        ~has_functions,
    )
    entries = tables.deployments
    for app in sql.execute(left).all():
        place = (
            entries.c.tenant == tenant,
            entries.c.environment == app.environment,
            entries.c.app == app.name,
        )
        sql.execute(sa.delete(entries).where(*place))
        sql.execute(
            sa.delete(apps).where(
                apps.c.tenant == tenant,
                apps.c.environment == app.environment,
                apps.c.name == app.name,
            )
        )
