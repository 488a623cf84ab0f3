"""What a worker says of a call is read with suspicion: it runs its tenant's code."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from activator.tracing.trace_builder import MAX_CHARS, MAX_MS, parse_report
from tests.hypothesis_profiles import examples

ID, OTHER = "00f067aa0ba902b7", "00f067aa0ba902b8"
ROW = [ID, "", "tokenise", 0.5, 2.0, "", {"tokens": 12}]


def encoded(body: Any) -> bytes:
    return base64.b64encode(json.dumps(body).encode())


def told(*rows: Any, ms: Any = 3.0, dropped: Any = 0) -> bytes:
    return encoded({"ms": ms, "spans": rows, "dropped": dropped})


def test_spans_come_as_they_were_recorded() -> None:
    reported = parse_report(told(ROW, [OTHER, ID, "inner", 0.6, 1.0, "ValueError", {}]))
    assert reported is not None
    assert [(one.name, one.parent, one.ms, one.error) for one in reported.spans] == [
        ("tokenise", "", 2.0, ""),
        ("inner", ID, 1.0, "ValueError"),
    ]
    assert reported.spans[0].attributes == {"tokens": 12}


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"not base64",
        base64.b64encode(b"not json"),
        base64.b64encode(b"[" * 5000),
        encoded([]),
        encoded({"spans": []}),
        encoded(None),
        told(["short"]),
        told(["0" * 16, *ROW[1:]]),
        told([ID.upper(), *ROW[1:]]),
        told([ID + "'); drop", *ROW[1:]]),
        told([ID, "parent", *ROW[2:]]),
        told([ID, "", 5, *ROW[3:]]),
        told([ID, "", "n", "soon", 1.0, "", {}]),
        told([ID, "", "n", 0.0, 1.0, "", []]),
        told([ID, "", "n", 0.0, 1.0, "", {"a": {"b": 1}}]),
        told(ROW, ROW),
        told(ROW, ms=None),
        told(ROW, dropped=-1),
        b"A" * 8193,
    ],
)
def test_what_is_broken_is_nothing(value: bytes) -> None:
    assert parse_report(value) is None


def test_what_is_too_much_is_cut() -> None:
    rows = [
        [f"{n:016x}", "", "x" * 999, -5.0, 1e300, "e" * 999, {f"k{k}": k for k in range(4)}]
        for n in range(1, 20)
    ]
    reported = parse_report(encoded({"ms": 1e300, "spans": rows[:2], "dropped": 10**9}))
    assert reported is not None
    assert reported.ms == MAX_MS
    assert reported.dropped == 10**6
    assert {len(one.name) for one in reported.spans} == {MAX_CHARS}
    assert [one.begin_ms for one in reported.spans] == [0.0] * 2


def test_what_is_the_platforms_to_say_is_not_the_users() -> None:
    reported = parse_report(
        told(
            [
                ID,
                "",
                "n",
                0.0,
                1.0,
                "",
                {"pilotlight.tenant": "other", "faas.name": "x", "mine": "y"},
            ]
        )
    )
    assert reported is not None
    assert reported.spans[0].attributes == {"mine": "y"}


def test_what_would_move_a_cursor_is_no_text() -> None:
    reported = parse_report(told([ID, "", "a\x1b[2Jb\n\ud800", 0.0, 1.0, "", {"k\r": "v\x07"}]))
    assert reported is not None
    assert (reported.spans[0].name, reported.spans[0].attributes) == ("a?[2Jb??", {"k?": "v?"})


@settings(max_examples=examples(40))
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda part: st.lists(part) | st.dictionaries(st.text(), part),
        max_leaves=20,
    )
)
def test_no_json_breaks_the_reader(body: Any) -> None:
    parse_report(encoded({"ms": 1.0, "spans": body, "dropped": 0}))
    parse_report(encoded({"ms": 1.0, "spans": [body], "dropped": 0}))
    parse_report(encoded(body))
