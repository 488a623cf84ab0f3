"""Speeds are measured over everything that comes in at once, and only while something does."""

from __future__ import annotations

from weight_cache.store.catalog import Catalog
from weight_cache.store.counters import FetchRateMeter, StoreCounters
from weight_cache.store.disk_eviction import EvictionPlan


class Meter:
    """A meter with a clock that is set by hand, and what it told."""

    def __init__(self) -> None:
        self.now = 0.0
        self.told: list[tuple[int, float]] = []
        self.meter = FetchRateMeter(
            lambda: self.now, lambda size, seconds: self.told.append((size, seconds))
        )


def test_one_fetch_is_its_bytes_and_seconds() -> None:
    m = Meter()
    m.meter.began()
    m.meter.count(100)
    m.now = 2.0
    m.meter.ended(well=True)
    assert m.told == [(100, 2.0)]


def test_two_at_once_are_counted_together_and_each_second_once() -> None:
    m = Meter()
    m.meter.began()
    m.now = 1.0
    m.meter.began()
    m.meter.count(100)
    m.now = 3.0
    m.meter.ended(well=True)
    m.meter.count(50)
    m.now = 4.0
    m.meter.ended(well=True)
    assert m.told == [(100, 3.0), (50, 1.0)]


def test_idle_time_counts_for_nobody() -> None:
    m = Meter()
    for begin in (0.0, 100.0):
        m.now = begin
        m.meter.began()
        m.meter.count(10)
        m.now = begin + 1
        m.meter.ended(well=True)
    assert m.told == [(10, 1.0), (10, 1.0)]


def test_failures_and_fetches_of_nothing_tell_nothing() -> None:
    m = Meter()
    m.meter.began()
    m.meter.count(10)
    m.now = 150.0
    m.meter.ended(well=False)
    m.meter.began()
    m.now = 151.0
    m.meter.ended(well=True)
    assert m.told == []


def test_figures_add_up() -> None:
    tally = StoreCounters(hits=1, fetched_bytes=7)
    tally.evicted(EvictionPlan(models=("m", "n"), files=("f",), size_bytes=30))
    tally.evicted(EvictionPlan(partials=("p",), size_bytes=5))
    now = tally.statistics(Catalog(100))
    assert (now.hits, now.fetched_bytes, now.evicted_models, now.evicted_bytes, now.max_bytes) == (
        1,
        7,
        2,
        35,
        100,
    )
