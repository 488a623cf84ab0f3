"""Pages of experiments: the arms, the intervals of their differences, and whether the result is
valid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import Path
from fastapi.responses import Response

from pilotlight.controller.analytics.feedback import LABEL
from pilotlight.controller.dashboard import formatting
from pilotlight.controller.dashboard.formatting import DASH, MINUS
from pilotlight.controller.dashboard.html import render
from pilotlight.controller.dashboard.page_context import MAX_NAME, PageContext, PageRoute, Visitor
from pilotlight.controller.dashboard.pages.functions import releases
from pilotlight.controller.experiments import lifecycle, report
from pilotlight.controller.experiments.design import FEEDBACK, QUANTILES, RATIOS
from pilotlight.controller.experiments.lifecycle import RUNNING, Experiment
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.errors import NotFound

NEWEST = 50
REPORTED = 10
"""Running experiments whose report the list shows: each needs several queries."""
WIDTH, HEIGHT = 240.0, 18.0
_DOT = 3.5
_Id = Annotated[str, Path(max_length=MAX_NAME)]

router = APIRouter(include_in_schema=False, route_class=PageRoute)

STATE_WORDS = {
    "DRAFT": "planned",
    "RUNNING": "running",
    "STOPPED": "stopped",
    "CONCLUDED": "concluded",
}
STATE_TONES = {"RUNNING": "on", "STOPPED": "warn", "CONCLUDED": "good"}
GUARD_TONES = {"breached": "bad", "within": "good", "open": "warn"}
_NAMES = {
    "latency_mean": "Warm latency, mean",
    "exec_mean": "Execution, mean",
    "cold_ratio": "Cold starts",
}
_BRIEF = ("error_ratio", "latency_p50", "latency_p99", "cost_per_call")
_BETTER_LESS = ("error_ratio", "degraded_ratio", "cold_ratio", "latency_", "exec_mean", "cost_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """An interval drawn around zero in the middle: x of both ends and of the value, and a text
    alternative."""

    left: float
    right: float
    dot: float
    alt_text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricLine:
    """A metric of an arm against the first arm. `tone`: good, bad, or "" if no difference is
    shown."""

    metric: str
    arm: str
    first: str
    value: str
    base: str
    change: str
    tone: str
    verdict: str
    drawn: Drawn
    is_brief: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentView:
    """An experiment with its report; `body` is the report's JSON."""

    id: str
    title: str
    body: Mapping[str, Any]
    lines: Sequence[MetricLine]

    @property
    def brief(self) -> Sequence[MetricLine]:
        """The lines shown in the list: errors, latency, cost, and feedback."""
        return [line for line in self.lines if line.is_brief]

    @property
    def of(self) -> Mapping[str, Any]:
        """The experiment's own JSON."""
        return dict(self.body["experiment"])

    @property
    def is_running(self) -> bool:
        """Whether the experiment is running."""
        return bool(self.of["state"] == RUNNING)


@router.get("/dashboard/experiments")
async def page(visit: Visitor) -> Response:
    """Render the environment's experiments: the running ones with reports, the others as
    history."""
    visit.require_deploy("experiments require")
    running, others = await visit.read(lambda sql: _load(sql, visit))
    return render("experiments.html", visit=visit, running=running, others=others, **_WORDS)


@router.get("/dashboard/experiments/{experiment}")
async def one(visit: Visitor, experiment: _Id) -> Response:
    """Render one experiment in full. Raises NotFound."""
    visit.require_deploy("experiments require")

    def load(sql: sa.Connection) -> ExperimentView:
        found = lifecycle.get(sql, tenant=visit.caller.tenant, experiment=experiment)
        if found.environment != visit.environment or not visit.caller.may_see(
            found.app, found.function
        ):
            raise NotFound(
                f"there is no experiment {experiment!r} in environment {visit.environment!r}"
            )
        return shown(report.make_report(sql, found, now=visit.now), currency=visit.currency)

    return render("experiment.html", visit=visit, one=await visit.read(load), **_WORDS)


