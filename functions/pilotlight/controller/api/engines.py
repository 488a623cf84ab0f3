"""Language models: what they did in the last 24 hours."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field

from pilotlight.controller.api.models import Body
from pilotlight.controller.context import Ctx, Deployer
from pilotlight.controller.figures import models
from pilotlight.controller.figures.promises import plan_of, rates_of
from pilotlight.errors import NotFound

router = APIRouter(prefix="/v1/engines", tags=["language models"])


class TimesInfo(Body):
    """Percentiles of `n` times."""

    n: int
    p50_ms: float
    p99_ms: float


class ShareInfo(Body):
    """What one tenant's calls took."""

    tenant: str
    calls: int
    tokens_in: int
    tokens_out: int
    cost: str


class EngineInfo(Body):
    """A language model over the last 24 hours; null = nothing was seen."""

    app: str
    function: str
    revision: str = Field(description="the heaviest one: what is declared is its")
    max_model_len: int
    max_num_seqs: int
    adapters: list[str]
    gpu: str = Field(description="acceptable kinds, best first; empty for a CPU")
    gpu_count: int
    calls: int
    failed: int
    tokens_in: int
    tokens_out: int
    cached: float | None = Field(
        description="share of prompt tokens that were in the engine's cache"
    )
    first_token: TimesInfo | None = Field(description="of calls that waited for no start")
    between_tokens: TimesInfo | None
    first_token_by_start: dict[str, TimesInfo] = Field(
        description="of the newest calls, by how their instance came up"
    )
    finishes: dict[str, int] = Field(
        description="why the newest answers ended: `stop`, `length`, `cancelled`, `error`, …"
    )
    streams: int
    completed: float | None = Field(description="share of the streams that ended by themselves")
    out_of_memory: int = Field(description="instances that ran out of memory")
    cache_use: tuple[int, int] | None = Field(
        description="percent of the KV cache in use: median, and the most"
    )
    tokens_per_s: float | None = Field(description="written per second of a busy instance")
    tokens_per_gpu_s: float | None
    cost: str
    price_per_1k: str | None = Field(description="cost by 1,000 tokens, in and out")
    tenants: list[ShareInfo]


class EngineList(Body):
    """Language models within reach of the key, by name."""

    currency: str
    engines: list[EngineInfo]


@router.get("")
def list_engines(
    context: Ctx,
    caller: Deployer,
    app: Annotated[str | None, Query(max_length=64)] = None,
    function: Annotated[str | None, Query(max_length=64)] = None,
) -> EngineList:
    """The language models of the environment."""
    app, function = caller.restrict(app, function)
    with context.store.read() as sql:
        currency = rates_of(
            plan_of(sql, tenant=caller.tenant, plans=context.config.plans), context.config.prices
        ).currency
        found = models.read(
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
    """One of them."""
    caller.demand_function(app, function)
    found = list_engines(context, caller, app, function).engines
    if not found:
        raise NotFound(
            f"there is no language model {app}/{function} that takes traffic: `pilotlight engine "
            f"list` shows those that there are"
        )
    return found[0]
