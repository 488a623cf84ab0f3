"""Routes for plans and tenants, and for the caller's own tenant."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import sqlalchemy as sa
from fastapi import Depends
from pydantic import Field

from pilotlight.controller.api.account.api_keys import KeyCreated, KeyRequest, created, make
from pilotlight.controller.api.schemas import Body
from pilotlight.controller.context import (
    REQUIRE_DISK_SPACE,
    Admin,
    Biller,
    Context,
    Ctx,
    RequestId,
    biller,
)
from pilotlight.controller.database import tables
from pilotlight.controller.deployments import app_registry
from pilotlight.controller.identity import api_keys, stored_bytes, tenants
from pilotlight.controller.identity.access_control import Principal
from pilotlight.controller.identity.tenant_plan import TenantPlan, tenant_plan_of
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.scheduling import submitted_calls as submitted
from pilotlight.controller.tenant_deletion import progress
from pilotlight.controller.tenant_deletion.progress import Deletion
from pilotlight.controller.weights import storage_usage
from pilotlight.errors import Forbidden
from pilotlight.spec.identifiers import Scope
from snapshotter.errors import SnapshotterError
from snapshotter.types import InstanceState

router = APIRouter(prefix="/v1", tags=["tenants"])
USE_WINDOW_S = 60.0
"""Usage covers the last minute, as far as activators have reported it."""
PlanBody = Annotated[
    dict[str, Any],
    Field(
        description="`pilotlight.spec.quotas.Plan`: quotas (null = no limit), weight, priority, …"
    ),
]
Overrides = Annotated[
    dict[str, Any],
    Field(description="keys of the plan that differ for this tenant; null removes a limit"),
]


class Plans(Body):
    """All plans, and the default for new tenants."""

    plans: list[PlanBody]
    default: str


class TenantInfo(Body):
    """A tenant. `uid` is the user id of its workers; null: the platform's own."""

    id: str
    name: str
    uid: int | None


class TenantDeletion(Body):
    """The deletion of a tenant. `state` is its next step, or `deleted`; `counts` are deleted rows
    by table; `waiting_for` says why the step is repeated, "" = it is not."""

    state: str
    requested_by: str
    began_at: float
    updated_at: float
    finished_at: float | None
    counts: dict[str, int]
    waiting_for: str


class TenantDetail(TenantInfo):
    """A tenant and its plan. `terms` is the plan with the overrides applied; `deletion` null: it is
    not deleted."""

    plan: str
    overrides: Overrides
    terms: PlanBody
    suspended: bool
    created_at: float
    deletion: TenantDeletion | None = None


class TenantList(Body):
    """All tenants of the platform, oldest first."""

    tenants: list[TenantDetail]


class TenantRequest(Body):
    """A new tenant. Without a plan it has the platform's default plan."""

    name: str
    plan: str | None = None
    overrides: Overrides = Field(default_factory=dict)


class TenantCreated(TenantDetail):
    """A new tenant with its first admin key."""

    key: KeyCreated


class TenantChange(Body):
    """Fields to change; omitted fields stay. `overrides` are added to the existing ones, after
    `clear` has removed some."""

    plan: str | None = None
    overrides: Overrides = Field(default_factory=dict)
    clear: list[str] | Literal["all"] = Field(default_factory=list)
    suspended: bool | None = None


class Use(Body):
    """A tenant's usage: instances now, the rest over the last minute as far as it has been
    reported; null: currently unknown."""

    instances: int | None
    gpus: int | None
    requests_per_s: float
    tokens_per_min: int
    stored_bytes: int = 0
    pinned_bytes: int = 0
    builds_at_once: int = 0
    functions: int = 0
    result_bytes: int = 0


class OwnTenant(TenantDetail):
    """The caller's tenant and its usage."""

    use: Use


@router.get("/plans", dependencies=[Depends(biller)])
def list_plans(context: Ctx) -> Plans:
    """List the platform's plans."""
    plans = context.config.plans
    return Plans(
        plans=[plan.to_json() for plan in plans.values()],
        default=context.config.settings.default_plan,
    )


@router.get("/tenants")
def list_tenants(context: Ctx, caller: Admin) -> TenantList:
    """List all tenants (platform administrators only)."""
    caller.require_platform()
    with context.store.read() as sql:
        rows = sql.execute(sa.select(tables.tenants).order_by(tables.tenants.c.created_at)).all()
        deletions = progress.by_tenant(sql)
    details = [_detail(context, row, deletions.get(row.id)) for row in rows]
    return TenantList(tenants=[TenantDetail(**detail) for detail in details])


@router.post("/tenants", dependencies=[REQUIRE_DISK_SPACE], status_code=201)
def create_tenant(
    context: Ctx, caller: Admin, request: RequestId, body: TenantRequest
) -> TenantCreated:
    """Create a tenant with its own uid and admin key (platform administrators only)."""
    caller.require_platform()
    if context.config.uid_base is None and context.config.trust != "shared":
        raise Forbidden(
            "without root every worker runs under one uid, so tenants could read each other's "
            "memory: run the platform as root, or set platform.trust to 'shared' if tenants trust "
            "each other"
        )
    terms = _terms(context, body.plan or context.config.settings.default_plan, body.overrides)
    with context.store.write() as write:
        made = tenants.create(
            write,
            name=body.name,
            uid_base=context.config.uid_base,
            actor=caller.key,
            request=request,
            terms=terms,
        )
        key = api_keys.create(
            write,
            tenant=made.id,
            scope=Scope.ADMIN,
            actor=caller.key,
            name="first admin key",
            request=request,
        )
        row = tenants.get(write.sql, tenant=made.id)
    return TenantCreated(**_detail(context, row), key=created(key, caller.key))


