"""The overview: an environment's activity and cost, and right-sizing hints; and the page of usage
with the details."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import sqlalchemy as sa
from fastapi.responses import Response

from pilotlight.controller.analytics import (
    entitlements,
    environment_usage,
    function_stats,
    latency_histograms,
    recent_calls,
    rightsizing,
    rollup_queries,
)
from pilotlight.controller.analytics.environment_usage import EnvironmentUsage
from pilotlight.controller.analytics.function_stats import FunctionStats
from pilotlight.controller.analytics.gpu_time import by_owner_and_kind, gpu_time
from pilotlight.controller.analytics.latency_histograms import Histogram, LatencyHistogram
from pilotlight.controller.analytics.rightsizing import ObservedUsage, RightsizingHint
from pilotlight.controller.analytics.rollup_queries import UsageCell, UsageSums
from pilotlight.controller.billing.budgets import spending
from pilotlight.controller.dashboard import charts, live_summary, page_stats, running_instances
from pilotlight.controller.dashboard.formatting import amount
from pilotlight.controller.dashboard.html import render
from pilotlight.controller.dashboard.page_context import PageContext, PageRoute, Visitor
from pilotlight.controller.dashboard.running_instances import LiveUse
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.core.dashboard.dashboard_origin import DASHBOARD_PATH
from pilotlight.spec.pricing import CACHED, UNPAID_KINDS

NEWEST = 8
MOST_HINTS = 5
MOST_FUNCTIONS = 12
"""Functions on the overview: the busiest; the page of apps lists all."""

router = APIRouter(include_in_schema=False, route_class=PageRoute)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverviewData:
    """What the page reads from the database."""

    usage: EnvironmentUsage
    parts: list[LatencyHistogram]
    hours: Mapping[int, Histogram]
    functions: list[FunctionStats]
    deployed: int
    budgets: list[spending.BudgetOverview]
    newest: recent_calls.CallPage
    live: Mapping[str, str]


@router.get(DASHBOARD_PATH)
async def page(visit: Visitor) -> Response:
    """Render the overview."""
    return await _render(visit, "overview.html")


@router.get(DASHBOARD_PATH + "/usage")
async def usage(visit: Visitor) -> Response:
    """Render the page of usage."""
    return await _render(visit, "usage.html")


async def _render(visit: PageContext, template: str) -> Response:
    found = await visit.read(lambda sql: overview_data(sql, visit))
    live = await running_instances.live_use(visit)
    return await visit.context.threads.run(visit.caller.tenant, _page, template, visit, found, live)


def _page(template: str, visit: PageContext, found: OverviewData, live: LiveUse) -> Response:
    """Render in a thread: a page of many functions takes some tens of milliseconds, which would
    block other requests."""
    for row in found.functions:
        row.instances = sum(
            1
            for i in live.running.instances
            if (i.labels.get("app"), i.labels.get("function")) == (row.app, row.name)
        )
    everything = latency_histograms.merge_histograms(
        part for part in found.parts if part.clock == "total"
    )
    return render(
        template,
        has_charts=True,
        visit=visit,
        found=found,
        functions=[row for row in found.functions if row.deployed is not None][:MOST_FUNCTIONS],
        live=found.live,
        amount=amount,
        running=live.running,
        total=found.usage.total,
        calls=found.usage.calls,
        latency=everything,
        starts=page_stats.starts(found.usage, found.parts),
        charts=[charts.spend_by_function(found.usage), charts.spend_by_kind(found.usage)],
        requests=charts.requests(found.usage),
        slowness=charts.latency(found.hours, visit.now),
        utilisation=page_stats.by_owner(found.usage.cells),
        gpus=by_owner_and_kind(found.usage.cells),
        gpus_now=live.gpus,
        per_thousand=page_stats.per_thousand,
        hints=_hints(visit, found, live),
    )


def overview_data(sql: sa.Connection, visit: PageContext) -> OverviewData:
    """Read everything but the running instances, in one consistent view of the database."""
    tenant, environment = visit.caller.tenant, visit.environment
    used = environment_usage.with_runs_added(
        environment_usage.read(
            sql, tenant=tenant, environment=environment, span=visit.span, currency=visit.currency
        )
    )
    parts = latency_histograms.read(
        sql, tenant=tenant, environment=environment, now=visit.now, clocks=("total", "start")
    )
    return OverviewData(
        usage=used,
        parts=parts,
        hours=latency_histograms.by_hour(
            sql, tenant=tenant, environment=environment, now=visit.now
        ),
        functions=function_stats.table(
            sql, tenant=tenant, environment=environment, usage=used, parts=parts
        ),
        deployed=function_stats.count(sql, tenant=tenant, environment=environment),
        budgets=spending.overview(sql, tenant=visit.caller.tenant, now=visit.now)
        if visit.sees_tenant
        else [],
        newest=recent_calls.read(
            sql, tenant=tenant, environment=environment, now=visit.now, limit=NEWEST
        ),
        live=live_summary.live_figures(
            sql, tenant=tenant, environment=environment, currency=visit.currency, now=visit.now
        ),
    )


def _hints(visit: PageContext, found: OverviewData, live: LiveUse) -> list[RightsizingHint]:
    rates = entitlements.rates_of(visit.plan, visit.context.config.prices)
    seen = observed(found.functions, found.usage, found.parts, live)
    elapsed_s = visit.now - found.usage.span.first * found.usage.span.unit_s
    return rightsizing.rightsizing_hints(seen, rates=rates, elapsed_s=elapsed_s)[:MOST_HINTS]


def observed(
    rows: Iterable[FunctionStats],
    used: EnvironmentUsage,
    parts: Iterable[LatencyHistogram],
    live: LiveUse,
) -> list[ObservedUsage]:
    """Return deployed functions in the form that hints use."""
    sums = used.by(lambda cell: (cell.function_id, cell.kind))
    cells: dict[str, list[UsageCell]] = {}
    for cell in used.cells:
        cells.setdefault(cell.function_id, []).append(cell)
    slow = latency_histograms.by_function(
        part for part in parts if part.clock == "start" and part.start_kind not in ("WARM", CACHED)
    )
    return [
        ObservedUsage(
            app=row.app,
            name=row.name,
            memory_bytes=row.deployed.memory_bytes,
            measured_bytes=live.memory.get(row.id),
            min_instances=row.deployed.min_instances,
            waiting_cost=row.deployed.waiting_cost,
            whole=rollup_queries.total(
                c for c in cells.get(row.id, ()) if c.kind not in UNPAID_KINDS
            ),
            gpus=gpu_time(cells.get(row.id, ())),
            gpus_now=tuple(
                gpu for gpu in live.gpus if (gpu.app, gpu.function) == (row.app, row.name)
            ),
            busy=sums.get((row.id, "CALL"), UsageSums()),
            idle=sums.get((row.id, "IDLE"), UsageSums()),
            reserved=sums.get((row.id, "RESERVED"), UsageSums()),
            start_ms=slow.get(row.id, Histogram()).percentile(50),
        )
        for row in rows
        if row.deployed is not None
    ]
