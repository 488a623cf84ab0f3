"""Plans, tenants and their terms; and what a tenant may see of its own."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import sqlalchemy as sa
from fastapi import Depends
from pydantic import Field

from pilotlight.controller import calls as submitted
from pilotlight.controller import keys, registry, tables, tenants
from pilotlight.controller.access import Principal
from pilotlight.controller.api.keys import KeyCreated, KeyRequest, created, make
from pilotlight.controller.api.models import Body
from pilotlight.controller.context import ROOM, Admin, Biller, Context, Ctx, RequestId, biller
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.plans import Terms, terms_of
from pilotlight.controller.stored import accounting
from pilotlight.errors import Forbidden
from pilotlight.types import Scope
from snapshotter.errors import SnapshotterError
from snapshotter.types import InstanceState

router = APIRouter(prefix="/v1", tags=["tenants"])
USE_WINDOW_S = 60.0
"""Use is told of the last minute, as far as activators have shipped it."""
PlanBody = Annotated[
    dict[str, Any],
    Field(description="`pilotlight.quotas.Plan`: quotas (null = no bound), weight, priority, …"),
]
Overrides = Annotated[
    dict[str, Any],
    Field(description="keys of the plan that are otherwise for this tenant; null lifts a bound"),
]


class Plans(Body):
    """Every plan, and the one that new tenants have."""

    plans: list[PlanBody]
    default: str


class TenantInfo(Body):
    """A tenant; `uid` is what its workers run as, None = the platform's own."""

    id: str
    name: str
    uid: int | None


class TenantDetail(TenantInfo):
    """A tenant and its terms: `terms` is the plan with its overrides applied."""

    plan: str
    overrides: Overrides
    terms: PlanBody
    suspended: bool
    created_at: float


class TenantList(Body):
    """Every tenant of the platform, oldest first."""

    tenants: list[TenantDetail]


class TenantRequest(Body):
    """A new tenant; without a plan it has the platform's default one."""

    name: str
    plan: str | None = None
    overrides: Overrides = Field(default_factory=dict)


class TenantCreated(TenantDetail):
    """A new tenant with its first admin key."""

    key: KeyCreated


class TenantChange(Body):
    """What shall be otherwise; what is not named stays. `overrides` are added to those there are,
    after `clear` took some away."""

    plan: str | None = None
    overrides: Overrides = Field(default_factory=dict)
    clear: list[str] | Literal["all"] = Field(default_factory=list)
    suspended: bool | None = None


class Use(Body):
    """What a tenant uses: instances now, the rest over the last minute as far as it has been
    reported; null: not known now."""

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
    """The caller's tenant, with what it uses."""

    use: Use


@router.get("/plans", dependencies=[Depends(biller)])
def list_plans(context: Ctx) -> Plans:
    """Every plan of the platform."""
    plans = context.config.plans
    return Plans(
        plans=[plan.to_json() for plan in plans.values()],
        default=context.config.settings.default_plan,
    )


@router.get("/tenants")
def list_tenants(context: Ctx, caller: Admin) -> TenantList:
    """Every tenant; for administrators of the platform."""
    caller.demand_platform()
    with context.store.read() as sql:
        rows = sql.execute(sa.select(tables.tenants).order_by(tables.tenants.c.created_at)).all()
    return TenantList(tenants=[TenantDetail(**_detail(context, row)) for row in rows])


@router.post("/tenants", dependencies=[ROOM], status_code=201)
def create_tenant(
    context: Ctx, caller: Admin, request: RequestId, body: TenantRequest
) -> TenantCreated:
    """A new tenant with a uid and an admin key of its own; for administrators of the platform."""
    caller.demand_platform()
    if context.config.uid_base is None and context.config.trust != "shared":
        raise Forbidden(
            "without root every worker runs under one uid, so tenants could read each other's "
            "memory: "
            "run the platform as root, or set platform.trust to 'shared' if they trust each other"
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
        key = keys.create(
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
    """One tenant and its terms; for administrators of the platform."""
    caller.demand_platform()
    with context.store.read() as sql:
        return TenantDetail(**_detail(context, tenants.find(sql, name=name)))


@router.patch("/tenants/{name}")
def change_tenant(
    context: Ctx, caller: Admin, request: RequestId, name: str, body: TenantChange
) -> TenantDetail:
    """Another plan, other overrides, suspended or not; for administrators of the platform.
    Activators follow within a second."""
    caller.demand_platform()
    with context.store.write() as write:
        now = terms_of(
            tenants.find(write.sql, name=name), context.config.plans, context.config.prices.lists()
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


@router.post("/tenants/{name}/keys", dependencies=[ROOM], status_code=201)
def create_tenants_key(
    context: Ctx, caller: Admin, request: RequestId, name: str, body: KeyRequest
) -> KeyCreated:
    """A key of another tenant, when it lost its last one; for administrators of the platform. It is
    in that tenant's audit log."""
    caller.demand_platform()
    with context.store.write() as write:
        tenant = tenants.find(write.sql, name=name).id
        return created(make(write, tenant, body, actor=caller.key, request=request), caller.key)


@router.get("/tenant")
async def own_tenant(context: Ctx, caller: Biller) -> OwnTenant:
    """The caller's own tenant: its plan, what that means for it, and what it uses."""
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
        calls, spoken = sql.execute(query).one()
        keeps = {
            "stored_bytes": accounting.stored(sql, tenant=caller.tenant).total_bytes,
            "pinned_bytes": accounting.pinned_bytes(sql, tenant=caller.tenant),
            "builds_at_once": context.files.gate.builds(caller.tenant),
            "functions": accounting.functions(sql, tenant=caller.tenant),
            "result_bytes": submitted.kept_bytes(sql, tenant=caller.tenant),
        }
    return _detail(context, row), {
        "requests_per_s": calls / USE_WINDOW_S,
        "tokens_per_min": int(spoken),
        **keeps,
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
        held = registry.gpus_of(sql, list(instances))
    return sum(held.get(revision, 0) * count for revision, count in instances.items())


def _detail(context: Context, row: sa.Row[Any]) -> dict[str, Any]:
    shown = {name: getattr(row, name) for name in ("id", "name", "uid", "plan", "created_at")}
    terms = terms_of(row, context.config.plans)
    return {
        **shown,
        "overrides": json.loads(row.overrides),
        "terms": terms.resolve().to_json(),
        "suspended": row.suspended_at is not None,
    }


def _terms(context: Context, plan: str, overrides: dict[str, Any]) -> Terms:
    return Terms(
        plan=plan,
        overrides=overrides,
        plans=context.config.plans,
        prices=context.config.prices.lists(),
    )
