"""Metrics of language models: tokens, time to the first token and between tokens, finish reasons,
and engine state.

There are too many intervals between tokens to take a lock for each: a call has its own buckets,
which are added when it ends."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from activator.llm.engine_state import EngineState
from activator.metrics.call_counters import FUNCTION, LabelLimiter
from activator.quotas.token_reservation import TokenReservation
from activator.routing.call_target import CallTarget
from pilotlight.spec.observations import LATENCY_BOUNDS
from snapshotter.types import StartKind

FIRST_TOKEN_S = (
    0.01,
    0.025,
    0.05,
    0.1,
    0.2,
    0.3,
    0.5,
    0.75,
    1.0,
    1.5,
    2.0,
    3.0,
    5.0,
    10.0,
    20.0,
    40.0,
    80.0,
)
GAP_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1.0,
    2.5,
    10.0,
)
_DIRECTIONS = ("in", "out", "cached")
Views = Callable[[], Mapping[str, tuple[CallTarget, EngineState]]]
"""Recently scraped engines, by instance."""


class LlmMetrics:
    """Metrics of calls with tokens. Owner: the event loop; read by the metrics thread."""

    def __init__(self, registry: CollectorRegistry, functions: LabelLimiter) -> None:
        self._registry = registry
        self._functions = functions
        self._tokens = Counter(
            "pilotlight_tokens",
            "Tokens of language models: `in`, `out`, and those of `in` that were `cached`.",
            (*FUNCTION, "direction"),
            registry=registry,
        )
        self._first = Histogram(
            "pilotlight_first_token_seconds",
            "From a request to its first token, by the start kind of its instance.",
            (*FUNCTION, "start_kind"),
            buckets=FIRST_TOKEN_S,
            registry=registry,
        )
        self._finished = Counter(
            "pilotlight_finishes",
            "Answers of language models, by finish reason.",
            (*FUNCTION, "reason"),
            registry=registry,
        )
        self._lost = Counter(
            "pilotlight_out_of_memory",
            "Instances that ran out of memory.",
            FUNCTION,
            registry=registry,
        )
        self._guarded = Counter(
            "pilotlight_guard_checks",
            "Prompts (`input`) and answers (`output`) that a guard allowed or refused, and checks "
            "that failed.",
            (*FUNCTION, "stage", "outcome"),
            registry=registry,
        )
        self._gaps: dict[tuple[str, ...], dict[int, int]] = {}
        registry.register(_GapCollector(self._gaps))

    def __repr__(self) -> str:
        return f"<LlmMetrics {len(self._gaps)} functions>"

    def ended(self, target: CallTarget, use: TokenReservation, start_kind: StartKind) -> None:
        """Count the usage of a call that has ended."""
        labels = self._labels(target)
        for direction, count in zip(
            _DIRECTIONS, (use.tokens_in, use.tokens_out, use.tokens_cached), strict=True
        ):
            if count:
                self._tokens.labels(*labels, direction).inc(count)
        if use.first_token_ns:
            self._first.labels(*labels, start_kind.value).observe(
                (use.first_token_ns - use.began_ns) / 1e9
            )
        if use.finish:
            self._finished.labels(*labels, use.finish).inc()
        if use.gaps:
            known = self._gaps.setdefault(labels, {})
            for bucket, count in use.gaps.items():
                known[bucket] = known.get(bucket, 0) + count

    def lost(self, target: CallTarget, reason: str) -> None:
        """Count an instance that ended unexpectedly."""
        if reason == "out_of_memory":
            self._lost.labels(*self._labels(target)).inc()

    def guarded(self, target: CallTarget, stage: str, outcome: str) -> None:
        """Count a check of a guard."""
        self._guarded.labels(*self._labels(target), stage, outcome).inc()

    def forget(self, labels: tuple[str, ...]) -> None:
        """Drop the series of a function."""
        named = dict(zip(FUNCTION, labels, strict=True))
        for metric in (self._tokens, self._first, self._finished, self._lost, self._guarded):
            metric.remove_by_labels(named)
        self._gaps.pop(labels, None)

    def collect_engines(self, views: Views) -> None:
        """Export the state of engines, read at each scrape."""
        self._registry.register(_EngineCollector(views, self._functions))

    def _labels(self, target: CallTarget) -> tuple[str, ...]:
        return self._functions.of(target.tenant, target.app, target.function)


class _GapCollector(Collector):
    def __init__(self, gaps: Mapping[tuple[str, ...], Mapping[int, int]]) -> None:
        self._gaps = gaps

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Current values (Prometheus' own interface). An interval counts as the upper end of its
        bucket, at most a tenth more."""
        family = HistogramMetricFamily(
            "pilotlight_token_gap_seconds",
            "Interval between two pieces of a language model's answer.",
            labels=FUNCTION,
        )
        for labels, gaps in list(self._gaps.items()):
            counts, total_s = [0] * (len(GAP_S) + 1), 0.0
            for bucket, count in list(gaps.items()):
                seconds = LATENCY_BOUNDS[min(bucket, len(LATENCY_BOUNDS) - 1)] / 1000
                counts[bisect_left(GAP_S, seconds)] += count
                total_s += seconds * count
            bounds = [str(bound) for bound in GAP_S] + ["+Inf"]
            family.add_metric(labels, list(zip(bounds, accumulate(counts), strict=True)), total_s)
        yield family


