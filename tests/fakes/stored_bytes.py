"""What a tenant stores, summed over its rows: the count is compared with it."""

from __future__ import annotations

import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.identity import stored_bytes
from pilotlight.controller.identity.stored_bytes import StorageUsage


def checked_usage(sql: sa.Connection, tenant: str) -> StorageUsage:
    """The usage as it is counted. Raises AssertionError where the sums differ."""
    blobs, owners = tables.blobs, tables.blob_owners
    owned = sa.select(blobs.c.size_bytes).join(owners, owners.c.digest == blobs.c.digest)
    others = (tables.images, tables.volume_chunks, tables.collections)
    queries = [
        owned.where(owners.c.tenant == tenant),
        *(sa.select(one.c.size_bytes).where(one.c.tenant == tenant) for one in others),
    ]
    parts = [sum(sql.execute(query).scalars()) for query in queries]
    counted = stored_bytes.usage_of_tenant(sql, tenant=tenant)
    assert (counted.total_bytes, counted.collection_bytes) == (sum(parts), parts[-1])
    return counted
