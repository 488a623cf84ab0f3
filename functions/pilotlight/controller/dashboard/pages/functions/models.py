"""The page of language models: tokens, time to first token, speed, cache use, and price."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence

import sqlalchemy as sa
from fastapi.responses import Response

from pilotlight.controller.analytics import model_stats
from pilotlight.controller.analytics.model_stats import ModelStats
from pilotlight.controller.analytics.time_range import HOUR_S
from pilotlight.controller.dashboard.charts import Chart, Series
from pilotlight.controller.dashboard.html import render
from pilotlight.controller.dashboard.page_context import PageContext, PageRoute, Visitor
from pilotlight.controller.lazy_routes import APIRouter

HOURS = 24
FULL = 0.9
"""KV cache use from which the engine delays or restarts sequences."""

router = APIRouter(include_in_schema=False, route_class=PageRoute)


@router.get("/dashboard/models")
async def page(visit: Visitor) -> Response:
    """Render the environment's language models, the busiest first."""
    visit.require_deploy("models require")
    found, chart = await visit.read(lambda sql: _load(sql, visit))
    return render("models.html", visit=visit, found=found, chart=chart, has_charts=True, full=FULL)


def _load(sql: sa.Connection, visit: PageContext) -> tuple[list[ModelStats], Chart]:
    tenant, environment = visit.caller.tenant, visit.environment
    found = model_stats.read(
        sql, tenant=tenant, environment=environment, currency=visit.currency, now=visit.now
    )
    visible = [one for one in found if visit.caller.may_see(one.app, one.function)]
    tokens = model_stats.hourly(
        sql,
        tenant=tenant,
        environment=environment,
        names=[(one.app, one.function) for one in visible],
        now=visit.now,
    )
    return sorted(
        visible, key=lambda one: (-one.tokens_in - one.tokens_out, one.app, one.function)
    ), tokens_chart(tokens, visit.now)


def tokens_chart(tokens: Mapping[int, tuple[int, int]], now: float) -> Chart:
    """Tokens in and out, per hour."""
    last = int(now // HOUR_S)
    hours = range(last - HOURS + 1, last + 1)
    moments = [dt.datetime.fromtimestamp(hour * HOUR_S, tz=dt.UTC) for hour in hours]
    pairs: Sequence[tuple[int, int]] = [tokens.get(hour, (0, 0)) for hour in hours]
    total_in, total_out = sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
    return Chart(
        id="tokens",
        title="Tokens, last 24 hours",
        alt_text=f"per hour; {total_in:,} in, {total_out:,} out",
        shape="bars",
        unit="tokens",
        labels=[f"{at:%d %b %H:%M}" for at in moments],
        moments=[f"{at:%Y-%m-%dT%H:%M}" for at in moments],
        series=[
            Series(name="Prompt", colour="--c1", values=[pair[0] for pair in pairs]),
            Series(name="Completion", colour="--c2", values=[pair[1] for pair in pairs]),
        ],
    )
