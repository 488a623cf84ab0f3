"""Metrics of the weight cache, collected from its components at each scrape.

pilotlight_weights_budget_bytes               disk that the store may use
pilotlight_weights_used_bytes                 disk in use, incoming models included
pilotlight_weights_models                     models in the store
pilotlight_weights_leases                     leases held
pilotlight_weights_arriving                   models being fetched
pilotlight_weights_leases_granted_total       by result: hit (in the store), miss (fetched)
pilotlight_weights_fetched_bytes_total        fetched from the origin
pilotlight_weights_evicted_models_total       evicted to make room
pilotlight_weights_evicted_bytes_total
pilotlight_weights_quarantined_files_total    found corrupt: check the disk
pilotlight_weights_partial_bytes              of partial files: the next attempt fetches the rest
pilotlight_weights_pinned_bytes               of pinned models, which are never evicted
pilotlight_weights_resumed_bytes_total        kept from an earlier attempt, so not fetched again
pilotlight_weights_scrubbed_bytes_total       read again and verified by the scrubber
pilotlight_weights_given_bytes_total          fetched from peers (more in `peers.metrics`)
pilotlight_weights_dram_budget_bytes          memory that models may be read ahead into
pilotlight_weights_dram_bytes                 part of that budget used by leased models
pilotlight_weights_read_ahead_bytes_total     read into memory before they were requested
pilotlight_weights_leases_served_total        by tier of the model when its lease was opened
pilotlight_weights_bandwidth_bytes_per_second by source tier: moving averages, used for predictions
pilotlight_weights_prediction_ratio           actual by predicted duration of fetches
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from weight_cache.dram.read_ahead import ReadAhead
from weight_cache.leases.bandwidth import TierBandwidths
from weight_cache.leases.manager import LeaseManager
from weight_cache.types import StoreStatistics, Tier

_RATIO_BUCKETS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0, 8.0)

_PREFIX = "pilotlight_weights"
_STORE = (
    (GaugeMetricFamily, "budget_bytes", "Disk that the store may use.", "max_bytes"),
    (GaugeMetricFamily, "used_bytes", "Disk in use, incoming models included.", "used_bytes"),
    (GaugeMetricFamily, "models", "Models in the store.", "models"),
    (GaugeMetricFamily, "leases", "Leases held.", "leases"),
    (GaugeMetricFamily, "arriving", "Models being fetched.", "arriving"),
    (CounterMetricFamily, "fetched_bytes", "Bytes fetched from the origin.", "fetched_bytes"),
    (CounterMetricFamily, "evicted_models", "Models evicted to make room.", "evicted_models"),
    (CounterMetricFamily, "evicted_bytes", "Bytes of evicted files.", "evicted_bytes"),
    (CounterMetricFamily, "quarantined_files", "Files found corrupt.", "quarantined_files"),
    (GaugeMetricFamily, "partial_bytes", "Bytes of partial files.", "partial_bytes"),
    (GaugeMetricFamily, "pinned_bytes", "Bytes of pinned models.", "pinned_bytes"),
    (CounterMetricFamily, "resumed_bytes", "Bytes kept from earlier attempts.", "resumed_bytes"),
    (CounterMetricFamily, "scrubbed_bytes", "Bytes verified by the scrubber.", "scrubbed_bytes"),
    (CounterMetricFamily, "given_bytes", "Bytes fetched from peers.", "given_bytes"),
)
"""Kind of metric, name, help, and the member of StoreStatistics."""


class StoreCollector(Collector):
    """Exports the store's statistics as metrics. Stateless."""

    def __init__(self, statistics: Callable[[], StoreStatistics]) -> None:
        self._statistics = statistics

    def collect(self) -> Iterator[Metric]:
        """All metrics, once per scrape."""
        now = self._statistics()
        for family, name, text, member in _STORE:
            yield family(f"{_PREFIX}_{name}", text, getattr(now, member))
        granted = CounterMetricFamily(
            f"{_PREFIX}_leases_granted", "Leases by store hit or miss.", labels=["result"]
        )
        granted.add_metric(["hit"], now.hits)
        granted.add_metric(["miss"], now.misses)
        yield granted


class TierCollector(Collector):
    """Exports lease, bandwidth and read-ahead state as metrics. Stateless."""

    def __init__(
        self, *, leases: LeaseManager, bandwidths: TierBandwidths, ahead: ReadAhead
    ) -> None:
        self._leases = leases
        self._bandwidths = bandwidths
        self._ahead = ahead

    def collect(self) -> Iterator[Metric]:
        """All metrics, once per scrape."""
        yield GaugeMetricFamily(
            f"{_PREFIX}_dram_budget_bytes",
            "Memory that models may be read ahead into.",
            self._ahead.max_bytes,
        )
        yield GaugeMetricFamily(
            f"{_PREFIX}_dram_bytes", "Read-ahead budget used by leases.", self._ahead.held_bytes
        )
        yield CounterMetricFamily(
            f"{_PREFIX}_read_ahead_bytes",
            "Bytes read into memory before they were requested.",
            self._ahead.brought_bytes,
        )
        served = CounterMetricFamily(
            f"{_PREFIX}_leases_served", "Leases by the tier their model was in.", labels=["tier"]
        )
        for tier in Tier:
            served.add_metric([tier.value], self._leases.served[tier])
        yield served
        speeds = GaugeMetricFamily(
            f"{_PREFIX}_bandwidth_bytes_per_second", "Bandwidth by source tier.", labels=["tier"]
        )
        for tier, speed in self._bandwidths.speeds().items():
            speeds.add_metric([tier.value], speed)
        yield speeds


class PredictionMetrics:
    """Accuracy of load time predictions. Owner: the event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._ratio = Histogram(
            "pilotlight_weights_prediction_ratio",
            "Actual duration of fetches divided by the predicted one.",
            buckets=_RATIO_BUCKETS,
            registry=registry,
        )

    def fetched(self, predicted_s: float, actual_s: float) -> None:
        """Record the predicted and the actual duration of a fetch."""
        if predicted_s > 0:
            self._ratio.observe(actual_s / predicted_s)
