"""Which rows of a log, and of a file, can be replayed, and as what."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from activator.prediction_log import parquet
from activator.prediction_log.writer import make_row
from pilotlight.cli.core.prediction_query import open_predictions
from pilotlight.errors import InvalidInput
from pilotlight.replay.rows import (
    LogSelection,
    Reason,
    ReplayRow,
    SkippedRow,
    read_file,
    read_log,
    row_of_log,
    take,
)
from pilotlight.spec.prediction_log import Content, PredictionLogSpec
from tests.activator.prediction_log.rows import logged

KEY = b"k" * 32
BEGIN_NS = 1_800_000_000 * 10**9


def parquet_file(directory: Path, *lines: bytes) -> list[Path]:
    path = directory / "1.parquet"
    path.write_bytes(parquet.convert(lines)[0])
    return [path]


def line(number: int, **changes: Any) -> bytes:
    facts: dict[str, Any] = {
        name: changes.pop(name) for name in ("version", "status", "method") if name in changes
    }
    call = logged(number, at_ns=BEGIN_NS + number * 10**9, **changes)
    call.facts.update(facts)
    return make_row(call, KEY)


def replayed(directory: Path, *lines: bytes, **selected: Any) -> list[ReplayRow | SkippedRow]:
    selection = LogSelection(**{"since": 0.0, **selected})
    with open_predictions(parquet_file(directory, *lines), directory) as database:
        total, rows = read_log(database, selection)
        found = list(rows)
    assert total == len(found)
    return found


def test_rows_are_read_from_the_files_the_newest_first(tmp_path: Path) -> None:
    rows = replayed(tmp_path, line(1, body=b'{"x":1}', answer=b"[1.5]"), line(2, method="rate"))
    new, old = rows
    assert isinstance(new, ReplayRow)
    assert isinstance(old, ReplayRow)
    assert (new.id, new.method, old.id) == ("req-2", "rate", "req-1")
    assert (json.loads(old.arguments), old.output) == ({"x": 1}, [1.5])
    assert (old.version, old.latency_ms, old.exec_ms, old.currency) == ("v1", 1.5, 1.5, "EUR")
    assert str(old.cost) == "0.000001234567"


def test_rows_are_selected_by_time_and_by_revision(tmp_path: Path) -> None:
    lines = [line(1, version="v1-aa"), line(2, version="v10-bb"), line(3, version="v1-aa")]
    begin = BEGIN_NS / 1e9
    by = {
        "v1": replayed(tmp_path, *lines, version="v1"),
        "whole": replayed(tmp_path, *lines, version="v10-bb"),
        "part": replayed(tmp_path, *lines, version="v1-a"),
        "until": replayed(tmp_path, *lines, since=begin + 2, until=begin + 3),
    }
    ids = {name: [row.id for row in rows] for name, rows in by.items()}
    assert ids == {"v1": ["req-3", "req-1"], "whole": ["req-2"], "part": [], "until": ["req-2"]}


def test_a_sample_has_the_same_rows_each_time(tmp_path: Path) -> None:
    lines = [line(number) for number in range(200)]
    once, again = ([row.id for row in replayed(tmp_path, *lines, sample=0.25)] for _ in range(2))
    assert once == again
    assert 20 < len(once) < 80
    more = [row.id for row in replayed(tmp_path, *lines, sample=0.5)]
    assert set(once) < set(more)
    assert replayed(tmp_path, *lines, sample=0.0) == []


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"status": 500}, Reason.FAILED),
        ({"body": b"\x80pickle"}, Reason.INPUT_NOT_JSON),
        ({"answer": b"\x80pickle"}, Reason.OUTPUT_NOT_JSON),
        ({"terms": PredictionLogSpec(sample=1.0, outputs=Content.FULL)}, Reason.NO_INPUT),
        ({"terms": PredictionLogSpec(sample=1.0, inputs=Content.FULL)}, Reason.NO_OUTPUT),
        (
            {
                "terms": PredictionLogSpec(
                    sample=1.0, inputs=Content.FULL, outputs=Content.FULL, scrub=("$.x",)
                )
            },
            Reason.SCRUBBED_INPUT,
        ),
        (
            {
                "body": b"[]",
                "terms": PredictionLogSpec(
                    sample=1.0, inputs=Content.FULL, outputs=Content.FULL, scrub=("$",)
                ),
            },
            Reason.SCRUBBED_INPUT,
        ),
    ],
)
def test_a_row_without_all_that_is_compared_is_skipped(
    tmp_path: Path, changes: Mapping[str, Any], reason: Reason
) -> None:
    assert replayed(tmp_path, line(1, **changes)) == [SkippedRow("req-1", reason)]


def a_row(**changes: Any) -> dict[str, Any]:
    return {
        "request_id": "req-1",
        "method": "",
        "version": "v1",
        "status": 200,
        "degraded": "",
        "input": '{"x":1}',
        "output": "2",
        "latency_ms": 1.0,
        "exec_ms": 1.0,
        "cost": None,
        "currency": "EUR",
        "has_json_input": True,
        "has_json_output": True,
        **changes,
    }


def test_degraded_and_wholly_scrubbed_answers_are_skipped() -> None:
    degraded = row_of_log(a_row(degraded="features=stale"))
    scrubbed = row_of_log(a_row(output='"[scrubbed]"'))
    assert (degraded, scrubbed) == (
        SkippedRow("req-1", Reason.DEGRADED),
        SkippedRow("req-1", Reason.SCRUBBED_OUTPUT),
    )


def test_scrubbed_arguments_are_sent_if_asked_for() -> None:
    row = row_of_log(a_row(input='{"x":["[scrubbed]"]}'), with_scrubbed=True)
    assert isinstance(row, ReplayRow)
    assert row.arguments == b'{"x":["[scrubbed]"]}'


def test_text_that_mentions_scrubbing_is_not_scrubbed() -> None:
    assert isinstance(row_of_log(a_row(input=r'{"x":"say \"[scrubbed]\""}')), ReplayRow)


def test_arguments_beyond_the_named_ones_go_by_position(tmp_path: Path) -> None:
    (row,) = replayed(tmp_path, line(1, body=b"[1, 2, 3]"))  # def f(x, *rest)
    assert isinstance(row, ReplayRow)
    assert json.loads(row.arguments) == [1, 2, 3]


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 5000, '{"a"'])
def test_a_row_that_cannot_be_parsed_is_skipped(text: str) -> None:
    assert row_of_log(a_row(input=text)) == SkippedRow("req-1", Reason.INPUT_NOT_JSON)


def test_lines_of_a_file_are_rows(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    path.write_text(
        '{"input": {"x": "é"}, "output": NaN}\n\n'
        '{"request_id": "req-7", "method": "rate", "input": [1], "output": {"a": 1}}\n'
        '{"input": {"x": "[scrubbed]"}, "output": 1}\n'
    )
    first, second, third = read_file(path)
    assert first == ReplayRow(id="line 1", method="", arguments='{"x": "é"}'.encode(), output=None)
    assert second == ReplayRow(id="req-7", method="rate", arguments=b"[1]", output={"a": 1})
    assert third == SkippedRow("line 4", Reason.SCRUBBED_INPUT)
    assert isinstance(list(read_file(path, with_scrubbed=True))[2], ReplayRow)


@pytest.mark.parametrize(
    "text",
    [
        '{"input": 1}',
        "[]",
        "{",
        '{"input": 1, "output": 2, "method": 3}',
        '{"input": "\\ud800", "output": 1}',
        '{"input": ' + "[" * 100_000,
        '"' + "x" * (16 * 1024**2) + '"',
    ],
    ids=["output", "list", "json", "method", "surrogate", "depth", "length"],
)
def test_a_line_that_is_no_row_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "calls.jsonl"
    path.write_text(f'{{"input": 1, "output": 2}}\n{text}\n')
    with pytest.raises(InvalidInput, match="line 2"):
        list(read_file(path))


def test_a_directory_is_no_file_of_rows(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="directory"):
        list(read_file(tmp_path))


def test_skipped_rows_do_not_count_for_the_limit() -> None:
    call = row_of_log(a_row())
    skipped = SkippedRow("req-2", Reason.FAILED)
    assert list(take([skipped, call, skipped, call, call], 2)) == [skipped, call, skipped, call]
    assert list(take([call], 5)) == [call]
