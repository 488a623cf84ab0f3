"""Route for the measured times of a function's calls and starts. A key that may call a function may
read them, like its traces."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from pydantic import Field

from pilotlight.controller.analytics import service_times
from pilotlight.controller.analytics.service_times import MAX_CALLS
from pilotlight.controller.api.account.billing import parse_time
from pilotlight.controller.api.schemas import Body
from pilotlight.controller.billing import price_lists
from pilotlight.controller.context import Ctx, Invoker
from pilotlight.controller.lazy_routes import APIRouter

DEFAULT_SINCE_S = 86_400.0
router = APIRouter(prefix="/v1", tags=["apps"])


class CallTimes(Body):
    """Calls that an instance answered without a start, newest first: equally long columns."""

    instance: list[int] = Field(description="a number for each instance")
    started_at: list[float]
    waited_ms: list[int] = Field(description="in the queue")
    exec_ms: list[int] = Field(description="from dispatch to the last byte")
    billed_ns: list[int] = Field(
        description="share of the instance's time: `exec_ms` divided among the calls at once"
    )
    first_token_ms: list[int] = Field(description="from the arrival; 0: not streamed")
    tokens_in: list[int]
    tokens_cached: list[int]
    tokens_out: list[int]


class InstancePrices(Body):
    """Prices of the tenant's list, as decimals."""

    currency: str
    version: str
    instance_s: str = Field(description="of a second of one instance")
    reserved_factor: str = Field(description="share of it while `min_instances` keeps it idle")
    request: str
    token_in: str
    token_out: str
    rounds: bool = Field(description="whether durations are charged rounded, or with a minimum")


class ServiceTimes(Body):
    """Measured times of the revision with the most traffic, and what it is deployed with."""

    revision: str
    since: float
    until: float
    is_cut: bool = Field(description="older calls of the requested time were not read")
    calls: CallTimes
    failed: int = Field(description="calls that failed")
    cold: int = Field(description="calls that waited for a start")
    cached: int = Field(description="calls that the response cache answered")
    starts_ms: dict[str, list[float]] = Field(
        description="durations of instances' starts by kind, without time in a queue"
    )
    is_language_model: bool
    slots: int = Field(description="calls at once on an instance")
    min_instances: int
    max_instances: int
    cpu: float
    memory_bytes: int
    gpu: list[str] = Field(description="acceptable kinds, best first")
    gpu_count: int
    prices: InstancePrices | None = Field(description="null: its GPU has no price")


@router.get("/apps/{app}/functions/{function}/service-times")
def get_service_times(
    *,
    context: Ctx,
    caller: Invoker,
    app: str,
    function: str,
    method: Annotated[
        str | None, Query(max_length=200, description="of a class; default: all of its methods")
    ] = None,
    since: Annotated[
        str | None,
        Query(max_length=200, description="seconds since the epoch, or ISO 8601; default: a day"),
    ] = None,
    until: Annotated[str | None, Query(max_length=200, description="exclusive")] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_CALLS, description="calls, the newest")] = MAX_CALLS,
) -> ServiceTimes:
    """Return the measured times of a function's newest calls and starts, for `pilotlight plan`."""
    caller.require_function(app, function)
    end = parse_time("until", until) or context.clock()
    begin = parse_time("since", since)
    with context.store.read() as sql:
        found = service_times.read(
            sql,
            tenant=caller.tenant,
            environment=caller.environment,
            app=app,
            function=function,
            method=method,
            since=end - DEFAULT_SINCE_S if begin is None else begin,
            until=end,
            limit=limit,
            rates=price_lists.of_tenant(sql, context.config, caller.tenant),
        )
    return ServiceTimes(**found)
