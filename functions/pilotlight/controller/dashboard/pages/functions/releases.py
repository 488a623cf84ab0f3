"""Pages of releases: the state, gates and decisions of each rollout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import Path
from fastapi.responses import Response

from pilotlight.controller.analytics.time_range import DAY_S
from pilotlight.controller.dashboard.formatting import DASH, milliseconds, percent
from pilotlight.controller.dashboard.html import render
from pilotlight.controller.dashboard.page_context import MAX_NAME, PageContext, PageRoute, Visitor
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.rollouts import repository, views
from pilotlight.controller.rollouts.records import ACTIVE
from pilotlight.controller.rollouts.repository import Rollout
from pilotlight.errors import NotFound

NEWEST = 50
DECISIONS = 100
RECENT_DAYS = 30
_Id = Annotated[str, Path(max_length=MAX_NAME)]

router = APIRouter(include_in_schema=False, route_class=PageRoute)

STATE_WORDS = {
    "running": "running",
    "paused": "paused",
    "done": "done",
    "rolled_back": "rolled back",
    "halted": "halted",
    "aborted": "aborted",
    "superseded": "superseded",
}
STATE_TONES = {
    "running": "on",
    "paused": "warn",
    "done": "good",
    "rolled_back": "bad",
    "halted": "bad",
    "aborted": "warn",
}
OUTCOME_WORDS = {
    "pass": "passed",
    "fail": "failed",
    "unclear": "unclear",
    "no_data": "too little data",
}
OUTCOME_TONES = {"pass": "good", "fail": "bad", "unclear": "warn"}
VERDICT_WORDS = {
    "advance": "advances",
    "hold": "holds",
    "rollback": "is rolled back",
    "halt": "is halted",
    "done": "is done",
}
VERDICT_TONES = {"advance": "good", "done": "good", "rollback": "bad", "halt": "bad"}
METRIC_WORDS = {
    "error_ratio": "Errors",
    "degraded_ratio": "Degraded answers",
    "incomplete_ratio": "Broken streams",
    "cost_per_call": "Cost per call",
    "cost_per_1k_tokens": "Cost per 1,000 tokens",
}
_CLOCKS = {"latency": "Warm latency", "first_byte": "First token", "cold": "Cold start"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStep:
    """A step of a rollout. `state` is `passed`, `here`, `left` (rolled back from here) or "" (not
    reached); `share` is the elapsed share of its time."""

    percent: int
    state: str
    share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GateLine:
    """One gate as text: the candidate's number, stable's, the limit, and the used share of the
    limit (0 to 1; None: unknown)."""

    name: str
    kind: str
    candidate: str
    stable: str
    limit: str
    used: float | None
    samples: int
    outcome: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutView:
    """A rollout's data for the page."""

    id: str
    title: str
    body: Mapping[str, Any]
    stations: Sequence[RolloutStep]
    gates: Sequence[GateLine]

    @property
    def is_active(self) -> bool:
        """Whether the rollout has not ended."""
        return self.body["state"] in ACTIVE


@router.get("/dashboard/releases")
async def page(visit: Visitor) -> Response:
    """Render the environment's rollouts: active ones with their numbers, the others as history."""
    visit.require_deploy("releases require")
    active, over = await visit.read(lambda sql: _load(sql, visit))
    counted = Counter(
        one.state.value for one in over if one.created_at >= visit.now - RECENT_DAYS * DAY_S
    )
    history = [shown(views.summary(one, now=visit.now), currency=visit.currency) for one in over]
    return render(
        "releases.html",
        visit=visit,
        active=active,
        history=history,
        counted=counted,
        recent_days=RECENT_DAYS,
        **_WORDS,
    )


