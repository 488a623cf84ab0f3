"""Routes for service level objectives: targets, remaining error budgets, burn rates and latency by
stage."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query
from pydantic import Field

from pilotlight.controller.api.schemas import Body
from pilotlight.controller.context import Ctx, Deployer
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.controller.slo import views
from pilotlight.errors import NotFound

router = APIRouter(prefix="/v1/slos", tags=["objectives"])


class Indicator(Body):
    """One indicator over the window of the error budgets; null: no data."""

    sli: str = Field(
        description="`availability`, `warm_latency`, `first_token`, `cold_latency`, `completion` "
        "or `degraded`"
    )
    target: float = Field(description="share of the calls that must be good")
    bound_s: float | None = Field(
        description="for a latency: the maximum of a good call, in seconds"
    )
    bad: int
    total: int
    ratio: float | None = Field(description="share of good calls")
    budget_left: float | None = Field(description="1 = unspent, 0 = spent, below 0 = overspent")
    is_spent: bool = Field(
        description="whether the budget is spent, on at least 20 calls and 5 bad ones"
    )
    is_told: bool = Field(
        description="whether it raises alarms; a latency raises them only if the function declares "
        "objectives"
    )


class BurningIndicator(Indicator):
    """An indicator with its burn rates; a rate of 1 spends exactly the budget of the window."""

    burn_rates: dict[str, float | None] = Field(
        description="by window: `5m`, `30m`, `1h`, `2h`, `6h`, `1d`, `3d`"
    )


class AlarmInfo(Body):
    """An alarm, with the values of its long window when it was last updated. Times are seconds
    since the epoch."""

    id: str
    sli: str
    severity: str = Field(description="`page` or `ticket`")
    window: str = Field(description="long and short window, such as `1h/5m`")
    factor: float = Field(description="the burn rate that both windows exceeded")
    burn_rate: float | None
    burn_rate_now: float | None = Field(description="burn rate of the short window")
    bad: int
    total: int
    budget: float
    stage: str = Field(description="for a latency: the stage that most calls overran")
    began_at: float
    ended_at: float | None = Field(description="null while it is open")


class SloInfo(Body):
    """A function's objectives and their state."""

    environment: str
    app: str
    function: str
    revision: str = Field(
        description="the revision with the most traffic, whose objectives these are"
    )
    is_declared: bool = Field(
        description="false: the function declares no objectives, and these are the defaults"
    )
    window_days: int
    freeze: bool = Field(description="whether releases are refused while a budget is spent")
    frozen: bool
    slis: list[Indicator]
    alarms: list[AlarmInfo] = Field(description="open alarms")


class StageInfo(Body):
    """One stage of a call's latency, over the last day."""

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
    """Functions that the key may access, by name."""

    slos: list[SloInfo]


@router.get("")
def list_slos(
    context: Ctx,
    caller: Deployer,
    app: Annotated[str | None, Query(max_length=64)] = None,
    function: Annotated[str | None, Query(max_length=64)] = None,
) -> SloList:
    """List the objectives of the environment's functions."""
    app, function = caller.restrict(app, function)
    now = context.clock()
    with context.store.read() as sql:
        found = views.functions_of(
            sql, tenant=caller.tenant, environment=caller.environment, app=app, function=function
        )
        return SloList(slos=[SloInfo(**views.summary(sql, promise, now=now)) for promise in found])


@router.get("/{app}/{function}")
def get_slo(context: Ctx, caller: Deployer, app: str, function: str) -> SloDetail:
    """Return one function's objectives, with burn rates by window, stages and alarms."""
    caller.require_function(app, function)
    with context.store.read() as sql:
        found = views.functions_of(
            sql, tenant=caller.tenant, environment=caller.environment, app=app, function=function
        )
        if not found:
            raise NotFound(
                f"there is no function {app}/{function} with traffic: `pilotlight app list` "
                f"shows what is deployed"
            )
        return SloDetail(**views.detail(sql, found[0], now=context.clock()))
