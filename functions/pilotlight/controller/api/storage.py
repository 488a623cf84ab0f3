"""Freeing what nothing refers to."""

from __future__ import annotations

from functools import partial

import anyio.to_thread
from pydantic import Field

from pilotlight.controller import tenants
from pilotlight.controller.api.models import Body
from pilotlight.controller.context import Admin, Context, Ctx, RequestId
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.stored import deletion
from pilotlight.controller.stored.collector import MAX_LISTED

router = APIRouter(prefix="/v1/storage", tags=["storage"])


class CollectRequest(Body):
    """Which blobs go: those to which nothing refers, and which nobody uploaded or asked for in the
    last `unused_s` seconds."""

    unused_s: float | None = Field(
        default=None, ge=0, le=31_536_000, description="null: controller.blob_grace_s"
    )
    dry_run: bool = False
    all_tenants: bool = Field(
        default=False, description="of every tenant; for administrators of the platform"
    )


class CollectResponse(Body):
    """What was freed, or with `dry_run` would be. `blobs` are digests, at most a thousand of
    them."""

    dry_run: bool
    count: int
    size_bytes: int
    blobs: list[str]
    deleted_blobs: int = Field(description="no tenant had these, so their bytes were deleted")
    deleted_bytes: int


@router.post(":collect")
async def collect(
    context: Ctx, caller: Admin, request: RequestId, body: CollectRequest
) -> CollectResponse:
    """Free the blobs of this tenant to which nothing refers. With `unused_s` 0 no deploy or push
    may run: its uploads would go."""
    caller.demand_whole_environment()
    whose = [caller.tenant]
    if body.all_tenants:
        caller.demand_platform()
        whose = await anyio.to_thread.run_sync(_all, context)
    unused_s = context.config.settings.blob_grace_s if body.unused_s is None else body.unused_s
    unused_since = context.clock() - unused_s if unused_s else float("inf")
    collect_one = partial(
        context.collector.collect,
        unused_since=unused_since,
        dry_run=body.dry_run,
        actor=caller.key,
        request=request,
    )
    found = [await collect_one(tenant=tenant) for tenant in whose]
    digests = sorted({digest for one in found for digest in one.digests})
    done = None if body.dry_run else await deletion.delete(context)
    return CollectResponse(
        dry_run=body.dry_run,
        count=sum(len(one.digests) for one in found),
        size_bytes=sum(one.size_bytes for one in found),
        blobs=digests[:MAX_LISTED],
        deleted_blobs=0 if done is None else done.blobs,
        deleted_bytes=0 if done is None else done.size_bytes,
    )


def _all(context: Context) -> list[str]:
    with context.store.read() as sql:
        return [str(row["id"]) for row in tenants.all_tenants(sql)]
