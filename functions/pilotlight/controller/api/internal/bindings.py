"""The route by which activators have bound functions made. It requires the platform token; the
activator has authenticated the caller, and checked that it may call the function."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends
from pydantic import Field

from pilotlight.controller.api.schemas import Body
from pilotlight.controller.context import Ctx, require_platform_token
from pilotlight.controller.database.store import Write
from pilotlight.controller.deployments import bound_functions
from pilotlight.controller.deployments.bound_functions import BindingRequest
from pilotlight.controller.identity import tenants
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.registry.app_ref import AppRef
from pilotlight.protocol import BIND_PATH

router = APIRouter(dependencies=[Depends(require_platform_token)], include_in_schema=False)
_Name = Annotated[str, Field(max_length=128)]
_Values = Annotated[dict[str, Any], Field(max_length=64)]


class Binding(Body):
    """A caller's binding, with its tenant and environment; `actor`: the id of its key."""

    tenant: _Name
    environment: _Name
    app: _Name
    function: _Name
    actor: Annotated[str, Field(max_length=400)]
    arguments: _Values = Field(default_factory=dict)
    options: _Values = Field(default_factory=dict)


class Bound(Body):
    """The name of the bound function."""

    function: str


@router.post(BIND_PATH)
async def bind(context: Ctx, body: Binding) -> Bound:
    """Return a bound function of the app, which is made if it is not there."""

    def change(write: Write) -> str:
        place = AppRef(
            tenant=body.tenant,
            uid=tenants.get(write.sql, tenant=body.tenant).uid,
            environment=body.environment,
            app=body.app,
            actor=body.actor,
        )
        wanted = BindingRequest(
            function=body.function, arguments=body.arguments, options=body.options
        )
        return bound_functions.make(write, context, place, wanted)

    return Bound(function=await context.write(body.tenant, change))
