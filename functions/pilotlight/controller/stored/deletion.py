"""After a tenant deleted something: give up the blobs that only it referred to, and delete their
bytes at once."""

from __future__ import annotations

import logging
from collections.abc import Collection

from pilotlight.controller.access import Principal
from pilotlight.controller.context import Context
from pilotlight.controller.stored.collector import Collected, Deleted
from pilotlight.errors import PilotlightError
from weight_cache.errors import ObjectStoreError

log = logging.getLogger(__name__)


async def give_up(
    context: Context,
    caller: Principal,
    digests: Collection[str],
    request: str,
    *,
    manifests: Collection[str] = (),
) -> Collected:
    """Release those of `digests` to which nothing refers, and delete what nobody has. What fails
    now the janitor does later."""
    try:
        done = await context.collector.give_up(
            tenant=caller.tenant,
            digests=digests,
            manifests=manifests,
            actor=caller.key,
            request=request,
        )
        await delete(context)
    except PilotlightError as e:
        log.warning("event=blobs_not_given_up tenant=%s error=%r", caller.tenant, e)
        return Collected()
    return done


async def delete(context: Context) -> Deleted:
    """Delete the blobs that no tenant has, and count them. A store that is away is asked again by
    the janitor."""
    try:
        done = await context.collector.delete_marked()
    except ObjectStoreError as e:
        log.warning("event=blobs_not_deleted error=%r", e)
        return Deleted()
    context.metrics.blobs_deleted.inc(done.blobs)
    context.metrics.blob_bytes_deleted.inc(done.size_bytes)
    return done
