"""Experiments: the arms, how sure their differences are, and whether any of it may be believed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import Path
from fastapi.responses import Response

from pilotlight.controller.dashboard import releases, words
from pilotlight.controller.dashboard.html import render
from pilotlight.controller.dashboard.visit import MAX_NAME, PageRoute, Visit, Visitor
from pilotlight.controller.dashboard.words import DASH, MINUS
from pilotlight.controller.experiments import lifecycle, report
from pilotlight.controller.experiments.design import FEEDBACK, QUANTILES, RATIOS
from pilotlight.controller.experiments.lifecycle import RUNNING, Experiment
from pilotlight.controller.feedback import LABEL
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.errors import Forbidden, NotFound
from pilotlight.types import Scope

NEWEST = 50
REPORTED = 10
"""Running experiments whose report the list shows: each is some queries."""
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
    """An interval as a drawing around zero, which is in the middle: x of both ends and of the
    value; what it says in words."""

    left: float
    right: float
    dot: float
    says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A metric of an arm against the first arm. `tone`: good, bad, or "" where no difference is
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
class Shown:
    """An experiment with its report; `body` is the report's JSON."""

    id: str
    title: str
    body: Mapping[str, Any]
    lines: Sequence[Line]

    @property
    def brief(self) -> Sequence[Line]:
        """What the list shows of it: errors, latency, cost, and what callers tell."""
        return [line for line in self.lines if line.is_brief]

    @property
    def of(self) -> Mapping[str, Any]:
        """The experiment's own JSON."""
        return dict(self.body["experiment"])

    @property
    def is_running(self) -> bool:
        """It goes on."""
        return bool(self.of["state"] == RUNNING)


@router.get("/dashboard/experiments")
async def page(visit: Visitor) -> Response:
    """All of the environment's: those that run with their reports, the others as history."""
    _demand_sight(visit)
    running, others = await visit.read(lambda sql: _look(sql, visit))
    return render("experiments.html", visit=visit, running=running, others=others, **_WORDS)


@router.get("/dashboard/experiments/{experiment}")
async def one(visit: Visitor, experiment: _Id) -> Response:
    """One of them with everything that is known. Raises NotFound."""
    _demand_sight(visit)

    def look(sql: sa.Connection) -> Shown:
        found = lifecycle.get(sql, tenant=visit.caller.tenant, experiment=experiment)
        if found.environment != visit.environment or not visit.caller.may_see(
            found.app, found.function
        ):
            raise NotFound(
                f"there is no experiment {experiment!r} in environment {visit.environment!r}"
            )
        return shown(report.make(sql, found, now=visit.now), currency=visit.currency)

    return render("experiment.html", visit=visit, one=await visit.read(look), **_WORDS)


def _look(sql: sa.Connection, visit: Visit) -> tuple[list[Shown], list[Experiment]]:
    found = lifecycle.listing(sql, tenant=visit.caller.tenant, environment=visit.environment)[
        :NEWEST
    ]
    mine = [
        experiment
        for experiment in found
        if visit.caller.may_see(experiment.app, experiment.function)
    ]
    active = [experiment for experiment in mine if experiment.state == RUNNING][:REPORTED]
    running = [
        shown(report.make(sql, experiment, now=visit.now), currency=visit.currency)
        for experiment in active
    ]
    return running, [experiment for experiment in mine if experiment not in active]


def _demand_sight(visit: Visit) -> None:
    if not visit.sees_instances:
        raise Forbidden("experiments are for keys that may deploy", scope=Scope.DEPLOY.value)


def shown(body: Mapping[str, Any], *, currency: str = "") -> Shown:
    """What a page needs of a report."""
    of = body["experiment"]
    values = {
        (arm["name"], metric): bounds["value"]
        for arm in body["arms"]
        for metric, bounds in arm["metrics"].items()
    }
    lines = [_line(one, values, currency=currency) for one in body["comparisons"]]
    return Shown(
        id=of["id"], title=f"{of['app']}/{of['function']}: {of['name']}", body=body, lines=lines
    )


def _line(
    one: Mapping[str, Any], values: Mapping[tuple[str, str], float], *, currency: str
) -> Line:
    metric, unit = one["metric"], unit_of(one["metric"])
    return Line(
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
    """An interval around zero: as wide as the farther end; an end that is not known reaches the
    border."""
    ends = [end for end in (one["value"], one["low"], one["high"]) if end is not None]
    scale = (WIDTH / 2 - 2 * _DOT) / (max(map(abs, ends), default=0) or 1)
    left = 0.0 if one["low"] is None else WIDTH / 2 + one["low"] * scale
    right = WIDTH if one["high"] is None else WIDTH / 2 + one["high"] * scale
    low, high = (
        DASH if one[end] is None else plus(one[end], unit, currency=currency)
        for end in ("low", "high")
    )
    says = f"{plus(one['value'], unit, currency=currency)}, between {low} and {high}"
    return Drawn(left=left, right=right, dot=WIDTH / 2 + one["value"] * scale, says=says)


def words_of(metric: str) -> str:
    """`Warm latency p99`, of `latency_p99`."""
    return _NAMES.get(metric) or releases.metric_words(metric)


def unit_of(metric: str) -> str:
    """In what a metric is told."""
    if metric in RATIOS or f":{LABEL}=" in metric:
        return "share"
    if metric in QUANTILES or metric.endswith("_mean"):
        return "ms"
    return "money" if metric.startswith("cost_") else ""


def tone_of(metric: str, verdict: str) -> str:
    """Whether a difference that is shown is a good one; of what callers tell, nobody here knows."""
    if verdict not in (report.HIGHER, report.LOWER) or not metric.startswith(_BETTER_LESS):
        return ""
    return "good" if verdict == report.LOWER else "bad"


def signed(share: float) -> str:
    """+12.3 %."""
    return f"{'+' if share >= 0 else MINUS}{abs(share):.1%}".replace("%", " %")


def number(value: float | None, unit: str, *, currency: str = "") -> str:
    """A metric's number."""
    if value is not None and unit == "money":
        return words.money(Decimal(f"{value:.12f}"), currency)
    return releases.number(value, unit)


def plus(value: float, unit: str, *, currency: str = "") -> str:
    """A difference with its sign."""
    return f"{'+' if value >= 0 else MINUS}{number(abs(value), unit, currency=currency)}"


_WORDS: Mapping[str, Any] = {
    "state_words": STATE_WORDS,
    "state_tones": STATE_TONES,
    "guard_tones": GUARD_TONES,
    "width": WIDTH,
    "height": HEIGHT,
}
