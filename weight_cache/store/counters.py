"""Counters of the store since process start, and the measured fetch rate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weight_cache.store.catalog import Catalog
from weight_cache.store.disk_eviction import EvictionPlan
from weight_cache.types import StoreStatistics

Observe = Callable[[int, float], None]
"""Called with (bytes, seconds) of successful fetches."""


@dataclass(slots=True, kw_only=True)
class StoreCounters:
    """Counters. Owner: the store's event loop."""

    hits: int = 0
    misses: int = 0
    fetched_bytes: int = 0
    given_bytes: int = 0
    resumed_bytes: int = 0
    scrubbed_bytes: int = 0
    evicted_models: int = 0
    evicted_bytes: int = 0
    quarantined_files: int = 0

    def evicted(self, removal: EvictionPlan) -> None:
        """Count an eviction."""
        self.evicted_models += len(removal.models)
        self.evicted_bytes += removal.size_bytes

    def statistics(self, catalogue: Catalog) -> StoreStatistics:
        """The counters together with the current state of the catalog."""
        return StoreStatistics(
            max_bytes=catalogue.max_bytes,
            used_bytes=catalogue.used_bytes,
            models=len(catalogue.models()),
            leases=len(catalogue.leases()),
            arriving=catalogue.arriving,
            hits=self.hits,
            misses=self.misses,
            fetched_bytes=self.fetched_bytes,
            evicted_models=self.evicted_models,
            evicted_bytes=self.evicted_bytes,
            quarantined_files=self.quarantined_files,
            partial_bytes=catalogue.partial_bytes,
            pinned_bytes=catalogue.pinned_bytes,
            resumed_bytes=self.resumed_bytes,
            scrubbed_bytes=self.scrubbed_bytes,
            given_bytes=self.given_bytes,
        )


class FetchRateMeter:
    """Measures fetched bytes and busy seconds over all concurrent models. Owner: the store's event
    loop.

    Two models that share the origin's bandwidth each see half of it; predictions need the total. So
    bytes are summed over all models, and time counts while any model is being fetched."""

    def __init__(self, clock: Callable[[], float], observe: Observe | None) -> None:
        self._observe = observe
        self._clock = clock
        self._under_way = 0
        self._since = 0.0
        self._bytes = 0

    def began(self) -> None:
        """Record that a model's fetch begins."""
        if not self._under_way:
            self._since, self._bytes = self._clock(), 0
        self._under_way += 1

    def count(self, size_bytes: int) -> None:
        """Count received bytes."""
        self._bytes += size_bytes

    def ended(self, *, well: bool) -> None:
        """Record the end of a model's fetch. Only successful ones are reported to the observer: an
        unresponsive origin gives no measure of its bandwidth."""
        self._under_way -= 1
        now = self._clock()
        if self._observe is not None and well and self._bytes and now > self._since:
            self._observe(self._bytes, now - self._since)
        self._since, self._bytes = now, 0
