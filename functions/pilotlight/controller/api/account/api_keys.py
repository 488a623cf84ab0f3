"""Routes for API keys: create, list, change, rotate and revoke."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query, Response
from pydantic import Field

from pilotlight.controller.api.schemas import Body
from pilotlight.controller.context import REQUIRE_DISK_SPACE, Admin, Ctx, RequestId
from pilotlight.controller.database.store import Write
from pilotlight.controller.identity import api_keys
from pilotlight.controller.identity.access_control import Principal
from pilotlight.controller.identity.api_keys import KeyRestrictions, NewKey
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.errors import Forbidden, NotFound
from pilotlight.spec.identifiers import Scope
from pilotlight.spec.record_json import to_json

router = APIRouter(prefix="/v1/keys", tags=["keys"])
Seconds = Annotated[float, Field(allow_inf_nan=False)]
QuotasBody = Annotated[
    dict[str, Any],
    Field(description="`pilotlight.spec.quotas.Quotas`: requests_per_s, burst, concurrent, …"),
]

Force = Annotated[
    bool, Query(description="End the key even if it is the last admin key of its tenant.")
]


class KeyRequest(Body):
    """A new key. null in `environment`, `app`, `function`: all of them; in `expires_in_s`: it never
    expires; in `customer`: its holder may name any customer. All calls of a key with a `customer`
    are made for this one; its scope must be `invoke`."""

    scope: Scope = Scope.INVOKE
    environment: str | None = None
    app: str | None = None
    function: str | None = None
    quotas: QuotasBody = Field(default_factory=dict)
    name: str = ""
    expires_in_s: Seconds | None = None
    customer: str | None = None


class KeyChange(Body):
    """Fields to change; omitted fields stay. `quotas` are replaced as a whole; `expires_in_s` null:
    the key never expires."""

    quotas: QuotasBody | None = None
    expires_in_s: Seconds | None = None


class KeyRotation(Body):
    """How long the old key stays valid, in seconds; 0: it ends immediately."""

    grace_s: Seconds = 0.0


class KeyInfo(Body):
    """A key without its secret. `replaces`: the key that was rotated into this one."""

    id: str
    scope: Scope
    environment: str | None
    app: str | None
    function: str | None
    quotas: QuotasBody
    name: str
    created_by: str
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    replaces: str | None
    customer: str | None


class KeyCreated(KeyInfo):
    """A new key. `secret` is its text, shown only once."""

    secret: str


class KeyList(Body):
    """A tenant's keys, newest first."""

    keys: list[KeyInfo]


@router.post("", dependencies=[REQUIRE_DISK_SPACE], status_code=201)
def create_key(context: Ctx, caller: Admin, request: RequestId, body: KeyRequest) -> KeyCreated:
    """Create a key. Its secret is in this response and cannot be retrieved again."""
    if not caller.covers(environment=body.environment, app=body.app, function=body.function):
        raise Forbidden(
            f"key {caller.key} can only create keys within its own scope: {reach_of(caller)}"
        )
    with context.store.write() as write:
        new = make(write, caller.tenant, body, actor=caller.key, request=request)
    return created(new, caller.key)


@router.get("")
def list_keys(context: Ctx, caller: Admin) -> KeyList:
    """List the tenant's keys that lie within this key's scope."""
    with context.store.read() as sql:
        found = api_keys.listing(sql, tenant=caller.tenant)
    return KeyList(keys=[KeyInfo(**entry) for entry in found if _covers(caller, entry)])


@router.get("/{key}")
def get_key(context: Ctx, caller: Admin, key: str) -> KeyInfo:
    """Return one key."""
    with context.store.read() as sql:
        found = [
            entry
            for entry in api_keys.listing(sql, tenant=caller.tenant, only=key)
            if _covers(caller, entry)
        ]
    if not found:
        raise NotFound(f"there is no API key {key}", key=key)
    return KeyInfo(**found[0])


@router.patch("/{key}")
def change_key(
    *,
    context: Ctx,
    caller: Admin,
    request: RequestId,
    key: str,
    body: KeyChange,
    force: Force = False,
) -> KeyInfo:
    """Change a key's quotas or its expiry. The last admin key of a tenant can be new to expire
    earlier only with `force`: 409 otherwise."""
    expiry = (body.expires_in_s,) if "expires_in_s" in body.model_fields_set else None
    with context.store.write() as write:
        _require_within_scope(write, caller, key)
        changed = api_keys.change(
            write,
            tenant=caller.tenant,
            key_id=key,
            actor=caller.key,
            bounds=body.quotas,
            expiry=expiry,
            force=force,
            request=request,
        )
    return KeyInfo(**changed)


@router.post("/{key}:rotate", dependencies=[REQUIRE_DISK_SPACE], status_code=201)
def rotate_key(
    context: Ctx, caller: Admin, request: RequestId, key: str, body: KeyRotation
) -> KeyCreated:
    """Create a new secret with the same scope. The old key ends immediately, or after `grace_s`
    seconds."""
    with context.store.write() as write:
        _require_within_scope(write, caller, key)
        new = api_keys.rotate(
            write,
            tenant=caller.tenant,
            key_id=key,
            grace_s=body.grace_s,
            actor=caller.key,
            request=request,
        )
    return created(new, caller.key)


@router.delete("/{key}", status_code=204)
def revoke_key(
    context: Ctx, caller: Admin, request: RequestId, key: str, force: Force = False
) -> Response:
    """Revoke a key immediately, everywhere. The last admin key of a tenant only with `force`: 409
    otherwise."""
    with context.store.write() as write:
        _require_within_scope(write, caller, key)
        api_keys.revoke(
            write, tenant=caller.tenant, key_id=key, actor=caller.key, force=force, request=request
        )
    return Response(status_code=204)


def make(write: Write, tenant: str, body: KeyRequest, *, actor: str, request: str) -> NewKey:
    """Create the key of `tenant` that `body` describes. Raises InvalidInput, NotFound."""
    reach = KeyRestrictions(
        environment=body.environment,
        app=body.app,
        function=body.function,
        quotas=body.quotas,
        customer=body.customer,
    )
    return api_keys.create(
        write,
        tenant=tenant,
        scope=body.scope,
        actor=actor,
        reach=reach,
        name=body.name,
        expires_in_s=body.expires_in_s,
        request=request,
    )


def created(new: NewKey, actor: str) -> KeyCreated:
    """Return a new key as the API's response."""
    record = {
        name: value for name, value in to_json(new.record).items() if name not in ("hash", "tenant")
    }
    late: dict[str, Any] = {"name": new.name, "created_by": actor, "created_at": new.created_at}
    late |= {"revoked_at": None, "replaces": new.replaces}
    return KeyCreated(**record, **late, secret=new.secret)


def reach_of(caller: Principal) -> str:
    """Describe the scope to which a key is bound."""
    pairs = (
        ("environment", caller.bound_environment),
        ("app", caller.bound_app),
        ("function", caller.bound_function),
    )
    return ", ".join(f"{kind} {name!r}" for kind, name in pairs if name is not None)


def _covers(caller: Principal, entry: dict[str, Any]) -> bool:
    return caller.covers(
        environment=entry["environment"], app=entry["app"], function=entry["function"]
    )


def _require_within_scope(write: Write, caller: Principal, key: str) -> None:
    """Raise NotFound for a key whose scope exceeds the caller's: the caller could not have created
    it."""
    row = api_keys.find(write.sql, tenant=caller.tenant, key_id=key)
    if not caller.covers(environment=row.environment, app=row.app, function=row.function):
        raise NotFound(f"there is no API key {key}", key=key)
