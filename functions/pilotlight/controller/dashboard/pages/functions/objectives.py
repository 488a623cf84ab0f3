"""Pages of objectives: remaining error budgets, burn rates, and latency by stage."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import Path
from fastapi.responses import Response

from pilotlight.controller.analytics.time_range import DAY_S
from pilotlight.controller.dashboard.charts import Chart, Series
from pilotlight.controller.dashboard.formatting import DASH, TIMES
from pilotlight.controller.dashboard.html import render
from pilotlight.controller.dashboard.page_context import MAX_NAME, PageContext, PageRoute, Visitor
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.slo import observations, views
from pilotlight.controller.slo.burn_rate import Sli, compute_budget_spend
from pilotlight.controller.slo.error_budget import SloTarget
from pilotlight.errors import NotFound
from pilotlight.spec.policies import STAGES

CHART_MINUTES = 15
"""Minutes per point of the chart: short enough to show an outage, long enough to contain calls."""
LOW = 0.25
"""Remaining share of a budget below which it is shown as a warning."""
MOST_SPENT = 999
"""A budget that was spent more often is shown as spent more than this many times."""
_Name = Annotated[str, Path(max_length=MAX_NAME)]

router = APIRouter(include_in_schema=False, route_class=PageRoute)

SLI_WORDS = {
    "availability": "Availability",
    "warm_latency": "Warm latency",
    "first_token": "First token",
    "cold_latency": "Cold start",
    "completion": "Completed streams",
    "degraded": "Undegraded answers",
}
STAGE_WORDS = {
    "route": "Route",
    "admit": "Admit",
    "queue": "Queue",
    "start": "Start",
    "exec": "Execute",
}
_COLOURS = ("--c1", "--c2", "--c3", "--c4", "--c5", "--c6")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge:
    """What is left of one budget, as text. `share` is the remaining share, 0 to 1; None without
    data."""

    sli: str
    name: str
    target: str
    ratio: str
    left: str
    share: float | None
    tone: str
    is_spent: bool
    bad: int
    total: int
    rates: Sequence[tuple[str, str, str]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBar:
    """One stage: `p99_ms` against its budget. `used` is p99's share of the budget, at most 1."""

    name: str
    words: str
    budget_s: float
    p50_ms: float | None
    p99_ms: float | None
    used: float | None
    tone: str
    overruns: int
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveView:
    """A function's data for the page; `body` is the API's response."""

    title: str
    body: Mapping[str, Any]
    gauges: Sequence[Gauge]
    stages: Sequence[StageBar] = ()
    chart: Chart | None = None

    @property
    def severity(self) -> str:
        """`page`, `ticket` or "": the highest severity of its open alarms."""
        return min((str(alarm["severity"]) for alarm in self.body["alarms"]), default="")

    @property
    def by_sli(self) -> dict[str, Gauge]:
        """The gauges by their indicator."""
        return {gauge.sli: gauge for gauge in self.gauges}

    @property
    def is_spent(self) -> bool:
        """Whether one of its budgets is spent. Without an alarm, nothing spends it now."""
        return any(gauge.is_spent for gauge in self.gauges)

    @property
    def budgets(self) -> dict[str, float]:
        """Budgets of the stages of a warm call, in seconds, for the bar."""
        return {stage.name: stage.budget_s for stage in self.stages if stage.name != "start"}

    @property
    def has_data(self) -> bool:
        """Whether any call counts for one of its budgets."""
        return any(gauge.total for gauge in self.gauges)


@router.get("/dashboard/objectives")
async def page(visit: Visitor) -> Response:
    """Render the environment's functions: those with alarms first, then those with the least budget
    left."""
    visit.require_deploy("objectives require")
    found = await visit.read(lambda sql: _load(sql, visit))
    known = {sli for one in found for sli in one.by_sli}
    columns = [(sli, words) for sli, words in SLI_WORDS.items() if sli in known]
    return render(
        "objectives.html", visit=visit, found=sorted(found, key=_urgency), columns=columns
    )


@router.get("/dashboard/objectives/{app}/{function}")
async def one(visit: Visitor, app: _Name, function: _Name) -> Response:
    """Render one function: burn rates, stages, alarms. Raises NotFound."""
    visit.require_deploy("objectives require")
    shown = await visit.read(lambda sql: _detail(sql, visit, app, function))
    return render(
        "objective.html",
        visit=visit,
        one=shown,
        has_charts=True,
        sli_words=SLI_WORDS,
        stage_words=STAGE_WORDS,
        stages=STAGES,
    )


def _load(sql: sa.Connection, visit: PageContext) -> list[ObjectiveView]:
    found = views.functions_of(sql, tenant=visit.caller.tenant, environment=visit.environment)
    visible = [promise for promise in found if visit.caller.may_see(promise.app, promise.function)]
    return [_view(views.summary(sql, promise, now=visit.now)) for promise in visible]


