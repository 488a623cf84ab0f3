"""`pilotlight.Monitor`: its defaults, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

import pilotlight
from pilotlight.errors import InvalidInput
from pilotlight.sdk.options import resolve_options
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.monitor import MonitoredFeature, MonitorSpec, Reference, value_at
from pilotlight.spec.prediction_log import PredictionLogSpec
from pilotlight.spec.record_json import from_json, to_json
from tests.fakes.routes import spec_of


def test_features_have_ranges_or_those_of_the_reference() -> None:
    found = pilotlight.Monitor(features={"$.age": (0, 120), "$.country": None}, window="7d")
    assert found == MonitorSpec(
        features=(
            MonitoredFeature(path="$.age", low=0.0, high=120.0),
            MonitoredFeature(path="$.country"),
        ),
        window_h=168,
    )
    assert pilotlight.Monitor(features=["$.age"]).features == (MonitoredFeature(path="$.age"),)


def test_it_is_a_part_of_the_log() -> None:
    log, monitor = pilotlight.PredictionLog(), pilotlight.Monitor(prediction="$")
    found = resolve_options({"log": log, "monitor": monitor}, concurrent=None).policies["log"]
    assert isinstance(found, PredictionLogSpec)
    assert found.monitor == monitor
    spec = spec_of("hello", log=found)
    assert from_json(FunctionSpec, to_json(spec)) == spec
    with pytest.raises(InvalidInput, match="monitor needs log="):
        resolve_options({"monitor": monitor}, concurrent=None)


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "neither features nor prediction"),
        ({"features": "$.age"}, "must be a list of paths"),
        ({"features": ["$..age"]}, "several values"),
        ({"features": ["$.items[*]"]}, "several values"),
        ({"features": ["age"]}, "must begin with"),
        ({"prediction": "$", "label": "label", "slices": ["$.a", "$.a"]}, "each once"),
        ({"features": [f"$.f{n}" for n in range(33)]}, "at most 32"),
        ({"features": {"$.a": (2, 1)}}, "is empty"),
        ({"features": {"$.a": 7}}, "must be two numbers"),
        ({"prediction": "$.*"}, "several values"),
        ({"prediction": "$", "slices": ["$.a"]}, "need label"),
        ({"features": ["$.a"], "label": "label"}, "label needs prediction"),
        ({"prediction": "$", "label": "rating", "positive": "x"}, "needs label='label'"),
        ({"prediction": "$", "reference": "first"}, "must be one of baseline, previous"),
        ({"prediction": "$", "window": "8d"}, "between 1 and 168"),
        ({"prediction": "$", "window": "1m"}, "monitor: window"),
        ({"prediction": "$", "min_rows": 99}, "between 100"),
        ({"prediction": "$", "psi": 0}, "psi = 0"),
        ({"prediction": "$", "ks": 2}, "ks = 2"),
        ({"prediction": "$", "shares": 0}, "shares = 0"),
        ({"prediction": "$", "alpha": 0.5}, "alpha = 0.5"),
        ({"prediction": "$", "label": "label", "quality": {"auc": 0.9}}, "must be one of accuracy"),
    ],
)
def test_what_cannot_be_watched_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        pilotlight.Monitor(**options)


@pytest.mark.parametrize(
    "log, message",
    [
        ({"scrub": ["$.age"]}, "scrubbed"),
        ({"outputs": "none"}, "prediction needs outputs"),
        ({"keep": "30h"}, "the log is kept for 30 hours"),
    ],
)
def test_the_log_must_have_what_is_watched(log: dict[str, Any], message: str) -> None:
    monitor = pilotlight.Monitor(
        features=["$.age"], prediction="$.score", reference=Reference.PREVIOUS
    )
    options = {"log": pilotlight.PredictionLog(**log), "monitor": monitor}
    with pytest.raises(InvalidInput, match=message):
        resolve_options(options, concurrent=None)


def test_a_path_leads_to_one_value() -> None:
    document = {"a": [{"b": 1}], "c d": True}
    for path, value in (
        ("$.a[0].b", 1),
        ("$['c d']", True),
        ("$.a[1].b", None),
        ("$.x.y", None),
        ("$.a.b", None),
        ("$", document),
    ):
        assert value_at(document, path) == value
