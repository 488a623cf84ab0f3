"""Routes for volumes that the platform's own processes use: the node agent reads manifests,
activators commit and reload for functions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial
from typing import Any, Literal

from fastapi import Depends, Response
from fastapi.responses import StreamingResponse

from pilotlight.controller.api.schemas import Body
from pilotlight.controller.context import Ctx, require_node_token, require_platform_token
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.registry.app_ref import EnvironmentRef
from pilotlight.controller.volumes import volumes
from snapshotter.volumes.heads import VOLUMES_PATH

router = APIRouter(prefix=VOLUMES_PATH, include_in_schema=False)
_JOINED = 2000


class Head(Body):
    """A volume's id, and the version of its newest manifest."""

    id: str
    version: int


@router.get("/{tenant}/{environment}/{name}", dependencies=[Depends(require_node_token)])
async def head(context: Ctx, tenant: str, environment: str, name: str) -> Head:
    """Return what a volume of that name is."""
    scope = EnvironmentRef(tenant=tenant, environment=environment)
    found = await context.read(tenant, partial(volumes.find, scope=scope, name=name))
    return Head(id=found.id, version=found.version)


@router.get("/{tenant}/{environment}/{name}/manifest", dependencies=[Depends(require_node_token)])
async def manifest(context: Ctx, tenant: str, environment: str, name: str) -> Response:
    """Return the newest manifest: `{"entries": […]}`."""
    scope = EnvironmentRef(tenant=tenant, environment=environment)

    def read(sql: Any) -> tuple[volumes.Volume, list[str]]:
        found = volumes.find(sql, scope, name=name)
        return found, volumes.manifest(sql, found)

    found, rows = await context.read(tenant, read)

    async def body() -> AsyncGenerator[str, None]:
        yield '{"entries":['
        for begin in range(0, len(rows), _JOINED):
            yield ("," if begin else "") + ",".join(rows[begin : begin + _JOINED])
        yield "]}"

    headers = {
        "pilotlight-volume": found.id,
        "pilotlight-volume-version": str(found.version),
    }
    return StreamingResponse(body(), headers=headers, media_type="application/json")


@router.post(
    "/{tenant}/{environment}/{name}/{verb}", dependencies=[Depends(require_platform_token)]
)
async def change(
    context: Ctx, tenant: str, environment: str, name: str, verb: Literal["commit", "reload"]
) -> dict[str, Any]:
    """Commit or reload a volume on the node, for one of the functions of that environment."""
    scope = EnvironmentRef(tenant=tenant, environment=environment)
    work = context.volumes.commit_node if verb == "commit" else context.volumes.reload_node
    return dict(await work(scope, name))
