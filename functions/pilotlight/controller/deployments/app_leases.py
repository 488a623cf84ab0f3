"""Leases of apps. An app that was deployed with a lease (`pilotlight run` and `serve`, `with
app.run()`, `deploy --lease`) is deleted when its lease is not renewed in time, so that a client
that was killed leaves no app behind.

A deploy sets the lease anew, or removes it."""

from __future__ import annotations

import asyncio
import logging

import anyio.to_thread
import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from pilotlight.controller.context import Context
from pilotlight.controller.database import audit_trail, tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.deployments import app_registry, revision_pruning
from pilotlight.controller.registry import snapshot_gc
from pilotlight.controller.registry.app_ref import AppRef
from pilotlight.controller.weights import blob_deletion
from pilotlight.errors import Conflict, PilotlightError

log = logging.getLogger(__name__)

POLL_S = 5.0
"""Interval between two looks for expired apps."""
BATCH = 100
"""Apps that one look deletes at most."""


def renew(write: Write, place: AppRef) -> float:
    """Extend the lease by its length, from now; return the new expiry (seconds since the epoch).
    Raises NotFound; Conflict for an app without a lease."""
    lease_s = app_registry.row_of(write.sql, place)["lease_s"]
    if lease_s is None:
        raise Conflict(
            f"app {place.app!r} has no lease to renew: deploy it with lease_s", app=place.app
        )
    expires_at = write.now + lease_s
    write.sql.execute(sa.update(tables.apps).where(*place.is_app()).values(expires_at=expires_at))
    return float(expires_at)


def expired(sql: sa.Connection, *, now: float) -> list[AppRef]:
    """The apps whose lease has ended, oldest first, BATCH at most."""
    table, owners = tables.apps, tables.tenants
    query = (
        sa.select(table.c.tenant, owners.c.uid, table.c.environment, table.c.name)
        .join(owners, owners.c.id == table.c.tenant)
        .where(table.c.expires_at <= now, table.c.deleted_at.is_(None))
        .order_by(table.c.expires_at)
        .limit(BATCH)
    )
    return [
        AppRef(
            tenant=row.tenant,
            uid=row.uid,
            environment=row.environment,
            app=row.name,
            actor=audit_trail.PLATFORM,
        )
        for row in sql.execute(query)
    ]


async def run(context: Context) -> None:
    """Delete expired apps until cancelled."""
    while True:
        try:
            await delete_expired(context)
        except (PilotlightError, SQLAlchemyError) as e:
            # a full disk, a lost database: the next round retries
            log.error("event=leases_not_checked error=%r", e)
        await asyncio.sleep(POLL_S)


async def delete_expired(context: Context) -> None:
    """Delete the apps whose lease has ended."""

    def read() -> list[AppRef]:
        with context.store.read() as sql:
            return expired(sql, now=context.clock())

    for place in await anyio.to_thread.run_sync(read):
        try:
            removed = await anyio.to_thread.run_sync(_remove_expired, context, place)
        except PilotlightError as e:
            # of one app, such as one that was deleted meanwhile; the others end nevertheless
            log.warning("event=app_not_expired app=%s error=%r", place.app, e)
            continue
        if removed is not None:
            log.info(
                "event=app_expired tenant=%s environment=%s app=%s",
                place.tenant,
                place.environment,
                place.app,
            )
            await release_contents(context, place, *removed)


def _remove_expired(context: Context, place: AppRef) -> tuple[tuple[str, ...], set[str]] | None:
    with context.store.write() as write:
        row = app_registry.row_of(write.sql, place)
        if row["expires_at"] is None or row["expires_at"] > write.now:
            return None  # renewed, or deployed again, meanwhile
        return remove(write, place)


def remove(write: Write, place: AppRef) -> tuple[tuple[str, ...], set[str]]:
    """Remove an app; returns the ids of its functions and the digests that they refer to, for
    `release_contents`. Raises NotFound."""
    removed = app_registry.delete(write, place)
    return removed, revision_pruning.blobs_of_functions(write.sql, removed)


async def release_contents(
    context: Context, place: AppRef, functions: tuple[str, ...], digests: set[str]
) -> None:
    """Delete the snapshots of the functions of a removed app, and the blobs that only they refer
    to."""
    await snapshot_gc.delete_snapshots(context.agent, functions)
    await blob_deletion.release_blobs(
        context.collector,
        context.metrics,
        tenant=place.tenant,
        actor=place.actor,
        digests=digests,
        request=place.request,
    )
