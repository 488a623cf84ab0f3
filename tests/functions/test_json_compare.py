"""Differences of two JSON documents, by path."""

from __future__ import annotations

import copy
import math
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.validation.json_compare import IGNORED, Change, differences
from pilotlight.validation.json_documents import replace_values
from pilotlight.validation.json_paths import format_path, parse_path

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def found(old: Any, new: Any, **options: Any) -> list[tuple[str, str]]:
    return [(format_path(one.path), one.change.value) for one in differences(old, new, **options)]


@pytest.mark.parametrize(
    "old, new, expected",
    [
        ({"a": 1, "b": [1.0, 2]}, {"b": [1, 2.0], "a": 1.0}, []),
        (0.1 + 0.2, 0.3, []),
        (1.0, 1.0 + 1e-5, [("$", "changed")]),
        (0.0, 1e-12, [("$", "changed")]),
        (1, True, [("$", "changed")]),
        ({"a": [True]}, {"a": [1]}, [("$.a[0]", "changed")]),
        (None, False, [("$", "changed")]),
        ("1", 1, [("$", "changed")]),
        ([], {}, [("$", "changed")]),
        (math.nan, math.nan, []),
        (math.nan, 1.0, [("$", "changed")]),
        (10**400, 1.5, [("$", "changed")]),
        (10**400, 10**400, []),
        ([1, 2, 3], [1, 4], [("$[1]", "changed"), ("$[2]", "missing")]),
        ([1], [1, 2], [("$[1]", "added")]),
        (
            {"a": {"b": 1, "c": 2}, "d": 3},
            {"a": {"b": 2, "e": 5}, "d": 3, "f": None},
            [
                ("$.a.b", "changed"),
                ("$.a.c", "missing"),
                ("$.a.e", "added"),
                ("$.f", "added"),
            ],
        ),
    ],
)
def test_documents_differ_at_paths(old: Any, new: Any, expected: list[tuple[str, str]]) -> None:
    assert found(old, new) == expected


def test_numbers_within_the_tolerance_are_equal() -> None:
    assert found([1.0, 100], [1.009, 100.9], tolerance=0.01) == []
    assert found([1.0], [1.02], tolerance=0.01) == [("$[0]", "changed")]
    assert found([1.0], [1.0 + 1e-9], tolerance=0.0) == [("$[0]", "changed")]


def test_an_ignored_path_equals_any_value_and_a_missing_one() -> None:
    paths = [parse_path("$..at"), parse_path("$.items[*].id")]
    old = {"at": 1, "items": [{"id": 1, "x": 2}], "inner": {"at": 1}}
    new = {"at": {"b": 2}, "items": [{"x": 3}], "inner": {}}
    one, other = (replace_values(each, paths, IGNORED) for each in (old, new))
    assert found(one, other) == [("$.items[0].x", "changed")]


def test_deep_documents_do_not_exceed_the_stack() -> None:
    old: Any = 1
    new: Any = 2
    for _ in range(20_000):
        old, new = [old], [new]
    assert list(differences(old, copy.copy(old))) == []
    (found,) = differences(old, new)
    assert (len(found.path), found.old, found.new) == (20_000, 1, 2)


def test_a_first_difference_among_many_deep_ones_takes_little_memory() -> None:
    old: Any = list(range(50_000))
    new: Any = [n + 1 for n in range(50_000)]
    for _ in range(900):
        old, new = [old], [new]
    tracemalloc.start()
    try:
        first = next(differences(old, new))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(first.path) == 901
    assert peak < 30 * 1024**2


@given(JSON)
def test_a_document_does_not_differ_from_its_copy(document: Any) -> None:
    assert list(differences(document, copy.deepcopy(document))) == []


@given(JSON, JSON)
def test_the_other_way_round_there_are_as_many_differences(one: Any, other: Any) -> None:
    there, back = list(differences(one, other)), list(differences(other, one))
    assert {d.path for d in there} == {d.path for d in back}
    assert sum(d.change is Change.ADDED for d in there) == sum(
        d.change is Change.MISSING for d in back
    )


@pytest.mark.parametrize("path", ["$", "$.a.b", "$['a b'][3]", "$.items[0].name", '$["it\'s"]'])
def test_a_path_is_written_as_it_is_read(path: str) -> None:
    keys = [segment.key for segment in parse_path(path)]
    assert format_path(key for key in keys if key is not None) == path


def test_indexes_of_a_general_path_are_left_open() -> None:
    assert format_path(("items", 3, "x"), is_general=True) == "$.items[*].x"
