"""What calls looked like, counted per revision, arm and minute: the evidence of canaries,
experiments and objectives.

Activators count, and post what is new each second; the controller adds up. Not money: a `kill -9`
may cost the last second of it. Every finished call is in exactly one of `answered`, `failed`,
`refused` and `cancelled`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

SHADOW_ARM = "~shadow"
"""Stands where an arm's name would: the copies that a shadow answered."""
GROWTH = 1.1
"""Latency buckets grow by a tenth: bucket b holds up to GROWTH**b milliseconds."""
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
"""`warm`: a whole call that neither streamed nor waited for a start; `first_byte`: of a stream that
did not wait for one; `cold`: a call that did wait for one, whole or to its first byte; `ttft`: to a
language model's first token, of those that waited for no start; `itl`: between two pieces of its
answer; `kv`, whose buckets are percent: how much of an engine's cache was in use, at each look; and
the stages."""


@dataclass(slots=True, kw_only=True)
class Observation:
    """Counts of one revision, arm and minute.

    Attributes:
        minute: whole minutes since the epoch, of the call's end. arm: of an experiment; "" for
        none, SHADOW_ARM for copies. answered: a success, degraded ones included. failed: what the
        platform or the function did not manage: status 500 and above. refused: intentional: status
        400 to 498, and answers of the function's own making that say 501 or 503 with an outcome
        `ok`. cancelled: the caller left. degraded: of those answered: by a variant or a fallback.
        cold: of those answered: waited for a start. raised, invalid, crashed, late: of those
        failed: user code raised; the answer broke its schema; the instance died; a clock ran out.
        starts, starts_failed: of instances. streams, streams_completed: of those answered: they
        streamed, and of these the ones that ended by themselves; a stream that broke
            after it had begun is answered and not completed.
        out_of_memory: of those crashed: their instance ran out of memory. calls_billed, cost_picos,
        tokens_in, tokens_out, tokens_cached, exec_ms: sums over the records that were closed.
        compared, matched: of a shadow: copies whose answer was compared, and was the same. skipped:
        of a shadow: copies that were not made, because of its cap or for want of room. overruns:
        stage → calls that took longer in it than its budget. latency: clock → bucket → calls; of
        calls answered and not degraded. Each is in one of `cold`, `first_byte` and `warm`.
    """

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
        """As JSON values; zeros are left out."""
        return {
            f.name: value
            for f in fields(self)
            if (value := getattr(self, f.name)) or f.name in _KEY
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`. Raises KeyError, TypeError or ValueError when the document is
        broken."""
        latency = {
            clock: {int(bucket): int(n) for bucket, n in buckets.items()}
            for clock, buckets in body.get("latency", {}).items()
        }
        return cls(**{**body, "latency": latency})


_KEY = frozenset({"tenant", "function_id", "revision", "minute", "arm"})
KEYS = ("tenant", "function_id", "revision", "arm", "minute")
COUNTS = tuple(
    f.name
    for f in fields(Observation)
    if f.name not in _KEY and f.name not in ("overruns", "latency")
)
"""Names of the plain counts, in their order."""


def latency_bucket(ms: float) -> int:
    """The latency bucket of so many milliseconds; never below 0."""
    return 0 if ms <= 1 else math.ceil(math.log(ms, GROWTH) - 1e-9)


def latency_quantile_ms(buckets: Mapping[int, int], share: float) -> float | None:
    """Milliseconds below which `share` of the calls are, by the upper end of their bucket; None
    without any."""
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
    """Calls in buckets above the one that `seconds` falls into: those certainly, to a tenth,
    slower."""
    bound = latency_bucket(seconds * 1000)
    return sum(count for bucket, count in buckets.items() if bucket > bound)


def count_eligible(observation: Observation) -> int:
    """Calls that somebody answers for: those answered and those that failed; not those refused on
    purpose, nor left by their callers."""
    return observation.answered + observation.failed


def count_errors(observation: Observation) -> int:
    """Of those judged: failed, or a stream that broke after it had begun."""
    return observation.failed + observation.streams - observation.streams_completed


def sum_observations(observations: Iterable[Observation]) -> Observation | None:
    """The sum of several, under the key of the first and the earliest minute; None without any."""
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
    """Add the counts of `one`."""
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
