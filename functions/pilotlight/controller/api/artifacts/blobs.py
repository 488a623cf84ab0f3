"""Routes for uploading and downloading blobs."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Header, Request, Response

from pilotlight.controller.api import schemas
from pilotlight.controller.context import Context, Ctx, Deployer
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.server.request_id import request_id
from pilotlight.controller.weights import blob_download, blobs, storage_usage
from pilotlight.errors import NotFound
from pilotlight.spec.quotas import Plan

router = APIRouter(prefix="/v1", tags=["blobs"])
TOUCHES = 4
"""How often per `controller.blob_grace_s` a HEAD request may refresh a blob's last use: each
refresh is a database write."""
_BYTES: dict[str, Any] = {
    "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}
}


@router.head("/blobs/{digest}")
async def has_blob(context: Ctx, caller: Deployer, digest: str) -> Response:
    """Return 200 with Content-Length if this tenant may refer to the blob, else 404. The blob is
    kept for at least `controller.blob_grace_s` from now."""
    size = await blobs.require_owned(
        context.files, context.store, tenant=caller.tenant, digest=digest
    )
    due = context.clock() - context.config.settings.blob_grace_s / TOUCHES
    if not await blobs.touch(context.store, tenant=caller.tenant, digest=digest, before=due):
        raise NotFound(f"there is no blob {digest}")
    return Response(
        status_code=200,
        headers={"content-length": str(size), "etag": f'"{digest}"', "accept-ranges": "bytes"},
    )


@router.get(
    "/blobs/{digest}",
    response_class=Response,
    responses={
        200: {"description": "The blob", "content": _BYTES},
        206: {"description": "The part that `Range` requests", "content": _BYTES},
        304: {"description": "Not modified: `If-None-Match` matches the blob's ETag"},
    },
)
async def get_blob(
    context: Ctx,
    caller: Deployer,
    digest: str,
    *,
    requested_range: Annotated[
        str | None, Header(alias="range", description="`bytes=0-16777215`; one range")
    ] = None,
    if_range: Annotated[
        str | None,
        Header(
            description="return the range only if this matches the blob's ETag, else the whole blob"
        ),
    ] = None,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """Return a blob that this tenant may refer to, or a range of it. Its ETag is its digest. 416 if
    no byte of the range exists."""
    size = await blobs.require_owned(
        context.files, context.store, tenant=caller.tenant, digest=digest
    )
    conditions = blob_download.RangeConditions(
        range=requested_range, if_range=if_range, if_none_match=if_none_match
    )
    turn = context.downloads.share(caller.tenant)
    return blob_download.blob_response(context.files, digest, size, conditions, turn=turn)


@router.put(
    "/blobs/{digest}",
    openapi_extra={"requestBody": {"required": True, "content": _BYTES}},
)
async def put_blob(
    context: Ctx,
    caller: Deployer,
    request: Request,
    digest: str,
    *,
    chunked: bool = False,
    content_length: Annotated[int | None, Header(ge=0, include_in_schema=False)] = None,
) -> schemas.BlobInfo:
    """Store the body under its sha256, or (`chunked`) as a weights file, whose digest is computed
    from its chunks' hashes.

    Uploading a blob again is cheap."""
    blobs.check_digest(digest)
    plan = await context.threads.run(caller.tenant, plan_of, context, caller.tenant)
    size, created = await blobs.store_blob(
        context.files,
        context.store,
        tenant=caller.tenant,
        digest=digest,
        chunked=chunked,
        pieces=request.stream(),
        announced_bytes=content_length,
        actor=caller.key,
        plan=plan,
        request=request_id(request),
    )
    context.metrics.blob_bytes.inc(size if created else 0)
    return schemas.BlobInfo(digest=digest, size_bytes=size, created=created)


def plan_of(context: Context, tenant: str) -> Plan:
    """Return the tenant's plan."""
    with context.store.read() as sql:
        return storage_usage.plan_of(sql, context.config.plans, tenant=tenant)
