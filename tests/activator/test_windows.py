"""The windows beyond Knative's own cases: silence, resizing, and what an empty window is."""

from __future__ import annotations

import pytest

from activator.autoscaler.windows import MaxWindow, TimeWindow, WeightedWindow


def test_a_window_without_data_is_empty_not_zero() -> None:
    window = TimeWindow(5)
    assert window.is_empty(0)
    assert (window.average(0), window.total(0)) == (0, 0)
    window.record(10, 0)
    assert not window.is_empty(15), "a measured zero is data"
    assert window.is_empty(16)


def test_a_window_forgets_second_by_second() -> None:
    window = TimeWindow(3)
    for second, load in enumerate([6, 3, 0, 0, 0]):
        window.record(second, load)
        # 0 s: 6 | 1 s: (6+3)/2 | 2 s: (6+3+0)/3 | 3 s: (3+0+0)/3 | 4 s: 0
        assert window.average(second) == [6, 4.5, 3, 1, 0][second]


def test_a_late_value_lands_in_its_own_second_and_a_too_late_one_nowhere() -> None:
    window = TimeWindow(3)
    window.record(10, 3)
    window.record(9, 3)
    window.record(7, 300)
    assert window.average(10) == 3
    assert repr(window) == "<TimeWindow 3x1s first=9 last=10 total=6>"


def test_dust_in_the_total_never_asks_for_one_more() -> None:
    window = TimeWindow(3)
    for second in range(50):
        window.record(second, 0.1)
    assert window.average(49) <= 0.1


def test_growing_keeps_what_was_seen_and_shrinking_keeps_the_newest() -> None:
    window = TimeWindow(3)
    for second in range(3):
        window.record(second, second + 1)
    window.resize(3, now_s=2)
    window.resize(5, now_s=2)
    assert window.average(2) == 2
    window.resize(2, now_s=2)
    assert window.total(2) == 5
    window.resize(4, now_s=100)
    assert window.is_empty(100)


def test_the_weighted_window_decays_when_nothing_comes() -> None:
    window = WeightedWindow(5)
    window.record(0, 10)
    first, later = window.average(0), window.average(2)
    assert first == pytest.approx(10 * window.smoothing)
    assert later == pytest.approx(first * (1 - window.smoothing) ** 2)
    assert window.average(20) == 0
    window.resize(60, now_s=0)
    assert window.smoothing == 0.2


def test_a_max_window_keeps_the_larger_of_one_slot() -> None:
    window = MaxWindow(size=3).record(1, 5).record(1, 3)
    assert window.current == 5
    assert MaxWindow(size=3).current is None
    assert window.record(4, 1).current == 1
