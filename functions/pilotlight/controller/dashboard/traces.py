"""Traces that were kept: a list that can be narrowed, and one trace as a waterfall."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import Path, Query
from fastapi.responses import Response

from pilotlight.controller import traces
from pilotlight.controller.dashboard.drawing import THINNEST
from pilotlight.controller.dashboard.html import render
from pilotlight.controller.dashboard.visit import MAX_NAME, PageRoute, Visit, Visitor
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.errors import Forbidden
from pilotlight.waterfall import Bar, bars

PAGE = 50
WIDTH = 420.0
KEPT_FOR = {
    "error": "failed",
    "cold": "waited for a start",
    "slow": "slower than promised",
    "asked": "its caller asked",
    "drawn": "by chance",
    "shadow": "copy of one",
}
SLOWNESS = (10, 100, 1000, 10_000)
"""Bounds to choose from, in ms."""
MAX_DEPTH = 8
"""Spans are indented so far; deeper ones stand below each other."""
_STEPS = frozenset({"route", "admit"})
_Text = Annotated[str, Query(max_length=MAX_NAME)]

router = APIRouter(include_in_schema=False, route_class=PageRoute)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A span as a row. `tone`: the colour of its bar; `left`, `width`: of WIDTH."""

    span: Mapping[str, Any]
    depth: int
    left: float
    width: float
    tone: str


@router.get("/dashboard/traces")
async def listing(
    *,
    visit: Visitor,
    function: _Text = "",
    kept_for: _Text = "",
    arm: _Text = "",
    slower: Annotated[int, Query(ge=0, le=10**9)] = 0,
    before: _Text = "",
) -> Response:
    """Traces of the environment, newest first: of one function (`app/name`), kept for one reason,
    longer than so many ms."""
    _demand(visit)
    at, _, call = before.partition("~")
    app, _, name = function.partition("/")
    wanted = traces.Wanted(
        tenant=visit.caller.tenant,
        environment=visit.environment,
        app=app or None,
        function=name or None,
        arm=arm or None,
        kept_for=kept_for or None,
        min_ms=float(slower) if slower else None,
        before=_number(at),
        before_call=call,
    )
    found, known = await visit.read(lambda sql: _look(sql, wanted))
    last = found[-1] if len(found) > PAGE else None
    shown = found[:PAGE]
    return render(
        "traces.html",
        visit=visit,
        found=shown,
        known=known,
        function=function,
        kept_for=kept_for,
        arm=arm,
        slower=slower,
        before=before,
        older=f"{shown[-1]['at']!r}~{shown[-1]['call']}" if last else "",
        words=KEPT_FOR,
        slowness=SLOWNESS,
    )


def _look(sql: sa.Connection, wanted: traces.Wanted) -> tuple[list[traces.Json], list[str]]:
    found = traces.listing(sql, wanted, limit=PAGE + 1)
    return found, traces.functions(sql, tenant=wanted.tenant, environment=wanted.environment or "")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


@router.get("/dashboard/traces/{trace:path}")
async def one(visit: Visitor, trace: Annotated[str, Path(max_length=MAX_NAME)]) -> Response:
    """One trace, by its id or by that of a call in it. Raises NotFound, for another tenant's as for
    nobody's."""
    _demand(visit)
    found = await visit.read(lambda sql: traces.get(sql, visit.caller, trace))
    rows = [_row(bar) for bar in bars(found)]
    return render("trace.html", visit=visit, trace=found, rows=rows, width=WIDTH, words=KEPT_FOR)


def _demand(visit: Visit) -> None:
    if not visit.sees_instances:
        raise Forbidden(
            "this key reads bills; what happens inside calls needs one of scope 'deploy'"
        )


def _row(bar: Bar) -> Row:
    left = min(bar.begin * WIDTH, WIDTH - THINNEST)
    width = min(max(THINNEST, bar.width * WIDTH), WIDTH - left)
    return Row(
        span=bar.span, depth=min(bar.depth, MAX_DEPTH), left=left, width=width, tone=_tone(bar.span)
    )


def _tone(span: Mapping[str, Any]) -> str:
    if span["error"]:
        return "fill-bad"
    if "pilotlight.phase_ms" in span["attributes"] or span["name"] == "start":
        return "start"
    if span["name"] == "queue":
        return "queue"
    if span["name"] in ("exec", "worker"):
        return "exec"
    is_ours = (
        span["kind"] in ("server", "consumer")
        or span["name"] in _STEPS
        or span["name"].startswith("attempt ")
    )
    return "fill-c7" if is_ours else "fill-c3"
