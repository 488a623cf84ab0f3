"""The simulation of instances, against what is known of queues."""

from __future__ import annotations

import random

import pytest

from pilotlight.capacity.simulation import Work, simulate
from pilotlight.loadtest.results import nearest_rank

SHARED = tuple(1 / calls for calls in range(1, 61))
"""Calls share one processor, and nearly none waits for a slot."""


def whole(*times: float) -> list[Work]:
    return [Work(first_ms=time, whole_ms=time) for time in times]


@pytest.mark.parametrize("times", [(10.0,), (1.0, 19.0)], ids=["equal", "unequal"])
def test_the_mean_response_of_a_shared_processor_depends_on_the_mean_work_alone(
    times: tuple[float, ...],
) -> None:
    """S / (1 - load): L. Kleinrock, "Queueing Systems", volume 2, 1976, section 4.4."""
    found = simulate(whole(*times), rate_per_s=70.0, instances=1, speeds=SHARED)
    mean = sum(found.latencies_ms) / len(found.latencies_ms)
    assert mean == pytest.approx(10.0 / (1 - 0.7), rel=0.06)
    assert found.busy == pytest.approx(0.7, rel=0.03)
    assert found.waited == 0.0


def test_calls_that_do_not_disturb_each_other_take_as_long_as_alone() -> None:
    found = simulate(whole(10.0), rate_per_s=100.0, instances=2, speeds=(1.0,) * 50, calls=5_000)
    assert (found.latencies_ms[0], found.latencies_ms[-1]) == pytest.approx((10.0, 10.0))


def test_slots_are_servers_where_calls_do_not_disturb_each_other() -> None:
    separate = simulate(whole(5.0, 15.0), rate_per_s=320.0, instances=4, speeds=(1.0,))
    together = simulate(whole(5.0, 15.0), rate_per_s=320.0, instances=2, speeds=(1.0, 1.0))
    for share in (0.5, 0.99):
        expected = nearest_rank(separate.latencies_ms, share)
        assert nearest_rank(together.latencies_ms, share) == pytest.approx(expected, rel=0.1)


def test_first_bytes_come_in_their_share_of_the_work() -> None:
    works = [Work(first_ms=2.0, whole_ms=10.0)]
    alone = simulate(works, rate_per_s=1.0, instances=5, speeds=SHARED, calls=2_000)
    assert nearest_rank(alone.firsts_ms, 0.5) == pytest.approx(2.0)
    assert len(alone.firsts_ms) == len(alone.latencies_ms) == 2_000
    shared = simulate(works, rate_per_s=80.0, instances=1, speeds=SHARED, calls=5_000)
    assert nearest_rank(shared.firsts_ms, 0.5) > 2.5


def test_more_instances_are_no_slower_under_the_same_load() -> None:
    source = random.Random(2)
    works = whole(*(source.expovariate(0.1) for _ in range(500)))
    tails = [
        nearest_rank(
            simulate(
                works, rate_per_s=250.0, instances=instances, speeds=(1.0, 0.6), calls=5_000
            ).latencies_ms,
            0.99,
        )
        for instances in (3, 4, 6, 10)
    ]
    assert tails == sorted(tails, reverse=True)


def test_a_simulation_is_the_same_each_time() -> None:
    found = [
        simulate(whole(1.0, 9.0), rate_per_s=90.0, instances=1, speeds=(1.0,), calls=500)
        for _ in range(2)
    ]
    assert found[0] == found[1]
