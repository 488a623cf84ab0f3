"""Routes by which activators claim warm pods and end promoted ones. They require the platform
token."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Response
from pydantic import Field

from pilotlight.controller.api.schemas import Body
from pilotlight.controller.context import Ctx, require_platform_token
from pilotlight.controller.kubernetes.warm.status import NoWarmPod, PromotionRequest
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.protocol import PODS_DELETE_PATH, PODS_PROMOTE_PATH

router = APIRouter(dependencies=[Depends(require_platform_token)], include_in_schema=False)

MAX_EXCLUDED = 64
_Id = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:/@-]{1,128}$")]
_Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")]


class Promotion(Body):
    """A start that wants a warm pod (`status.PromotionRequest`)."""

    tenant: _Id
    revision: _Id
    attempt: _Id
    member: _Id
    exclude: Annotated[list[_Id], Field(max_length=MAX_EXCLUDED)] = Field(default_factory=list)
    claimed_only: bool = False


class Promoted(Body):
    """The claimed pod, and its signed launch document."""

    namespace: str
    name: str
    uid: str
    ip: str
    node: str
    launch: dict[str, Any]


class Deletion(Body):
    """A promoted pod to delete, and why, for the log."""

    namespace: _Name
    name: _Name
    uid: _Id
    reason: Annotated[str, Field(max_length=200)]


@router.post(PODS_PROMOTE_PATH)
async def promote(context: Ctx, body: Promotion) -> Promoted:
    """Claim a warm pod for a revision. 409 `no-warm-pod` says why there is none."""
    try:
        if not context.config.cluster.warm_pods:
            raise NoWarmPod("cluster.warm_pods of platform.yaml has no shapes", reason="off")
        found = await context.warm_pods.require_claimer().promote(
            PromotionRequest(**{**body.model_dump(), "exclude": tuple(body.exclude)})
        )
    except NoWarmPod as e:
        context.metrics.promotions.labels(str(e.detail["reason"])).inc()
        raise
    context.metrics.promotions.labels("promoted").inc()
    return Promoted(**{name: getattr(found, name) for name in Promoted.model_fields})


@router.post(PODS_DELETE_PATH, status_code=204)
async def delete(context: Ctx, body: Deletion) -> Response:
    """Delete a promoted pod; one that is gone counts as deleted."""
    await context.warm_pods.require_claimer().delete(
        namespace=body.namespace, name=body.name, uid=body.uid, reason=body.reason
    )
    return Response(status_code=204)