@router.get("/dashboard/releases/{rollout}")
async def one(visit: Visitor, rollout: _Id) -> Response:
    """Render one rollout with its decisions. Raises NotFound."""
    visit.require_deploy("releases require")
    rates = visit.context.config.prices.rates()

    def load(sql: sa.Connection) -> RolloutView:
        found = repository.find(sql, tenant=visit.caller.tenant, rollout=rollout)
        if found.environment != visit.environment or not visit.caller.may_see(
            found.app, found.function
        ):
            raise NotFound(f"there is no rollout {rollout!r} in environment {visit.environment!r}")
        return shown(
            views.detail(sql, found, now=visit.now, limit=DECISIONS, rates=rates),
            currency=visit.currency,
        )

    return render("release.html", visit=visit, one=await visit.read(load), **_WORDS)


def _load(sql: sa.Connection, visit: PageContext) -> tuple[list[RolloutView], list[Rollout]]:
    rates = visit.context.config.prices.rates()
    found = repository.listing(
        sql, tenant=visit.caller.tenant, environment=visit.environment, limit=NEWEST
    )
    visible = [rollout for rollout in found if visit.caller.may_see(rollout.app, rollout.function)]
    active = [
        shown(
            views.detail(sql, rollout, now=visit.now, limit=5, rates=rates), currency=visit.currency
        )
        for rollout in visible
        if rollout.state.value in ACTIVE
    ]
    return active, [rollout for rollout in visible if rollout.state.value not in ACTIVE]


def shown(body: Mapping[str, Any], *, currency: str = "") -> RolloutView:
    """Build the page's data from a rollout's JSON."""
    decided: list[dict[str, Any]] = next(
        (decision["gates"] for decision in body.get("decisions", ()) if decision["gates"]), []
    )
    gates = (body.get("now") or {}).get("gates") or decided
    return RolloutView(
        id=body["id"],
        title=f"{body['app']}/{body['function']}",
        body=body,
        stations=stations(body),
        gates=[line(gate, currency=currency) for gate in gates],
    )


def stations(body: Mapping[str, Any]) -> list[RolloutStep]:
    """Return the steps with their states."""
    is_over, is_done = body["state"] not in ACTIVE, body["state"] == "done"
    out = []
    for number, weight in enumerate(body["steps"]):
        if is_done or number < body["step"]:
            out.append(RolloutStep(percent=weight, state="passed", share=1.0))
        elif number == body["step"]:
            share = min(1.0, body["elapsed_s"] / body["every_s"])
            out.append(
                RolloutStep(percent=weight, state="left" if is_over else "here", share=share)
            )
        else:
            out.append(RolloutStep(percent=weight, state=""))
    return out


def line(gate: Mapping[str, Any], *, currency: str = "") -> GateLine:
    """Build the line of one gate."""
    candidate, limit = gate["candidate"], gate["limit"]
    numbers = {
        key: number(gate[key], gate["unit"], currency=currency)
        for key in ("candidate", "stable", "limit")
    }
    used = (
        None
        if candidate is None or not limit or limit < 0
        else min(1.0, max(0.0, candidate / limit))
    )
    return GateLine(
        name=metric_words(gate["metric"]),
        kind=gate["kind"],
        **numbers,
        used=used,
        samples=gate["samples"],
        outcome=gate["outcome"],
        reason=gate["reason"],
    )


def metric_words(metric: str) -> str:
    """Return a metric's display name: `Warm latency p99` for `latency_p99`."""
    if metric.startswith("feedback:"):
        return f"Feedback: {metric.removeprefix('feedback:')}"
    name, _, share = metric.rpartition("_p")
    return f"{_CLOCKS[name]} p{share}" if name in _CLOCKS else METRIC_WORDS.get(metric, metric)


def number(value: float | None, unit: str, *, currency: str = "") -> str:
    """Format a gate's number."""
    if value is None:
        return DASH
    match unit:
        case "share":
            return percent(value)
        case "ms":
            return milliseconds(value)
        case "money":
            return f"{value:.3g} {currency}".strip()
    return f"{value:.4g}"


_WORDS: Mapping[str, Any] = {
    "state_words": STATE_WORDS,
    "state_tones": STATE_TONES,
    "outcome_words": OUTCOME_WORDS,
    "outcome_tones": OUTCOME_TONES,
    "verdict_words": VERDICT_WORDS,
    "verdict_tones": VERDICT_TONES,
}
