"""The page of one function: activity, cost, latency, and newest calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import sqlalchemy as sa
from fastapi import Path
from fastapi.responses import Response

from pilotlight.controller.analytics import (
    entitlements,
    environment_usage,
    function_stats,
    latency_histograms,
    recent_calls,
    rightsizing,
)
from pilotlight.controller.analytics.environment_usage import EnvironmentUsage
from pilotlight.controller.analytics.function_stats import FunctionStats
from pilotlight.controller.analytics.gpu_time import by_owner_and_kind
from pilotlight.controller.analytics.latency_histograms import Histogram, LatencyHistogram
from pilotlight.controller.dashboard import charts, page_stats, running_instances
from pilotlight.controller.dashboard.html import render
from pilotlight.controller.dashboard.page_context import MAX_NAME, PageContext, PageRoute, Visitor
from pilotlight.controller.dashboard.pages import overview
from pilotlight.controller.dashboard.running_instances import LiveUse
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.errors import NotFound

NEWEST = 20
_Name = Annotated[str, Path(max_length=MAX_NAME)]

router = APIRouter(include_in_schema=False, route_class=PageRoute)


@dataclass(frozen=True, slots=True, kw_only=True)
class _FunctionData:
    row: FunctionStats
    usage: EnvironmentUsage
    parts: list[LatencyHistogram]
    hours: dict[int, Histogram]
    newest: recent_calls.CallPage


@router.get("/dashboard/functions/{app}/{name}")
async def page(visit: Visitor, app: _Name, name: _Name) -> Response:
    """Render the page. Raises NotFound if the function is not deployed in this environment."""
    found = await visit.read(lambda sql: _load(sql, visit, app, name))
    live = await running_instances.live_use(visit, function=(app, name))
    return await visit.context.threads.run(visit.caller.tenant, _page, visit, found, live)


def _page(visit: PageContext, found: _FunctionData, live: LiveUse) -> Response:
    seen = overview.observed([found.row], found.usage, found.parts, live)
    rates = entitlements.rates_of(visit.plan, visit.context.config.prices)
    elapsed_s = visit.now - found.usage.span.first * found.usage.span.unit_s
    return render(
        "function.html",
        has_charts=True,
        visit=visit,
        found=found,
        row=found.row,
        deployed=found.row.deployed,
        running=live.running,
        starts=page_stats.starts(found.usage, found.parts),
        clocks=[
            (clock, latency_histograms.merge_histograms(p for p in found.parts if p.clock == clock))
            for clock in ("total", "queue", "start", "exec")
        ],
        spend=charts.spend_by_kind(found.usage),
        requests=charts.requests(found.usage),
        slowness=charts.latency(found.hours, visit.now),
        utilisation=page_stats.utilisation(found.row.title, found.usage.cells),
        gpus=by_owner_and_kind(found.usage.cells),
        gpus_now=live.gpus,
        per_thousand=page_stats.per_thousand,
        hints=rightsizing.rightsizing_hints(seen, rates=rates, elapsed_s=elapsed_s),
    )


def _load(sql: sa.Connection, visit: PageContext, app: str, name: str) -> _FunctionData:
    tenant, environment = visit.caller.tenant, visit.environment
    deployed = function_stats.one(sql, tenant=tenant, environment=environment, app=app, name=name)
    if deployed is None:
        raise NotFound(f"there is no function {app}/{name} in environment {visit.environment!r}")
    used = environment_usage.read(
        sql,
        tenant=tenant,
        environment=environment,
        span=visit.span,
        currency=visit.currency,
        function_id=deployed.id,
    )
    parts = latency_histograms.read(
        sql, tenant=tenant, environment=environment, now=visit.now, function_id=deployed.id
    )
    row = FunctionStats(
        id=deployed.id, app=app, name=name, deployed=deployed, calls=used.calls, whole=used.total
    )
    row.latency = latency_histograms.merge_histograms(
        part for part in parts if part.clock == "total"
    )
    return _FunctionData(
        row=row,
        usage=used,
        parts=parts,
        hours=latency_histograms.by_hour(
            sql, tenant=tenant, environment=environment, now=visit.now, function_id=deployed.id
        ),
        newest=recent_calls.read(
            sql,
            tenant=tenant,
            environment=environment,
            now=visit.now,
            limit=NEWEST,
            wanted=recent_calls.CallFilter(function_id=deployed.id),
        ),
    )
