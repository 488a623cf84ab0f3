"""Routes for building, listing and deleting images."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any

from fastapi import Response
from pydantic import Field

from pilotlight.controller.api import schemas
from pilotlight.controller.api.artifacts.blobs import plan_of
from pilotlight.controller.api.schemas import Body
from pilotlight.controller.billing.build_charges import BuildCharge
from pilotlight.controller.context import REQUIRE_DISK_SPACE, Context, Ctx, Deployer, RequestId
from pilotlight.controller.database import audit_trail
from pilotlight.controller.identity import access_control
from pilotlight.controller.identity.access_control import Principal
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.registry import images
from pilotlight.controller.server.ndjson import NdjsonResponse
from pilotlight.controller.weights import blob_deletion, blobs, storage_usage
from pilotlight.controller.weights.storage_reservations import image_key
from pilotlight.errors import Conflict, InvalidInput, StorageQuotaExceeded
from pilotlight.protocol import CONTENT_NDJSON
from pilotlight.spec.function import ImageSpec
from pilotlight.spec.quotas import Plan
from pilotlight.spec.record_json import from_json, to_json
from snapshotter.errors import SnapshotterError

log = logging.getLogger(__name__)

router = APIRouter(prefix="/v1/images", tags=["images"])


class ImageInfo(Body):
    """An image that this tenant has built. `size_bytes` counts towards `stored_bytes`."""

    digest: str
    size_bytes: int
    build_cpu_s: float = Field(
        description="CPU time of its last build, billed as BUILD; 0 if it was not measured"
    )
    steps: int
    created_at: float
    functions: list[str] = Field(description="`environment/app/function` whose revisions use it")


class ImageList(Body):
    """The tenant's images, newest first."""

    images: list[ImageInfo]


@router.get("")
def list_images(context: Ctx, caller: Deployer) -> ImageList:
    """List the images that this tenant has built."""
    with context.store.read() as sql:
        return ImageList(
            images=[ImageInfo(**row) for row in images.listing(sql, tenant=caller.tenant)]
        )


@router.delete("/{digest}", status_code=204)
async def delete_image(context: Ctx, caller: Deployer, request: RequestId, digest: str) -> Response:
    """Delete an image that no revision uses, and the archives that only its steps copied. 409 while
    the tenant builds or uses it."""
    caller.require_whole_environment()
    blobs.check_digest(digest)

    def delete_record() -> tuple[set[str], bool]:
        with context.store.write() as write:
            copied, is_last = images.delete(write, tenant=caller.tenant, digest=digest)
            audit_trail.record(
                write,
                tenant=caller.tenant,
                actor=caller.key,
                action="image.delete",
                subject=digest,
                request=request,
            )
            return copied, is_last

    gate = context.files.gate
    with gate.deleting(image_key(digest, caller.tenant)) as is_free:
        if not is_free:
            raise Conflict(
                f"image {digest[:12]} is being built or deleted: try again when that has finished"
            )
        copied, is_last = await context.threads.run(caller.tenant, delete_record)
        if caller.uid is not None:
            await _discard(context, digest, uid=caller.uid)
        elif is_last:
            with gate.deleting(image_key(digest)) as is_unused:
                if is_unused:  # otherwise another tenant is building it
                    await _discard(context, digest, uid=None)
    await blob_deletion.release_blobs(
        context.collector,
        context.metrics,
        tenant=caller.tenant,
        actor=caller.key,
        digests=copied,
        request=request,
    )
    return Response(status_code=204)


