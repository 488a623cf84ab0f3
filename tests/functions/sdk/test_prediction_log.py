"""`log=pilotlight.PredictionLog(…)`: what it records, and what it says when it is used wrongly."""

from __future__ import annotations

from typing import Any

import pytest

import pilotlight
from pilotlight.errors import InvalidInput
from pilotlight.sdk.options import resolve_options
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.prediction_log import (
    DAY_S,
    HOUR_S,
    RAW_KEEP_S,
    SUMMARY_KEEP_S,
    Content,
    PredictionLogSpec,
)
from pilotlight.spec.record_json import from_json, to_json
from pilotlight.validation.json_paths import Segment, parse_path
from tests.fakes.routes import spec_of


def test_a_log_is_a_share_of_summaries_by_default() -> None:
    log = pilotlight.PredictionLog()
    assert log == PredictionLogSpec(sample=0.1, keep_s=SUMMARY_KEEP_S)
    assert resolve_options({"log": log}, concurrent=None).policies["log"] == log
    assert resolve_options({}, concurrent=None).policies["log"] is None


@pytest.mark.parametrize(
    "more, keep_s",
    [
        ({}, SUMMARY_KEEP_S),
        ({"inputs": "full"}, RAW_KEEP_S),
        ({"outputs": "full"}, RAW_KEEP_S),
        ({"inputs": "none", "outputs": "none"}, SUMMARY_KEEP_S),
        ({"inputs": "full", "keep": "30d"}, 30 * DAY_S),
        ({"keep": "12h"}, 12 * HOUR_S),
    ],
)
def test_whole_arguments_are_kept_for_a_shorter_time(more: dict[str, Any], keep_s: int) -> None:
    assert pilotlight.PredictionLog(**more).keep_s == keep_s


@pytest.mark.parametrize(
    "more, said",
    [
        ({"sample": 0}, "must be above 0"),
        ({"sample": 1.1}, "between 0 and 1"),
        ({"sample": "all"}, "between 0 and 1"),
        ({"inputs": "some"}, "must be one of none, summary, full"),
        ({"outputs": None}, "must be one of none, summary, full"),
        ({"scrub": "$.a"}, "must be a list of paths"),
        ({"scrub": ["user.email"]}, "must begin with \\$"),
        ({"scrub": ["$.a[?(@.b)]"]}, "not understood from"),
        ({"scrub": ["$." + "a" * 300]}, "at most 256"),
        ({"scrub": ["$" + ".a" * 17]}, "at most 16"),
        ({"scrub": ["$.a"] * 33}, "at most 32"),
        ({"keep": "7"}, "must be hours or days"),
        ({"keep": "0d"}, "must be hours or days"),
        ({"keep": "401d"}, "400d"),
        ({"keep": 7}, "must be hours or days"),
    ],
)
def test_what_is_out_of_range_is_named(more: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        pilotlight.PredictionLog(**more)


def test_another_value_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"expected pilotlight.PredictionLog"):
        resolve_options({"log": True}, concurrent=None)


def test_paths_are_names_indexes_and_all() -> None:
    assert parse_path("$") == ()
    assert parse_path("$.a['b c'][\"d\"][3][*].*..é") == (
        Segment("a"),
        Segment("b c"),
        Segment("d"),
        Segment(3),
        Segment(None),
        Segment(None),
        Segment("é", is_deep=True),
    )


def test_a_spec_with_a_log_is_the_same_after_json() -> None:
    spec = spec_of(log=pilotlight.PredictionLog(inputs="full", scrub=["$..email"]))
    again = from_json(FunctionSpec, to_json(spec))
    assert again == spec
    assert again.log is not None
    assert again.log.inputs is Content.FULL
    assert again.digest() != spec_of().digest()
    with pytest.raises(InvalidInput, match="whole hours"):
        from_json(FunctionSpec, {**to_json(spec), "log": {"sample": 1.0, "keep_s": 5}})
