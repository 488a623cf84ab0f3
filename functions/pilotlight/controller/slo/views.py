"""Objectives as JSON values for the API, the command line and the dashboard; None: no data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.slo import error_budget, slo_alerts
from pilotlight.controller.slo.burn_rate import (
    BURN_RATE_ALERTS,
    DAY,
    BudgetSpend,
    Sli,
    compute_budget_spend,
    error_budget_ratio,
)
from pilotlight.controller.slo.error_budget import SloTarget
from pilotlight.controller.slo.release_freeze import is_exhausted
from pilotlight.errors import NotFound
from pilotlight.spec.observations import Observation, latency_quantile_ms
from pilotlight.spec.policies import STAGES, Objectives

MAX_FUNCTIONS = 500
"""Maximum number of functions in a list: each reads a month of hours."""
HISTORY_DAYS = 30
WINDOW_NAMES = {
    alarm_s: name
    for alarm in BURN_RATE_ALERTS
    for alarm_s, name in zip((alarm.long_s, alarm.short_s), alarm.name.split("/"), strict=True)
}
_SECONDS = {
    Sli.WARM_LATENCY: "warm_latency_s",
    Sli.FIRST_TOKEN: "first_token_s",
    Sli.COLD_LATENCY: "cold_latency_s",
}


def functions_of(
    sql: sa.Connection,
    *,
    tenant: str,
    environment: str,
    app: str | None = None,
    function: str | None = None,
) -> list[SloTarget]:
    """Return the objectives of an environment's functions, by name. Functions without traffic are
    omitted."""
    c = tables.functions.c
    where = [c.tenant == tenant, c.environment == environment, c.removed_at.is_(None)]
    where += [c.app == app] if app else []
    where += [c.name == function] if function else []
    ids = (
        sql.execute(sa.select(c.id).where(*where).order_by(c.app, c.name).limit(MAX_FUNCTIONS))
        .scalars()
        .all()
    )
    found = []
    for function_id in ids:
        try:
            found.append(error_budget.slo_target(sql, function_id))
        except NotFound:
            continue
    return found


def summary(sql: sa.Connection, promise: SloTarget, *, now: float) -> dict[str, Any]:
    """Return one function's indicators over the window of its budgets, and its open alarms."""
    observed = error_budget.budget_window_observation(sql, promise, now=now)
    opened = slo_alerts.open_alerts(sql, promise.function_id)
    return _head(promise) | {
        "slis": [_indicator(promise, observed, sli) for sli in Sli],
        "alarms": [_alarm(alarm) for alarm in opened],
        "frozen": promise.objectives.freeze
        and any(
            is_exhausted(compute_budget_spend(observed, promise.objectives, sli)) for sli in Sli
        ),
    }


def detail(sql: sa.Connection, promise: SloTarget, *, now: float) -> dict[str, Any]:
    """Return `summary` with burn rates by window, stages, and the alarms of the last month."""
    windows = error_budget.observations_by_window(sql, promise.function_id, now=now)
    body = summary(sql, promise, now=now)
    for one in body["slis"]:
        by_window = error_budget.spent_by_window(windows, promise.objectives, Sli(one["sli"]))
        one["burn_rates"] = {
            WINDOW_NAMES[length_s]: rate(found.burn) for length_s, found in by_window.items()
        }
    history = slo_alerts.listing(
        sql, functions=[promise.function_id], since=now - HISTORY_DAYS * DAY
    )
    return body | {
        "objectives": asdict(promise.objectives) | {"stages_s": dict(promise.objectives.stages_s)},
        "stages": stages(windows[DAY], promise.objectives),
        "worst_stage": slo_alerts.worst_stage(windows[DAY]),
        "history": [_alarm(alarm) for alarm in history],
    }


def stages(observed: Observation | None, objectives: Objectives) -> list[dict[str, Any]]:
    """Return each stage's budget, its percentiles, and how many calls exceeded the budget."""
    latency: Mapping[str, Mapping[int, int]] = observed.latency if observed is not None else {}
    overruns: Mapping[str, int] = observed.overruns if observed is not None else {}
    budgets_s = objectives.budgets_s()
    return [
        {
            "stage": stage,
            "budget_s": round(budgets_s[stage], 6),
            "calls": sum(latency.get(stage, {}).values()),
            "overruns": overruns.get(stage, 0),
            "p50_ms": _ms(latency.get(stage), 0.5),
            "p99_ms": _ms(latency.get(stage), 0.99),
        }
        for stage in STAGES
    ]


def rate(value: float | None) -> float | None:
    """Return a burn rate, or what is left of a budget, as a finite JSON number."""
    if value is None:
        return None
    return round(value, 3) if math.isfinite(value) else math.copysign(1e6, value)


def _head(promise: SloTarget) -> dict[str, Any]:
    return {
        "environment": promise.environment,
        "app": promise.app,
        "function": promise.function,
        "revision": promise.revision,
        "is_declared": promise.is_declared,
        "window_days": promise.objectives.window_days,
        "freeze": promise.objectives.freeze,
    }


def _indicator(promise: SloTarget, observed: Observation | None, sli: Sli) -> dict[str, Any]:
    one: BudgetSpend = compute_budget_spend(observed, promise.objectives, sli)
    bound = _SECONDS.get(sli)
    return {
        "sli": sli.value,
        "target": round(1 - error_budget_ratio(promise.objectives, sli), 6),
        "bound_s": getattr(promise.objectives, bound) if bound else None,
        "bad": one.bad,
        "total": one.total,
        "ratio": None if one.ratio is None else round(1 - one.ratio, 6),
        "budget_left": rate(one.left),
        "is_spent": is_exhausted(one),
        "is_told": sli in promise.alerting_slis,
    }


def _alarm(alarm: slo_alerts.SloAlert) -> dict[str, Any]:
    shown = {
        name: value for name, value in alarm.document.items() if name not in ("last_at", "window")
    }
    return {
        "id": alarm.id,
        "sli": alarm.sli,
        "severity": alarm.severity,
        "window": alarm.window,
        "began_at": alarm.began_at,
        "ended_at": alarm.ended_at,
        **shown,
    }


def _ms(buckets: Mapping[int, int] | None, share: float) -> float | None:
    found = latency_quantile_ms(buckets or {}, share)
    return None if found is None else round(found, 2)
