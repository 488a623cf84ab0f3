"""Pages of drift: monitored functions with their last windows, and one function's features and
quality."""

from __future__ import annotations

from typing import Annotated, Any, Final

import sqlalchemy as sa
from fastapi import Path
from fastapi.responses import Response

from pilotlight.controller.dashboard.html import render
from pilotlight.controller.dashboard.page_context import MAX_NAME, PageContext, PageRoute, Visitor
from pilotlight.controller.drift import views
from pilotlight.controller.drift.targets import find_target
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.errors import NotFound

WINDOWS: Final = 20
TONES: Final = {"drift": "bad", "quality": "bad", "moderate": "warn", "ok": "good"}
WORDS: Final = {
    "ok": "as the reference",
    "moderate": "moderate",
    "drift": "drift",
    "quality": "bad quality",
    "no_data": "too few rows",
    "no_reference": "no reference",
}
_Name = Annotated[str, Path(max_length=MAX_NAME)]

router = APIRouter(include_in_schema=False, route_class=PageRoute)


@router.get("/dashboard/drift")
async def page(visit: Visitor) -> Response:
    """Render the environment's monitored functions: those in drift first."""
    visit.require_deploy("drift requires")
    found = await visit.read(lambda sql: _load(sql, visit))
    return render("drift.html", visit=visit, found=found, tones=TONES, words=WORDS)


@router.get("/dashboard/drift/{app}/{function}")
async def one(visit: Visitor, app: _Name, function: _Name) -> Response:
    """Render one function: its features, quality by slices, and the windows before. Raises
    NotFound."""
    visit.require_deploy("drift requires")
    shown = await visit.read(lambda sql: _detail(sql, visit, app, function))
    return render("drift_function.html", visit=visit, one=shown, tones=TONES, words=WORDS)


def _load(sql: sa.Connection, visit: PageContext) -> list[dict[str, Any]]:
    found = views.listing(sql, tenant=visit.caller.tenant, environment=visit.environment)
    rows = [
        views.summary(sql, target)
        for target in found
        if visit.caller.may_see(target.app, target.function)
    ]
    order = list(TONES)
    return sorted(
        rows,
        key=lambda row: (
            order.index(row["last"]["status"])
            if row["last"] is not None and row["last"]["status"] in order
            else len(order)
        ),
    )


def _detail(sql: sa.Connection, visit: PageContext, app: str, function: str) -> dict[str, Any]:
    if not visit.caller.may_see(app, function):
        raise NotFound(f"there is no function {app}/{function}")
    target = find_target(
        sql,
        tenant=visit.caller.tenant,
        environment=visit.environment,
        app=app,
        function=function,
    )
    return views.detail(sql, target, now=visit.now, limit=WINDOWS)
