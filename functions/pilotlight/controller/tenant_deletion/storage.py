"""What a deleted tenant has on nodes and in the blob store: images, models, volumes, and objects.

Nodes are asked before the rows go that name what they have, so that an interrupted step is repeated
whole. Objects are deleted by what deletes them otherwise, too: the collectors of blobs, volumes,
batch files and prediction logs."""

from __future__ import annotations

from functools import partial
from typing import Final

import sqlalchemy as sa

from pilotlight.controller.batches import files as batch_files
from pilotlight.controller.context import Context
from pilotlight.controller.database import bulk, tables
from pilotlight.controller.database.pieces import Keys, Pieces
from pilotlight.controller.database.store import Write
from pilotlight.controller.database.transactions import in_read
from pilotlight.controller.predictions import storage as prediction_storage
from pilotlight.controller.retention import images
from pilotlight.controller.tenant_deletion import progress
from pilotlight.controller.tenant_deletion.progress import Deletion
from pilotlight.controller.tenant_deletion.tenant_tables import Step, TenantRows, of_step
from pilotlight.controller.weights import blob_gc, node_cache
from pilotlight.controller.weights.storage_reservations import image_key

_EXPIRING: Final = (tables.batch_files.name, tables.prediction_files.name)
"""Tables whose rows are deleted with their objects after `expires_at`."""


class Waiting(Exception):
    """Raised when a step of a deletion must be repeated later; its text says why."""


class TenantStorage:
    """Deletes what tenants store. Owner: the task that deletes tenants."""

    def __init__(self, context: Context, pieces: Pieces) -> None:
        self._context = context
        self._pieces = pieces

    async def delete(self, found: Deletion) -> None:
        """Delete images, models and volumes on nodes, then their rows, and release blobs. Raises
        SnapshotterError, Waiting."""
        await self._delete_images(found)
        await self._evict_weights(found)
        for volume in await self._ids(tables.volumes.c.id, found):
            await self._context.agent.drop_volume(volume)
        for rows in of_step(Step.STORAGE):
            delete = _release if rows.table is tables.blob_owners else progress.delete_rows
            change = partial(delete, rows, found.tenant)
            await self._pieces.apply(rows.table, rows.where(found.tenant), change)

    async def wait_for_objects(self, found: Deletion) -> None:
        """Have the collectors delete the tenant's objects. Raises ObjectStoreError,
        PilotlightError, Waiting."""
        now = self._context.clock()
        for rows in of_step(Step.OBJECTS):
            if rows.name in _EXPIRING:
                is_kept = sa.and_(rows.where(found.tenant), rows.table.c.expires_at > now)
                await self._pieces.apply(rows.table, is_kept, partial(_expire, rows, now))
        while await batch_files.delete_expired(self._context):
            pass
        await prediction_storage.delete_expired(self._context)
        await self._context.volumes.collect(found.tenant, before=float("inf"))
        await self._context.collector.delete_marked()
        for rows in of_step(Step.OBJECTS):
            if await self._pieces.keys(rows.table, rows.where(found.tenant), limit=1):
                raise Waiting(f"objects of {rows.name} are in use")

    async def _delete_images(self, found: Deletion) -> None:
        gate = self._context.files.gate
        for digest in await self._ids(tables.images.c.digest, found):
            with gate.deleting(image_key(digest, found.tenant)) as is_free:
                if not is_free:
                    raise Waiting(f"image {digest[:12]} is being built")
                await images.delete_on_node(
                    self._context, tenant=found.tenant, uid=found.uid, digest=digest
                )

    async def _evict_weights(self, found: Deletion) -> None:
        """Unpin and drop models that no other tenant names. A cache that does not answer unpins
        them later (`node_cache.sweep`), and evicts the least recently used."""
        manifests = await in_read(self._context.store, partial(_only_of, tenant=found.tenant))
        await node_cache.forget(self._context.cache, manifests)

    async def _ids(self, column: sa.Column[str], found: Deletion) -> list[str]:
        query = sa.select(column).where(column.table.c.tenant == found.tenant).order_by(column)
        return await in_read(self._context.store, lambda sql: list(sql.execute(query).scalars()))


def _release(rows: TenantRows, tenant: str, write: Write, keys: Keys) -> None:
    digests = {digest for _, digest in keys}
    blob_gc.drop(write, tenant=tenant, digests=digests)
    progress.count(write, tenant, rows.name, len(digests))


def _expire(rows: TenantRows, now: float, write: Write, keys: Keys) -> None:
    those = bulk.is_one_of(write.sql, tuple(rows.table.primary_key), keys)
    write.sql.execute(sa.update(rows.table).where(those).values(expires_at=now))


def _only_of(sql: sa.Connection, *, tenant: str) -> list[str]:
    """Manifests that only this tenant has names for."""
    table = tables.weights
    others = table.alias()
    elsewhere = sa.exists().where(others.c.manifest == table.c.manifest, others.c.tenant != tenant)
    query = sa.select(table.c.manifest).where(table.c.tenant == tenant, ~elsewhere).distinct()
    return sorted(sql.execute(query).scalars())
