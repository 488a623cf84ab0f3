"""Retention of revisions by age (`controller.revision_days`).

Revisions that cannot be called are pruned, as `pilotlight app prune` does: of each function the
newest `KEPT` stay, and those with traffic, a tag, an alias, a pin, or a part in a rollout or an
experiment. Rows of revisions that were pruned, or whose function was removed, are deleted as long
after that; those with tags that bills are grouped by after 400 days at the earliest."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Final

import sqlalchemy as sa

from pilotlight.controller.billing.usage_aggregation import DAY_S
from pilotlight.controller.context import Context
from pilotlight.controller.database import audit_trail, retention, tables
from pilotlight.controller.database.transactions import in_read, in_write
from pilotlight.controller.deployments import revision_pruning
from pilotlight.controller.registry.app_ref import AppRef
from snapshotter.errors import SnapshotterError

log = logging.getLogger(__name__)

KEPT: Final = 10
"""Revisions of a function that stay, whatever their age; the default of `app prune --keep`, too."""
AT_ONCE: Final = 50
"""Rows of revisions that one transaction deletes."""


async def prune_revisions(context: Context) -> int:
    """Prune, app by app; returns the number of revisions."""
    days = context.config.settings.revision_days
    if days is None:
        return 0
    before, pruned = context.clock() - days * DAY_S, 0
    for place in await in_read(context.store, partial(_apps, before=before)):
        change = partial(
            revision_pruning.prune, place=place, keep=KEPT, dry_run=False, before=before
        )
        done = await in_write(context.store, change)
        pruned += len(done.revisions)
        await _delete_snapshots(context, done.revisions)
    deleted = AT_ONCE
    while deleted >= AT_ONCE:
        delete = partial(retention.delete_retired, before=before, at_most=AT_ONCE)
        deleted = await in_write(context.store, delete)
    if pruned:
        log.info("event=revisions_pruned count=%d", pruned)
    return pruned


async def _delete_snapshots(context: Context, revisions: Sequence[tuple[str, str]]) -> None:
    """If this fails, the node's own budget evicts them."""
    try:
        for function, name in revisions:
            await context.agent.delete_snapshots(revision=f"{function}@{name}")
    except SnapshotterError as e:
        log.info("event=snapshots_stay error=%r", e)


def _apps(sql: sa.Connection, *, before: float) -> list[AppRef]:
    """Apps with revisions to prune, as far as that shows without reading who calls them."""
    functions, revisions, owners = tables.functions, tables.revisions, tables.tenants
    columns = (functions.c.tenant, owners.c.uid, functions.c.environment, functions.c.app)
    query = (
        sa.select(*columns)
        .join(owners, owners.c.id == functions.c.tenant)
        .join(revisions, revisions.c.function == functions.c.id)
        .where(
            functions.c.removed_at.is_(None),
            revisions.c.pruned_at.is_(None),
            revisions.c.created_at < before,
            revisions.c.ordinal <= functions.c.revisions - KEPT,
            owners.c.deleted_at.is_(None),
        )
    )
    return [
        AppRef(
            tenant=row.tenant,
            uid=row.uid,
            environment=row.environment,
            app=row.app,
            actor=audit_trail.PLATFORM,
        )
        for row in sql.execute(query.distinct())
    ]
