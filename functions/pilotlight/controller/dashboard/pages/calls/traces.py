"""Pages of stored traces: a filtered list, and one trace as a waterfall."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import Path, Query
from fastapi.responses import Response

from pilotlight.controller.analytics import traces
from pilotlight.controller.dashboard.html import render
from pilotlight.controller.dashboard.page_context import MAX_NAME, PageRoute, Visitor
from pilotlight.controller.dashboard.svg import THINNEST
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.core.tracing.trace_layout import SpanRow, layout_spans

PAGE = 50
WIDTH = 420.0
KEPT_FOR = {
    "error": "failed",
    "cold": "waited for a start",
    "slow": "slower than its objective",
    "asked": "requested by the caller",
    "drawn": "sampled",
    "shadow": "shadow of a traced call",
}
SLOWNESS = (10, 100, 1000, 10_000)
"""Selectable minimum durations, in ms."""
MAX_DEPTH = 8
"""Maximum indentation of spans."""
_STEPS = frozenset({"route", "admit"})
_Text = Annotated[str, Query(max_length=MAX_NAME)]

router = APIRouter(include_in_schema=False, route_class=PageRoute)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanTableRow:
    """A span as a row. `tone`: the colour of its bar; `left`, `width`: out of WIDTH."""

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
    """Render the environment's traces, newest first: of one function (`app/name`), stored for one
    reason, or with a minimum duration in ms."""
    visit.require_deploy("traces require")
    at, _, call = before.partition("~")
    app, _, name = function.partition("/")
    filters = traces.TraceQuery(
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
    found, known = await visit.read(lambda sql: _load(sql, filters))
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


def _load(sql: sa.Connection, filters: traces.TraceQuery) -> tuple[list[traces.Json], list[str]]:
    found = traces.listing(sql, filters, limit=PAGE + 1)
    return found, traces.functions(
        sql, tenant=filters.tenant, environment=filters.environment or ""
    )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


@router.get("/dashboard/traces/{trace:path}")
async def one(visit: Visitor, trace: Annotated[str, Path(max_length=MAX_NAME)]) -> Response:
    """Render one trace, by its id or the id of a call in it. Raises NotFound, also for another
    tenant's trace."""
    visit.require_deploy("traces require")
    found = await visit.read(lambda sql: traces.get(sql, visit.caller, trace))
    rows = [_row(bar) for bar in layout_spans(found)]
    return render("trace.html", visit=visit, trace=found, rows=rows, width=WIDTH, words=KEPT_FOR)


def _row(bar: SpanRow) -> SpanTableRow:
    left = min(bar.begin * WIDTH, WIDTH - THINNEST)
    width = min(max(THINNEST, bar.width * WIDTH), WIDTH - left)
    return SpanTableRow(
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
