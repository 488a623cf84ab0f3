"""The overview: an environment's activity and cost, and right-sizing hints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import sqlalchemy as sa
from fastapi.responses import Response

from pilotlight.controller import budgets
from pilotlight.controller.dashboard import charts, machines, now, tally
from pilotlight.controller.dashboard.budgets import amount
from pilotlight.controller.dashboard.html import render
from pilotlight.controller.dashboard.machines import Running
from pilotlight.controller.dashboard.visit import PageRoute, Visit, Visitor
from pilotlight.controller.figures import functions, hints, latency, newest, promises, usage
from pilotlight.controller.figures.functions import FunctionFigures
from pilotlight.controller.figures.hints import Hint, Observed
from pilotlight.controller.figures.latency import Histogram, Part
from pilotlight.controller.figures.sums import Sums
from pilotlight.controller.figures.usage import Usage
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.dashboard_origin import HOME

NEWEST = 8
MOST_HINTS = 5

router = APIRouter(include_in_schema=False, route_class=PageRoute)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """What the page reads from the database."""

    usage: Usage
    parts: list[Part]
    hours: Mapping[int, Histogram]
    functions: list[FunctionFigures]
    deployed: int
    budgets: list[budgets.Overview]
    newest: newest.Page
    live: Mapping[str, str]


@router.get(HOME)
async def page(visit: Visitor) -> Response:
    """Render the page."""
    found = await visit.read(lambda sql: look(sql, visit))
    running = await machines.running(visit)
    measured = await machines.measured(visit, running.instances)
    return await visit.context.threads.run(
        visit.caller.tenant, _page, visit, found, running, measured
    )


def _page(visit: Visit, found: Overview, running: Running, measured: Mapping[str, int]) -> Response:
    """Render in a thread: a page of many functions takes some tens of milliseconds, which would
    block other requests."""
    for row in found.functions:
        row.instances = sum(
            1
            for i in running.instances
            if (i.labels.get("app"), i.labels.get("function")) == (row.app, row.name)
        )
    everything = latency.merged(part for part in found.parts if part.clock == "total")
    return render(
        "overview.html",
        has_charts=True,
        visit=visit,
        found=found,
        live=found.live,
        amount=amount,
        running=running,
        total=found.usage.total,
        calls=found.usage.calls,
        latency=everything,
        starts=tally.starts(found.usage, found.parts),
        charts=[charts.spend_by_function(found.usage), charts.spend_by_kind(found.usage)],
        requests=charts.requests(found.usage),
        slowness=charts.latency(found.hours, visit.now),
        utilisation=tally.by_owner(found.usage.cells),
        per_thousand=tally.per_thousand,
        hints=_hints(visit, found, measured),
    )


def look(sql: sa.Connection, visit: Visit) -> Overview:
    """Read everything but the running instances, in one consistent view of the database."""
    tenant, environment = visit.caller.tenant, visit.environment
    used = usage.read(
        sql, tenant=tenant, environment=environment, span=visit.span, currency=visit.currency
    )
    parts = latency.read(
        sql, tenant=tenant, environment=environment, now=visit.now, clocks=("total", "start")
    )
    return Overview(
        usage=used,
        parts=parts,
        hours=latency.by_hour(sql, tenant=tenant, environment=environment, now=visit.now),
        functions=functions.table(
            sql, tenant=tenant, environment=environment, usage=used, parts=parts
        ),
        deployed=functions.count(sql, tenant=tenant, environment=environment),
        budgets=budgets.overview(sql, tenant=visit.caller.tenant, now=visit.now)
        if visit.sees_tenant
        else [],
        newest=newest.read(
            sql, tenant=tenant, environment=environment, now=visit.now, limit=NEWEST
        ),
        live=now.figures(
            sql, tenant=tenant, environment=environment, currency=visit.currency, now=visit.now
        ),
    )


def _hints(visit: Visit, found: Overview, measured: Mapping[str, int]) -> list[Hint]:
    rates = promises.rates_of(visit.plan, visit.context.config.prices)
    seen = observed(found.functions, found.usage, found.parts, measured)
    elapsed_s = visit.now - found.usage.span.first * found.usage.span.unit_s
    return hints.hints(seen, rates=rates, elapsed_s=elapsed_s)[:MOST_HINTS]


def observed(
    rows: Iterable[FunctionFigures], used: Usage, parts: Iterable[Part], measured: Mapping[str, int]
) -> list[Observed]:
    """Return deployed functions in the form that hints use."""
    sums = used.by(lambda cell: (cell.function_id, cell.kind))
    slow = latency.by_function(
        part for part in parts if part.clock == "start" and part.start_kind != "WARM"
    )
    return [
        Observed(
            app=row.app,
            name=row.name,
            memory_bytes=row.deployed.memory_bytes,
            measured_bytes=measured.get(row.id),
            min_instances=row.deployed.min_instances,
            scaledown_window_s=row.deployed.scaledown_window_s,
            whole=row.whole,
            busy=sums.get((row.id, "CALL"), Sums()),
            idle=sums.get((row.id, "IDLE"), Sums()),
            reserved=sums.get((row.id, "RESERVED"), Sums()),
            start_ms=slow.get(row.id, Histogram()).percentile(50),
        )
        for row in rows
        if row.deployed is not None
    ]
