"""From counters to a table: parsing, quantiles, rates."""

from __future__ import annotations

import pytest

from pilotlight.cli.commands.operations.top import (
    MetricsSample,
    parse_samples,
    rows_between,
    sum_samples,
)
from pilotlight.cli.core.histogram import histogram_quantile

PAGE = r"""# HELP pilotlight_requests_total Calls answered, by status.
# TYPE pilotlight_requests_total counter
pilotlight_requests_total{tenant="t-1",app="search",function="Embedder",status="200"} 10.0
pilotlight_requests_total{tenant="t-1",app="search",function="Embedder",status="500"} 2
pilotlight_instances{tenant="t-1",app="search",function="Embedder",state="calls_in_flight"} 3
pilotlight_execution_seconds_bucket{tenant="t-1",app="search",function="Embedder",le="0.1"} 6
pilotlight_execution_seconds_bucket{tenant="t-1",app="search",function="Embedder",le="+Inf"} 12
pilotlight_cold_calls_total{tenant="t-1",app="search",function="Embedder",start_kind="RESTORE"} 2
pilotlight_cold_calls_total{tenant="t-1",app="search",function="Embedder",start_kind="COLD"} 1
"""
KEY = "search", "Embedder"


@pytest.mark.parametrize("share, value", [(0.25, 0.05), (0.5, 0.1), (0.75, 0.15), (1.0, 0.2)])
def test_quantiles_are_linear_within_a_bucket(share: float, value: float) -> None:
    assert histogram_quantile(
        [(0.1, 2.0), (0.2, 4.0), (float("inf"), 4.0)], share
    ) == pytest.approx(value)


def test_quantiles_of_nothing_are_nothing_and_beyond_the_last_bound_that_bound() -> None:
    assert histogram_quantile([], 0.5) is None
    assert histogram_quantile([(0.1, 0.0), (float("inf"), 0.0)], 0.5) is None
    assert histogram_quantile([(0.1, 0.0), (float("inf"), 5.0)], 0.5) == 0.1


def look(at: float, requests: float, cost: float) -> MetricsSample:
    return MetricsSample(
        at=at,
        requests={KEY: requests},
        buckets={KEY: {0.1: requests, float("inf"): requests}},
        cost={KEY: cost},
        instances={KEY: 2},
    )


def test_rates_are_differences_between_two_looks() -> None:
    (row,) = rows_between(look(10, 100, 1.0), look(12, 150, 1.5))
    assert (row.calls_per_s, row.cost_per_h, row.instances) == (25.0, 900.0, 2)
    assert row.p50_ms == pytest.approx(50)


def test_one_look_has_totals_and_no_rates_and_a_restart_none_below_zero() -> None:
    (first,) = rows_between(None, look(10, 100, 1.0))
    assert first.calls_per_s == 0
    (after,) = rows_between(look(10, 100, 1.0), look(12, 3, 1.0))
    assert after.calls_per_s == 0


def test_samples_are_summed_by_function() -> None:
    now = sum_samples(parse_samples(PAGE), at=0, instances={KEY: 1}, cost={})
    (row,) = rows_between(None, now)
    assert now.requests[KEY] == 12
    assert (row.app, row.function, row.in_flight) == ("search", "Embedder", 3)
    assert row.starts == {"COLD": 1, "RESTORE": 2}