def _detail(sql: sa.Connection, visit: PageContext, app: str, function: str) -> ObjectiveView:
    found = views.functions_of(
        sql, tenant=visit.caller.tenant, environment=visit.environment, app=app, function=function
    )
    if not found or not visit.caller.may_see(app, function):
        raise NotFound(
            f"there is no function {app}/{function} with traffic in environment "
            f"{visit.environment!r}"
        )
    shown = _view(views.detail(sql, found[0], now=visit.now))
    return ObjectiveView(
        title=shown.title,
        body=shown.body,
        gauges=shown.gauges,
        stages=shown.stages,
        chart=burn_chart(sql, found[0], visit.now),
    )


def _view(body: Mapping[str, Any]) -> ObjectiveView:
    gauges = [
        gauge(one)
        for one in body["slis"]
        if one["is_told"] and (one["total"] or one["sli"] == Sli.AVAILABILITY)
    ]
    stages = [_stage(stage, body["worst_stage"]) for stage in body.get("stages", ())]
    return ObjectiveView(
        title=f"{body['app']}/{body['function']}", body=body, gauges=gauges, stages=stages
    )


def gauge(one: Mapping[str, Any]) -> Gauge:
    """Build the gauge of one indicator. A few bad calls of a few spend no budget, as for alarms and
    frozen releases."""
    left, is_spent = one["budget_left"], one["is_spent"]
    bound = f" within {one['bound_s']:g} s" if one["bound_s"] is not None else ""
    is_unclear = left is None or (left <= 0 and not is_spent)
    tone = "" if is_unclear else "bad" if is_spent else "warn" if left < LOW else "good"
    return Gauge(
        sli=one["sli"],
        is_spent=is_spent,
        name=SLI_WORDS[one["sli"]],
        target=f"{one['target'] * 100:.6g} %{bound}",
        ratio=DASH if one["ratio"] is None else f"{one['ratio'] * 100:.5g} %",
        left=_left(left, is_spent=is_spent),
        share=None if is_unclear else max(0.0, min(1.0, left)),
        tone=tone,
        bad=one["bad"],
        total=one["total"],
        rates=[(window, *_rate(rate)) for window, rate in one.get("burn_rates", {}).items()],
    )


def _left(left: float | None, *, is_spent: bool) -> str:
    """Format what is left of a budget, or how often it was spent."""
    if left is None:
        return DASH
    if left > 0:
        return f"{left * 100:.0f} % left"
    if not is_spent:
        return "too few calls"
    return (
        f"{1 - left:.3g} {TIMES} spent" if left > -MOST_SPENT else f"> {MOST_SPENT} {TIMES} spent"
    )


def _rate(rate: float | None) -> tuple[str, str]:
    """Return a burn rate as text, and its tone."""
    if rate is None:
        return DASH, "soft"
    return f"{rate:.3g}", "bad" if rate > 6 else "warn" if rate > 1 else ""


def _stage(stage: Mapping[str, Any], worst: str) -> StageBar:
    p99_ms = stage["p99_ms"]
    used = None if p99_ms is None else min(1.0, p99_ms / (stage["budget_s"] * 1000))
    tone = "bad" if stage["stage"] == worst else "warn" if stage["overruns"] else "good"
    return StageBar(
        name=stage["stage"],
        words=STAGE_WORDS[stage["stage"]],
        budget_s=stage["budget_s"],
        p50_ms=stage["p50_ms"],
        p99_ms=p99_ms,
        used=used,
        tone=tone,
        overruns=stage["overruns"],
        calls=stage["calls"],
    )


def burn_chart(sql: sa.Connection, promise: SloTarget, now: float) -> Chart:
    """Burn rates of the last day, per 15 minutes; 1 spends exactly the budget."""
    step_s = CHART_MINUTES * 60
    last = int(now // step_s)
    first = last - int(DAY_S // step_s) + 1
    found = observations.units(
        sql,
        function_id=promise.function_id,
        since_s=first * step_s,
        until_s=now,
        minutes=CHART_MINUTES,
    )
    by_unit = {one.minute // CHART_MINUTES: one for one in found}
    units = range(first, last + 1)
    series = []
    for sli, colour in zip(Sli, _COLOURS, strict=True):
        values = [
            views.rate(compute_budget_spend(by_unit.get(unit), promise.objectives, sli).burn)
            for unit in units
        ]
        if sli in promise.alerting_slis and any(value is not None for value in values):
            series.append(Series(name=SLI_WORDS[sli], colour=colour, values=values))
    moments = [dt.datetime.fromtimestamp(unit * step_s, tz=dt.UTC) for unit in units]
    highest = max((value for one in series for value in one.values if value is not None), default=0)
    return Chart(
        id="burn",
        title="Burn rates, last 24 hours",
        alt_text=f"per {CHART_MINUTES} minutes; at most {float(highest):.3g} times the budget",
        shape="lines",
        unit="times",
        labels=[f"{at:%d %b %H:%M}" for at in moments],
        moments=[f"{at:%Y-%m-%dT%H:%M}" for at in moments],
        series=series,
    )


def _urgency(one: ObjectiveView) -> tuple[int, float, str]:
    """Sort key: pages first, then tickets, then spent budgets, then the least budget left."""
    order = {"page": 0, "ticket": 1}.get(one.severity, 2 if one.is_spent else 3)
    return (
        order,
        min((gauge.share for gauge in one.gauges if gauge.share is not None), default=2.0),
        one.title,
    )
