"""Routes for language-model statistics of the last 24 hours."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from pydantic import Field

from pilotlight.controller.analytics import model_stats
from pilotlight.controller.analytics.entitlements import plan_of, rates_of
from pilotlight.controller.api.schemas import Body
from pilotlight.controller.context import Ctx, Deployer
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.errors import NotFound

router = APIRouter(prefix="/v1/engines", tags=["language models"])


class TimesInfo(Body):
    """Percentiles of `n` durations."""

    n: int
    p50_ms: float
    p99_ms: float


class ShareInfo(Body):
    """Usage by one tenant's calls."""

    tenant: str
    calls: int
    tokens_in: int
    tokens_out: int
    cost: str


class EngineInfo(Body):
    """A language model's figures for the last 24 hours; null: no data."""

    app: str
    function: str
    revision: str = Field(
        description="the revision with the most traffic; its declared values are shown"
    )
    max_model_len: int
    max_num_seqs: int
    adapters: list[str]
    gpu: str = Field(description="acceptable GPU types, best first; empty for CPU only")
    gpu_count: int
    calls: int
    failed: int
    tokens_in: int
    tokens_out: int
    cached: float | None = Field(description="share of prompt tokens found in the engine's cache")
    first_token: TimesInfo | None = Field(
        description="time to first token, of calls that did not wait for an instance to start"
    )
    between_tokens: TimesInfo | None
    first_token_by_start: dict[str, TimesInfo] = Field(
        description="time to first token of the newest calls, by start kind of their instance"
    )
    finishes: dict[str, int] = Field(
        description="finish reasons of the newest calls: `stop`, `length`, `cancelled`, `error`, …"
    )
    streams: int
    completed: float | None = Field(description="share of streams that ran to completion")
    out_of_memory: int = Field(description="instances that ran out of memory")
    cache_use: tuple[int, int] | None = Field(
        description="percent of the KV cache in use: median and maximum"
    )
    tokens_per_s: float | None = Field(
        description="tokens generated per second of busy instance time"
    )
    tokens_per_gpu_s: float | None
    cost: str
    price_per_1k: str | None = Field(description="cost per 1,000 tokens, input and output")
    tenants: list[ShareInfo]


class EngineList(Body):
    """Language models that the key may access, by name."""

    currency: str
    engines: list[EngineInfo]


@router.get("")
def list_engines(
    context: Ctx,
    caller: Deployer,
    app: Annotated[str | None, Query(max_length=64)] = None,
    function: Annotated[str | None, Query(max_length=64)] = None,
) -> EngineList:
    """List the language models of the environment."""
    app, function = caller.restrict(app, function)
    with context.store.read() as sql:
        currency = rates_of(
            plan_of(sql, tenant=caller.tenant, plans=context.config.plans), context.config.prices
        ).currency
        found = model_stats.read(
            sql,
            tenant=caller.tenant,
            environment=caller.environment,
            currency=currency,
            now=context.clock(),
            app=app,
            function=function,
        )
    return EngineList(currency=currency, engines=[EngineInfo(**one.to_json()) for one in found])


@router.get("/{app}/{function}")
def get_engine(context: Ctx, caller: Deployer, app: str, function: str) -> EngineInfo:
    """Return one language model."""
    caller.require_function(app, function)
    found = list_engines(context, caller, app, function).engines
    if not found:
        raise NotFound(
            f"there is no language model {app}/{function} with traffic: `pilotlight engine "
            f"list` shows those that exist"
        )
    return found[0]
