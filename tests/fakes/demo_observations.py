"""Calls as activators would have observed them: one function keeps its objectives, one had an
outage, one is too slow in its queue; those with tokens are language models."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from pilotlight.spec.observations import Observation, latency_bucket
from tests.fakes.demo_books import HABITS

EVERY_MINUTES = 5
OUTAGE = (60, 95)
"""Minutes ago, of the function that had one."""


def observations(
    *, tenant: str, ids: Mapping[str, str], revisions: Mapping[str, str], now: float
) -> Iterator[Observation]:
    """Of each function, the first of which has the outage and the second the queue."""
    tokens = {f"{habit.app}/{habit.function}": habit.tokens for habit in HABITS}
    for place, name in enumerate(ids):
        for back in range(0, 24 * 60, EVERY_MINUTES):
            calls = int(40 + 30 * math.sin(back / 229 + place) + 20 * math.sin(back / 37))
            if any(tokens[name]):
                calls = int(back % 15 == 0)  # some hundred a day, as the ledger has
            failed = calls // 4 if place == 0 and OUTAGE[0] <= back <= OUTAGE[1] else 0
            slow = calls // 12 if place == 1 and back < 300 else 0
            yield _observation(
                tenant,
                ids[name],
                revisions[name],
                int(now // 60) - back,
                calls=calls - failed,
                failed=failed,
                slow=slow,
                tokens=tokens[name],
            )


def _observation(
    tenant: str,
    function_id: str,
    revision: str,
    minute: int,
    *,
    calls: int,
    failed: int,
    slow: int,
    tokens: tuple[int, int],
) -> Observation:
    cold = calls // 25
    warm = {
        latency_bucket(24): calls // 2,
        latency_bucket(41): calls - calls // 2 - cold - slow,
        latency_bucket(260): slow,
    }
    stages = {
        "route": {0: calls},
        "admit": {0: calls},
        "queue": {latency_bucket(2): calls - slow, latency_bucket(230): slow},
        "start": {0: calls - cold, latency_bucket(130): cold},
        "exec": {latency_bucket(22): calls // 2, latency_bucket(39): calls - calls // 2},
    }
    latency = {"warm": warm, "cold": {latency_bucket(180): cold}, **stages}
    streams = calls if any(tokens) else 0
    if streams:
        latency |= {
            "ttft": {latency_bucket(160): streams - cold, latency_bucket(950): cold},
            "itl": {latency_bucket(17): streams * 9, latency_bucket(44): streams},
            "kv": {31: streams, 64: streams // 9},
        }
    return Observation(
        tenant=tenant,
        function_id=function_id,
        revision=revision,
        minute=minute,
        answered=calls,
        failed=failed,
        raised=failed,
        cold=cold,
        refused=calls // 40,
        streams=streams,
        streams_completed=streams - streams // 60,
        tokens_in=streams * tokens[0],
        tokens_out=streams * tokens[1],
        tokens_cached=streams * tokens[0] // 5,
        overruns={"queue": slow} if slow else {},
        latency={
            clock: {bucket: n for bucket, n in buckets.items() if n}
            for clock, buckets in latency.items()
        },
    )
