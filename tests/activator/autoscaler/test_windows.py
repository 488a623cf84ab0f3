"""The windows beyond Knative's own cases: silence, and what an empty window is."""

from __future__ import annotations

from activator.autoscaler.windows import MaxWindow, TimeWindow


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


def test_a_max_window_keeps_the_larger_of_one_slot() -> None:
    window = MaxWindow(size=3).record(1, 5).record(1, 3)
    assert window.current == 5
    assert MaxWindow(size=3).current is None
    assert window.record(4, 1).current == 1
