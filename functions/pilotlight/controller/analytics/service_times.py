"""Measured times of a function's newest calls and starts, from which its capacity is planned.

Bounded: at most MAX_SCANNED records of the tenant are looked at by index, and at most MAX_CALLS of
the function returned, as plain columns. Everything else is computed by who asks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.analytics.time_range import DAY_S
from pilotlight.controller.database import tables
from pilotlight.controller.database.serving_revisions import select_serving
from pilotlight.errors import NotFound
from pilotlight.spec.engines import is_language_model
from pilotlight.spec.pricing import (
    CACHED,
    FREE_START,
    NOT_RUN,
    Footprint,
    Rates,
    acceptable_gpus,
    rate_per_s,
)

MAX_CALLS = 5_000
MAX_STARTS = 500
MAX_SCANNED = 50_000
"""Records of the tenant, of all functions, that one request looks at."""
_STARTS = ("START", FREE_START)
_COLUMNS = (
    "started_at",
    "exec_ms",
    "billed_ns",
    "first_token_ms",
    "tokens_in",
    "tokens_cached",
    "tokens_out",
)
CALL_COLUMNS = (*_COLUMNS, "waited_ms")
"""Of each call, and `instance`; `waited_ms`: in the queue."""


def read(
    sql: sa.Connection,
    *,
    tenant: str,
    environment: str,
    app: str,
    function: str,
    method: str | None,
    since: float,
    until: float,
    limit: int,
    rates: Rates,
) -> dict[str, Any]:
    """Return the times of the newest `limit` calls of the revision with the most traffic, and what
    it is deployed with, as JSON values; starts are of a day at least. Raises NotFound."""
    serving = _serving(sql, tenant=tenant, environment=environment, app=app, function=function)
    scanned = _scanned_since(sql, tenant=tenant, since=min(since, until - DAY_S), until=until)
    seen_since = max(since, scanned)
    own = (tables.usage.c.function_id == serving.id, tables.usage.c.revision == serving.revision)
    of_method = () if method is None else (tables.usage.c.method == method,)
    within = (*_within(tenant, seen_since, until), *own, *of_method)
    calls = _newest(sql, ("CALL",), within, limit)
    starts = _newest(sql, _STARTS, (*_within(tenant, scanned, until), *own), MAX_STARTS)
    answered = [row for row in calls if row.outcome == "ok" and row.start_kind == "WARM"]
    is_full = len(calls) >= limit
    return {
        "revision": serving.revision,
        "since": min((row.started_at for row in calls), default=until) if is_full else seen_since,
        "until": until,
        "is_cut": is_full or seen_since > since,
        "calls": _columns(answered),
        "failed": sum(row.outcome != "ok" and row.outcome not in NOT_RUN for row in calls),
        "cold": sum(
            row.outcome == "ok" and row.start_kind not in ("WARM", CACHED) for row in calls
        ),
        "cached": sum(row.start_kind == CACHED for row in calls),
        "starts_ms": _starts(starts),
        **_deployed(json.loads(serving.spec), rates),
    }


def _serving(
    sql: sa.Connection, *, tenant: str, environment: str, app: str, function: str
) -> sa.Row[Any]:
    c = tables.functions.c
    of_it = (c.tenant == tenant, c.environment == environment, c.app == app, c.name == function)
    found = sql.execute(select_serving(*of_it).limit(1)).first()
    if found is None:
        raise NotFound(
            f"there is no function {app}/{function} with traffic in environment {environment!r}",
            hint="List apps with `pilotlight app list`.",
        )
    return found


def _within(tenant: str, since: float, until: float) -> list[sa.ColumnElement[bool]]:
    c = tables.usage.c
    return [c.tenant == tenant, c.started_at >= since, c.started_at < until]


def _scanned_since(sql: sa.Connection, *, tenant: str, since: float, until: float) -> float:
    """The time of the oldest record that is looked at, from the index alone."""
    at = tables.usage.c.started_at
    query = sa.select(at).where(*_within(tenant, since, until)).order_by(at.desc())
    oldest = sql.execute(query.offset(MAX_SCANNED - 1).limit(1)).scalar_one_or_none()
    return since if oldest is None else max(since, float(oldest))


def _newest(
    sql: sa.Connection, kinds: Sequence[str], where: Sequence[sa.ColumnElement[bool]], limit: int
) -> Sequence[sa.Row[Any]]:
    """The newest records of these kinds."""
    c = tables.usage.c
    waited = (c.queued_ms + c.start_ms).label("waited_ms")
    names = (c.outcome, c.start_kind, c.instance, *(c[name] for name in _COLUMNS), waited)
    query = sa.select(*names).where(*where, c.kind.in_(kinds)).order_by(c.started_at.desc())
    return sql.execute(query.limit(limit)).all()


def _columns(calls: Sequence[sa.Row[Any]]) -> dict[str, list[Any]]:
    numbers: dict[str, int] = {}
    instances = [numbers.setdefault(call.instance, len(numbers)) for call in calls]
    columns = {name: [getattr(call, name) for call in calls] for name in CALL_COLUMNS}
    return {**columns, "instance": instances}


def _starts(starts: Sequence[sa.Row[Any]]) -> dict[str, list[float]]:
    """Durations by start kind. A start is recorded without the time it was queued."""
    found: dict[str, list[float]] = {}
    for start in starts:
        found.setdefault(start.start_kind, []).append(start.billed_ns / 1e6)
    return found


def _deployed(spec: dict[str, Any], rates: Rates) -> dict[str, Any]:
    resources, scaling, engine = spec["resources"], spec["scaling"], spec.get("engine")
    return {
        "is_language_model": is_language_model(spec),
        "slots": engine["max_num_seqs"] if engine else scaling["max_inputs"],
        "min_instances": scaling["min_instances"],
        "max_instances": scaling["max_instances"],
        "cpu": resources["cpu"],
        "memory_bytes": resources["memory_bytes"],
        "gpu": list(resources["gpu"]),
        "gpu_count": resources["gpu_count"],
        "prices": _prices(resources, rates),
    }


def _prices(resources: dict[str, Any], rates: Rates) -> dict[str, Any] | None:
    """Prices with the GPU that is preferred; None where it has no longer a price."""
    try:
        gpus = acceptable_gpus(resources["gpu"], rates)
    except KeyError:
        return None
    footprint = Footprint(
        cpu=resources["cpu"],
        memory_bytes=resources["memory_bytes"],
        gpu=gpus[0] if gpus else None,
        gpu_count=resources["gpu_count"],
    )
    amounts: dict[str, Decimal] = {
        "instance_s": rate_per_s(footprint, rates),
        "reserved_factor": rates.reserved_factor,
        "request": rates.request,
        "token_in": rates.token_in,
        "token_out": rates.token_out,
    }
    return {
        "currency": rates.currency,
        "version": rates.version,
        "rounds": bool(rates.minimum_ms or rates.rounding_ms),
        **{name: f"{amount:f}" for name, amount in amounts.items()},
    }
