"""What an image is said to carry, once the zeros are out of it."""

from __future__ import annotations

from snapshotter.snapshots.heap import ALLOCATOR, LARGE, less


def test_zeros_are_taken_from_the_large_regions_first() -> None:
    assert less({ALLOCATOR: 900, LARGE: 500}, 400) == {ALLOCATOR: 900, LARGE: 100}


def test_what_is_more_than_those_is_taken_from_the_next_largest() -> None:
    assert less({ALLOCATOR: 900, LARGE: 500}, 600) == {ALLOCATOR: 800}


def test_nothing_left_out_changes_nothing() -> None:
    assert less({ALLOCATOR: 9}, 0) == {ALLOCATOR: 9}
