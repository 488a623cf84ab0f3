"""Routes for language-model statistics of the last 24 hours."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query

from pilotlight.controller.analytics import model_stats
from pilotlight.controller.analytics.entitlements import plan_of, rates_of
from pilotlight.controller.analytics.model_stats import ModelStats
from pilotlight.controller.api.schemas import Body, DocumentedAs
from pilotlight.controller.context import Ctx, Deployer
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.errors import NotFound

router = APIRouter(prefix="/v1/engines", tags=["language models"])


EngineInfo = Annotated[dict[str, Any], DocumentedAs(ModelStats)]


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
    return EngineList(currency=currency, engines=[one.to_json() for one in found])


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
