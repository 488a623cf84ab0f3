"""Blobs in and out, and building images."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any

import anyio.to_thread
from fastapi import APIRouter, Header, Request, Response

from pilotlight.controller import audit, blobs, downloads, images
from pilotlight.controller.access import Principal
from pilotlight.controller.api import models
from pilotlight.controller.context import Context, Ctx, Deployer, RequestId, request_id
from pilotlight.controller.streams import NdjsonResponse
from pilotlight.errors import InvalidInput
from pilotlight.protocol import CONTENT_NDJSON
from pilotlight.spec import ImageSpec, from_json, to_json

router = APIRouter(prefix="/v1", tags=["blobs"])
_BYTES: dict[str, Any] = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


@router.head("/blobs/{digest}")
async def has_blob(context: Ctx, caller: Deployer, digest: str) -> Response:
    """200 with Content-Length when this tenant may name the blob, else 404."""
    size = await blobs.owned(context.files, context.store, tenant=caller.tenant, digest=digest)
    return Response(status_code=200, headers={"content-length": str(size), "etag": f'"{digest}"', "accept-ranges": "bytes"})


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
    asked_range: Annotated[str | None, Header(alias="range", description="`bytes=0-16777215`; one range")] = None,
    if_range: Annotated[str | None, Header(description="the part only if this is the blob's ETag, else the whole")] = None,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """A blob that this tenant may name, or a part of it; its ETag is its digest. 416 when no byte of the range exists."""
    size = await blobs.owned(context.files, context.store, tenant=caller.tenant, digest=digest)
    conditions = downloads.Conditions(range=asked_range, if_range=if_range, if_none_match=if_none_match)
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
    """Store the body under its sha256, or (`chunked`) as a file of weights, whose digest is made of its chunks' hashes.

    Sending it again is cheap.
    """
    blobs.check_digest(digest)
    size, created = await blobs.store_blob(
        context.files,
        context.store,
        tenant=caller.tenant,
        digest=digest,
        chunked=chunked,
        pieces=request.stream(),
        announced_bytes=content_length,
        actor=caller.key,
        request=request_id(request),
    )
    context.metrics.blob_bytes.inc(size if created else 0)
    return models.BlobInfo(digest=digest, size_bytes=size, created=created)


@router.post("/images", status_code=200, response_class=NdjsonResponse, responses={200: {"content": {CONTENT_NDJSON: {}}}})
async def build_image(context: Ctx, caller: Deployer, request: RequestId, body: models.ImageSpecBody) -> NdjsonResponse:
    """Build an environment: lines `{"step", "text"}`, then `{"image": digest}` or `{"error": problem}`."""
    spec = from_json(ImageSpec, body)
    needed = {blobs.check_digest(digest, "a copy step's blob") for digest in images.blobs_of(spec)}

    def missing() -> set[str]:
        with context.store.read() as sql:
            return needed - set(blobs.sizes(sql, tenant=caller.tenant, digests=needed))

    if absent := await anyio.to_thread.run_sync(missing):
        raise InvalidInput(f"the image copies blob {min(absent)}, which was not uploaded", missing={"blob": min(absent)})
    await context.agent.capabilities()  # an agent that is away is a 503 here; later it could only be a line
    return NdjsonResponse(_build(context, caller, spec, request), request=request)


async def _build(context: Context, caller: Principal, spec: ImageSpec, request: str) -> AsyncIterator[Mapping[str, Any]]:
    async for part in context.agent.build_image(to_json(spec), uid=caller.uid):
        if "image" in part:
            await anyio.to_thread.run_sync(_register, context, caller, spec, str(part["image"]), request)
        yield part


def _register(context: Context, caller: Principal, spec: ImageSpec, digest: str, request: str) -> None:
    with context.store.write() as write:
        images.register(write, tenant=caller.tenant, spec=spec, digest=digest)
        audit.record(write, tenant=caller.tenant, actor=caller.key, action="image.build", subject=digest, request=request)
