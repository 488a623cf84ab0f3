"""Every metric of this process, read from its parts when somebody asks.

pilotlight_weights_budget_bytes               what the store may use
pilotlight_weights_used_bytes                 what it uses, what is arriving included
pilotlight_weights_models                     models that are here
pilotlight_weights_leases                     leases held
pilotlight_weights_arriving                   models on their way in
pilotlight_weights_leases_granted_total       by result: hit (was here), miss (had to be fetched)
pilotlight_weights_fetched_bytes_total        taken from the origin
pilotlight_weights_evicted_models_total       made to go for others
pilotlight_weights_evicted_bytes_total
pilotlight_weights_quarantined_files_total    found corrupt: look at the disk
pilotlight_weights_partial_bytes              of files that are half here: the next try fetches the rest
pilotlight_weights_pinned_bytes               of models that stay whoever needs room
pilotlight_weights_resumed_bytes_total        that an earlier try had brought, and that were not fetched again
pilotlight_weights_scrubbed_bytes_total       read again and compared, while nothing else was to do
pilotlight_weights_given_bytes_total           taken from other nodes instead of the origin (weight_cache.peers.metrics has the rest)
pilotlight_weights_dram_budget_bytes          of models that are read ahead into memory
pilotlight_weights_dram_bytes                 room that held models take of it
pilotlight_weights_read_ahead_bytes_total     read from the disk into memory before anybody asked for them
pilotlight_weights_leases_served_total        by tier: where the model was when its lease was opened
pilotlight_weights_bandwidth_bytes_per_second by tier that bytes leave: moving averages, what
predictions are made of
pilotlight_weights_prediction_ratio           seconds that fetches took, as a multiple of what was predicted
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from weight_cache.leases.bandwidth import TierBandwidths
from weight_cache.leases.manager import LeaseManager
from weight_cache.leases.read_ahead import ReadAhead
from weight_cache.types import StoreStatistics, Tier

_RATIO_BUCKETS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0, 8.0)


class StoreCollector(Collector):
    """Turns the store's statistics into metrics; holds no state of its own."""

    def __init__(self, statistics: Callable[[], StoreStatistics]) -> None:
        self._statistics = statistics

    def collect(self) -> Iterator[Metric]:
        """All metrics, once per scrape."""
        now = self._statistics()
        prefix = "pilotlight_weights"
        yield GaugeMetricFamily(
            f"{prefix}_budget_bytes", "Disk that the store may use.", now.max_bytes
        )
        yield GaugeMetricFamily(
            f"{prefix}_used_bytes", "Disk that it uses, what is arriving included.", now.used_bytes
        )
        yield GaugeMetricFamily(f"{prefix}_models", "Models that are here.", now.models)
        yield GaugeMetricFamily(f"{prefix}_leases", "Leases held.", now.leases)
        yield GaugeMetricFamily(f"{prefix}_arriving", "Models on their way in.", now.arriving)
        granted = CounterMetricFamily(
            f"{prefix}_leases_granted", "Leases by whether their model was here.", labels=["result"]
        )
        granted.add_metric(["hit"], now.hits)
        granted.add_metric(["miss"], now.misses)
        yield granted
        yield CounterMetricFamily(
            f"{prefix}_fetched_bytes", "Bytes taken from the origin.", now.fetched_bytes
        )
        yield CounterMetricFamily(
            f"{prefix}_evicted_models", "Models made to go for others.", now.evicted_models
        )
        yield CounterMetricFamily(
            f"{prefix}_evicted_bytes", "Bytes of evicted files.", now.evicted_bytes
        )
        yield CounterMetricFamily(
            f"{prefix}_quarantined_files", "Files found corrupt.", now.quarantined_files
        )
        yield GaugeMetricFamily(
            f"{prefix}_partial_bytes", "Of files that are half here.", now.partial_bytes
        )
        yield GaugeMetricFamily(f"{prefix}_pinned_bytes", "Of models that stay.", now.pinned_bytes)
        yield CounterMetricFamily(
            f"{prefix}_resumed_bytes", "Not fetched again.", now.resumed_bytes
        )
        yield CounterMetricFamily(
            f"{prefix}_scrubbed_bytes", "Read again and compared.", now.scrubbed_bytes
        )
        yield CounterMetricFamily(
            f"{prefix}_given_bytes", "Bytes taken from other nodes.", now.given_bytes
        )


class TierCollector(Collector):
    """Turns what leases, speeds and reading ahead know into metrics; holds no state of its own."""

    def __init__(
        self, *, leases: LeaseManager, bandwidths: TierBandwidths, ahead: ReadAhead
    ) -> None:
        self._leases = leases
        self._bandwidths = bandwidths
        self._ahead = ahead

    def collect(self) -> Iterator[Metric]:
        """All metrics, once per scrape."""
        prefix = "pilotlight_weights"
        yield GaugeMetricFamily(
            f"{prefix}_dram_budget_bytes",
            "Of models read ahead into memory.",
            self._ahead.max_bytes,
        )
        yield GaugeMetricFamily(
            f"{prefix}_dram_bytes", "Room that held models take of it.", self._ahead.held_bytes
        )
        yield CounterMetricFamily(
            f"{prefix}_read_ahead_bytes",
            "Read into memory before anybody asked.",
            self._ahead.brought_bytes,
        )
        served = CounterMetricFamily(
            f"{prefix}_leases_served", "Leases by the tier their model was in.", labels=["tier"]
        )
        for tier in Tier:
            served.add_metric([tier.value], self._leases.served[tier])
        yield served
        speeds = GaugeMetricFamily(
            f"{prefix}_bandwidth_bytes_per_second", "Speed upwards from a tier.", labels=["tier"]
        )
        for tier, speed in self._bandwidths.speeds().items():
            speeds.add_metric([tier.value], speed)
        yield speeds


class PredictionMetrics:
    """How good predictions were. Owner: the event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._ratio = Histogram(
            "pilotlight_weights_prediction_ratio",
            "Actual by predicted seconds of fetches.",
            buckets=_RATIO_BUCKETS,
            registry=registry,
        )

    def fetched(self, predicted_s: float, actual_s: float) -> None:
        """A fetch that was predicted to take so long."""
        if predicted_s > 0:
            self._ratio.observe(actual_s / predicted_s)
