"""The page of budgets with their forecast, and of quotas with their use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

import sqlalchemy as sa
from fastapi.responses import Response

from pilotlight.controller.analytics import (
    entitlements,
    environment_usage,
    function_stats,
    latency_histograms,
    monthly_spend,
)
from pilotlight.controller.analytics.time_range import HOUR_S, TimeRange
from pilotlight.controller.billing.budgets import spending
from pilotlight.controller.billing.forecast import Forecast
from pilotlight.controller.dashboard import page_stats, running_instances
from pilotlight.controller.dashboard.formatting import amount
from pilotlight.controller.dashboard.html import render
from pilotlight.controller.dashboard.page_context import PageContext, PageRoute, Visitor
from pilotlight.controller.identity import stored_bytes
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.weights import storage_usage

router = APIRouter(include_in_schema=False, route_class=PageRoute)


@dataclass(frozen=True, slots=True, kw_only=True)
class _BudgetsData:
    budgets: list[spending.BudgetOverview]
    month: str
    spent: Decimal
    forecast: Forecast | None
    gpus: Mapping[str, int]
    busiest_per_s: float
    tokens_per_min: float
    objectives: list[page_stats.ObjectiveRow]
    own: list[tuple[str, dict[str, float]]]
    storage: Mapping[str, int]


@router.get("/dashboard/budgets")
async def page(visit: Visitor) -> Response:
    """Render the page."""
    found = await visit.read(lambda sql: _load(sql, visit))
    running = await running_instances.list_running(visit)
    used: dict[str, float] = {
        "requests_per_s": found.busiest_per_s,
        "tokens_per_min": found.tokens_per_min,
        **found.storage,
    }
    if visit.sees_instances and not running.trouble:
        used |= page_stats.instance_use(running.instances, found.gpus)
    return render(
        "budgets.html",
        visit=visit,
        found=found,
        quotas=page_stats.quotas(visit.plan, used),
        running=running,
        amount=amount,
        objectives=found.objectives,
        quota_words=page_stats.QUOTA_WORDS,
    )


def _load(sql: sa.Connection, visit: PageContext) -> _BudgetsData:
    tenant, environment = visit.caller.tenant, visit.environment
    day = environment_usage.read(
        sql,
        tenant=tenant,
        environment=environment,
        span=TimeRange.of("24h", visit.now),
        currency=visit.currency,
    )
    hours = day.by(lambda cell: cell.unit, calls_only=True)
    rows = function_stats.table(sql, tenant=tenant, environment=environment, usage=day, parts=[])
    month = (
        monthly_spend.month_so_far(
            sql, tenant=visit.caller.tenant, currency=visit.currency, now=visit.now
        )
        if visit.sees_tenant
        else None
    )
    return _BudgetsData(
        budgets=spending.overview(sql, tenant=visit.caller.tenant, now=visit.now)
        if visit.sees_tenant
        else [],
        month=month.period.name if month else "",
        spent=amount(month.spent) if month else Decimal(0),
        forecast=month.forecast if month else None,
        gpus={
            row.id: row.deployed.gpu_count
            for row in rows
            if row.deployed is not None and row.deployed.gpu
        },
        busiest_per_s=max((sums.records for sums in hours.values()), default=0) / HOUR_S,
        tokens_per_min=max((sums.tokens for sums in hours.values()), default=0) / 60,
        storage={
            "stored_bytes": stored_bytes.usage_of_tenant(sql, tenant=tenant).total_bytes,
            "pinned_bytes": storage_usage.pinned_bytes(sql, tenant=tenant),
        },
        own=entitlements.own_quotas(sql, tenant=tenant, environment=environment),
        objectives=page_stats.objectives(
            visit.plan,
            day,
            latency_histograms.read(
                sql, tenant=tenant, environment=environment, now=visit.now, clocks=("total",)
            ),
        ),
    )