@router.get("/tenants/{name}")
def get_tenant(context: Ctx, caller: Admin, name: str) -> TenantDetail:
    """Return one tenant and its plan (platform administrators only)."""
    caller.require_platform()
    with context.store.read() as sql:
        row = tenants.find(sql, name=name)
        return TenantDetail(**_detail(context, row, progress.find(sql, tenant=row.id)))


@router.patch("/tenants/{name}")
def change_tenant(
    context: Ctx, caller: Admin, request: RequestId, name: str, body: TenantChange
) -> TenantDetail:
    """Change a tenant's plan, overrides or suspension (platform administrators only). Activators
    apply the change within a second."""
    caller.require_platform()
    with context.store.write() as write:
        now = tenant_plan_of(
            tenants.find_existing(write.sql, name=name),
            context.config.plans,
            context.config.prices.lists(),
        )
        terms = now.changed(plan=body.plan, overrides=body.overrides, clear=body.clear)
        tenants.change(
            write,
            name=name,
            terms=terms,
            suspended=body.suspended,
            actor=caller.key,
            request=request,
        )
        return TenantDetail(**_detail(context, tenants.find(write.sql, name=name)))


@router.delete("/tenants/{name}", status_code=202)
def delete_tenant(context: Ctx, caller: Admin, request: RequestId, name: str) -> TenantDetail:
    """Delete a tenant: its keys and calls are refused at once, and all that it has is deleted; its
    invoices, usage records and audit log are kept, and its name with them (platform administrators
    only). It cannot be taken back.

    `deletion` says how far that is; again changes nothing."""
    caller.require_platform()
    progress.begin(
        context.store,
        name=name,
        plans=context.config.plans,
        actor=caller.key,
        request=request,
    )
    with context.store.read() as sql:
        row = tenants.find(sql, name=name)
        return TenantDetail(**_detail(context, row, progress.find(sql, tenant=row.id)))


@router.post("/tenants/{name}/keys", dependencies=[REQUIRE_DISK_SPACE], status_code=201)
def create_tenants_key(
    context: Ctx, caller: Admin, request: RequestId, name: str, body: KeyRequest
) -> KeyCreated:
    """Create a key for another tenant that has lost its last one (platform administrators only). It
    is recorded in that tenant's audit log."""
    caller.require_platform()
    with context.store.write() as write:
        tenant = tenants.find_existing(write.sql, name=name).id
        return created(make(write, tenant, body, actor=caller.key, request=request), caller.key)


@router.get("/tenant")
async def own_tenant(context: Ctx, caller: Biller) -> OwnTenant:
    """Return the caller's tenant: its plan with overrides, and its usage."""
    detail, rates = await context.threads.run(caller.tenant, _own, context, caller)
    return OwnTenant(**detail, use=Use(**rates, **await _instances(context, caller)))


def _own(context: Context, caller: Principal) -> tuple[dict[str, Any], dict[str, Any]]:
    usage = tables.usage
    since = context.clock() - USE_WINDOW_S
    tokens = sa.func.coalesce(sa.func.sum(usage.c.tokens_in + usage.c.tokens_out), 0)
    query = sa.select(sa.func.count(), tokens).where(
        usage.c.tenant == caller.tenant,
        usage.c.started_at > since,
        usage.c.kind == "CALL",
        usage.c.attempt == 1,
    )
    with context.store.read() as sql:
        row = tenants.get(sql, tenant=caller.tenant)
        calls, token_count = sql.execute(query).one()
        stored = {
            "stored_bytes": stored_bytes.usage_of_tenant(sql, tenant=caller.tenant).total_bytes,
            "pinned_bytes": storage_usage.pinned_bytes(sql, tenant=caller.tenant),
            "builds_at_once": context.files.gate.builds(caller.tenant),
            "functions": storage_usage.count_functions(sql, tenant=caller.tenant),
            "result_bytes": submitted.kept_bytes(sql, tenant=caller.tenant),
        }
    return _detail(context, row), {
        "requests_per_s": calls / USE_WINDOW_S,
        "tokens_per_min": int(token_count),
        **stored,
    }


async def _instances(context: Context, caller: Principal) -> dict[str, Any]:
    try:
        found = await context.agent.instances({"tenant": caller.tenant})
    except SnapshotterError:
        return {"instances": None, "gpus": None}
    live = Counter(str(one.revision) for one in found if one.state is not InstanceState.STOPPED)
    return {
        "instances": live.total(),
        "gpus": await context.threads.run(caller.tenant, _gpus, context, live),
    }


def _gpus(context: Context, instances: Mapping[str, int]) -> int:
    with context.store.read() as sql:
        gpus = app_registry.gpus_of(sql, list(instances))
    return sum(gpus.get(revision, 0) * count for revision, count in instances.items())


def _detail(context: Context, row: sa.Row[Any], deletion: Deletion | None = None) -> dict[str, Any]:
    shown = {name: getattr(row, name) for name in ("id", "name", "uid", "plan", "created_at")}
    terms = tenant_plan_of(row, context.config.plans)
    return {
        **shown,
        "overrides": json.loads(row.overrides),
        "terms": terms.resolve().to_json(),
        "suspended": row.suspended_at is not None,
        "deletion": None if deletion is None else _deletion(deletion),
    }


def _deletion(found: Deletion) -> dict[str, Any]:
    return {name: getattr(found, name) for name in TenantDeletion.model_fields}


def _terms(context: Context, plan: str, overrides: dict[str, Any]) -> TenantPlan:
    return TenantPlan(
        plan=plan,
        overrides=overrides,
        plans=context.config.plans,
        prices=context.config.prices.lists(),
    )
