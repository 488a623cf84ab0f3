"""Plans: how many instances, and why."""

from __future__ import annotations

import time
from decimal import Decimal

import pytest

from pilotlight.capacity import instance_model, planner
from pilotlight.capacity.instance_model import InstanceModel
from pilotlight.capacity.measurements import Prices
from pilotlight.capacity.planner import Constraint, Demand
from pilotlight.capacity.simulation import Work
from pilotlight.errors import InvalidInput
from tests.functions.capacity.made_calls import made_calls


def model(slots: int = 1, **behaviour: float) -> InstanceModel:
    return instance_model.estimate(made_calls(1_000, **behaviour), slots=slots)  # type: ignore[arg-type]


def test_the_rate_decides_where_the_bound_is_wide() -> None:
    found = planner.plan(model(), Demand(rate_per_s=100.0, p99_ms=5_000.0))
    assert found is not None
    # 130 calls a second of 20.9 ms keep 2.7 instances busy
    assert (found.serving, found.constraint) == (3, Constraint.RATE)
    assert found.expected.busy == pytest.approx(2.09, rel=0.05)


def test_the_percentile_decides_where_it_is_narrow() -> None:
    found = planner.plan(model(), Demand(rate_per_s=100.0, p99_ms=60.0))
    assert found is not None
    assert found.constraint is Constraint.P99
    assert found.serving > 3
    assert found.expected.p99_ms <= found.at_headroom.p99_ms <= 60.0
    fewer = planner.predict(model(), rate_per_s=130.0, instances=found.serving - 1)
    assert fewer.p99_ms > 60.0


def test_a_load_test_of_a_busy_instance_varies_more() -> None:
    """Late calls of a busy instance come together."""
    spreads = []
    for rate in (5.0, 38.0):
        found = planner.predict(model(), rate_per_s=rate, instances=1)
        assert found.test_p99_ms is not None
        low, high = found.test_p99_ms
        assert low < found.p99_ms < high
        spreads.append((high - low) / found.p99_ms)
    assert 2 * spreads[0] < spreads[1]


def test_what_is_impossible_is_said_with_its_distance() -> None:
    shortfall = planner.shortfall_ms(model(), 30.0)
    assert shortfall is not None
    assert shortfall == pytest.approx(20 * 2.01 - 30, rel=0.2)
    assert planner.shortfall_ms(model(), 60.0) is None
    assert planner.plan(model(), Demand(rate_per_s=10.0, p99_ms=30.0)) is None


@pytest.mark.parametrize("zones, per_zone, total", [(1, 4, 4), (2, 4, 8), (3, 2, 6), (4, 2, 8)])
def test_the_loss_of_a_zone_leaves_enough(zones: int, per_zone: int, total: int) -> None:
    demand = Demand(rate_per_s=100.0, p99_ms=5_000.0, headroom=0.6, zones=zones)
    found = planner.plan(model(), demand)
    assert found is not None
    assert found.serving == 4
    assert (found.per_zone, found.total) == (per_zone, total)
    assert found.total - found.per_zone >= found.serving or zones == 1


def test_the_reserve_grows_with_starts_and_growth() -> None:
    reserves = []
    for start_ms, growth in ((20.0, 0.2), (60_000.0, 0.5), (60_000.0, 2.0)):
        demand = Demand(rate_per_s=200.0, p99_ms=5_000.0, growth_per_min=growth, start_ms=start_ms)
        found = planner.plan(model(), demand)
        assert found is not None
        assert found.total == found.serving + (found.reserve or 0)
        reserves.append(found.reserve)
    assert reserves[0] == 0
    assert 0 < (reserves[1] or 0) < (reserves[2] or 0)


def test_the_reserve_is_not_known_without_a_start() -> None:
    found = planner.plan(model(), Demand(rate_per_s=10.0, p99_ms=500.0))
    assert found is not None
    assert found.reserve is None


def test_many_instances_are_planned_by_formula_in_little_time() -> None:
    began = time.process_time()
    found = planner.plan(model(), Demand(rate_per_s=200_000.0, p99_ms=80.0, start_ms=1000.0))
    assert time.process_time() - began < 20.0
    assert found is not None
    assert not found.expected.is_simulated
    assert found.expected.test_p99_ms is None
    assert 5_400 < found.serving < 6_000


@pytest.mark.parametrize("rate, growth", [(5e6, 0.0), (4e6, 9.0)])
def test_more_instances_than_anyone_has_are_refused(rate: float, growth: float) -> None:
    demand = Demand(
        rate_per_s=rate, p99_ms=80.0, headroom=0.0, growth_per_min=growth, start_ms=60_000.0
    )
    with pytest.raises(InvalidInput, match="need more than 100000 instances"):
        planner.plan(model(), demand)


def test_calls_at_once_need_fewer_instances_where_they_do_not_disturb_each_other() -> None:
    counts = []
    for slowdown in (0.0, 1.0):
        slow = model(slots=4, slowdown=slowdown, at_once=4)
        found = planner.plan(slow, Demand(rate_per_s=400.0, p99_ms=400.0))
        assert found is not None
        counts.append(found.serving)
    assert counts[0] * 2.5 < counts[1]


def test_the_cost_of_a_day_is_exact() -> None:
    prices = Prices(
        currency="USD",
        version="1",
        instance_s=Decimal("0.00001"),
        reserved_factor=Decimal("0.5"),
        request=Decimal("0.000001"),
        token_out=Decimal("0.0000001"),
    )
    fixed = InstanceModel(
        slowdown=0.0, measured=1, slots=1, works=[Work(first_ms=10.0, whole_ms=10.0)]
    )
    expected = planner.predict(fixed, rate_per_s=50.0, instances=2)
    cost = planner.daily_cost(prices, expected, total=4, tokens_out=10.0)
    busy = Decimal(repr(expected.busy))
    assert cost.busy == busy * 86_400 * Decimal("0.00001")
    assert cost.reserved == (4 - busy) * 86_400 * Decimal("0.000005")
    assert cost.calls == 50 * 86_400 * Decimal("0.000002")
    assert cost.total == cost.busy + cost.reserved + cost.calls
