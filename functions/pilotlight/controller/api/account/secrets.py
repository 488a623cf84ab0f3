"""Routes for the secrets of an environment: a key that may deploy to it sets, lists and deletes
them. Their values are never returned."""

from __future__ import annotations

from typing import Any

from fastapi import Response

from pilotlight.controller.api import schemas
from pilotlight.controller.context import REQUIRE_DISK_SPACE, Ctx, Deployer, RequestId
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.registry import secret_store
from pilotlight.errors import InvalidInput

router = APIRouter(prefix="/v1", tags=["tenancy"])


@router.put("/secrets/{name}", dependencies=[REQUIRE_DISK_SPACE], response_model=schemas.SecretInfo)
def put_secret(
    context: Ctx, caller: Deployer, request: RequestId, name: str, body: schemas.SecretRequest
) -> dict[str, Any]:
    """Create or replace a secret. Running instances keep the old values until they restart."""
    caller.require_whole_environment()
    if (body.values is None) == (body.value is None):
        raise InvalidInput(
            "give either 'values' (variables) or 'value' (one variable of the secret's name)",
            parameter="values",
        )
    variables = body.values if body.values is not None else {name: body.value or ""}
    with context.store.write() as write:
        return secret_store.put(
            write,
            key=context.key,
            tenant=caller.tenant,
            environment=caller.environment,
            name=name,
            variables=variables,
            actor=caller.key,
            request=request,
        )


@router.get("/secrets", response_model=schemas.SecretList)
def list_secrets(context: Ctx, caller: Deployer) -> dict[str, Any]:
    """List secrets with the names of their variables. Values are never returned."""
    with context.store.read() as sql:
        return {
            "secrets": secret_store.listing(
                sql, tenant=caller.tenant, environment=caller.environment
            )
        }


@router.delete("/secrets/{name}", status_code=204)
def delete_secret(context: Ctx, caller: Deployer, request: RequestId, name: str) -> Response:
    """Delete a secret that nothing uses."""
    caller.require_whole_environment()
    with context.store.write() as write:
        secret_store.delete(
            write,
            tenant=caller.tenant,
            environment=caller.environment,
            name=name,
            actor=caller.key,
            request=request,
        )
    return Response(status_code=204)
