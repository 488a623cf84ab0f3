"""Objectives: what functions promise, what is left of their error budgets, how fast it goes, and in
which stage."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import Field

from pilotlight.controller.api.models import Body
from pilotlight.controller.context import Ctx, Deployer
from pilotlight.controller.objectives import views
from pilotlight.errors import NotFound

router = APIRouter(prefix="/v1/slos", tags=["objectives"])


class Indicator(Body):
    """One indicator over the window of the error budgets; null = no data."""

    sli: str = Field(
        description="`availability`, `warm_latency`, `first_token`, `cold_latency`, `completion` "
        "or `degraded`"
    )
    target: float = Field(description="share of the calls that must be good")
    bound_s: float | None = Field(description="of a latency: a good call is not slower")
    bad: int
    total: int
    ratio: float | None = Field(description="share that was good")
    budget_left: float | None = Field(description="1 = untouched, 0 = spent, below 0 = overspent")
    is_told: bool = Field(
        description="alarms of it are raised; not those of a latency that the function never "
        "promised"
    )


class BurningIndicator(Indicator):
    """An indicator with its burn rates; 1 spends exactly the budget of the window."""

    burn_rates: dict[str, float | None] = Field(
        description="by window: `5m`, `30m`, `1h`, `2h`, `6h`, `1d`, `3d`"
    )


class AlarmInfo(Body):
    """An alarm, with what its long window said when it was last written down. Times are seconds
    since the epoch."""

    id: str
    sli: str
    severity: str = Field(description="`page` or `ticket`")
    window: str = Field(description="long and short window, as `1h/5m`")
    factor: float = Field(description="the burn rate above which both windows were")
    burn_rate: float | None
    burn_rate_now: float | None = Field(description="of the short window")
    bad: int
    total: int
    budget: float
    stage: str = Field(description="of a latency: the stage that most calls overran")
    began_at: float
    ended_at: float | None = Field(description="null while it is open")


class SloInfo(Body):
    """What a function promises and how it stands."""

    environment: str
    app: str
    function: str
    revision: str = Field(description="the heaviest one: its objectives are these")
    is_declared: bool = Field(description="false: it declares none, and these are the defaults")
    window_days: int
    freeze: bool = Field(description="nothing is released while a budget is spent")
    frozen: bool
    slis: list[Indicator]
    alarms: list[AlarmInfo] = Field(description="those that are open")


class StageInfo(Body):
    """One stage of a call's time, over the last day."""

    stage: str
    budget_s: float
    calls: int
    overruns: int
    p50_ms: float | None
    p99_ms: float | None


class SloDetail(SloInfo):
    """One function in detail."""

    slis: list[BurningIndicator]  # type: ignore[assignment]
    objectives: dict[str, Any]
    stages: list[StageInfo]
    worst_stage: str = Field(
        description="the stage that most calls of the last day overran; empty where none did"
    )
    history: list[AlarmInfo] = Field(description="alarms of the last 30 days, newest first")


class SloList(Body):
    """Functions within reach of the key, by name."""

    slos: list[SloInfo]


@router.get("")
def list_slos(
    context: Ctx,
    caller: Deployer,
    app: Annotated[str | None, Query(max_length=64)] = None,
    function: Annotated[str | None, Query(max_length=64)] = None,
) -> SloList:
    """How the functions of the environment stand."""
    app, function = caller.restrict(app, function)
    now = context.clock()
    with context.store.read() as sql:
        found = views.functions_of(
            sql, tenant=caller.tenant, environment=caller.environment, app=app, function=function
        )
        return SloList(slos=[SloInfo(**views.summary(sql, made, now=now)) for made in found])


@router.get("/{app}/{function}")
def get_slo(context: Ctx, caller: Deployer, app: str, function: str) -> SloDetail:
    """One function: burn rates by window, stages, alarms."""
    caller.demand_function(app, function)
    with context.store.read() as sql:
        found = views.functions_of(
            sql, tenant=caller.tenant, environment=caller.environment, app=app, function=function
        )
        if not found:
            raise NotFound(
                f"there is no function {app}/{function} that takes traffic: `pilotlight app list` "
                f"shows what is deployed"
            )
        return SloDetail(**views.detail(sql, found[0], now=context.clock()))
