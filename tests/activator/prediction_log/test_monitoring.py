"""What drift monitoring gets of rows: watched values only, after they are scrubbed, in a sketch
beside the file of rows that is whole after a crash at each step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from activator.prediction_log import monitoring, parquet
from activator.prediction_log.shipper import PredictionShipper, PutResult
from activator.prediction_log.spool import Spool
from activator.prediction_log.writer import make_row
from pilotlight.controller.drift.sketch_store import SketchFile
from pilotlight.spec.monitor import MonitoredFeature, MonitorSpec
from pilotlight.spec.prediction_log import Content, PredictionLogSpec
from pilotlight.spec.sketches import Sketch
from tests.activator.prediction_log.rows import MemoryStore, logged, read_rows

KEY = b"k" * 32
TERMS = PredictionLogSpec(
    sample=1.0,
    inputs=Content.NONE,
    outputs=Content.SUMMARY,
    scrub=("$.x.card",),
    monitor=MonitorSpec(
        features=(
            MonitoredFeature(path="$.x.age", low=0, high=120),
            MonitoredFeature(path="$.x.plan"),
        ),
        prediction="$.score",
        label="label",
        slices=("$.x.plan",),
    ),
)


def row(number: int, given: Any, answer: Any = None, **facts: Any) -> bytes:
    body = json.dumps([given]).encode()
    result = json.dumps({"score": 0.5} if answer is None else answer).encode()
    call = logged(number, body=body, answer=result, terms=TERMS)
    call.facts.update(facts)
    return make_row(call, KEY)


def sketch_of(*lines: bytes) -> dict[str, Any]:
    made = monitoring.sketch(lines)
    assert made is not None
    return dict(json.loads(made))


def test_rows_are_counted_by_revision_and_feature() -> None:
    found = sketch_of(
        row(1, {"age": 30, "plan": "pro", "card": "4711"}),
        row(2, {"age": 130, "plan": "pro"}, {"score": 0.9}),
        row(3, {"age": None, "plan": "x" * 100}),
        row(4, {"plan": ["no", "scalar"]}, version="v2"),
    )
    assert {name: one["rows"] for name, one in found["revisions"].items()} == {"v1": 3, "v2": 1}
    age = Sketch.from_json(found["revisions"]["v1"]["features"]["$.x.age"])
    assert (age.present, age.missing, age.outside, age.low, age.high) == (2, 1, 1, 30, 130)
    plan = Sketch.from_json(found["revisions"]["v1"]["features"]["$.x.plan"])
    assert plan.categories == {"pro": 2, "": 1}
    assert Sketch.from_json(found["revisions"]["v2"]["features"]["$.x.plan"]).missing == 1
    assert [one[0] for one in found["scores"]] == ["req-1", "req-2", "req-3", "req-4"]
    assert found["scores"][1][3:] == [0.9, ["pro"]]
    assert "4711" not in json.dumps(found)


def test_errors_and_unreadable_calls_are_no_predictions() -> None:
    failed = row(1, {"age": 30}, status=500)
    assert monitoring.sketch([failed]) is None
    found = sketch_of(row(2, {"age": 30}, input_is_json=False, output_is_json=False))
    features = found["revisions"]["v1"]["features"]
    assert {name: one["missing"] for name, one in features.items()} == {
        "$.x.age": 1,
        "$.x.plan": 1,
        "prediction": 1,
    }
    assert found["scores"] == []


def test_an_integer_beyond_the_doubles_is_no_number() -> None:
    """The controller could not read a sketch with it, and the file would be sent for ever."""
    beyond = 2**1024
    found = sketch_of(row(1, {"age": beyond, "plan": -beyond}, {"score": beyond}))
    features = found["revisions"]["v1"]["features"]
    assert {one["missing"] for one in features.values()} == {1}
    assert found["scores"] == []
    assert SketchFile.parse(json.dumps(found).encode()).scores == []


def test_text_that_no_database_takes_is_changed() -> None:
    found = sketch_of(row(1, {"age": "a\ud800", "plan": "\0"}, {"score": "\udfff\0"}))
    assert found["scores"][0][3:] == ["??", ["?"]]
    assert SketchFile.parse(json.dumps(found).encode()).scores[0].label == "??"
    features = found["revisions"]["v1"]["features"]
    assert [list(one["categories"]) for one in features.values()] == [["a?"], ["?"], ["??"]]


def test_a_log_without_monitoring_has_no_sketch() -> None:
    plain = make_row(logged(1), KEY)
    assert b"watched" not in plain
    assert monitoring.sketch([plain]) is None


def test_the_size_of_a_sketch_is_bounded() -> None:
    lines = [
        row(n, {"age": n * 1.1, "plan": f"plan-{n}"}, version=f"v{n % 20}") for n in range(2_000)
    ]
    made = monitoring.sketch(lines) or b""
    found = json.loads(made)
    assert len(found["revisions"]) == monitoring.MAX_REVISIONS
    one = found["revisions"]["v0"]["features"]["$.x.plan"]
    assert len(one["categories"]) <= 65
    assert sum(one["categories"].values()) == 100
    assert len(made) < 200_000


def spool_in(directory: Path) -> Spool:
    return Spool(
        directory,
        parquet.convert,
        sketch=monitoring.sketch,
        max_bytes=1024**2,
        max_age_s=60.0,
    )


def fill(directory: Path) -> Spool:
    spool = spool_in(directory)
    for number in range(3):
        line = row(number, {"age": 30, "plan": "pro"})
        spool.append(line, tenant="t-1", function="f-1", at_s=0.0, keep_s=3600)
    return spool


def ready(directory: Path) -> list[str]:
    return sorted(path.suffix for path in (directory / "ready").iterdir())


@pytest.mark.parametrize("step", ["before", "between", "after"])
def test_a_writer_killed_at_any_step_leaves_each_file_once(tmp_path: Path, step: str) -> None:
    lines = [row(number, {"age": 30, "plan": "pro"}) for number in range(3)]
    expected = monitoring.sketch(lines) or b""
    for name in ("open", "ready"):
        (tmp_path / name).mkdir()
    name = f"t-1~f-1~0~3600~{1:024x}"
    (tmp_path / "open" / f"{name}.ndjson").write_bytes(b"\n".join([*lines, b""]))
    if step in ("between", "after"):
        (tmp_path / "ready" / f"{name}~3.parquet").write_bytes(parquet.convert(lines)[0])
    if step == "after":
        (tmp_path / "ready" / f"{name}~3.sketch").write_bytes(expected)
    spool = spool_in(tmp_path)
    spool.recover()
    spool.close()
    assert ready(tmp_path) == [".parquet", ".sketch"]
    assert (tmp_path / "ready" / f"{name}~3.sketch").read_bytes() == expected
    assert list((tmp_path / "open").iterdir()) == []


async def test_a_sketch_is_shipped_after_its_rows(tmp_path: Path) -> None:
    fill(tmp_path).close()
    store = MemoryStore()
    shipper = PredictionShipper(tmp_path, store)
    store.answers = [PutResult(503)]  # the store is down: neither leaves
    assert not await shipper.ship()
    assert ready(tmp_path) == [".parquet", ".sketch"]
    assert await shipper.ship()
    assert ready(tmp_path) == []
    first, second = store.files.items()
    assert [first[0].rpartition(".")[2], second[0].rpartition(".")[2]] == ["parquet", "sketch"]
    assert len(read_rows(first[1])) == 3
    assert shipper.shipped == 3
