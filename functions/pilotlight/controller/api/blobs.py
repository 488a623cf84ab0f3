"""Blobs in and out."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Header, Request, Response

from pilotlight.controller import blobs, downloads
from pilotlight.controller.api import models
from pilotlight.controller.context import Context, Ctx, Deployer, request_id
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.stored import accounting
from pilotlight.errors import NotFound
from pilotlight.quotas import Plan

router = APIRouter(prefix="/v1", tags=["blobs"])
TOUCHES = 4
"""A question for a blob is noted so often during the grace of `controller.blob_grace_s`: each note
is a write to the database."""
_BYTES: dict[str, Any] = {
    "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}
}


@router.head("/blobs/{digest}")
async def has_blob(context: Ctx, caller: Deployer, digest: str) -> Response:
    """200 with Content-Length when this tenant may name the blob, else 404. It is kept for
    `controller.blob_grace_s` from now on."""
    size = await blobs.owned(context.files, context.store, tenant=caller.tenant, digest=digest)
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
        206: {"description": "The part that `Range` asks for", "content": _BYTES},
        304: {"description": "The caller has it: `If-None-Match` names it"},
    },
)
async def get_blob(
    context: Ctx,
    caller: Deployer,
    digest: str,
    *,
    asked_range: Annotated[
        str | None, Header(alias="range", description="`bytes=0-16777215`; one range")
    ] = None,
    if_range: Annotated[
        str | None, Header(description="the part only if this is the blob's ETag, else the whole")
    ] = None,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """A blob that this tenant may name, or a part of it; its ETag is its digest. 416 when no byte
    of the range exists."""
    size = await blobs.owned(context.files, context.store, tenant=caller.tenant, digest=digest)
    conditions = downloads.Conditions(
        range=asked_range, if_range=if_range, if_none_match=if_none_match
    )
    return downloads.answer(context.files, digest, size, conditions)


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
) -> models.BlobInfo:
    """Store the body under its sha256, or (`chunked`) as a file of weights, whose digest is made of
    its chunks' hashes.

    Sending it again is cheap.
    """
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
    return models.BlobInfo(digest=digest, size_bytes=size, created=created)


def plan_of(context: Context, tenant: str) -> Plan:
    """The tenant's plan."""
    with context.store.read() as sql:
        return accounting.plan_of(sql, context.config.plans, tenant=tenant)
