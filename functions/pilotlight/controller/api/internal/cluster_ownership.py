"""Routes for whose objects are in the cluster, and for its warm pods."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pilotlight.controller.api.schemas import Body
from pilotlight.controller.context import REQUIRE_DISK_SPACE, Admin, Context, Ctx, RequestId
from pilotlight.controller.database import platform_identity
from pilotlight.controller.lazy_routes import APIRouter

router = APIRouter(prefix="/v1", tags=["node"])


class ForeignNamespaces(Body):
    """Tenants' namespaces of another platform: its id, or `unlabelled`."""

    platform: str
    namespaces: list[str]


class WarmPodsInfo(Body):
    """Warm pods of a shape of `cluster.warm_pods`: as many as are `wanted`, those that are ready
    (`warm`), those that start, and those that were promoted to instances of functions."""

    shape: str
    wanted: int
    warm: int
    starting: int
    promoted: int


class ClusterInfo(Body):
    """Whose objects are in the cluster, and its warm pods.

    `platform`: this platform's id. `adopted`: ids of platforms whose objects it took over.
    `is_checked`: whether the leading controller has looked, and is this one. While `foreign` is not
    empty, nothing in the cluster is changed; `message` says why, and the ways out. `warm_trouble`
    says why promoted pods do not get the size of their functions, where that is so."""

    platform: str
    adopted: list[str]
    is_checked: bool
    foreign: list[ForeignNamespaces]
    message: str
    warm_pods: list[WarmPodsInfo]
    warm_trouble: str


class Adoption(Body):
    """`platform`: id of the platform whose objects are taken over, or `unlabelled`."""

    platform: Annotated[str, Field(max_length=64)]


@router.get("/cluster")
def cluster(context: Ctx, caller: Admin) -> ClusterInfo:
    """Show whose objects are in the cluster (platform administrators only)."""
    caller.require_platform()
    return _info(context)


@router.post("/cluster:adopt", dependencies=[REQUIRE_DISK_SPACE])
def adopt(context: Ctx, caller: Admin, body: Adoption, request: RequestId) -> ClusterInfo:
    """Take over all objects of another platform in the cluster: from now on this platform changes
    them, and deletes those of functions that it does not have (platform administrators only)."""
    caller.require_platform()
    with context.store.write() as write:
        platform_identity.adopt(
            write, [body.platform], tenant=caller.tenant, actor=caller.key, request=request
        )
    context.notifier.ring()
    return _info(context)


def _info(context: Context) -> ClusterInfo:
    with context.store.read() as sql:
        identity = platform_identity.read(sql)
    found = context.statuses.ownership
    foreign = {} if found is None else found.foreign
    left = {one: names for one, names in foreign.items() if not identity.owns(one)}
    return ClusterInfo(
        platform=identity.id,
        adopted=sorted(identity.adopted),
        is_checked=found is not None,
        foreign=[ForeignNamespaces(platform=one, namespaces=list(left[one])) for one in left],
        message=found.message if found is not None and left else "",
        warm_pods=[
            WarmPodsInfo(**{name: getattr(one, name) for name in WarmPodsInfo.model_fields})
            for one in context.warm_pods.shapes
        ],
        warm_trouble=context.warm_pods.trouble,
    )
