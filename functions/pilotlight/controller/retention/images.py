"""Deletes images that no revision uses and that were built longer ago than `controller.image_days`:
their records, and the built environments on this machine's node. A deploy that needs one builds it
again."""

from __future__ import annotations

import logging
from functools import partial

import sqlalchemy as sa

from pilotlight.controller.billing.usage_aggregation import DAY_S
from pilotlight.controller.context import Context
from pilotlight.controller.database import audit_trail, tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.database.transactions import in_read, in_write
from pilotlight.controller.registry import images
from pilotlight.controller.weights.storage_reservations import image_key
from pilotlight.errors import Conflict, NotFound
from snapshotter.errors import SnapshotterError

log = logging.getLogger(__name__)


async def delete_images(context: Context) -> int:
    """Delete them; returns their number. What a node without an answer keeps, the next build of the
    image uses."""
    days = context.config.settings.image_days
    if days is None:
        return 0
    before, deleted = context.clock() - days * DAY_S, 0
    for tenant, uid, digest in await in_read(context.store, partial(_unused, before=before)):
        with context.files.gate.deleting(image_key(digest, tenant)) as is_free:
            forget = partial(_forget, tenant=tenant, digest=digest)
            if not is_free or not await in_write(context.store, forget):
                continue
            deleted += 1
            try:
                await delete_on_node(context, tenant=tenant, uid=uid, digest=digest)
            except SnapshotterError as e:
                log.info("event=image_stays image=%s error=%r", digest, e)
    if deleted:
        log.info("event=images_deleted count=%d", deleted)
    return deleted


async def delete_on_node(context: Context, *, tenant: str, uid: int | None, digest: str) -> None:
    """Delete the built environment of a tenant's image; one that tenants share only where no other
    tenant has it, or builds it. Raises SnapshotterError."""
    if uid is not None:
        await context.agent.delete_image(digest, uid=uid)
        return
    if await in_read(context.store, partial(_is_of_others, tenant=tenant, digest=digest)):
        return
    with context.files.gate.deleting(image_key(digest)) as is_unused:
        if is_unused:
            await context.agent.delete_image(digest, uid=None)


def _unused(sql: sa.Connection, *, before: float) -> list[tuple[str, int | None, str]]:
    table, owners = tables.images, tables.tenants
    query = (
        sa.select(table.c.tenant, owners.c.uid, table.c.digest)
        .join(owners, owners.c.id == table.c.tenant)
        .where(table.c.created_at < before, owners.c.deleted_at.is_(None))
        .order_by(table.c.tenant, table.c.digest)
    )
    used: dict[str, set[str]] = {}
    found = []
    for tenant, uid, digest in sql.execute(query):
        if tenant not in used:
            used[tenant] = set(images.users(sql, tenant=tenant))
        if digest not in used[tenant]:
            found.append((tenant, uid, digest))
    return found


def _is_of_others(sql: sa.Connection, *, tenant: str, digest: str) -> bool:
    table = tables.images
    others = sa.select(table.c.tenant).where(table.c.digest == digest, table.c.tenant != tenant)
    return sql.execute(others.limit(1)).first() is not None


def _forget(write: Write, *, tenant: str, digest: str) -> bool:
    try:
        images.delete(write, tenant=tenant, digest=digest)
    except (Conflict, NotFound):  # a deploy uses it now, or it was deleted
        return False
    audit_trail.record(
        write, tenant=tenant, actor=audit_trail.PLATFORM, action="image.delete", subject=digest
    )
    return True