@router.post(
    "",
    dependencies=[REQUIRE_DISK_SPACE],
    status_code=200,
    response_class=NdjsonResponse,
    responses={200: {"content": {CONTENT_NDJSON: {}}}},
)
async def build_image(
    context: Ctx, caller: Deployer, request: RequestId, body: schemas.ImageSpecBody
) -> NdjsonResponse:
    """Build an image. Streams lines `{"step", "text"}`, then `{"image": digest, "size_bytes"}` or
    `{"error": problem}`. The CPU time of its commands is charged as BUILD, even if the build fails
    or the caller disconnects. It ends with an error when the tenant is suspended or the key revoked
    meanwhile.

    429 while the tenant runs as many builds as `builds_at_once` of its plan allows; 507 if its
    storage is full."""
    spec = from_json(ImageSpec, body)
    images.check_packages(spec)
    needed = {blobs.check_digest(digest, "a copy step's blob") for digest in images.blobs_of(spec)}
    digest = spec.digest()

    def check() -> tuple[Plan, set[str]]:
        plan = plan_of(context, caller.tenant)
        with context.store.read() as sql:
            if images.recorded_bytes(sql, tenant=caller.tenant, digest=digest) is None:
                storage_usage.require_room(
                    sql,
                    plan,
                    tenant=caller.tenant,
                    more_bytes=1,
                    coming_bytes=context.files.gate.coming_bytes(caller.tenant),
                )
            return plan, needed - set(blobs.sizes(sql, tenant=caller.tenant, digests=needed))

    plan, missing = await context.threads.run(caller.tenant, check)
    if missing:
        raise InvalidInput(
            f"the image copies blob {min(missing)}, which was not uploaded",
            missing={"blob": min(missing)},
        )
    # Fail here with a status (503, 429): once the stream has begun, an error is only a line.
    await context.agent.capabilities()
    context.files.gate.require_build(caller.tenant, limit=plan.builds_at_once)
    return NdjsonResponse(_build(context, caller, spec, plan, request), request=request)


async def _build(
    context: Context, caller: Principal, spec: ImageSpec, plan: Plan, request: str
) -> AsyncIterator[Mapping[str, Any]]:
    gate = context.files.gate
    with gate.building(caller.tenant, limit=plan.builds_at_once):
        digest = spec.digest()
        async with (
            gate.using(image_key(digest, caller.tenant)),
            gate.using(image_key(digest)),
            BuildCharge(context.builds, context.store, context.config, caller, digest[:12]) as bill,
        ):
            async for part in context.agent.build_image(to_json(spec), uid=caller.uid):
                if await bill.on_message(part):  # each two seconds, and at the end
                    await context.threads.look_up(partial(_recheck, context, caller))
                    continue
                if "image" in part:
                    await _finish(
                        context,
                        caller,
                        spec,
                        plan=plan,
                        part={**part, "cpu_ns": bill.cpu_ns},
                        request=request,
                    )
                yield part


def _recheck(context: Context, caller: Principal) -> None:
    with context.store.read() as sql:
        access_control.recheck(sql, caller)


async def _finish(
    context: Context,
    caller: Principal,
    spec: ImageSpec,
    *,
    plan: Plan,
    part: Mapping[str, Any],
    request: str,
) -> None:
    """Record the image, or delete it again if it does not fit. Raises StorageQuotaExceeded."""
    digest, size_bytes = str(part["image"]), int(part.get("size_bytes", 0))

    def register() -> None:
        with context.store.write() as write:
            known = images.recorded_bytes(write.sql, tenant=caller.tenant, digest=digest)
            if known is None:
                coming = context.files.gate.coming_bytes(caller.tenant)
                storage_usage.require_room(
                    write.sql,
                    plan,
                    tenant=caller.tenant,
                    more_bytes=size_bytes,
                    coming_bytes=coming,
                )
            images.register(
                write,
                tenant=caller.tenant,
                spec=spec,
                digest=digest,
                size_bytes=size_bytes,
                cpu_ns=int(part["cpu_ns"]),
            )
            audit_trail.record(
                write,
                tenant=caller.tenant,
                actor=caller.key,
                action="image.build",
                subject=digest,
                request=request,
            )

    def is_in_use() -> bool:
        with context.store.read() as sql:
            return images.is_known(sql, digest=digest)

    try:
        await context.threads.run(caller.tenant, register)
    except StorageQuotaExceeded:
        if caller.uid is not None or not await context.threads.run(caller.tenant, is_in_use):
            await _discard(context, digest, uid=caller.uid)
        raise


async def _discard(context: Context, digest: str, *, uid: int | None) -> None:
    """Delete an image: the tenant's own if tenants have uids, else a shared one that no tenant has.

    If the node does not respond, the image stays there and its next build reuses it."""
    try:
        await context.agent.delete_image(digest, uid=uid)
    except SnapshotterError as e:
        log.warning("event=image_not_deleted image=%s error=%r", digest, e)
