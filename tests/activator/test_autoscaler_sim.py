"""The simulated cluster keeps its books right: by hand on tiny traces, and by what must hold on
any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.autoscaler_seeds import Result, lines, ratio
from benchmarks.autoscaler_sim import AUTO, KPA, Arm, arms, loses, pilotlight
from benchmarks.autoscaling.policies import Kpa, KpaTerms
from benchmarks.autoscaling.traces import TRACES, Function, Trace
from benchmarks.autoscaling.world import Books, Scaled, World


def function(*calls: tuple[float, float], start_s: float = 2.0, **rest: object) -> Function:
    return Function(name="f", tenant="t", start_s=start_s, calls=calls, **rest)  # type: ignore[arg-type]


def lived(arm: Arm, *functions: Function, gpus: int | None = None) -> Books:
    return World(
        Trace(name="tiny", functions=functions, gpus=gpus),
        policy=arm.policy,
        placement=arm.placement(),
    ).run()


def first_start_s(of: Function) -> float:
    return of.start_time(of.calls[0][0], 0)


@pytest.mark.parametrize("name", ["scaledown_window=60", "keep-alive of 60 s", KPA])
def test_a_cold_call_waits_for_exactly_one_start(name: str) -> None:
    one = function((10.0, 1.0))
    books = lived(arms()[name], one)
    assert books.waits_s == pytest.approx([first_start_s(one)])
    assert books.busy_s == pytest.approx(1.0)


def test_a_keep_alive_ends_an_instance_after_its_window() -> None:
    one = function((10.0, 1.0), (40.0, 1.0))
    books = lived(arms()["keep-alive of 60 s"], one)
    start_s = first_start_s(one)
    assert books.starts == 1
    assert books.starting_s == pytest.approx(start_s)
    assert books.busy_s == pytest.approx(2.0)
    assert books.idle_s == pytest.approx((40 - (10 + start_s + 1)) + 60)
    assert books.waits_s == pytest.approx([start_s, 0.0])


def test_a_call_after_the_window_starts_anew() -> None:
    books = lived(arms()["keep-alive of 60 s"], function((10.0, 1.0), (200.0, 1.0)))
    assert books.starts == 2
    assert min(books.waits_s) > 0


def test_knatives_last_instance_lives_for_its_window_and_a_few_seconds_more() -> None:
    tight = Arm(policy=lambda scaled: Kpa(scaled, KpaTerms(utilisation=1.0)))
    one = function((10.0, 1.0), start_s=2.0)
    books = lived(tight, one)
    assert books.starts == 1
    assert 58 <= books.idle_s <= 70, "60 s of silence, the tick, and 3 s from inactive to gone"


def test_knative_starts_two_for_one_call_at_seventy_per_cent() -> None:
    assert lived(arms()[KPA], function((10.0, 1.0))).starts == 2, "ceil(1 / 0.7)"


def test_calls_wait_their_turn_where_there_is_one_instance() -> None:
    one = function((10.0, 4.0), (10.5, 4.0), (11.0, 4.0), max_instances=1)
    start_s = first_start_s(one)
    books = lived(arms()["keep-alive of 60 s"], one)
    ready = 10 + start_s
    assert books.waits_s == pytest.approx([ready - 10, ready + 4 - 10.5, ready + 8 - 11.0])


def test_one_gpu_serves_one_function_after_the_other() -> None:
    first, second = function((10.0, 1.0)), function((11.0, 1.0))
    books = lived(arms()["keep-alive of 60 s"], first, second, gpus=1)
    assert sorted(books.waits_s)[1] > 60, "until the first one's keep-alive is over"
    shared = lived(pilotlight(waiting_cost=10.0), first, second, gpus=1)
    assert sorted(shared.waits_s)[1] < 60, (
        "an idle instance is not kept while others wait for its place"
    )


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("name", arms())
def test_every_call_is_served_once_and_every_gpu_second_is_booked(trace: str, name: str) -> None:
    world, arm = TRACES[trace](7, 0.05), arms()[name]
    running: list[Scaled] = []

    def policy(scaled: Scaled) -> object:
        running.append(scaled)
        return arm.policy(scaled)

    books = World(world, policy=policy, placement=arm.placement()).run()  # type: ignore[arg-type]
    assert len(books.waits_s) == world.calls
    assert min(books.waits_s, default=0) >= 0
    assert not any(scaled.pods or scaled.line for scaled in running), "all are gone in the end"
    spent = sum(took for one in world.functions for _, took in one.calls)
    assert books.busy_s <= spent + 1e-6, "calls that share an instance share its seconds"
    if all(one.max_inputs == 1 for one in world.functions):
        assert books.busy_s == pytest.approx(spent)


@pytest.mark.parametrize("make", TRACES.values(), ids=TRACES)
def test_the_same_seed_gives_the_same_traffic(make: Callable[[int, float], Trace]) -> None:
    assert make(3, 0.05) == make(3, 0.05) != make(4, 0.05)
    assert all(0.1 <= one.start_s <= 90 for one in make(3, 0.05).functions)


def test_one_that_is_worse_on_both_axes_says_so() -> None:
    cheap, dear = Books(idle_s=1.0, waits_s=[1.0]), Books(idle_s=2.0, waits_s=[2.0])
    assert loses(dear, cheap)
    assert not loses(cheap, dear)
    assert not loses(Books(idle_s=2.0, waits_s=[0.5]), cheap)


def test_seeds_on_which_auto_loses_are_counted_and_named() -> None:
    own = Result(trace="spike", arm=AUTO, seed=1, gpu_s=10.0, mean_s=2.0, p99_s=4.0)
    better = replace(own, arm=KPA, gpu_s=8.0, mean_s=1.0, p99_s=2.0)
    longer = replace(better, mean_s=2.0)
    results = {
        (one.trace, one.arm, one.seed): one
        for one in (own, better, replace(own, seed=2), replace(longer, seed=2))
    }
    (row,) = list(lines(results))[1:]
    assert row.split("to KPA, Knative's defaults")[1].split() == [
        *("2", "1", "1.250", "1.500", "2.000", "1")
    ], "on seed 2 its mean wait is no longer"
    assert (ratio(0.0, 0.0), ratio(1.0, 0.0)) == (1.0, float("inf"))
