"""Metrics of response caches, by function. Calls add to plain numbers, which a scrape reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from activator.metrics.call_counters import FUNCTION, LabelLimiter

RESULTS: Final = ("hit", "miss", "bypass")


class CacheTally:
    """Counts of one function: calls by result, and answers that made room for others."""

    __slots__ = ("dropped", "results")

    def __init__(self) -> None:
        self.results = dict.fromkeys(RESULTS, 0)
        self.dropped = 0


class CacheMetrics(Collector):
    """The tallies of functions with a response cache. Owner: the event loop; the metrics thread may
    read them one call late.

    Attributes:
        sizes: returns the bytes of the answers of each function, by `CallTarget.name`.
        shared_failures: returns how often Redis did not answer; None = answers are not shared."""

    def __init__(self, functions: LabelLimiter) -> None:
        self._functions = functions
        self._tallies: dict[tuple[str, ...], CacheTally] = {}
        self.sizes: Callable[[], Mapping[str, int]] = dict
        self.shared_failures: Callable[[], int] | None = None

    def __repr__(self) -> str:
        return f"<CacheMetrics {len(self._tallies)} functions>"

    def count(self, function: str, result: str) -> None:
        """Count a call of a function, by its `CallTarget.name`: hit, miss or bypass."""
        self._tally(function).results[result] += 1

    def count_evicted(self, function: str) -> None:
        """Count an answer of a function that made room for others."""
        self._tally(function).dropped += 1

    def _tally(self, function: str) -> CacheTally:
        labels = self._labels(function)
        found = self._tallies.get(labels)
        if found is None:
            found = self._tallies[labels] = CacheTally()
        return found

    def forget(self, labels: tuple[str, ...]) -> None:
        """Forget a function."""
        self._tallies.pop(labels, None)

    def _labels(self, function: str) -> tuple[str, ...]:
        tenant, _, app, name = function.split("/")
        return self._functions.of(tenant, app, name)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Current values (Prometheus' own interface)."""
        calls = CounterMetricFamily(
            "pilotlight_response_cache_calls",
            "Calls of functions with a response cache: hit, miss or bypass.",
            labels=(*FUNCTION, "result"),
        )
        dropped = CounterMetricFamily(
            "pilotlight_response_cache_dropped",
            "Answers that made room for others.",
            labels=FUNCTION,
        )
        for labels, tally in list(self._tallies.items()):
            for result, count in tally.results.items():
                calls.add_metric((*labels, result), count)
            dropped.add_metric(labels, tally.dropped)
        yield from (calls, dropped, self._sizes())
        if self.shared_failures is not None:
            yield CounterMetricFamily(
                "pilotlight_response_cache_redis_failures",
                "Requests for shared answers that Redis did not answer in time, or refused.",
                value=self.shared_failures(),
            )

    def _sizes(self) -> GaugeMetricFamily:
        family = GaugeMetricFamily(
            "pilotlight_response_cache_bytes",
            "Memory of the answers of a function, those for cached_answer() included.",
            labels=FUNCTION,
        )
        sums: Counter[tuple[str, ...]] = Counter()
        for function, size in self.sizes().items():
            sums[self._labels(function)] += size
        for labels, total in sums.items():
            family.add_metric(labels, total)
        return family
