"""Routes for budgets: limits, spending, forecasts and alerts."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import Depends, Query, Response
from pydantic import Field

from pilotlight.controller.api.account.billing import format_decimal
from pilotlight.controller.api.schemas import Body
from pilotlight.controller.billing import budget_alerts, budget_definition
from pilotlight.controller.billing.budget_alerts import BudgetAlert
from pilotlight.controller.billing.budget_definition import (
    DEFAULT_ALERTS,
    MAX_ALERTS,
    BudgetDefinition,
)
from pilotlight.controller.billing.budgets import changes, records, spending
from pilotlight.controller.billing.budgets.records import Budget
from pilotlight.controller.billing.budgets.spending import BudgetOverview
from pilotlight.controller.billing.credits import accounts
from pilotlight.controller.billing.forecast import Forecast
from pilotlight.controller.context import (
    REQUIRE_DISK_SPACE,
    Admin,
    Biller,
    Context,
    Ctx,
    RequestId,
    require_platform_token,
)
from pilotlight.controller.customers import budgets as customer_budgets
from pilotlight.controller.database import audit_trail
from pilotlight.controller.identity import tenants
from pilotlight.controller.identity.access_control import Principal
from pilotlight.controller.identity.tenant_plan import tenant_plan_of
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.webhooks import webhook_sender
from pilotlight.controller.webhooks.delivery_queues import alert_data
from pilotlight.controller.webhooks.webhook_sender import WebhookMessage, WebhookSender
from pilotlight.errors import Conflict, Forbidden, NotFound
from pilotlight.protocol import BUDGETS_PATH, CUSTOMER_BUDGETS_PATH, new_call_id
from pilotlight.spec.identifiers import MAX_CUSTOMER_LENGTH, Scope, require_customer
from pilotlight.spec.pricing import COST_QUANTUM

router = APIRouter(prefix="/v1/budgets", tags=["budgets"])
MAX_NAMED = 500
internal = APIRouter(dependencies=[Depends(require_platform_token)], include_in_schema=False)


class BudgetRequest(Body):
    """A complete budget: omitted fields take their defaults. There is one budget per environment,
    app, function, customer, period and currency."""

    environment: str = Field(default="", description='"" covers all')
    app: str = Field(default="", description='"" covers all')
    function: str = Field(default="", description='"" covers all; requires `app`')
    customer: str = Field(
        default="",
        description='"" covers all calls, an id those for this customer (`Pilotlight-Customer`); '
        "* gives each customer without an own one of the same reach such a budget",
    )
    period: Literal["day", "month"] = Field(default="month", description="calendar period, in UTC")
    amount: str = Field(max_length=64, description='a decimal number as a string: "250", "0.05"')
    currency: str | None = Field(
        default=None, max_length=64, description="null: the currency of the tenant's price list"
    )
    hard: bool = Field(
        default=True,
        description="refuse calls (402) when the budget is spent; otherwise it only warns",
    )
    alerts: list[int] = Field(
        default=list(DEFAULT_ALERTS),
        max_length=MAX_ALERTS,
        description="percentages of the amount; each alerts once per period",
    )
    webhook: str | None = Field(
        default=None, description="URL to which alerts are posted (Standard Webhooks)"
    )
    new_secret: bool = Field(
        default=False, description="replace the secret that signs the webhook's messages"
    )


class ForecastInfo(Body):
    """Expected spending at the end of the period, from the last full days: `low` to `high` is an 80
    % interval. Amounts are strings."""

    expected: str
    low: str | None
    high: str | None
    per_day: str
    basis_days: int
    reached_at: float | None


class AlertInfo(Body):
    """A threshold that was reached. `next_attempt_at` null: the webhook is not retried."""

    id: str
    percent: int
    period: str
    spent: str
    at: float
    delivered_at: float | None
    next_attempt_at: float | None
    attempts: int
    error: str | None


class BudgetInfo(Body):
    """A budget and its state in the current period (`begins_at` to `ends_at`)."""

    id: str
    environment: str
    app: str
    function: str
    customer: str
    parent: str | None = Field(
        description="the budget for each customer from which this customer has it; null for others"
    )
    period: str
    amount: str
    currency: str
    hard: bool
    alerts: list[int]
    webhook: str | None = Field(
        description="the full URL for administrators, only the host for others"
    )
    created_at: float
    updated_at: float
    current: str
    begins_at: float
    ends_at: float
    spent: str
    left: str
    percent: float
    is_spent: bool
    forecast: ForecastInfo | None = Field(description="null while there is too little data")
    alerted: list[AlertInfo]


class BudgetSet(BudgetInfo):
    """A budget that was set. `webhook_secret` signs its messages and is shown only once; null:
    unchanged, or there is no webhook."""

    created: bool
    webhook_secret: str | None


class BudgetList(Body):
    """Budgets that the key may access."""

    budgets: list[BudgetInfo]


class AlertList(Body):
    """Alerts, newest first."""

    alerts: list[AlertInfo]


class Tested(Body):
    """The result of a test delivery. `error` null: the receiver accepted it."""

    status: int | None
    error: str | None
    url: str
    headers: dict[str, str]
    body: str
    elapsed_ms: int


@router.put(
    "", dependencies=[REQUIRE_DISK_SPACE], responses={201: {"description": "The budget is new."}}
)
def set_budget(
    context: Ctx, caller: Admin, request: RequestId, body: BudgetRequest, response: Response
) -> BudgetSet:
    """Create or update the budget of this environment, app, function, customer, period and
    currency."""
    _require_scope(caller, body.environment, body.app, body.function)
    if body.webhook is not None:
        webhook_sender.check_url(body.webhook, policy=context.config.settings.webhooks)
    with context.store.write() as write:
        if body.environment:
            tenants.require_environment(write.sql, tenant=caller.tenant, name=body.environment)
        terms = _terms(context, tenants.get(write.sql, tenant=caller.tenant), body)
        result = changes.put(
            write,
            key=context.key,
            tenant=caller.tenant,
            terms=terms,
            actor=caller.key,
            new_secret=body.new_secret,
            request=request,
        )
        overview = spending.overview(
            write.sql, tenant=caller.tenant, now=write.now, budget_id=result.budget.id
        )[0]
    response.status_code = 201 if result.is_new else 200
    return BudgetSet(**_info(overview, caller), created=result.is_new, webhook_secret=result.secret)


@router.get("")
def list_budgets(
    context: Ctx,
    caller: Biller,
    customer: Annotated[
        str | None,
        Query(max_length=MAX_CUSTOMER_LENGTH, description="only those of this customer"),
    ] = None,
) -> BudgetList:
    """List the tenant's budgets, broadest first, without those that customers have of one for each
    customer; those of one customer with these."""
    with context.store.read() as sql:
        found = spending.overview(sql, tenant=caller.tenant, now=context.clock(), customer=customer)
    return BudgetList(
        budgets=[
            BudgetInfo(**_info(overview, caller))
            for overview in found
            if _covers(caller, overview.budget.terms)
        ]
    )


@router.get("/{budget}")
def get_budget(context: Ctx, caller: Biller, budget: str) -> BudgetInfo:
    """Return one budget."""
    with context.store.read() as sql:
        overview = spending.overview(
            sql, tenant=caller.tenant, now=context.clock(), budget_id=budget
        )[0]
    _require_visible(caller, overview.budget)
    return BudgetInfo(**_info(overview, caller))


@router.get("/{budget}/alerts")
def list_alerts(context: Ctx, caller: Biller, budget: str) -> AlertList:
    """List every alert of a budget, in all periods."""
    with context.store.read() as sql:
        _require_visible(caller, records.get(sql, tenant=caller.tenant, budget_id=budget))
        found = budget_alerts.listing(sql, budgets=[budget])
    return AlertList(alerts=[_alert(alert) for alert in found])


@router.delete("/{budget}", status_code=204)
def delete_budget(context: Ctx, caller: Admin, request: RequestId, budget: str) -> Response:
    """Delete a budget and its alerts."""
    with context.store.write() as write:
        _require_visible(caller, records.get(write.sql, tenant=caller.tenant, budget_id=budget))
        changes.delete(
            write, tenant=caller.tenant, budget_id=budget, actor=caller.key, request=request
        )
    context.metrics.remove_budget(caller.tenant, budget)
    return Response(status_code=204)


@router.post("/{budget}:test")
async def test_budget(context: Ctx, caller: Admin, request: RequestId, budget: str) -> Tested:
    """Post a signed example (`type`: `budget.test`) to the budget's webhook once, and return the
    result."""
    message, url, secret = await context.threads.run(
        caller.tenant, _example, context, caller, budget, request
    )
    return await post_example(context, message, url=url, secret=secret)


async def post_example(
    context: Context, message: WebhookMessage, *, url: str, secret: str
) -> Tested:
    """Post a signed message to a webhook once."""
    began, now = time.perf_counter(), context.clock()
    async with WebhookSender(policy=context.config.settings.webhooks) as sender:
        outcome = await sender.post(message, url=url, secret=secret, now=now)
    body = message.body()
    return Tested(
        status=outcome.status,
        error=outcome.error,
        url=url,
        headers=webhook_sender.headers(message, body, secret=secret, now=now),
        body=body.decode(),
        elapsed_ms=round((time.perf_counter() - began) * 1000),
    )


class FirstCall(Body):
    """A customer that has no budget of its own yet."""

    tenant: str
    customer: str


@internal.post(CUSTOMER_BUDGETS_PATH)
def derive_budgets(context: Ctx, body: FirstCall) -> dict[str, int]:
    """Make the budgets that a customer gets with its first call."""
    customer = require_customer(body.customer)
    with context.store.write() as write:
        made = customer_budgets.derive(write, tenant=body.tenant, customer=customer)
    return {"budgets": made}


@internal.get(BUDGETS_PATH)
def budget_states(
    context: Ctx, id: Annotated[list[str] | None, Query(max_length=MAX_NAMED)] = None
) -> dict[str, dict[str, Any]]:
    """Return the ledger's state of every budget's current period, and of all credit; or of
    these."""
    with context.store.read() as sql:
        now = context.clock()
        found = spending.states(sql, now=now, ids=id or ()) | accounts.states(
            sql, now=now, ids=id or ()
        )
    return {"budgets": {budget: state.to_json() for budget, state in found.items()}}


def _terms(context: Context, tenant: Any, body: BudgetRequest) -> BudgetDefinition:
    lists = context.config.prices.lists()
    own = lists.get(
        tenant_plan_of(tenant, context.config.plans).resolve().prices or "",
        context.config.prices.rates(),
    )
    fields = body.model_dump(exclude={"new_secret", "currency"})
    currencies = {rates.currency for rates in lists.values()}
    return budget_definition.parse_definition(
        **fields,
        currency=own.currency if body.currency is None else body.currency,
        currencies=currencies,
    )


def _example(
    context: Context, caller: Principal, budget_id: str, request: str
) -> tuple[WebhookMessage, str, str]:
    with context.store.write() as write:
        budget = records.get(write.sql, tenant=caller.tenant, budget_id=budget_id)
        _require_visible(caller, budget)
        if budget.terms.webhook is None or budget.sealed_secret is None:
            raise Conflict(
                f"budget {budget_id} has no webhook",
                hint="Set one: `pilotlight budget set … --webhook https://…`.",
            )
        audit_trail.record(
            write,
            tenant=caller.tenant,
            actor=caller.key,
            action="budget.test",
            subject=budget_id,
            request=request,
        )
        period = budget.period_at(write.now)
    example = BudgetAlert(
        id=f"test-{new_call_id()}",
        budget=budget.id,
        tenant=budget.tenant,
        period=period.name,
        percent=100,
        spent=budget.terms.amount,
        at=write.now,
        delivered_at=None,
        next_attempt_at=None,
        attempts=1,
        error=None,
    )
    message = WebhookMessage(
        id=example.id,
        type="budget.test",
        at=example.at,
        data=alert_data(example, budget, caller.tenant_name),
    )
    return message, budget.terms.webhook, context.key.webhooks.open(budget.sealed_secret)


def _covers(caller: Principal, terms: BudgetDefinition) -> bool:
    return caller.covers(
        environment=terms.environment or None,
        app=terms.app or None,
        function=terms.function or None,
    )


def _require_visible(caller: Principal, budget: Budget) -> None:
    if not _covers(caller, budget.terms):
        raise NotFound(f"there is no budget {budget.id}")


def _require_scope(caller: Principal, environment: str, app: str, function: str) -> None:
    if not caller.covers(
        environment=environment or None, app=app or None, function=function or None
    ):
        raise Forbidden(
            f"key {caller.key} cannot access everything this budget would cover: name its "
            f"environment, app or function"
        )


def _info(overview: BudgetOverview, caller: Principal) -> dict[str, Any]:
    budget, terms = overview.budget, overview.budget.terms
    shown = (
        terms.webhook
        if caller.scope is Scope.ADMIN or terms.webhook is None
        else webhook_sender.host_of(terms.webhook)
    )
    return {
        **terms.to_json(),
        "webhook": shown,
        "id": budget.id,
        "parent": budget.parent,
        "created_at": budget.created_at,
        "updated_at": budget.updated_at,
        "current": overview.period.name,
        "begins_at": overview.period.begins_at,
        "ends_at": overview.period.ends_at,
        "spent": _money(overview.spent),
        "left": _money(max(0, terms.picos - overview.spent)),
        "percent": round(overview.percent, 2),
        "is_spent": overview.spent >= terms.picos,
        "forecast": overview.forecast and _forecast(overview.forecast),
        "alerted": [_alert(alert) for alert in overview.alerts],
    }


def _forecast(found: Forecast) -> ForecastInfo:
    low, high = (None if end is None else _money(end) for end in (found.low, found.high))
    expected, per_day = _money(found.expected), _money(found.per_day)
    return ForecastInfo(
        expected=expected,
        low=low,
        high=high,
        per_day=per_day,
        basis_days=found.basis_days,
        reached_at=found.reached_at,
    )


def _alert(alert: BudgetAlert) -> AlertInfo:
    return AlertInfo(
        **{name: value for name, value in asdict(alert).items() if name not in ("budget", "tenant")}
    )


def _money(picos: int) -> str:
    return format_decimal(picos * COST_QUANTUM)
