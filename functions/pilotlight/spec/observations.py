"""Statistics of calls per revision, arm and minute, for canaries, experiments and objectives.

Activators count and post new counts every second; the controller adds them up. Unlike billing, a
`kill -9` may lose the last second. Every finished call is in exactly one of `answered`, `failed`,
`refused` and `cancelled`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

SHADOW_ARM = "~shadow"
"""The arm of copies answered by a shadow."""
REPLAY_ARM = "~replay"
"""The arm of calls that repeat logged ones (`pilotlight replay`)."""
UNCOUNTED_ARMS = (SHADOW_ARM, REPLAY_ARM)
"""Arms whose calls no user waits for: they count in no rollout and no objective."""
GROWTH = 1.1
"""Latency buckets grow by a tenth: bucket b covers up to GROWTH**b milliseconds."""
CLOCKS = (
    "warm",
    "cold",
    "first_byte",
    "ttft",
    "itl",
    "kv",
    "route",
    "admit",
    "queue",
    "start",
    "exec",
)
"""Measured latencies. `warm`: a complete call without streaming or waiting for a start;
`first_byte`: first byte of a stream that did not wait for a start; `cold`: a call that waited for a
start, complete or to its first byte; `ttft`: time to first token of a language model, without a
start; `itl`: inter-token latency; `kv`: samples of the cache usage of an engine, with percentages
as buckets; and the stages."""


@dataclass(slots=True, kw_only=True)
class Observation:
    """Counts of one revision, arm and minute.

    Attributes:
        minute: minutes since the epoch, of the end of the call.
        arm: arm of an experiment; "" for none, else one of UNCOUNTED_ARMS.
        answered: successes, including degraded answers.
        failed: failures of the platform or the function: status 500 and above.
        refused: intentional rejections: status 400 to 498, and answers of the function with 501 or
            503 and outcome `ok`.
        cancelled: the caller disconnected.
        degraded: answered by a variant or a fallback (part of `answered`).
        cold: waited for a start (part of `answered`).
        raised, invalid, crashed, late: parts of `failed`: user code raised; the answer violated its
            schema; the instance died; a timeout expired.
        starts, starts_failed: starts of instances.
        streams, streams_completed: parts of `answered`: streams, and those that ended normally. A
            stream that broke after it had begun is answered but not completed.
        out_of_memory: the instance ran out of memory (part of `crashed`).
        calls_billed, cost_picos, tokens_in, tokens_out, tokens_cached, exec_ms: sums over closed
            usage records.
        compared, matched: for a shadow: copies whose answer was compared, and was equal.
        skipped: for a shadow: copies not made, because of its cap or lack of capacity.
        overruns: stage → calls that exceeded its budget.
        latency: clock → bucket → calls, of answered calls that are not degraded. Each is in one of
            `cold`, `first_byte` and `warm`."""

    tenant: str
    function_id: str
    revision: str
    minute: int
    arm: str = ""
    answered: int = 0
    failed: int = 0
    refused: int = 0
    cancelled: int = 0
    degraded: int = 0
    cold: int = 0
    raised: int = 0
    invalid: int = 0
    crashed: int = 0
    late: int = 0
    starts: int = 0
    starts_failed: int = 0
    streams: int = 0
    streams_completed: int = 0
    calls_billed: int = 0
    cost_picos: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    tokens_cached: int = 0
    out_of_memory: int = 0
    exec_ms: int = 0
    compared: int = 0
    matched: int = 0
    skipped: int = 0
    overruns: dict[str, int] = field(default_factory=dict)
    latency: dict[str, dict[int, int]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values, without zeros."""
        return {
            f.name: value
            for f in fields(self)
            if (value := getattr(self, f.name)) or f.name in _KEY
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Parse the output of `to_json`. Raises KeyError, TypeError or ValueError if it is
        invalid."""
        latency = {
            clock: {int(bucket): int(n) for bucket, n in buckets.items()}
            for clock, buckets in body.get("latency", {}).items()
        }
        return cls(**{**body, "latency": latency})


_KEY = frozenset({"tenant", "function_id", "revision", "minute", "arm"})
COUNTS = tuple(
    f.name
    for f in fields(Observation)
    if f.name not in _KEY and f.name not in ("overruns", "latency")
)
"""Names of the plain counts, in order."""


def latency_bucket(ms: float) -> int:
    """Return the latency bucket of a duration in milliseconds, at least 0."""
    return 0 if ms <= 1 else math.ceil(math.log(ms, GROWTH) - 1e-9)


MAX_BUCKET = latency_bucket(7 * 86_400_000)
"""Bucket of the longest possible call; longer ones are in it, too."""
LATENCY_BOUNDS = tuple(GROWTH**bucket for bucket in range(MAX_BUCKET))
"""Upper ends of the latency buckets, in milliseconds: `bisect_left(LATENCY_BOUNDS, ms)` is
`latency_bucket(ms)` at a third of its cost."""


def latency_quantile_ms(buckets: Mapping[int, int], share: float) -> float | None:
    """Return the latency quantile `share` in milliseconds, as the upper end of its bucket; None
    without calls."""
    total = sum(buckets.values())
    if not total:
        return None
    left = share * total
    for bucket in sorted(buckets):
        left -= buckets[bucket]
        if left <= 1e-9:
            return float(GROWTH**bucket)
    return float(GROWTH ** max(buckets))


def count_slower_than(buckets: Mapping[int, int], seconds: float) -> int:
    """Count the calls in buckets above that of `seconds`, which are certainly slower (to within a
    tenth)."""
    bound = latency_bucket(seconds * 1000)
    return sum(count for bucket, count in buckets.items() if bucket > bound)


def count_eligible(observation: Observation) -> int:
    """Count the calls that are judged: answered or failed, but not intentionally rejected or
    abandoned by the caller."""
    return observation.answered + observation.failed


def count_errors(observation: Observation) -> int:
    """Count the judged calls that failed, or whose stream broke after it had begun."""
    return observation.failed + observation.streams - observation.streams_completed


def sum_observations(observations: Iterable[Observation]) -> Observation | None:
    """Add up observations, under the key of the first and the earliest minute; None without
    any."""
    total: Observation | None = None
    for one in observations:
        if total is None:
            total = replace(
                one,
                overruns=dict(one.overruns),
                latency={clock: dict(counts) for clock, counts in one.latency.items()},
            )
        else:
            add_observation(total, one)
    return total


def add_observation(total: Observation, one: Observation) -> None:
    """Add the counts of `one` to `total`."""
    total.minute = min(total.minute, one.minute)
    for name in COUNTS:
        if count := getattr(one, name):
            setattr(total, name, getattr(total, name) + count)
    for stage, calls in one.overruns.items():
        total.overruns[stage] = total.overruns.get(stage, 0) + calls
    for clock, buckets in one.latency.items():
        known = total.latency.setdefault(clock, {})
        for bucket, calls in buckets.items():
            known[bucket] = known.get(bucket, 0) + calls
