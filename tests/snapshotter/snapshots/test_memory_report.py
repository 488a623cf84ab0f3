"""What an image is said to carry, once the zeros are out of it."""

from __future__ import annotations

from snapshotter.snapshots.memory_report import ALLOCATOR, LARGE, without_zero_pages


def test_zeros_are_taken_from_the_large_regions_first() -> None:
    assert without_zero_pages({ALLOCATOR: 900, LARGE: 500}, 400) == {ALLOCATOR: 900, LARGE: 100}


def test_what_is_more_than_those_is_taken_from_the_next_largest() -> None:
    assert without_zero_pages({ALLOCATOR: 900, LARGE: 500}, 600) == {ALLOCATOR: 800}


def test_nothing_left_out_changes_nothing() -> None:
    assert without_zero_pages({ALLOCATOR: 9}, 0) == {ALLOCATOR: 9}