class _EngineCollector(Collector):
    """Sums over the engines of a function; the maximum of memory shares, because it is the limiting
    one."""

    def __init__(self, views: Views, functions: LabelLimiter) -> None:
        self._views = views
        self._functions = functions

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Current values (Prometheus' own interface)."""
        found: dict[tuple[str, ...], list[EngineState]] = {}
        for target, view in self._views().values():
            found.setdefault(
                self._functions.of(target.tenant, target.app, target.function), []
            ).append(view)
        for name, help_text, value in _ENGINE_GAUGES:
            family = GaugeMetricFamily(name, help_text, labels=FUNCTION)
            for labels, views in found.items():
                if (number := value(views)) is not None:
                    family.add_metric(labels, number)
            yield family


def _known(views: list[EngineState], name: str) -> list[float]:
    return [number for view in views if (number := getattr(view, name)) is not None]


def _total(name: str) -> Callable[[list[EngineState]], float | None]:
    return lambda views: sum(known) if (known := _known(views, name)) else None


def _greatest(name: str) -> Callable[[list[EngineState]], float | None]:
    return lambda views: max(_known(views, name), default=None)


def _mean(name: str) -> Callable[[list[EngineState]], float | None]:
    return lambda views: sum(known) / len(known) if (known := _known(views, name)) else None


_ENGINE_GAUGES: tuple[tuple[str, str, Callable[[list[EngineState]], float | None]], ...] = (
    (
        "pilotlight_engines",
        "Engines that answered the last scrape.",
        lambda views: float(len(views)),
    ),
    (
        "pilotlight_engine_slots",
        "Concurrent calls of a function's engines, by their sequences and their cache.",
        _total("slots"),
    ),
    ("pilotlight_engine_running", "Sequences that engines generate now.", _total("running")),
    ("pilotlight_engine_waiting", "Sequences that wait inside engines.", _total("waiting")),
    (
        "pilotlight_engine_cache_use",
        "Share of the KV cache in use, of the fullest engine.",
        _greatest("kv_use"),
    ),
    (
        "pilotlight_engine_prefix_hit_ratio",
        "Share of prompt tokens in the cache since the previous scrape.",
        _mean("prefix_hit_rate"),
    ),
    (
        "pilotlight_engine_prompt_tokens_per_second",
        "Prompt tokens processed per second.",
        _total("prompt_tokens_per_s"),
    ),
    (
        "pilotlight_engine_generated_tokens_per_second",
        "Tokens generated per second.",
        _total("generation_tokens_per_s"),
    ),
)
