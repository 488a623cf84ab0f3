"""What a report says of results whose numbers are known, and its picture."""

from __future__ import annotations

import json
from xml.etree import ElementTree as ET

import pytest

from pilotlight.loadtest.chart import draw_chart
from pilotlight.loadtest.results import Result, histogram, report, summary


def streamed(due_s: float, first_ms: float, gaps_ms: list[float]) -> Result:
    return Result(
        due_s=due_s,
        status=200,
        latency_ms=first_ms + sum(gaps_ms),
        first_ms=first_ms,
        gaps_ms=gaps_ms,
        tokens_in=5,
        tokens_out=1 + len(gaps_ms),
        start="WARM",
        cost="0.25",
    )


RESULTS = [streamed(i, first_ms=10.0 + i, gaps_ms=[2.0, 4.0]) for i in range(99)] + [
    Result(due_s=99.0, status=503),
    Result(due_s=100.0, error="connect"),
]


def test_quantiles_are_by_nearest_rank() -> None:
    values = [float(n) for n in range(1, 101)]

    found = summary(values)
    assert found is not None
    assert (found["p50"], found["p99"], found["max"]) == (50, 99, 100)
    assert summary([]) is None


def test_a_report_counts_what_was_good_and_names_what_was_not() -> None:
    found = report(RESULTS, elapsed_s=10.0, plan={"rate_per_s": 10})

    assert (found["requests"], found["good"], found["errors"]) == (
        101,
        99,
        {"503": 1, "connect": 1},
    )
    assert found["good_per_s"] == pytest.approx(9.9)
    assert (found["tokens_in"], found["tokens_out"], found["starts"]) == (495, 297, {"WARM": 99})
    assert found["cost"] == "24.75"
    assert found["ms"]["ttft"]["p50"] == 59.0
    assert found["ms"]["itl"] == {
        "n": 198,
        "mean": 3.0,
        "p50": 2.0,
        "p90": 4.0,
        "p99": 4.0,
        "max": 4.0,
    }
    json.dumps(found)


def test_a_failure_is_not_in_the_latencies_of_the_good() -> None:
    assert report(RESULTS, elapsed_s=1, plan={})["ms"]["latency"]["n"] == 99


def test_each_value_is_in_one_bucket_that_is_a_little_above_it() -> None:
    rows = histogram([1.0, 1.0, 9.9, 1000.0])

    assert [count for _, count in rows] == [2, 1, 1]
    assert all(
        end == pytest.approx(value, rel=0.13)
        for (end, _), value in zip(rows, (1.0, 9.9, 1000.0), strict=True)
    )


def test_the_picture_is_a_drawing_of_every_measure() -> None:
    text = draw_chart(
        report(RESULTS, elapsed_s=10.0, plan={"rate_per_s": 10}), title="load of <llm/assistant>"
    )

    root = ET.fromstring(text)
    curves = [element for element in root.iter() if element.tag.endswith("polyline")]
    assert len(curves) == 4
    assert "load of <llm/assistant>" in "".join(root.itertext())
    assert "2 failed" in "".join(root.itertext())


def test_a_test_without_any_answer_has_a_picture_too() -> None:
    ET.fromstring(
        draw_chart(
            report([Result(due_s=0, error="connect")], elapsed_s=1, plan={}), title="nothing"
        )
    )
