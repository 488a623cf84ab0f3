"""Proofs of drift monitoring: through rows as the activator sends them, what the writer counts of
them, and the report that the controller makes of the counts."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

from activator.prediction_log import monitoring
from activator.prediction_log.queue import PredictionQueue
from activator.prediction_log.writer import make_row
from pilotlight.controller.drift.labels import quality_of
from pilotlight.controller.drift.loop import GRACE_S, ended_window
from pilotlight.controller.drift.report import DriftStatus, compare
from pilotlight.controller.drift.sketch_store import FeatureCounts
from pilotlight.controller.drift.targets import MonitoredFunction
from pilotlight.spec.monitor import MonitoredFeature, MonitorSpec, Reference
from pilotlight.spec.prediction_log import HOUR_S, PredictionLogSpec
from pilotlight.spec.record_json import from_json, to_json
from pilotlight.spec.sketches import Sketch
from tests.activator.conftest import Edge
from tests.fakes.routes import route_of, spec_of
from tests.options.contract import proves

KEY = b"k" * 32
TERMS = MonitorSpec(features=(MonitoredFeature(path="$.x"),), min_rows=100)


@proves(
    "MonitorSpec.prediction",
    "MonitorSpec.slices",
    "MonitorSpec.label",
    "MonitoredFeature.path",
    "MonitoredFeature.low",
    "MonitoredFeature.high",
)
async def test_what_is_named_is_counted(fleet: str, edge: Edge) -> None:
    age = MonitoredFeature(path="$.x", low=0.0, high=10.0)
    terms = MonitorSpec(features=(age,), prediction="$.x", label="label", slices=("$.x",))
    queue = PredictionQueue()
    edge.log_calls(queue)
    for name, monitor in (("watched", terms), ("plain", None)):
        edge.add(route_of(spec_of(name, log=PredictionLogSpec(sample=1, monitor=monitor))))
        for x in (5, 11, -1):
            assert (await edge.call(f"shop/{name}:invoke", json={"x": x})).status_code == 200
    rows = [(one.facts["function"], make_row(one, KEY)) for one in queue.pop_batch()]
    assert monitoring.sketch(row for name, row in rows if name == "plain") is None
    made = json.loads(monitoring.sketch(row for name, row in rows if name == "watched") or b"")
    (found,) = made["revisions"].values()
    seen = Sketch.from_json(found["features"]["$.x"])
    assert (seen.present, seen.outside, seen.low, seen.high) == (3, 2, -1, 11)
    assert Sketch.from_json(found["features"]["prediction"]).present == 3
    assert [one[3:] for one in made["scores"]] == [[5, ["5"]], [11, ["11"]], [-1, ["-1"]]]


def counted(n: int, mean: float, *, missing: int = 0) -> FeatureCounts:
    rng = random.Random(n)
    values: list[Any] = [rng.gauss(mean, 1) for _ in range(n)] + [None] * missing
    return FeatureCounts(rows=n + missing, features={"$.x": Sketch.of(values)})


def status(terms: MonitorSpec, current: FeatureCounts) -> DriftStatus:
    return compare(terms, counted(2_000, 5.0), current, since_h=0, until_h=1).status


@proves(
    "MonitorSpec.psi",
    "MonitorSpec.ks",
    "MonitorSpec.shares",
    "MonitorSpec.alpha",
    "MonitorSpec.min_rows",
)
async def test_bounds_say_what_is_drift(fleet: str) -> None:
    lax = replace(TERMS, psi=5.0, ks=0.9, shares=0.9)
    moved, holes = counted(600, 5.6), counted(600, 5.0, missing=90)
    assert status(lax, moved) is DriftStatus.MODERATE
    assert status(lax, holes) is DriftStatus.OK
    for terms, current in (
        (replace(lax, psi=0.25), moved),
        (replace(lax, ks=0.1), moved),
        (replace(lax, shares=0.1), holes),
    ):
        assert status(terms, current) is DriftStatus.DRIFT
    small = counted(130, 5.35)
    bounds = replace(TERMS, psi=0.05, ks=0.05)
    assert status(replace(bounds, alpha=0.2), small) is DriftStatus.DRIFT
    assert status(replace(bounds, alpha=1e-6), small) is DriftStatus.OK
    assert status(replace(bounds, min_rows=200), small) is DriftStatus.NO_DATA


@proves("MonitorSpec.quality", "MonitorSpec.positive")
async def test_quality_has_bounds(fleet: str) -> None:
    from pilotlight.controller.drift.labels import LabelledPrediction
    from pilotlight.controller.statistics.quality import Outcome

    terms = MonitorSpec(prediction="$.x", label="label", positive="yes", quality={"accuracy": 0.9})
    found = [LabelledPrediction(Outcome(0.9, number % 2 == 0), ()) for number in range(400)]
    (all_,) = quality_of(function(terms), found)
    assert all_.broken == ["accuracy"]
    (all_,) = quality_of(function(replace(terms, quality={"accuracy": 0.4})), found)
    assert all_.broken == []


@proves("MonitorSpec.window_h", "MonitorSpec.reference")
async def test_windows_have_their_length_and_reference(fleet: str) -> None:
    target = function(replace(TERMS, window_h=6))
    assert ended_window(target, now=13 * HOUR_S + GRACE_S) == 12
    assert ended_window(target, now=12 * HOUR_S + GRACE_S - 1) == 6
    body = to_json(replace(TERMS, reference=Reference.PREVIOUS))
    assert from_json(MonitorSpec, body).reference == "previous"


def function(terms: MonitorSpec) -> MonitoredFunction:
    return MonitoredFunction(
        function_id="f-1",
        tenant="t-1",
        environment="main",
        app="shop",
        function="hello",
        revision="v1",
        terms=terms,
    )
