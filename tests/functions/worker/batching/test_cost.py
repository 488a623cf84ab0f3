"""The cost of batches is found from what they took, and followed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.worker.batching.latency_model import LatencyFit, LatencyModel


def fitted(
    sizes: list[int], *, per_item_s: float, fixed_s: float, noise: float = 0.0
) -> LatencyFit:
    dice, cost = random.Random(1), LatencyModel()
    for size in sizes:
        cost.note(size, (per_item_s * size + fixed_s) * (1 + noise * (dice.random() - 0.5)))
    assert cost.line is not None
    return cost.line


def test_nothing_is_known_before_the_first_batch() -> None:
    assert LatencyModel().line is None
    assert repr(LatencyModel()) == "<LatencyModel unknown>"


@given(
    st.floats(0, 0.01),
    st.floats(0.0001, 0.1),
    st.lists(st.integers(1, 64), min_size=2, max_size=60).filter(lambda n: len(set(n)) > 1),
)
def test_exact_batches_give_the_exact_line(
    per_item_s: float, fixed_s: float, sizes: list[int]
) -> None:
    line = fitted(sizes, per_item_s=per_item_s, fixed_s=fixed_s)

    for size in (min(sizes), max(sizes)):
        assert line.seconds(size) == pytest.approx(per_item_s * size + fixed_s, rel=0.05, abs=1e-6)


def test_noise_is_averaged_out() -> None:
    line = fitted([1, 8, 16, 3, 12, 32] * 20, per_item_s=0.001, fixed_s=0.02, noise=0.2)

    assert line.per_item_s == pytest.approx(0.001, rel=0.3)
    assert line.fixed_s == pytest.approx(0.02, rel=0.2)


def test_equal_sizes_alone_are_taken_for_fixed_cost() -> None:
    line = fitted([4] * 10, per_item_s=0.001, fixed_s=0.02)

    assert line.per_item_s == 0
    assert line.fixed_s == pytest.approx(0.024)


def test_the_slope_that_was_known_stays_while_sizes_do_not_vary() -> None:
    line = fitted([1, 16] * 10 + [8] * 200, per_item_s=0.001, fixed_s=0.02)

    assert line.per_item_s == pytest.approx(0.001, rel=0.05)
    assert line.fixed_s == pytest.approx(0.02, rel=0.05)


def test_it_follows_a_machine_that_became_slower() -> None:
    cost = LatencyModel()
    for factor in (1, 3):
        for size in [1, 8, 16] * 40:
            cost.note(size, factor * (0.001 * size + 0.02))

    assert cost.line is not None
    assert cost.line.fixed_s == pytest.approx(0.06, rel=0.1)


def test_one_batch_that_was_held_up_is_not_the_rule() -> None:
    cost = LatencyModel()
    for size in [1, 8, 16] * 10:
        cost.note(size, 0.001 * size + 0.02)
    cost.note(8, 30.0)

    assert cost.line is not None
    assert cost.line.seconds(8) < 2 * 0.028


@given(st.lists(st.tuples(st.integers(1, 10_000), st.floats(0, 100)), min_size=1, max_size=50))
def test_no_cost_is_ever_below_nothing(batches: list[tuple[int, float]]) -> None:
    cost = LatencyModel()
    for size, seconds in batches:
        cost.note(size, seconds)

    assert cost.line is not None
    assert min(cost.line.per_item_s, cost.line.fixed_s) >= 0
