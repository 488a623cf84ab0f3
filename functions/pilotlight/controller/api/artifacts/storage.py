"""Routes for freeing unreferenced storage."""

from __future__ import annotations

from functools import partial

import anyio.to_thread
from pydantic import Field

from pilotlight.controller.api.schemas import Body
from pilotlight.controller.context import Admin, Context, Ctx, RequestId
from pilotlight.controller.identity import tenants
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.weights import blob_deletion
from pilotlight.controller.weights.blob_gc import MAX_LISTED

router = APIRouter(prefix="/v1/storage", tags=["storage"])


class CollectRequest(Body):
    """Which blobs to free: unreferenced ones that were neither uploaded nor requested in the last
    `unused_s` seconds."""

    unused_s: float | None = Field(
        default=None, ge=0, le=31_536_000, description="null: controller.blob_grace_s"
    )
    dry_run: bool = False
    all_tenants: bool = Field(
        default=False, description="of all tenants; platform administrators only"
    )


class CollectResponse(Body):
    """What was freed, or would be with `dry_run`. `blobs` lists at most a thousand digests."""

    dry_run: bool
    count: int
    size_bytes: int
    blobs: list[str]
    deleted_blobs: int = Field(
        description="blobs that no tenant owns, tenant_ids bytes were deleted"
    )
    deleted_bytes: int


@router.post(":collect")
async def collect(
    context: Ctx, caller: Admin, request: RequestId, body: CollectRequest
) -> CollectResponse:
    """Free this tenant's unreferenced blobs. With `unused_s` 0, no deploy or push may be running:
    its uploads would be deleted."""
    caller.require_whole_environment()
    tenant_ids = [caller.tenant]
    if body.all_tenants:
        caller.require_platform()
        tenant_ids = await anyio.to_thread.run_sync(_all, context)
    unused_s = context.config.settings.blob_grace_s if body.unused_s is None else body.unused_s
    unused_since = context.clock() - unused_s if unused_s else float("inf")
    collect_one = partial(
        context.collector.collect,
        unused_since=unused_since,
        dry_run=body.dry_run,
        actor=caller.key,
        request=request,
    )
    found = [await collect_one(tenant=tenant) for tenant in tenant_ids]
    digests = sorted({digest for one in found for digest in one.digests})
    done = (
        None
        if body.dry_run
        else await blob_deletion.delete_unreferenced(context.collector, context.metrics)
    )
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
