"""What a deleted tenant has on nodes and in the blob store: images, models, volumes, and objects.

Nodes are asked before the rows go that name what they have, so that an interrupted step is repeated
whole. Objects are deleted by what deletes them otherwise, too: the collectors of blobs, volumes,
batch files and prediction logs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

import anyio.to_thread
import sqlalchemy as sa

from pilotlight.controller.batches import files as batch_files
from pilotlight.controller.context import Context
from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.predictions import storage as prediction_storage
from pilotlight.controller.tenant_deletion import progress
from pilotlight.controller.tenant_deletion.progress import Deletion
from pilotlight.controller.tenant_deletion.row_deletion import Keys, RowDeletion, is_one_of
from pilotlight.controller.tenant_deletion.tenant_tables import Step, TenantRows, of_step
from pilotlight.controller.weights import blob_gc, node_cache
from pilotlight.controller.weights.storage_reservations import image_key

T = TypeVar("T")
_EXPIRING: Final = (tables.batch_files.name, tables.prediction_files.name)
"""Tables whose rows are deleted with their objects after `expires_at`."""


class Waiting(Exception):
    """Raised when a step of a deletion must be repeated later; its text says why."""


class TenantStorage:
    """Deletes what tenants store. Owner: the task that deletes tenants."""

    def __init__(self, context: Context, rows: RowDeletion) -> None:
        self._context = context
        self._rows = rows

    async def delete(self, found: Deletion) -> None:
        """Delete images, models and volumes on nodes, then their rows, and release blobs. Raises
        SnapshotterError, Waiting."""
        await self._delete_images(found)
        await self._evict_weights(found)
        for volume in await self._ids(tables.volumes.c.id, found):
            await self._context.agent.drop_volume(volume)
        for rows in of_step(Step.STORAGE):
            if rows.table is tables.blob_owners:
                await self._rows.apply(rows, found.tenant, partial(_release, found.tenant))
            else:
                await self._rows.delete(rows, found.tenant)

    async def wait_for_objects(self, found: Deletion) -> None:
        """Have the collectors delete the tenant's objects. Raises ObjectStoreError, PilotlightError,
        Waiting."""
        now = self._context.clock()
        for rows in of_step(Step.OBJECTS):
            if rows.name in _EXPIRING:
                column = rows.table.c.expires_at
                await self._rows.apply(
                    rows, found.tenant, partial(_expire, rows, now), column > now
                )
        while await batch_files.delete_expired(self._context):
            pass
        await prediction_storage.delete_expired(self._context)
        await self._context.volumes.collect(found.tenant, before=float("inf"))
        await self._context.collector.delete_marked()
        for rows in of_step(Step.OBJECTS):
            if await self._rows.keys(rows, found.tenant, limit=1):
                raise Waiting(f"objects of {rows.name} are in use")

    async def _delete_images(self, found: Deletion) -> None:
        gate = self._context.files.gate
        for digest in await self._ids(tables.images.c.digest, found):
            with gate.deleting(image_key(digest, found.tenant)) as is_free:
                if not is_free:
                    raise Waiting(f"image {digest[:12]} is being built")
                if found.uid is not None:
                    await self._context.agent.delete_image(digest, uid=found.uid)
                elif await self._read(partial(_is_last_image, tenant=found.tenant, digest=digest)):
                    with gate.deleting(image_key(digest)) as is_unused:
                        if is_unused:  # otherwise another tenant is building it
                            await self._context.agent.delete_image(digest, uid=None)

    async def _evict_weights(self, found: Deletion) -> None:
        """Unpin and drop models that no other tenant names. A cache that does not answer unpins
        them later (`node_cache.sweep`), and evicts the least recently used."""
        manifests = await self._read(partial(_only_of, tenant=found.tenant))
        await node_cache.forget(self._context.cache, manifests)

    async def _ids(self, column: sa.Column[str], found: Deletion) -> list[str]:
        query = sa.select(column).where(column.table.c.tenant == found.tenant).order_by(column)
        return await self._read(lambda sql: list(sql.execute(query).scalars()))

    async def _read(self, query: Callable[[sa.Connection], T]) -> T:
        def run() -> T:
            with self._context.store.read() as sql:
                return query(sql)

        return await anyio.to_thread.run_sync(run)


def _release(tenant: str, write: Write, keys: Keys) -> None:
    digests = {digest for _, digest in keys}
    blob_gc.drop(write, tenant=tenant, digests=digests)
    progress.count(write, tenant, tables.blob_owners.name, len(digests))


def _expire(rows: TenantRows, now: float, write: Write, keys: Keys) -> None:
    change = sa.update(rows.table).where(is_one_of(rows.table, keys)).values(expires_at=now)
    write.sql.execute(change)


def _is_last_image(sql: sa.Connection, *, tenant: str, digest: str) -> bool:
    table = tables.images
    others = sa.select(table.c.tenant).where(table.c.digest == digest, table.c.tenant != tenant)
    return sql.execute(others.limit(1)).first() is None


def _only_of(sql: sa.Connection, *, tenant: str) -> list[str]:
    """Manifests that only this tenant has names for."""
    table = tables.weights
    others = table.alias()
    elsewhere = sa.exists().where(
        others.c.manifest == table.c.manifest, others.c.tenant != tenant
    )
    query = sa.select(table.c.manifest).where(table.c.tenant == tenant, ~elsewhere).distinct()
    return sorted(sql.execute(query).scalars())
