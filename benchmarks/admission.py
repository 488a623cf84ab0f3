"""What one admission costs: three sets of quotas (of the tenant, the key and the function), each
with a rate and a count of calls at once.

In the process a decision is a few microseconds of arithmetic, and is timed in batches. In Redis it
is one round trip of one script; how many commands the server got for each call is counted by the
server itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from redis.asyncio import Redis

from activator.quotas.admission import Admission
from activator.quotas.process_store import ProcessQuotas
from activator.quotas.redis_store import RedisQuotas
from activator.quotas.rules import Rule, Rules
from activator.quotas.store_protocol import QuotaCheck
from benchmarks.harness import Report, Row
from pilotlight.spec.quotas import Quotas

BATCH = 1000
ALONE = 50
"""Calls through Redis for each batch of those in the process: each takes a hundred times as
long."""
CALLERS = 64
_SCRIPTS = ("cmdstat_evalsha", "cmdstat_eval", "cmdstat_fcall")
PLENTY = Quotas(requests_per_s=1_000_000, burst=1_000_000, concurrent=1_000_000)
"""Never used up: what is measured is the decision that a call may go on."""


def rules(quotas: Quotas = PLENTY) -> Rules:
    """The same quotas for a tenant, its function and its key."""
    return (
        Rule(of="tenant", subject="t-bench", quotas=quotas, tenant="t-bench"),
        Rule(of="function", subject="t-bench/main/app/function", quotas=quotas, tenant="t-bench"),
        Rule(of="key", subject="k-bench", quotas=quotas, tenant="t-bench"),
    )


def in_process(report: Report, *, batches: int) -> None:
    """Microseconds of a call that is let in and let go again, with and without the headers that
    tell what is left; and of one refused."""
    check = _check(PLENTY)
    report.rows.append(
        Row.of(
            "admission in the process: 3 x (rate, at once)",
            "µs",
            _timed(lambda: _admitted(check), batches),
        )
    )
    report.rows.append(
        Row.of(
            "... its RateLimit headers", "µs", _timed(check.head, batches), note="on every answer"
        )
    )
    full = _check(Quotas(concurrent=0))
    report.rows.append(
        Row.of("... refused", "µs", _timed(lambda: full.try_acquire_nowait(1, 1, 0), batches))
    )


def _check(quotas: Quotas) -> QuotaCheck:
    check = ProcessQuotas().quota_check(rules(quotas))
    if check is None:
        raise AssertionError("quotas that count nothing")
    return check


def _admitted(check: QuotaCheck) -> None:
    if check.try_acquire_nowait(1, 1, 0) is not None:
        raise AssertionError(f"refused: {check!r}")
    Admission(check).release()


def _timed(step: Callable[[], object], batches: int) -> list[float]:
    """Microseconds per step, one number per batch of BATCH."""
    took = []
    for _ in range(batches):
        began = time.perf_counter_ns()
        for _ in range(BATCH):
            step()
        took.append((time.perf_counter_ns() - began) / BATCH / 1000)
    return took


def in_redis(report: Report, *, url: str, batches: int) -> None:
    """Microseconds of a decision in Redis: one caller, and many at once. And how many scripts the
    server ran for each call."""
    alone_us, alone_trips = asyncio.run(_through_redis(url, callers=1, calls=batches * ALONE))
    report.rows.append(Row.of("admission in Redis, one caller", "µs", alone_us))
    report.rows.append(
        Row.of("... round trips per call", "1", [alone_trips], note="as the server counts scripts")
    )
    many_us, many_trips = asyncio.run(_through_redis(url, callers=CALLERS, calls=batches * ALONE))
    report.rows.append(
        Row.of(
            f"admission in Redis, {CALLERS} callers",
            "µs",
            many_us,
            note="until each has its answer",
        )
    )
    report.rows.append(
        Row.of(
            "... round trips per call",
            "1",
            [many_trips],
            note="calls that come together go together",
        )
    )


async def _through_redis(url: str, *, callers: int, calls: int) -> tuple[list[float], float]:
    """Microseconds of each decision, and scripts per call."""
    store = RedisQuotas(url, platform="bench", member="a-0", is_open=lambda _kind: True)
    task = asyncio.create_task(store.run())
    check = store.quota_check(rules())
    server: Redis = Redis.from_url(url)
    try:
        if check is None:
            raise AssertionError("quotas that count nothing")
        await _admitted_in_redis(check, 1)  # the script is known to the server from now on
        await server.config_resetstat()
        took = await asyncio.gather(
            *(_admitted_in_redis(check, calls // callers) for _ in range(callers))
        )
        ran = await server.info("commandstats")
    finally:
        task.cancel()
        await asyncio.wait([task])
        await store.aclose()
        await server.aclose()
    scripts = sum(int(stats["calls"]) for command, stats in ran.items() if command in _SCRIPTS)
    return [us for part in took for us in part], scripts / (calls // callers * callers)


async def _admitted_in_redis(check: QuotaCheck, calls: int) -> list[float]:
    took = []
    for _ in range(calls):
        began = time.perf_counter_ns()
        if await check.try_acquire(1, 1, 0) is not None:
            raise AssertionError(f"refused: {check!r}")
        took.append((time.perf_counter_ns() - began) / 1000)
        Admission(check).release()
    return took
