"""Routes for the container images of functions in a cluster, which users push to its registry."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path
from pydantic import Field

from pilotlight.controller.api import schemas
from pilotlight.controller.api.schemas import Body
from pilotlight.controller.context import (
    REQUIRE_DISK_SPACE,
    Context,
    Ctx,
    Deployer,
    RequestId,
    app_ref_of,
)
from pilotlight.controller.identity import tenants
from pilotlight.controller.identity.access_control import Principal
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.registry import container_images, images
from pilotlight.controller.weights import blobs
from pilotlight.core.oci.image_reference import Repository, parse_repository
from pilotlight.errors import InvalidInput
from pilotlight.spec.function import ImageSpec
from pilotlight.spec.record_json import from_json

router = APIRouter(prefix="/v1/apps/{app}/images", tags=["images"])
AppName = Annotated[str, Path(max_length=63)]


class ContainerImage(Body):
    """Where the container image of an Image is, or is to be pushed."""

    repository: str | None = Field(
        description="the tenant's repository; null: this platform builds images itself"
    )
    reference: str | None = Field(
        description="`repository@sha256:…`, what the app's next revisions consist of; null: push it"
    )


class PushedImage(Body):
    """A container image that was pushed to the tenant's repository, and the description of the
    Image that it was made of."""

    image: schemas.ImageSpecBody
    reference: str = Field(max_length=400, description="`repository@sha256:…`")


@router.get("/{digest}")
def get_container_image(
    context: Ctx, caller: Deployer, request: RequestId, app: AppName, digest: str
) -> ContainerImage:
    """Return the container image of the Image with this digest, for one app. 400 on a cluster
    without a registry."""
    caller.require_app(app)
    blobs.check_digest(digest)
    if context.config.platform.fleet == "local":
        return ContainerImage(repository=None, reference=None)
    repository = container_images.require_registry(repository_of(context, caller))
    with context.store.read() as sql:
        reference = container_images.reference_of(
            sql, app_ref_of(caller, app, request), digest=digest, repository=repository
        )
    return ContainerImage(repository=str(repository), reference=reference)


@router.put("/{digest}", dependencies=[REQUIRE_DISK_SPACE])
def put_container_image(
    context: Ctx,
    caller: Deployer,
    request: RequestId,
    app: AppName,
    digest: str,
    *,
    body: PushedImage,
) -> ContainerImage:
    """Record the container image of which the app's next revisions with the Image `digest` consist.
    Revisions that exist keep theirs."""
    caller.require_app(app)
    spec = from_json(ImageSpec, body.image, "image")
    images.check_packages(spec)
    if digest != spec.digest():
        raise InvalidInput(
            f"image {spec.digest()} is described, but the path names {digest}", parameter="digest"
        )
    repository = container_images.require_registry(repository_of(context, caller))
    with context.store.write() as write:
        tenants.require_environment(write.sql, tenant=caller.tenant, name=caller.environment)
        images.register(write, tenant=caller.tenant, spec=spec, digest=digest)
        container_images.record(
            write,
            app_ref_of(caller, app, request),
            digest=digest,
            reference=body.reference,
            repository=repository,
        )
    return ContainerImage(repository=str(repository), reference=body.reference)


def repository_of(context: Context, caller: Principal) -> Repository | None:
    """Return the repository of the caller's tenant; None without a cluster or a registry."""
    registry = context.config.cluster.registry
    if context.config.platform.fleet == "local" or registry is None:
        return None
    # only a platform on a cluster loads the package
    from pilotlight.kubernetes import names

    return parse_repository(names.tenant_repository(registry, caller.tenant_name))
