"""The page of one function: activity, cost, latency, and newest calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import sqlalchemy as sa
from fastapi import Path
from fastapi.responses import Response

from pilotlight.controller.dashboard import charts, machines, overview, tally
from pilotlight.controller.dashboard.html import render
from pilotlight.controller.dashboard.machines import Running
from pilotlight.controller.dashboard.visit import MAX_NAME, PageRoute, Visit, Visitor
from pilotlight.controller.figures import functions, hints, latency, newest, promises, usage
from pilotlight.controller.figures.functions import FunctionFigures
from pilotlight.controller.figures.latency import Histogram, Part
from pilotlight.controller.figures.usage import Usage
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.errors import NotFound

NEWEST = 20
_Name = Annotated[str, Path(max_length=MAX_NAME)]

router = APIRouter(include_in_schema=False, route_class=PageRoute)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    row: FunctionFigures
    usage: Usage
    parts: list[Part]
    hours: dict[int, Histogram]
    newest: newest.Page


@router.get("/dashboard/functions/{app}/{name}")
async def page(visit: Visitor, app: _Name, name: _Name) -> Response:
    """Render the page. Raises NotFound if the function is not deployed in this environment."""
    found = await visit.read(lambda sql: _load(sql, visit, app, name))
    running = await machines.running(visit, function=(app, name))
    measured = await machines.measured(visit, running.instances)
    return await visit.context.threads.run(
        visit.caller.tenant, _page, visit, found, running, measured
    )


def _page(visit: Visit, found: _Found, running: Running, measured: Mapping[str, int]) -> Response:
    seen = overview.observed([found.row], found.usage, found.parts, measured)
    rates = promises.rates_of(visit.plan, visit.context.config.prices)
    elapsed_s = visit.now - found.usage.span.first * found.usage.span.unit_s
    return render(
        "function.html",
        has_charts=True,
        visit=visit,
        found=found,
        row=found.row,
        deployed=found.row.deployed,
        running=running,
        starts=tally.starts(found.usage, found.parts),
        clocks=[
            (clock, latency.merged(p for p in found.parts if p.clock == clock))
            for clock in ("total", "queue", "start", "exec")
        ],
        spend=charts.spend_by_kind(found.usage),
        requests=charts.requests(found.usage),
        slowness=charts.latency(found.hours, visit.now),
        utilisation=tally.utilisation(found.row.title, found.usage.cells),
        per_thousand=tally.per_thousand,
        hints=hints.hints(seen, rates=rates, elapsed_s=elapsed_s),
    )


def _load(sql: sa.Connection, visit: Visit, app: str, name: str) -> _Found:
    tenant, environment = visit.caller.tenant, visit.environment
    deployed = functions.one(sql, tenant=tenant, environment=environment, app=app, name=name)
    if deployed is None:
        raise NotFound(f"there is no function {app}/{name} in environment {visit.environment!r}")
    used = usage.read(
        sql,
        tenant=tenant,
        environment=environment,
        span=visit.span,
        currency=visit.currency,
        function_id=deployed.id,
    )
    parts = latency.read(
        sql, tenant=tenant, environment=environment, now=visit.now, function_id=deployed.id
    )
    row = FunctionFigures(
        id=deployed.id, app=app, name=name, deployed=deployed, calls=used.calls, whole=used.total
    )
    row.latency = latency.merged(part for part in parts if part.clock == "total")
    return _Found(
        row=row,
        usage=used,
        parts=parts,
        hours=latency.by_hour(
            sql, tenant=tenant, environment=environment, now=visit.now, function_id=deployed.id
        ),
        newest=newest.read(
            sql,
            tenant=tenant,
            environment=environment,
            now=visit.now,
            limit=NEWEST,
            function_id=deployed.id,
        ),
    )
