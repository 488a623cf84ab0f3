"""Parses the Prometheus metrics of an engine; only the needed ones.

Names are those of vLLM 0.32 (`vllm/v1/metrics/loggers.py`). An engine with several schedulers
reports each number per scheduler: counts are summed, of the KV memory usage the maximum counts. A
missing number is None, never zero.

Source: Prometheus text exposition format 0.0.4."""

from __future__ import annotations

import contextlib
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

MOST = 1e15
"""Larger numbers are invalid."""
MAX_BUCKETS = 128
"""Maximum buckets of one histogram: vLLM has some twenty. Each is processed with every scrape, and
kept."""
_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
_COUNTERS = (
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "prompt_tokens_total",
    "generation_tokens_total",
)
_FIRST_TOKEN = "time_to_first_token_seconds"
_BUCKETS, _SUM = f"{_FIRST_TOKEN}_bucket", f"{_FIRST_TOKEN}_sum"
_NAMES = {f"vllm:{name}".encode(): name for name in (*_GAUGES, *_COUNTERS, _BUCKETS, _SUM)}
_BOUND = re.compile(rb'(?:^|,)le="([^"]*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """A histogram of durations. `counts[n]` of them took at most `bounds_s[n]`; the last bound is
    infinite, so the last count is the total."""

    bounds_s: tuple[float, ...]
    counts: tuple[float, ...]
    sum_s: float

    @property
    def count(self) -> float:
        """Total number of durations."""
        return self.counts[-1] if self.counts else 0.0

    def since(self, before: Histogram | None) -> Histogram:
        """The durations that are not in `before` yet; all if its buckets differ or its count is
        higher."""
        if before is None or before.bounds_s != self.bounds_s or before.count > self.count:
            return self
        counts = tuple(now - then for now, then in zip(self.counts, before.counts, strict=True))
        return Histogram(bounds_s=self.bounds_s, counts=counts, sum_s=self.sum_s - before.sum_s)

    def plus(self, other: Histogram) -> Histogram:
        """The sum of both; `other`, the newer one, if their buckets differ."""
        if other.bounds_s != self.bounds_s:
            return other
        counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        return Histogram(bounds_s=self.bounds_s, counts=counts, sum_s=self.sum_s + other.sum_s)

    def longer_than(self, seconds: float) -> float:
        """Estimated number of durations above a limit, by linear interpolation within a bucket."""
        low_s, below = 0.0, 0.0
        for bound_s, count in zip(self.bounds_s, self.counts, strict=True):
            if bound_s >= seconds:
                inside = (
                    0.0
                    if bound_s == float("inf")
                    else (count - below) * (seconds - low_s) / (bound_s - low_s)
                )
                return max(0.0, self.count - below - inside)
            low_s, below = bound_s, count
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMetrics:
    """An engine's metrics at one moment. Counters are since its start, including the time before
    its snapshot.

    Attributes:
        running, waiting: requests that are computed, and that wait inside the engine.
        kv_use: share of its KV memory in use, 0 to 1.
        prefix_queries, prefix_hits: prompt tokens that were looked up in the prefix cache, and
            those found.
        first_token_s: times to the first token."""

    running: int
    waiting: int
    kv_use: float | None = None
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    first_token_s: Histogram | None = None


def parse(text: bytes) -> EngineMetrics | None:
    """Parse metrics. None if the numbers of requests are missing: the text is not an engine's, or
    the engine is broken."""
    values: dict[str, list[float]] = defaultdict(list)
    first_token: dict[float, float] = defaultdict(float)
    for name, labels, number in _samples(text):
        if name == _BUCKETS:
            bound_s = _bound_s(labels)
            if bound_s is not None:
                first_token[bound_s] += number
        else:
            values[name].append(number)
    if "num_requests_running" not in values or "num_requests_waiting" not in values:
        return None
    added = {name: sum(numbers) for name, numbers in values.items()}
    return EngineMetrics(
        running=int(added["num_requests_running"]),
        waiting=int(added["num_requests_waiting"]),
        kv_use=max(values["kv_cache_usage_perc"], default=None),
        prefix_queries=added.get("prefix_cache_queries_total"),
        prefix_hits=added.get("prefix_cache_hits_total"),
        prompt_tokens=added.get("prompt_tokens_total"),
        generation_tokens=added.get("generation_tokens_total"),
        first_token_s=_histogram(first_token, added.get(_SUM, 0.0)),
    )


def _bound_s(labels: bytes) -> float | None:
    found = _BOUND.search(labels)
    try:
        bound_s = float(found[1]) if found is not None else math.nan
    except ValueError:
        return None
    return bound_s if bound_s >= 0 else None


def _samples(text: bytes) -> Iterator[tuple[str, bytes, float]]:
    """Yield name, labels and number of the needed lines: some fifty of five hundred, so other lines
    are skipped by their prefix.

    Impossible numbers (negative, above MOST, NaN) are skipped, because a tenant controls the
    engine."""
    for line in text.split(b"\n"):
        if line[:5] != b"vllm:":
            continue
        brace = line.find(b"{")
        name = _NAMES.get(line[: brace if brace >= 0 else line.find(b" ")])
        if name is not None:
            labels, _, rest = line.rpartition(b"} ") if brace >= 0 else line.partition(b" ")
            with contextlib.suppress(ValueError, IndexError):
                number = float(rest.split()[0])
                if 0 <= number <= MOST:
                    yield name, labels[brace + 1 :], number


def _histogram(buckets: dict[float, float], sum_s: float) -> Histogram | None:
    if not 0 < len(buckets) <= MAX_BUCKETS:
        return None
    bounds_s = tuple(sorted(buckets))
    counts = tuple(buckets[bound_s] for bound_s in bounds_s)
    return Histogram(bounds_s=bounds_s, counts=counts, sum_s=sum_s)
