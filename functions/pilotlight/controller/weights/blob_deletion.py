"""Release blobs after a tenant deleted something that referred to them, and delete their bytes at
once."""

from __future__ import annotations

import logging
from collections.abc import Collection

from pilotlight.controller.server.metrics import Metrics
from pilotlight.controller.weights.blob_gc import BlobCollector, DeletedBlobs, ReleasedBlobs
from pilotlight.core.object_store.errors import ObjectStoreError
from pilotlight.errors import PilotlightError

log = logging.getLogger(__name__)


async def release_blobs(
    collector: BlobCollector,
    metrics: Metrics,
    *,
    tenant: str,
    actor: str,
    digests: Collection[str],
    request: str,
    manifests: Collection[str] = (),
) -> ReleasedBlobs:
    """Release those of `digests` that are not referenced, and delete blobs without an owner. The
    janitor retries failures later."""
    try:
        done = await collector.give_up(
            tenant=tenant,
            digests=digests,
            manifests=manifests,
            actor=actor,
            request=request,
        )
        await delete_unreferenced(collector, metrics)
    except PilotlightError as e:
        log.warning("event=blobs_not_given_up tenant=%s error=%r", tenant, e)
        return ReleasedBlobs()
    return done


async def delete_unreferenced(collector: BlobCollector, metrics: Metrics) -> DeletedBlobs:
    """Delete the blobs without an owner and update the metrics. If the store does not answer, the
    janitor retries later."""
    try:
        done = await collector.delete_marked()
    except ObjectStoreError as e:
        log.warning("event=blobs_not_deleted error=%r", e)
        return DeletedBlobs()
    metrics.blobs_deleted.inc(done.blobs)
    metrics.blob_bytes_deleted.inc(done.size_bytes)
    return done
