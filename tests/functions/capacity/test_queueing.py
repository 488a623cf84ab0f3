"""Formulas of queues: against tables of Erlang's formulas, known special cases, and simulated
queues."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from pilotlight.capacity import queueing
from pilotlight.capacity.simulation import Work, simulate
from pilotlight.loadtest.results import nearest_rank

EXPONENTIAL = [-math.log(1 - (n + 0.5) / 2000) for n in range(2000)]
"""Quantiles of the exponential distribution with mean 1."""


def lognormal(sigma: float, n: int = 2000) -> list[float]:
    source = random.Random(1)
    return [math.exp(source.gauss(0.0, sigma)) for _ in range(n)]


@pytest.mark.parametrize(
    "servers, load, share",
    [(1, 1.0, 0.5), (2, 1.0, 0.2), (10, 5.0, 0.018385), (20, 15.0, 0.045593), (5, 0.0, 0.0)],
)
def test_erlang_b_has_the_values_of_tables(servers: int, load: float, share: float) -> None:
    assert queueing.erlang_b(servers, load) == pytest.approx(share, rel=1e-3)


@pytest.mark.parametrize(
    "servers, load, share",
    [(1, 0.5, 0.5), (2, 1.0, 1 / 3), (3, 2.0, 4 / 9), (10, 8.0, 0.4092), (3, 3.0, 1.0)],
)
def test_erlang_c_has_the_values_of_tables(servers: int, load: float, share: float) -> None:
    assert queueing.erlang_c(servers, load) == pytest.approx(share, rel=1e-3)


def test_erlang_c_of_many_servers_does_not_overflow() -> None:
    assert 0 < queueing.erlang_c(20_000, 19_800.0) < 0.2


@pytest.mark.parametrize("scv, wait", [(1.0, 4.0), (0.0, 2.0), (3.0, 8.0)])
def test_the_mean_wait_of_one_server_is_exact(scv: float, wait: float) -> None:
    """Pollaczek and Khinchine at a load of 0.8."""
    found = queueing.wait_of(1, 0.8, mean=1.0, scv=scv)
    assert found.share * found.mean == pytest.approx(wait)


def test_an_overloaded_queue_has_no_quantile() -> None:
    assert queueing.response_quantile(0.99, 2, 2.5, [1.0]) == math.inf
    assert queueing.erlang_c(2, 2.5) == 1.0


@pytest.mark.parametrize("load", [0.3, 0.7, 0.9])
def test_the_quantile_of_exponential_times_at_one_server_is_exact(load: float) -> None:
    """The response of M/M/1 is exponential with rate 1 - load."""
    found = queueing.response_quantile(0.99, 1, load, EXPONENTIAL)
    assert found == pytest.approx(-math.log(0.01) / (1 - load), rel=0.03)


def test_the_quantile_without_load_is_that_of_the_service_times() -> None:
    times = [float(n) for n in range(1, 101)]
    assert queueing.response_quantile(0.99, 5, 1e-6, times) == pytest.approx(99.0)


@pytest.mark.parametrize("servers, busy", [(1, 0.5), (1, 0.8), (4, 0.7), (16, 0.85)])
@pytest.mark.parametrize(
    "times", [EXPONENTIAL, [1.0] * 10, lognormal(0.5)], ids=["exponential", "equal", "lognormal"]
)
def test_formulas_agree_with_simulated_queues(
    times: Sequence[float], servers: int, busy: float
) -> None:
    mean = sum(times) / len(times)
    found = simulate(
        [Work(first_ms=time, whole_ms=time) for time in times],
        rate_per_s=1000 * busy * servers / mean,
        instances=servers,
        speeds=(1.0,),
        calls=20_000,
    )
    expected = queueing.response_quantile(0.99, servers, busy * servers, times)
    assert nearest_rank(found.latencies_ms, 0.99) == pytest.approx(expected, rel=0.15)
    scv = sum((time - mean) ** 2 for time in times) / len(times) / mean**2
    wait = queueing.wait_of(servers, busy * servers, mean=mean, scv=scv)
    response = sum(found.latencies_ms) / len(found.latencies_ms)
    assert response == pytest.approx(mean + wait.share * wait.mean, rel=0.1)
    assert found.waited == pytest.approx(queueing.erlang_c(servers, busy * servers), abs=0.08)
