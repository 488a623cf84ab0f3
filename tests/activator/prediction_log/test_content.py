"""What rows have of arguments and results: scrubbed before they are hashed, summarized or written."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.prediction_log.content import (
    input_columns,
    output_columns,
    scrub_document,
    summarize,
)
from pilotlight.spec.prediction_log import SCRUBBED, Content

KEY = b"k" * 32
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def columns(body: bytes, *paths: str, content: Content = Content.FULL) -> dict[str, str | None]:
    return input_columns(body, content=content, scrub=paths, parameters=("user", "items"), key=KEY)


@pytest.mark.parametrize(
    "path, left",
    [
        (
            "$.user.email",
            {"user": {"email": SCRUBBED, "n": 1}, "items": [{"card": 4}, {"card": 5}]},
        ),
        (
            "$['user']['n']",
            {"user": {"email": "a@b", "n": SCRUBBED}, "items": [{"card": 4}, {"card": 5}]},
        ),
        (
            "$.items[*].card",
            {"user": {"email": "a@b", "n": 1}, "items": [{"card": SCRUBBED}, {"card": SCRUBBED}]},
        ),
        ("$.items[1]", {"user": {"email": "a@b", "n": 1}, "items": [{"card": 4}, SCRUBBED]}),
        (
            "$..card",
            {"user": {"email": "a@b", "n": 1}, "items": [{"card": SCRUBBED}, {"card": SCRUBBED}]},
        ),
        ("$.*", {"user": SCRUBBED, "items": SCRUBBED}),
        ("$", SCRUBBED),
        (
            "$.absent[3]..card",
            {"user": {"email": "a@b", "n": 1}, "items": [{"card": 4}, {"card": 5}]},
        ),
    ],
)
def test_a_path_replaces_what_it_leads_to_and_nothing_else(path: str, left: Any) -> None:
    document = {"user": {"email": "a@b", "n": 1}, "items": [{"card": 4}, {"card": 5}]}
    assert scrub_document(document, [path]) == left


def test_arguments_by_position_are_scrubbed_by_their_names() -> None:
    by_name, by_position = (
        columns(body, "$.user.email")
        for body in (b'{"user":{"email":"a@b"},"items":[]}', b'[{"email":"a@b"},[]]')
    )
    assert by_name == by_position
    assert "a@b" not in str(by_name)


def test_more_arguments_than_parameters_are_scrubbed_by_their_names_too() -> None:
    """A function with `*args` takes them; one without answers 400, which is logged."""
    body = b'[{"email":"a@b"},[],3,4]'
    whole = '{"user":{"email":"[scrubbed]"},"items":[],"*":[3,4]}'
    assert columns(body, "$.user.email")["input"] == whole
    assert "a@b" not in str(columns(body, "$[0]")["input"]), "by its place"
    assert columns(body, "$['*'][1]")["input"] == (
        '{"user":{"email":"a@b"},"items":[],"*":[3,"[scrubbed]"]}'
    )


def test_what_is_scrubbed_does_not_change_the_hash_and_the_key_does() -> None:
    one, other = (columns(b'{"user":{"email":"%b"}}' % text, "$..email") for text in (b"a", b"b"))
    assert one["feature_hash"] == other["feature_hash"] is not None
    foreign = input_columns(
        b'{"user":{"email":"a"}}',
        content=Content.NONE,
        scrub=["$..email"],
        parameters=(),
        key=b"x" * 32,
    )
    assert foreign["feature_hash"] != one["feature_hash"]


def test_each_content_has_what_it_names() -> None:
    body = b'{"user":"Ada","items":[1,2,6]}'
    none = columns(body, content=Content.NONE)
    assert (none["input_summary"], none["input"]) == (None, None)
    assert none["feature_hash"] is not None
    summary = columns(body, content=Content.SUMMARY)
    assert summary["input"] is None
    assert "Ada" not in str(summary)
    assert json.loads(str(summary["input_summary"]))["members"] == {
        "user": {"type": "string", "chars": 3},
        "items": {"type": "array", "items": 3, "min": 1, "max": 6, "mean": 3.0},
    }
    assert columns(body)["input"] == '{"user":"Ada","items":[1,2,6]}'
    assert output_columns(b'"yes"', content=Content.NONE, scrub=[]) == {
        "output_summary": None,
        "output": None,
    }


@pytest.mark.parametrize(
    "body",
    [b"", b"\x80\x04pickle", b"{", b"[" * 100_000, b"9" * 10_000, b'{"a":1}garbage'],
    ids=["empty", "pickle", "torn", "deep", "long number", "trailing"],
)
def test_what_is_no_json_is_logged_without_content(body: bytes) -> None:
    assert set(columns(body, "$..a").values()) == {None}
    assert set(output_columns(body, content=Content.FULL, scrub=["$..a"]).values()) == {None}


def test_text_of_a_row_is_always_valid_json_in_utf_8() -> None:
    found = columns(b'{"user":"\\ud800","items":[1e999,NaN,-Infinity]}')
    assert found["input"] is not None
    assert json.loads(found["input"], parse_constant=pytest.fail) == {
        "user": "?",
        "items": [None, None, None],
    }


@given(JSON)
def test_every_json_value_has_columns_and_its_summary_has_no_text_of_values(value: Any) -> None:
    body = json.dumps({"user": "needle-in-a-haystack", "items": value}).encode()
    found = columns(body, content=Content.SUMMARY)
    assert "needle-in-a-haystack" not in str(found)
    json.loads(str(found["input_summary"]), parse_constant=pytest.fail)
    assert json.loads(str(columns(body)["input"]))["user"] == "needle-in-a-haystack"


def test_paths_of_any_depth_take_time_by_the_size_of_the_document() -> None:
    document: Any = [{"a": 1} for _ in range(200)]
    for _ in range(400):
        document = {"a": [document, {"a": 1}]}
    began = time.process_time()
    found = scrub_document(document, ["$" + "..a" * 8])
    assert time.process_time() - began < 5
    assert SCRUBBED in json.dumps(found)


def test_a_summary_describes_a_bounded_number_of_members() -> None:
    assert len(summarize({str(number): number for number in range(1000)})["members"]) == 64
