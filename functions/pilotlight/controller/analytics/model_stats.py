"""Language-model figures of the last day: tokens, time to first token, time between tokens, cost,
and usage by tenant.

Three sources: observations (counts and histograms of every call, per minute), records of the newest
calls (first token by start kind), and rollups (cost and calling tenant)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.analytics import rollup_queries
from pilotlight.controller.analytics.environment_usage import START_KINDS
from pilotlight.controller.analytics.time_range import DAY_S, HOUR_S
from pilotlight.controller.database import tables
from pilotlight.controller.database.serving_revisions import select_serving
from pilotlight.controller.slo import observations
from pilotlight.controller.slo.error_budget import total_observation
from pilotlight.spec.engines import is_language_model
from pilotlight.spec.observations import Observation, latency_quantile_ms

NEWEST = 5000
"""Usage records read per function, for values that only records hold."""
MAX_MODELS = 200
MAX_TENANTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyPercentiles:
    """Percentiles of `n` durations, in milliseconds."""

    n: int
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTenantShare:
    """Usage by one tenant's calls."""

    tenant: str
    calls: int
    tokens_in: int
    tokens_out: int
    cost: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStats:
    """One language model over the last 24 hours; None: no data.

    Attributes:
        max_model_len, max_num_seqs, adapters, gpu: as declared by the revision with the most
            traffic; of a web server `max_num_seqs` is its `max_inputs`.
        first_token, between_tokens: of calls that did not wait for a start.
        first_token_by_start: start kind → first token of the newest calls' records.
        finishes: finish reason → number of the newest calls.
        completed: share of streams that ran to completion.
        cached: share of prompt tokens found in the cache.
        cache_use: median and maximum percent of the KV cache in use.
        tokens_per_s: tokens generated per second of busy instance time; `tokens_per_gpu_s` per GPU.
        price_per_1k: cost per 1,000 tokens, input and output, as a decimal string.
    """

    app: str
    function: str
    revision: str
    max_model_len: int
    max_num_seqs: int
    adapters: tuple[str, ...]
    gpu: str
    gpu_count: int
    calls: int = 0
    failed: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    cached: float | None = None
    first_token: LatencyPercentiles | None = None
    between_tokens: LatencyPercentiles | None = None
    first_token_by_start: Mapping[str, LatencyPercentiles] = field(default_factory=dict)
    finishes: Mapping[str, int] = field(default_factory=dict)
    streams: int = 0
    completed: float | None = None
    out_of_memory: int = 0
    cache_use: tuple[int, int] | None = None
    tokens_per_s: float | None = None
    tokens_per_gpu_s: float | None = None
    cost: str = "0"
    price_per_1k: str | None = None
    tenants: tuple[ModelTenantShare, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


def read(
    sql: sa.Connection,
    *,
    tenant: str,
    environment: str,
    currency: str,
    now: float,
    app: str | None = None,
    function: str | None = None,
) -> list[ModelStats]:
    """Return an environment's language models with traffic, by name. Costs are in the given
    currency."""
    return [
        _figures(sql, row, tenant=tenant, currency=currency, now=now)
        for row in _rows(sql, tenant, environment, app, function)
    ]


def _rows(
    sql: sa.Connection, tenant: str, environment: str, app: str | None, function: str | None
) -> list[sa.Row[Any]]:
    """Return functions with the spec of their revision with the most traffic, if it is a language
    model."""
    functions = tables.functions
    where = [functions.c.tenant == tenant, functions.c.environment == environment]
    where += [functions.c.app == app] if app else []
    where += [functions.c.name == function] if function else []
    query = select_serving(*where, tables.revisions.c.spec.like('%"max_model_len"%'))
    heaviest: dict[str, Any] = {}
    for row in sql.execute(query):
        if is_language_model(json.loads(row.spec)):
            heaviest.setdefault(row.id, row)
    return list(heaviest.values())[:MAX_MODELS]


def _figures(
    sql: sa.Connection, row: sa.Row[Any], *, tenant: str, currency: str, now: float
) -> ModelStats:
    spec = json.loads(row.spec)
    resources = spec["resources"]
    max_model_len, max_num_seqs, adapters = _declared(spec)
    seen = total_observation(
        observations.window(sql, function_id=row.id, since_s=now - DAY_S, until_s=now)
    )
    shares = _by_caller(sql, row.id, tenant=tenant, currency=currency, now=now)
    whole = rollup_queries.UsageSums()
    for _, one in shares:
        whole.add(one)
    gpus = int(resources["gpu_count"])
    pace = whole.tokens_out / whole.billed_s if whole.billed_ns and whole.tokens_out else None
    firsts, finishes = _newest(sql, row.id, tenant=tenant, now=now)
    return ModelStats(
        app=row.app,
        function=row.name,
        revision=row.revision,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        adapters=adapters,
        gpu=",".join(resources["gpu"]),
        gpu_count=gpus,
        **_observed(seen),
        first_token_by_start=firsts,
        finishes=finishes,
        tokens_per_s=pace,
        tokens_per_gpu_s=pace / gpus if pace and gpus else None,
        cost=str(whole.cost),
        price_per_1k=_per_1k(whole),
        tenants=tuple(_share(name, one) for name, one in shares),
    )


def _declared(spec: Mapping[str, Any]) -> tuple[int, int, tuple[str, ...]]:
    """Its `max_model_len`, calls at once of an instance, and further models."""
    if engine := spec["engine"]:
        return engine["max_model_len"], engine["max_num_seqs"], tuple(sorted(engine["lora"]))
    openai = spec["web_server"]["openai"]
    return openai["max_model_len"], spec["scaling"]["max_inputs"], tuple(openai["models"][1:])


def _share(name: str, one: rollup_queries.UsageSums) -> ModelTenantShare:
    return ModelTenantShare(
        tenant=name,
        calls=one.records,
        tokens_in=one.tokens_in,
        tokens_out=one.tokens_out,
        cost=str(one.cost),
    )


def _observed(seen: Observation | None) -> dict[str, Any]:
    if seen is None:
        return {}
    memory = seen.latency.get("kv", {})
    return {
        "calls": seen.answered + seen.failed + seen.cancelled,
        "failed": seen.failed,
        "tokens_in": seen.tokens_in,
        "tokens_out": seen.tokens_out,
        "cached": seen.tokens_cached / seen.tokens_in if seen.tokens_in else None,
        "first_token": _times(seen.latency.get("ttft", {})),
        "between_tokens": _times(seen.latency.get("itl", {})),
        "streams": seen.streams,
        "completed": seen.streams_completed / seen.streams if seen.streams else None,
        "out_of_memory": seen.out_of_memory,
        "cache_use": (_median(memory), max(memory)) if memory else None,
    }


def _times(buckets: Mapping[int, int]) -> LatencyPercentiles | None:
    n, p50, p99 = (
        sum(buckets.values()),
        latency_quantile_ms(buckets, 0.5),
        latency_quantile_ms(buckets, 0.99),
    )
    return None if p50 is None or p99 is None else LatencyPercentiles(n=n, p50_ms=p50, p99_ms=p99)


def _median(counts: Mapping[int, int]) -> int:
    left = sum(counts.values()) / 2
    for value in sorted(counts):
        left -= counts[value]
        if left <= 0:
            return value
    return max(counts)


def _per_1k(whole: rollup_queries.UsageSums) -> str | None:
    return (
        str((whole.cost * 1000 / whole.tokens).quantize(Decimal("1e-9"))) if whole.tokens else None
    )


def _newest(
    sql: sa.Connection, function_id: str, *, tenant: str, now: float
) -> tuple[dict[str, LatencyPercentiles], dict[str, int]]:
    """From the newest records, return first-token times by start kind, and counts of finish
    reasons."""
    c = tables.usage.c
    query = (
        sa.select(c.start_kind, c.first_token_ms, c.finish)
        .where(
            c.tenant == tenant,
            c.started_at >= now - DAY_S,
            c.function_id == function_id,
            c.finish != "",
        )
        .order_by(c.started_at.desc())
        .limit(NEWEST)
    )
    by_start: dict[str, list[int]] = {}
    finishes: dict[str, int] = {}
    for kind, first_ms, finish in sql.execute(query):
        finishes[finish] = finishes.get(finish, 0) + 1
        if first_ms:
            by_start.setdefault(kind, []).append(first_ms)
    return {kind: _times_of(by_start[kind]) for kind in START_KINDS if kind in by_start}, dict(
        sorted(finishes.items())
    )


def _times_of(found: Iterable[int]) -> LatencyPercentiles:
    ordered = sorted(found)
    return LatencyPercentiles(
        n=len(ordered),
        p50_ms=float(ordered[(len(ordered) - 1) // 2]),
        p99_ms=float(ordered[-(-len(ordered) * 99 // 100) - 1]),
    )


def _by_caller(
    sql: sa.Connection, function_id: str, *, tenant: str, currency: str, now: float
) -> list[tuple[str, rollup_queries.UsageSums]]:
    """Return (tenant's name, sums of calls), most tokens first."""
    table, last = tables.usage_hours, int(now // HOUR_S)
    names = {
        row.id: row.name
        for row in sql.execute(sa.select(tables.tenants.c.id, tables.tenants.c.name))
    }
    query = (
        sa.select(table.c.caller, table.c.currency, *rollup_queries.summed(table))
        .where(
            table.c.tenant == tenant,
            table.c.hour.between(last - 23, last),
            table.c.function_id == function_id,
            table.c.kind == "CALL",
        )
        .group_by(table.c.caller, table.c.currency)
    )
    found: dict[str, rollup_queries.UsageSums] = {}
    for caller, paid_in, *row in sql.execute(query):
        one = rollup_queries.sums_of_row(row)
        if paid_in != currency:
            one.picos = 0
        found.setdefault(str(names.get(caller or tenant, caller)), rollup_queries.UsageSums()).add(
            one
        )
    return sorted(found.items(), key=lambda pair: -pair[1].tokens)[:MAX_TENANTS]


def hourly(
    sql: sa.Connection,
    *,
    tenant: str,
    environment: str,
    names: Iterable[tuple[str, str]],
    now: float,
) -> dict[int, tuple[int, int]]:
    """Map each hour since the epoch to the tokens (in, out) of these functions' calls, as (app,
    name), over the last day."""
    table, last = tables.usage_hours, int(now // HOUR_S)
    query = (
        sa.select(table.c.hour, sa.func.sum(table.c.tokens_in), sa.func.sum(table.c.tokens_out))
        .where(
            table.c.tenant == tenant,
            table.c.hour.between(last - 23, last),
            table.c.environment == environment,
            table.c.kind == "CALL",
            sa.or_(
                sa.false(),
                *(sa.and_(table.c.app == app, table.c.function == name) for app, name in names),
            ),
        )
        .group_by(table.c.hour)
    )
    return {
        int(hour): (int(tokens_in), int(tokens_out))
        for hour, tokens_in, tokens_out in sql.execute(query)
    }
