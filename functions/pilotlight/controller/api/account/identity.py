"""Routes for environments, the caller's identity, and signing in to the dashboard."""

from __future__ import annotations

from typing import Any

from fastapi import Response

from pilotlight.controller.api import schemas
from pilotlight.controller.api.account.plans import TenantInfo
from pilotlight.controller.context import (
    REQUIRE_DISK_SPACE,
    Admin,
    AnyKey,
    Ctx,
    Deployer,
    RequestId,
)
from pilotlight.controller.identity import sessions, tenants
from pilotlight.controller.identity.sign_in_codes import LIFETIME_S
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.spec.identifiers import Scope

router = APIRouter(prefix="/v1", tags=["tenancy"])


class Whoami(schemas.Body):
    """The caller's identity. `bound_…` null: the key is not bound to one.
    `issuer`: by which the person signed in for whom the key was made; null: it is no such key.
    `expires_at` null: the key never expires."""

    tenant: TenantInfo
    key: str
    scope: Scope
    environment: str
    bound_environment: str | None
    bound_app: str | None
    bound_function: str | None
    suspended: bool
    issuer: str | None
    expires_at: float | None


@router.get("/whoami")
def whoami(caller: AnyKey) -> Whoami:
    """Return the caller's identity."""
    return Whoami(
        tenant=TenantInfo(id=caller.tenant, name=caller.tenant_name, uid=caller.uid),
        key=caller.key,
        scope=caller.scope,
        environment=caller.environment,
        bound_environment=caller.bound_environment,
        bound_app=caller.bound_app,
        bound_function=caller.bound_function,
        suspended=caller.suspended,
        issuer=caller.issuer,
        expires_at=caller.expires_at,
    )


class SignInCode(schemas.Body):
    """A one-time code. `dashboard_url` null: the dashboard has the API's own address."""

    code: str
    expires_at: float
    dashboard_url: str | None


@router.post("/sign-in-codes", status_code=201)
async def create_sign_in_code(context: Ctx, caller: AnyKey) -> SignInCode:
    """Create a code that signs one browser in to the dashboard, once and within a minute: open
    `/dashboard/login#code=<code>`. Requires a key that may open the dashboard."""
    now = context.clock()
    code = context.codes.issue(sessions.require_dashboard_access(caller), now=now)
    origin = context.config.settings.dashboard_origin
    return SignInCode(
        code=code,
        expires_at=now + LIFETIME_S,
        dashboard_url=origin.url if origin is not None else None,
    )


@router.get("/environments", response_model=schemas.EnvironmentList)
def list_environments(context: Ctx, caller: Deployer) -> dict[str, Any]:
    """List the tenant's environments."""
    with context.store.read() as sql:
        return {"environments": tenants.environments(sql, tenant=caller.tenant)}


@router.post(
    "/environments",
    dependencies=[REQUIRE_DISK_SPACE],
    status_code=201,
    response_model=schemas.EnvironmentInfo,
)
def create_environment(
    context: Ctx, caller: Admin, request: RequestId, body: schemas.NamedRequest
) -> dict[str, Any]:
    """Create an empty environment."""
    caller.require_whole_tenant()
    with context.store.write() as write:
        return tenants.create_environment(
            write, tenant=caller.tenant, name=body.name, actor=caller.key, request=request
        )


@router.delete("/environments/{name}", status_code=204)
def delete_environment(context: Ctx, caller: Admin, request: RequestId, name: str) -> Response:
    """Delete an environment without apps, with its secrets and keys."""
    caller.require_whole_tenant()
    with context.store.write() as write:
        tenants.delete_environment(
            write, tenant=caller.tenant, name=name, actor=caller.key, request=request
        )
    return Response(status_code=204)
