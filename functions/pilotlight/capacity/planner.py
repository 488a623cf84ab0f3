"""How many instances a function needs for a rate and a bound on its 99th percentile. Pure.

1. *Serving*: the fewest instances with which the simulated 99th percentile is within the bound at
   the rate and its headroom.
2. *Reserve*: those that must be warm besides, because the rate grows while an instance starts: the
   same for the rate that is reached until then, less the serving ones.
3. *Zones*: with one of z zones lost, z - 1 must hold all of them, so each has 1/(z - 1) of them: in
   all z/(z - 1) times as many (B. Beyer and others, "Site Reliability Engineering", 2016, chapter
   18: N + 1)."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal

from pilotlight.capacity import queueing
from pilotlight.capacity.instance_model import InstanceModel
from pilotlight.capacity.measurements import Prices
from pilotlight.capacity.simulation import simulate
from pilotlight.errors import InvalidInput
from pilotlight.loadtest.results import nearest_rank

SHARE = 0.99
TEST_CALLS = 1_000
"""Calls of a load test whose 99th percentile is predicted as a range."""
_TESTS = (0.05, 0.95)
"""The range in which nine of ten of these are."""
DAY_S = 86_400
MINUTE_S = 60.0
MAX_SIMULATED_SLOTS = 4_000
"""Slots of all instances up to which they are simulated, in a second or two. Of more the formulas
are exact enough: nearly no call waits in a queue of so many servers that is not overloaded."""
MAX_INSTANCES = 100_000
_MOST_UTILISED = 0.98
"""Busy share of instances beyond which a plan is not considered: the wait is then decided by chance
hours ago."""
_FEW_BUSY = 0.05
"""Busy share of instances below which more of them no longer make calls faster."""
_FORMULA_TIMES = 500
"""Measured times in a formula: quantiles of all of them."""


class Constraint(enum.StrEnum):
    """What decides the number of serving instances. RATE: fewer would be overloaded. P99: fewer
    would answer, but later than asked."""

    RATE = "rate"
    P99 = "p99"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is asked.

    Attributes:
        rate_per_s: calls per second that instances answer.
        p99_ms: bound on the 99th percentile, from arrival to the last byte.
        headroom: share that the rate may be higher without exceeding the bound.
        zones: zones over which instances are spread; with more than one, the loss of one is borne.
        growth_per_min: share by which the rate grows in a minute.
        start_ms: how long a start takes; None if it is not known.
    """

    rate_per_s: float
    p99_ms: float
    headroom: float = 0.3
    zones: int = 1
    growth_per_min: float = 0.2
    start_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a number of instances does at a rate.

    Attributes:
        waited: share of calls that wait for a slot; None by formula.
        at_once: mean number of calls of an instance, with those that wait; None by formula.
        busy: mean number of instances with a call.
        first_p99_ms: to the first byte; None by formula.
        test_p99_ms: range in which nine of ten load tests of TEST_CALLS calls measure the 99th
            percentile; None by formula. Late calls come together, in the same queues, so that few
            of them decide it.
        is_simulated: by simulation; else by formula.
    """

    rate_per_s: float
    instances: int
    p50_ms: float
    p99_ms: float
    busy: float
    waited: float | None
    at_once: float | None
    first_p99_ms: float | None
    test_p99_ms: tuple[float, float] | None
    is_simulated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPlan:
    """A plan.

    Attributes:
        serving, reserve: without the factor for zones; `reserve` None: the start time is not known.
        per_zone, total: instances that are warm.
        constraint: what decides `serving`.
        expected, at_headroom: with the serving instances, at the rate and at that with headroom.
    """

    serving: int
    reserve: int | None
    per_zone: int
    total: int
    constraint: Constraint
    expected: Prediction
    at_headroom: Prediction


def predict(model: InstanceModel, *, rate_per_s: float, instances: int) -> Prediction:
    """Predict latencies of `instances` at a rate below their capacity."""
    if instances * model.slots > MAX_SIMULATED_SLOTS:
        return _by_formula(model, rate_per_s, instances)
    found = simulate(model.works, rate_per_s=rate_per_s, instances=instances, speeds=model.speeds)
    return Prediction(
        rate_per_s=rate_per_s,
        instances=instances,
        p50_ms=nearest_rank(found.latencies_ms, 0.5),
        p99_ms=nearest_rank(found.latencies_ms, SHARE),
        busy=found.busy,
        waited=found.waited,
        at_once=rate_per_s
        * sum(found.latencies_ms)
        / len(found.latencies_ms)
        / 1000
        / instances,  # J. D. C. Little, "A proof for the queuing formula L = λW", 1961
        first_p99_ms=nearest_rank(found.firsts_ms, SHARE),
        test_p99_ms=_of_tests(found.ended_ms),
        is_simulated=True,
    )


def _of_tests(ended_ms: Sequence[float]) -> tuple[float, float]:
    """The range of the 99th percentiles of successive parts of a simulation (batches: A. M. Law and
    W. D. Kelton, "Simulation Modeling and Analysis", 1991, section 9.5)."""
    parts = (ended_ms[at : at + TEST_CALLS] for at in range(0, len(ended_ms), TEST_CALLS))
    tails = sorted(nearest_rank(sorted(part), SHARE) for part in parts)
    low, high = (nearest_rank(tails, share) for share in _TESTS)
    return low, high


def _by_formula(model: InstanceModel, rate_per_s: float, instances: int) -> Prediction:
    """Predict by the formulas of `queueing`: as many servers as calls alone do as much work as all
    instances."""
    servers = max(1, math.floor(instances * model.throughput(model.slots)))
    load = rate_per_s * model.mean_ms / 1000
    times = _quantiles([work.whole_ms for work in model.works])
    return Prediction(
        rate_per_s=rate_per_s,
        instances=instances,
        p50_ms=queueing.response_quantile(0.5, servers, load, times),
        p99_ms=queueing.response_quantile(SHARE, servers, load, times),
        busy=min(float(instances), load),
        waited=None,
        at_once=None,
        first_p99_ms=None,
        test_p99_ms=None,
        is_simulated=False,
    )


def _quantiles(times: Sequence[float]) -> Sequence[float]:
    ordered = sorted(times)
    if len(ordered) <= _FORMULA_TIMES:
        return ordered
    return [nearest_rank(ordered, (n + 0.5) / _FORMULA_TIMES) for n in range(_FORMULA_TIMES)]


def shortfall_ms(model: InstanceModel, p99_ms: float) -> float | None:
    """How much longer than the bound the 99th percentile is even without any waiting and other
    calls, so that no number of instances is enough; None where it is not."""
    alone = nearest_rank(sorted(work.whole_ms for work in model.works), SHARE)
    return alone - p99_ms if alone > p99_ms else None


def fewest_for_rate(model: InstanceModel, rate_per_s: float) -> int:
    """The fewest instances that are not overloaded at a rate. Raises InvalidInput for more than
    MAX_INSTANCES."""
    found = max(1, math.ceil(rate_per_s / (model.max_rate_per_s * _MOST_UTILISED)))
    if found > MAX_INSTANCES:
        raise InvalidInput(
            f"{rate_per_s:g} calls per second need more than {MAX_INSTANCES} instances, each of "
            f"which bears {model.max_rate_per_s:.4g}",
            hint="Plan for a lower --rate, or less --growth.",
        )
    return found


def fewest(model: InstanceModel, *, rate_per_s: float, p99_ms: float) -> Prediction | None:
    """Return the prediction for the fewest instances whose 99th percentile is within the bound at a
    rate; None where no number is enough. Raises InvalidInput like `fewest_for_rate`."""
    least = fewest_for_rate(model, rate_per_s)
    most = min(MAX_INSTANCES, max(least + 10, math.ceil(least / _FEW_BUSY)))
    found: dict[int, Prediction] = {}

    def is_enough(instances: int) -> bool:
        found[instances] = predict(model, rate_per_s=rate_per_s, instances=instances)
        return found[instances].p99_ms <= p99_ms

    enough = _first(is_enough, least, most)
    return None if enough is None else found[enough]


def _first(is_enough: Callable[[int], bool], least: int, most: int) -> int | None:
    """The first number from `least` that is enough, by steps that double and then by halving; None
    if `most` is not."""
    low, step, high = least - 1, 1, least
    while not is_enough(high):
        if high >= most:
            return None
        low, high, step = high, min(most, high + step), step * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def plan(model: InstanceModel, demand: Demand) -> CapacityPlan | None:
    """Plan for a demand; None where no number of instances is enough. Raises InvalidInput for more
    than MAX_INSTANCES."""
    peak = demand.rate_per_s * (1 + demand.headroom)
    at_headroom = fewest(model, rate_per_s=peak, p99_ms=demand.p99_ms)
    if at_headroom is None:
        return None
    serving = at_headroom.instances
    expected = predict(model, rate_per_s=demand.rate_per_s, instances=serving)
    reserve = None
    if demand.start_ms is not None:
        growth = demand.growth_per_min * demand.start_ms / 1000 / MINUTE_S
        grown = fewest(model, rate_per_s=peak * (1 + growth), p99_ms=demand.p99_ms)
        reserve = 0 if grown is None else max(0, grown.instances - serving)
    needed = serving + (reserve or 0)
    per_zone = needed if demand.zones == 1 else math.ceil(needed / (demand.zones - 1))
    is_overloaded = serving == 1 or fewest_for_rate(model, peak) == serving
    return CapacityPlan(
        serving=serving,
        reserve=reserve,
        per_zone=per_zone,
        total=per_zone * demand.zones,
        constraint=Constraint.RATE if is_overloaded else Constraint.P99,
        expected=expected,
        at_headroom=at_headroom,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DailyCost:
    """Cost of a day at a constant rate. `busy`: of instances while they answer; `reserved`: while
    they wait; `calls`: per call and token."""

    busy: Decimal
    reserved: Decimal
    calls: Decimal

    @property
    def total(self) -> Decimal:
        """All of it."""
        return self.busy + self.reserved + self.calls


def daily_cost(
    prices: Prices,
    expected: Prediction,
    *,
    total: int,
    tokens_in: float = 0.0,
    tokens_out: float = 0.0,
) -> DailyCost:
    """Return the cost of a day with `total` warm instances (`min_instances`). `tokens_in`,
    `tokens_out`: mean of a call."""
    busy, calls = Decimal(repr(expected.busy)), Decimal(repr(expected.rate_per_s)) * DAY_S
    idle = Decimal(total) - busy
    tokens = (
        Decimal(repr(tokens_in)) * prices.token_in + Decimal(repr(tokens_out)) * prices.token_out
    )
    return DailyCost(
        busy=busy * prices.instance_s * DAY_S,
        reserved=idle * prices.instance_s * prices.reserved_factor * DAY_S,
        calls=calls * (prices.request + tokens),
    )