def _load(sql: sa.Connection, visit: PageContext) -> tuple[list[ExperimentView], list[Experiment]]:
    found = lifecycle.listing(sql, tenant=visit.caller.tenant, environment=visit.environment)[
        :NEWEST
    ]
    visible = [
        experiment
        for experiment in found
        if visit.caller.may_see(experiment.app, experiment.function)
    ]
    active = [experiment for experiment in visible if experiment.state == RUNNING][:REPORTED]
    running = [
        shown(report.make_report(sql, experiment, now=visit.now), currency=visit.currency)
        for experiment in active
    ]
    return running, [experiment for experiment in visible if experiment not in active]


def shown(body: Mapping[str, Any], *, currency: str = "") -> ExperimentView:
    """Build the page's data from a report."""
    of = body["experiment"]
    values = {
        (arm["name"], metric): bounds["value"]
        for arm in body["arms"]
        for metric, bounds in arm["metrics"].items()
    }
    lines = [_line(one, values, currency=currency) for one in body["comparisons"]]
    return ExperimentView(
        id=of["id"], title=f"{of['app']}/{of['function']}: {of['name']}", body=body, lines=lines
    )


def _line(
    one: Mapping[str, Any], values: Mapping[tuple[str, str], float], *, currency: str
) -> MetricLine:
    metric, unit = one["metric"], unit_of(one["metric"])
    return MetricLine(
        metric=words_of(metric),
        arm=one["arm"],
        first=one["first"],
        value=number(values.get((one["arm"], metric)), unit, currency=currency),
        base=number(values.get((one["first"], metric)), unit, currency=currency),
        change=DASH if one["relative"] is None else signed(one["relative"]),
        tone=tone_of(metric, one["verdict"]),
        verdict=one["verdict"],
        drawn=drawn(one, unit, currency=currency),
        is_brief=metric in _BRIEF or metric.startswith(FEEDBACK),
    )


def drawn(one: Mapping[str, Any], unit: str, *, currency: str = "") -> Drawn:
    """Draw an interval around zero, scaled to the farther end; an unknown end reaches the
    border."""
    ends = [end for end in (one["value"], one["low"], one["high"]) if end is not None]
    scale = (WIDTH / 2 - 2 * _DOT) / (max(map(abs, ends), default=0) or 1)
    left = 0.0 if one["low"] is None else WIDTH / 2 + one["low"] * scale
    right = WIDTH if one["high"] is None else WIDTH / 2 + one["high"] * scale
    low, high = (
        DASH if one[end] is None else plus(one[end], unit, currency=currency)
        for end in ("low", "high")
    )
    alt_text = f"{plus(one['value'], unit, currency=currency)}, between {low} and {high}"
    return Drawn(left=left, right=right, dot=WIDTH / 2 + one["value"] * scale, alt_text=alt_text)


def words_of(metric: str) -> str:
    """Return a metric's display name: `Warm latency p99` for `latency_p99`."""
    return _NAMES.get(metric) or releases.metric_words(metric)


def unit_of(metric: str) -> str:
    """Return a metric's unit."""
    if metric in RATIOS or f":{LABEL}=" in metric:
        return "share"
    if metric in QUANTILES or metric.endswith("_mean"):
        return "ms"
    return "money" if metric.startswith("cost_") else ""


def tone_of(metric: str, verdict: str) -> str:
    """Return whether a shown difference is good or bad; "" for feedback, whose direction is
    unknown."""
    if verdict not in (report.HIGHER, report.LOWER) or not metric.startswith(_BETTER_LESS):
        return ""
    return "good" if verdict == report.LOWER else "bad"


def signed(share: float) -> str:
    """Format a share as +12.3 %."""
    return f"{'+' if share >= 0 else MINUS}{abs(share):.1%}".replace("%", " %")


def number(value: float | None, unit: str, *, currency: str = "") -> str:
    """Format a metric's number."""
    if value is not None and unit == "money":
        return formatting.money(Decimal(f"{value:.12f}"), currency)
    return releases.number(value, unit)


def plus(value: float, unit: str, *, currency: str = "") -> str:
    """Format a difference with its sign."""
    return f"{'+' if value >= 0 else MINUS}{number(abs(value), unit, currency=currency)}"


_WORDS: Mapping[str, Any] = {
    "state_words": STATE_WORDS,
    "state_tones": STATE_TONES,
    "guard_tones": GUARD_TONES,
    "width": WIDTH,
    "height": HEIGHT,
}
