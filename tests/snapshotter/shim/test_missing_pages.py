"""Which memory is missing, against a plain table of pages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshotter.shim.pages.missing_pages import MissingPages

END = 40
Span = tuple[int, int]
spans = st.tuples(st.integers(0, END), st.integers(0, END)).map(lambda two: (min(two), max(two)))


def table_of(missing: MissingPages) -> dict[int, int]:
    """Address → position, byte by byte."""
    return {
        address: position + address - start
        for start, end, position in missing
        for address in range(start, end)
    }


def made(positions: dict[int, int]) -> MissingPages:
    """One range for each byte."""
    return MissingPages((a, a + 1, p) for a, p in sorted(positions.items()))


tables = st.dictionaries(st.integers(0, END), st.integers(0, 1000))


@given(tables, st.lists(spans, max_size=6))
def test_what_is_removed_is_missing_no_longer_and_the_rest_keeps_its_position(
    table: dict[int, int], removed: list[Span]
) -> None:
    missing = made(table)
    for start, end in removed:
        missing.remove(start, end)
        table = {a: p for a, p in table.items() if not start <= a < end}
    assert table_of(missing) == table
    assert bool(missing) == bool(table)


@given(tables, spans, st.integers(0, 2 * END))
def test_moved_memory_replaces_what_was_at_its_target(
    table: dict[int, int], moved: Span, target: int
) -> None:
    start, end = moved
    missing = made(table)
    missing.move(start, target, end - start)
    inside = {a: p for a, p in table.items() if start <= a < end}
    rest = {a: p for a, p in table.items() if a not in inside}
    rest = {a: p for a, p in rest.items() if not target <= a < target + end - start}
    assert table_of(missing) == rest | {a + target - start: p for a, p in inside.items()}


@given(tables, spans)
def test_the_missing_parts_of_a_span_are_all_found_in_order(
    table: dict[int, int], span: Span
) -> None:
    found = [
        (address, position + address - start)
        for start, end, position in made(table).within(*span)
        for address in range(start, end)
    ]
    assert found == sorted((a, p) for a, p in table.items() if span[0] <= a < span[1])


def test_a_copy_is_independent() -> None:
    missing = MissingPages([(0, 8, 100)])
    copy = missing.copy()
    missing.remove(2, 4)
    assert table_of(copy) == table_of(MissingPages([(0, 8, 100)]))
    assert missing.first() == (0, 2, 100)


@pytest.mark.parametrize("ranges", [[(4, 4, 0)], [(4, 8, 0), (7, 9, 0)], [(4, 8, 0), (0, 2, 0)]])
def test_ranges_that_overlap_or_are_out_of_order_are_refused(
    ranges: list[tuple[int, int, int]],
) -> None:
    with pytest.raises(ValueError, match="ascending"):
        MissingPages(ranges)
