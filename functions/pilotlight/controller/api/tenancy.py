"""Keys, secrets, environments, tenants, and who am I."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from pilotlight.controller import keys, tenants, vault
from pilotlight.controller.api import models
from pilotlight.controller.context import Admin, Ctx, Deployer, Invoker, RequestId
from pilotlight.controller.keys import NewKey
from pilotlight.errors import Forbidden, InvalidInput, NotFound
from pilotlight.types import Scope

router = APIRouter(prefix="/v1", tags=["tenancy"])


@router.get("/whoami")
def whoami(caller: Invoker) -> models.Whoami:
    """The caller as the platform sees it."""
    return models.Whoami(
        tenant=models.TenantInfo(id=caller.tenant, name=caller.tenant_name, uid=caller.uid),
        key=caller.key,
        scope=caller.scope,
        environment=caller.environment,
        bound_environment=caller.bound_environment,
    )


@router.post("/keys", status_code=201)
def create_key(context: Ctx, caller: Admin, request: RequestId, body: models.KeyRequest) -> models.KeyCreated:
    """A new key; its text is in this answer and nowhere else."""
    if caller.bound_environment is not None and body.environment != caller.bound_environment:
        raise Forbidden(f"key {caller.key} can only make keys for environment {caller.bound_environment!r}")
    with context.store.write() as write:
        made = keys.create(write, tenant=caller.tenant, actor=caller.key, request=request, **body.model_dump())
    return _key_created(made, caller.key)


@router.get("/keys", response_model=models.KeyList)
def list_keys(context: Ctx, caller: Admin) -> dict[str, Any]:
    """The tenant's keys."""
    with context.store.read() as sql:
        found = keys.listing(sql, tenant=caller.tenant)
    return {"keys": [k for k in found if caller.bound_environment in (None, k["environment"])]}


@router.delete("/keys/{key}", status_code=204)
def revoke_key(context: Ctx, caller: Admin, request: RequestId, key: str) -> Response:
    """End a key now, everywhere."""
    with context.store.write() as write:
        if caller.bound_environment is not None:
            reach = [k["id"] for k in keys.listing(write.sql, tenant=caller.tenant) if k["environment"] == caller.bound_environment]
            if key not in reach:
                raise NotFound(f"there is no API key {key}")
        keys.revoke(write, tenant=caller.tenant, key_id=key, actor=caller.key, request=request)
    return Response(status_code=204)


@router.put("/secrets/{name}", response_model=models.SecretInfo)
def put_secret(context: Ctx, caller: Deployer, request: RequestId, name: str, body: models.SecretRequest) -> dict[str, Any]:
    """Create or replace a secret; running instances keep the old one until they start again."""
    if (body.values is None) == (body.value is None):
        raise InvalidInput("give either 'values' (variables) or 'value' (one variable of the secret's name)", parameter="values")
    variables = body.values if body.values is not None else {name: body.value or ""}
    with context.store.write() as write:
        return vault.put(
            write,
            key=context.key,
            tenant=caller.tenant,
            environment=caller.environment,
            name=name,
            variables=variables,
            actor=caller.key,
            request=request,
        )


@router.get("/secrets", response_model=models.SecretList)
def list_secrets(context: Ctx, caller: Deployer) -> dict[str, Any]:
    """Names and variables; values are never shown."""
    with context.store.read() as sql:
        return {"secrets": vault.listing(sql, tenant=caller.tenant, environment=caller.environment)}


@router.delete("/secrets/{name}", status_code=204)
def delete_secret(context: Ctx, caller: Deployer, request: RequestId, name: str) -> Response:
    """Remove a secret that nothing uses."""
    with context.store.write() as write:
        vault.delete(write, tenant=caller.tenant, environment=caller.environment, name=name, actor=caller.key, request=request)
    return Response(status_code=204)


@router.get("/environments", response_model=models.EnvironmentList)
def list_environments(context: Ctx, caller: Deployer) -> dict[str, Any]:
    """The tenant's environments."""
    with context.store.read() as sql:
        return {"environments": tenants.environments(sql, tenant=caller.tenant)}


@router.post("/environments", status_code=201, response_model=models.EnvironmentInfo)
def create_environment(context: Ctx, caller: Admin, request: RequestId, body: models.NamedRequest) -> dict[str, Any]:
    """A new, empty environment."""
    caller.demand_whole_tenant()
    with context.store.write() as write:
        return tenants.create_environment(write, tenant=caller.tenant, name=body.name, actor=caller.key, request=request)


@router.delete("/environments/{name}", status_code=204)
def delete_environment(context: Ctx, caller: Admin, request: RequestId, name: str) -> Response:
    """Remove an environment without apps; its secrets and keys go with it."""
    caller.demand_whole_tenant()
    with context.store.write() as write:
        tenants.delete_environment(write, tenant=caller.tenant, name=name, actor=caller.key, request=request)
    return Response(status_code=204)


@router.get("/tenants", response_model=models.TenantList)
def list_tenants(context: Ctx, caller: Admin) -> dict[str, Any]:
    """Every tenant; for administrators of the platform."""
    caller.demand_platform()
    with context.store.read() as sql:
        return {"tenants": [{name: t[name] for name in ("id", "name", "uid")} for t in tenants.all_tenants(sql)]}


@router.post("/tenants", status_code=201)
def create_tenant(context: Ctx, caller: Admin, request: RequestId, body: models.NamedRequest) -> models.TenantCreated:
    """A new tenant with a uid and an admin key of its own; for administrators of the platform."""
    caller.demand_platform()
    if context.config.uid_base is None and context.config.trust != "shared":
        raise Forbidden(
            "without root every worker runs under one uid, so tenants could read each other's memory: "
            "run the platform as root, or set platform.trust to 'shared' if they trust each other"
        )
    with context.store.write() as write:
        made = tenants.create(write, name=body.name, uid_base=context.config.uid_base, actor=caller.key, request=request)
        key = keys.create(write, tenant=made.id, scope=Scope.ADMIN, actor=caller.key, name="first admin key", request=request)
    return models.TenantCreated(id=made.id, name=made.name, uid=made.uid, key=_key_created(key, caller.key))


def _key_created(made: NewKey, actor: str) -> models.KeyCreated:
    record = made.record
    return models.KeyCreated(
        id=record.id,
        scope=Scope(record.scope),
        environment=record.environment,
        name=made.name,
        created_by=actor,
        created_at=made.created_at,
        expires_at=record.expires_at,
        revoked_at=None,
        secret=made.secret,
    )
