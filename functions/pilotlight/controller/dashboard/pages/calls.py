"""Pages of the newest calls, and of one call with the phases of each attempt."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated

import sqlalchemy as sa
from fastapi import Path, Query
from fastapi.responses import Response

from pilotlight.controller.analytics import function_stats, recent_calls, traces
from pilotlight.controller.billing import ledger
from pilotlight.controller.dashboard.html import render
from pilotlight.controller.dashboard.page_context import MAX_NAME, PageContext, PageRoute, Visitor
from pilotlight.controller.dashboard.svg import total_ms
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.errors import NotFound

PAGE = 50

router = APIRouter(include_in_schema=False, route_class=PageRoute)


@router.get("/dashboard/calls")
async def listing(
    visit: Visitor,
    function: Annotated[str, Query(max_length=MAX_NAME)] = "",
    before: Annotated[str, Query(max_length=MAX_NAME)] = "",
) -> Response:
    """Render the calls of the environment, or of one function (`app/name`), newest first."""
    found = await visit.read(lambda sql: _load(sql, visit, function, before))
    return render("calls.html", visit=visit, found=found, function=function, before=before)


def _load(
    sql: sa.Connection, visit: PageContext, function: str, before: str
) -> recent_calls.CallPage:
    where = {"tenant": visit.caller.tenant, "environment": visit.environment}
    identity = None
    if function:
        app, _, name = function.partition("/")
        deployed = function_stats.one(sql, **where, app=app, name=name)
        if deployed is None:
            raise NotFound(f"there is no function {function} in environment {visit.environment!r}")
        identity = deployed.id
    return recent_calls.read(
        sql, **where, now=visit.now, limit=PAGE, function_id=identity, before=before
    )


@router.get("/dashboard/calls/{call:path}")
async def one(visit: Visitor, call: Annotated[str, Path(max_length=MAX_NAME)]) -> Response:
    """Render one call. Raises NotFound, also for another tenant's call."""
    where = {"tenant": visit.caller.tenant, "environment": visit.environment}
    records, is_traced = await visit.read(
        lambda sql: (
            recent_calls.attempts(sql, **where, call=call),
            traces.is_kept(sql, tenant=visit.caller.tenant, call=call),
        )
    )
    attempts = [record for record in records if record.kind != ledger.ADJUSTMENT]
    if not attempts:
        raise NotFound(f"there is no call {call} in environment {visit.environment!r}")
    cost = sum((Decimal(record.cost) for record in records), Decimal(0))
    return render(
        "call.html",
        visit=visit,
        call=call,
        attempts=attempts,
        corrections=[record for record in records if record.kind == ledger.ADJUSTMENT],
        cost=cost,
        is_traced=is_traced and visit.sees_instances,
        longest_ms=max(total_ms(attempt) for attempt in attempts),
    )
