"""Routes for quotas: those of the tenant's plan, and those that it sets for its functions and
keys."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path, Response

from pilotlight.controller.api.account.api_keys import QuotasBody
from pilotlight.controller.api.schemas import Body
from pilotlight.controller.context import REQUIRE_DISK_SPACE, Admin, Biller, Ctx, RequestId
from pilotlight.controller.customers import quotas as customer_quotas
from pilotlight.controller.identity import api_keys, quotas, tenants
from pilotlight.controller.identity.access_control import Principal
from pilotlight.controller.identity.quotas import FunctionRef
from pilotlight.controller.identity.tenant_plan import tenant_plan_of
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.spec.identifiers import MAX_CUSTOMER_LENGTH
from pilotlight.spec.quotas import STORAGE_KEYS
from pilotlight.spec.record_json import to_json

router = APIRouter(prefix="/v1/quotas", tags=["quotas"])
CustomerId = Annotated[str, Path(max_length=MAX_CUSTOMER_LENGTH)]


class FunctionQuotas(Body):
    """A function's quotas; {}: it has none of its own."""

    app: str
    function: str
    environment: str
    quotas: QuotasBody


class KeyQuotas(Body):
    """A key's quotas."""

    key: str
    name: str
    quotas: QuotasBody


class CustomerQuotas(Body):
    """Quotas of a customer, or with customer * of each that has none of its own."""

    customer: str
    quotas: QuotasBody


class AllQuotas(Body):
    """The tenant's quotas (null = no limit), and those of its functions, keys and customers that
    have some. A call must satisfy all that apply."""

    tenant: QuotasBody
    plan: str
    functions: list[FunctionQuotas]
    keys: list[KeyQuotas]
    customers: list[CustomerQuotas]


@router.get("")
def all_quotas(context: Ctx, caller: Biller) -> AllQuotas:
    """List the quotas of this tenant, of its functions in this environment, and of its keys, within
    the scope of the caller's key; and those of its customers, for a key that is bound to nothing.
    """
    with context.store.read() as sql:
        row = tenants.get(sql, tenant=caller.tenant)
        functions = quotas.listing(sql, tenant=caller.tenant, environment=caller.environment)
        bounded = [
            key
            for key in api_keys.listing(sql, tenant=caller.tenant, bounded=True)
            if _covers(caller, key)
        ]
        is_whole = caller.covers(environment=None, app=None, function=None)
        customers = customer_quotas.listing(sql, caller.tenant) if is_whole else []
    plan = tenant_plan_of(row, context.config.plans).resolve()
    bounds = {**to_json(plan.quotas()), **{name: getattr(plan, name) for name in STORAGE_KEYS}}
    shown = [f for f in functions if caller.may_see(f["app"], f["function"])]
    return AllQuotas(
        tenant=bounds,
        plan=row.plan,
        functions=[_function(caller, f["app"], f["function"], f["quotas"]) for f in shown],
        keys=[KeyQuotas(key=key["id"], name=key["name"], quotas=key["quotas"]) for key in bounded],
        customers=[CustomerQuotas(customer=name, quotas=found) for name, found in customers],
    )


@router.get("/customers/{customer}")
def get_customer_quotas(context: Ctx, caller: Biller, customer: CustomerId) -> CustomerQuotas:
    """Return a customer's own quotas."""
    caller.require_whole_tenant()
    with context.store.read() as sql:
        found = customer_quotas.get(sql, caller.tenant, customer)
    return CustomerQuotas(customer=customer, quotas=found)


@router.put("/customers/{customer}", dependencies=[REQUIRE_DISK_SPACE])
def put_customer_quotas(
    *, context: Ctx, caller: Admin, request: RequestId, customer: CustomerId, body: QuotasBody
) -> CustomerQuotas:
    """Set the quotas of a customer (`Pilotlight-Customer`), or with * of each that has none of its
    own, in addition to all others; replaces the previous ones."""
    caller.require_whole_tenant()
    with context.store.write() as write:
        put = customer_quotas.put(
            write,
            tenant=caller.tenant,
            customer=customer,
            body=body,
            actor=caller.key,
            request=request,
        )
    return CustomerQuotas(customer=customer, quotas=put)


@router.get("/functions/{app}/{function}")
def get_function_quotas(context: Ctx, caller: Biller, app: str, function: str) -> FunctionQuotas:
    """Return a function's own quotas."""
    caller.require_function(app, function)
    with context.store.read() as sql:
        return _function(
            caller, app, function, quotas.get(sql, _function_ref(caller, app, function))
        )


@router.put("/functions/{app}/{function}", dependencies=[REQUIRE_DISK_SPACE])
def put_function_quotas(
    *, context: Ctx, caller: Admin, request: RequestId, app: str, function: str, body: QuotasBody
) -> FunctionQuotas:
    """Set a function's quotas, in addition to its tenant's; replaces the previous ones. They
    persist across deploys and may be set before the first."""
    caller.require_function(app, function)
    with context.store.write() as write:
        put = quotas.put(
            write, _function_ref(caller, app, function), body, actor=caller.key, request=request
        )
    return _function(caller, app, function, put)


@router.delete("/functions/{app}/{function}", status_code=204)
def delete_function_quotas(
    context: Ctx, caller: Admin, request: RequestId, app: str, function: str
) -> Response:
    """Remove a function's own quotas."""
    caller.require_function(app, function)
    with context.store.write() as write:
        quotas.put(
            write, _function_ref(caller, app, function), {}, actor=caller.key, request=request
        )
    return Response(status_code=204)


def _function_ref(caller: Principal, app: str, function: str) -> FunctionRef:
    return FunctionRef(
        tenant=caller.tenant, environment=caller.environment, app=app, function=function
    )


def _function(caller: Principal, app: str, function: str, found: dict[str, Any]) -> FunctionQuotas:
    return FunctionQuotas(app=app, function=function, environment=caller.environment, quotas=found)


def _covers(caller: Principal, key: dict[str, Any]) -> bool:
    return caller.covers(environment=key["environment"], app=key["app"], function=key["function"])
