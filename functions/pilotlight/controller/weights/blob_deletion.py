"""Release blobs after a tenant deleted something that referred to them, and delete their bytes at
once."""

from __future__ import annotations

import logging
from collections.abc import Collection

from pilotlight.controller.context import Context
from pilotlight.controller.identity.access_control import Principal
from pilotlight.controller.weights.blob_gc import DeletedBlobs, ReleasedBlobs
from pilotlight.core.object_store.errors import ObjectStoreError
from pilotlight.errors import PilotlightError

log = logging.getLogger(__name__)


async def release_blobs(
    context: Context,
    caller: Principal,
    digests: Collection[str],
    request: str,
    *,
    manifests: Collection[str] = (),
) -> ReleasedBlobs:
    """Release those of `digests` that are not referenced, and delete blobs without an owner. The
    janitor retries failures later."""
    try:
        done = await context.collector.give_up(
            tenant=caller.tenant,
            digests=digests,
            manifests=manifests,
            actor=caller.key,
            request=request,
        )
        await delete_unreferenced(context)
    except PilotlightError as e:
        log.warning("event=blobs_not_given_up tenant=%s error=%r", caller.tenant, e)
        return ReleasedBlobs()
    return done


async def delete_unreferenced(context: Context) -> DeletedBlobs:
    """Delete the blobs without an owner and update the metrics. If the store does not answer, the
    janitor retries later."""
    try:
        done = await context.collector.delete_marked()
    except ObjectStoreError as e:
        log.warning("event=blobs_not_deleted error=%r", e)
        return DeletedBlobs()
    context.metrics.blobs_deleted.inc(done.blobs)
    context.metrics.blob_bytes_deleted.inc(done.size_bytes)
    return done
