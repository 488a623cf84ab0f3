"""What a report of a replay counts and shows."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

from pilotlight.replay.report import (
    MAX_EXAMPLES,
    MAX_PATHS,
    SHOWN_PATHS,
    ReplayReport,
    describe,
    describe_outcome,
)
from pilotlight.replay.rows import Reason, ReplayRow, SkippedRow
from pilotlight.replay.runner import Comparison, FailedCall, Outcome, ReplayedCall
from pilotlight.validation.json_compare import Change, Difference


def row(number: int = 1, output: Any = None) -> ReplayRow:
    return ReplayRow(
        id=f"req-{number}",
        method="",
        arguments=b"{}",
        output=output,
        version="v1-aa",
        latency_ms=float(number),
        exec_ms=float(number),
        cost=Decimal("0.001"),
        currency="EUR",
    )


def answered(old: Any, new: Any, number: int = 1, exec_ms: float = 2.0) -> ReplayedCall:
    return ReplayedCall(
        row=row(number, old),
        request_id=f"req-new-{number}",
        differences=Comparison().differences(old, new),
        latency_ms=exec_ms + 1,
        exec_ms=exec_ms,
        cost=Decimal("0.002"),
    )


def test_outcomes_are_counted() -> None:
    report = ReplayReport()
    assert (report.share, report.compared) == (0.0, 0)
    for number in range(1, 8):
        report.add(answered({"p": 1.0}, {"p": 1.0}, number, exec_ms=10.0 * number))
    report.add(answered({"p": 1.0}, {"p": 0.5}, 8))
    report.add(FailedCall(row=row(9), reason="function-raised", message="boom\nTraceback: secret"))
    report.add(FailedCall(row=row(10), reason="function-raised", message="other"))
    report.add(SkippedRow("req-11", Reason.SCRUBBED_INPUT))
    found = report.to_json()
    assert {
        name: found[name] for name in ("compared", "equal", "different", "failed", "skipped")
    } == {"compared": 8, "equal": 7, "different": 1, "failed": 2, "skipped": 1}
    assert found["share"] == 0.3
    assert found["versions"] == {"v1-aa": 10}
    assert found["skipped_by"] == {"the input is scrubbed": 1}
    assert found["failures"] == {
        "function-raised": {"calls": 2, "request_id": "req-9", "message": "boom"}
    }
    assert found["ms"]["exec"] == {
        "old": {"p50": 4.0, "p95": 8.0},
        "new": {"p50": 30.0, "p95": 70.0},
    }
    assert found["cost"] == {"old": "0.008", "new": "0.016", "currency": "EUR"}
    json.dumps(found)


def test_paths_are_counted_once_for_each_row_and_the_most_frequent_come_first() -> None:
    report = ReplayReport()
    for number in range(5):
        report.add(answered({"items": [1.0, 2.0]}, {"items": [1.1, 4.0]}, number))
    report.add(answered({"label": "a"}, {"label": "b"}, 6))
    first, second = report.to_json()["paths"]
    assert (first["path"], first["rows"], first["largest"]) == ("$.items[*]", 5, 0.5)
    assert first["examples"][0] == {
        "request_id": "req-0",
        "replayed_as": "req-new-0",
        "path": "$.items[0]",
        "change": "changed",
        "old": "1.0",
        "new": "1.1",
    }
    assert len(first["examples"]) == MAX_EXAMPLES
    assert (second["path"], second["rows"], second["largest"]) == ("$.label", 1, None)


def test_a_flood_of_paths_is_bounded() -> None:
    report = ReplayReport()
    for number in range(MAX_PATHS + 5):
        report.add(answered({f"name {number}": 1}, {}))
    found = report.to_json()
    assert len(found["paths"]) == SHOWN_PATHS
    assert found["uncounted_paths"] == 5
    assert found["different"] == MAX_PATHS + 5


def test_new_values_are_shown_only_where_the_log_has_a_plain_value() -> None:
    shown = [
        describe(Difference(("a",), change, old, new))
        for change, old, new in (
            (Change.CHANGED, "x", "y" * 200),
            (Change.CHANGED, "x", {"mail": "a@b"}),
            (Change.CHANGED, {"mail": "[scrubbed]"}, "a@b"),
            (Change.CHANGED, 1, b"\x00"),
            (Change.ADDED, None, "a@b"),
            (Change.MISSING, "[scrubbed]", None),
        )
    ]
    assert [(one.get("old"), one.get("new")) for one in shown] == [
        ('"x"', '"' + "y" * 79 + "…"),
        ('"x"', "<object>"),
        ('{"mail": "[scrubbed]"}', "<string>"),
        ("1", "<not JSON>"),
        (None, "<string>"),
        ('"[scrubbed]"', None),
    ]


def test_integers_beyond_the_doubles_are_reported() -> None:
    report = ReplayReport()
    report.add(answered(10**400, 1.5))
    report.add(answered(0, 0.0))
    (path,) = report.to_json()["paths"]
    assert (path["path"], path["largest"]) == ("$", None)


def test_outcomes_are_lines_of_a_file() -> None:
    lines = [
        describe_outcome(one)
        for one in (
            answered({"p": 1}, {"p": 2}),
            answered(1, 1),
            FailedCall(row=row(), reason="shed", message="full"),
            SkippedRow("req-2", Reason.FAILED),
        )
    ]
    assert [line["result"] for line in lines] == ["different", "equal", "failed", "skipped"]
    assert lines[0]["differences"] == [{"path": "$.p", "change": "changed", "old": "1", "new": "2"}]
    assert lines[3] == {
        "request_id": "req-2",
        "result": "skipped",
        "reason": "the logged call failed",
    }


def test_halves_of_surrogate_pairs_can_be_written() -> None:
    report = ReplayReport()
    outcomes: list[Outcome] = [
        answered({"a": "x"}, {"a": "\ud800", "\udfff": 1}),
        FailedCall(row=row(), reason="function-raised", message="\ud800"),
    ]
    for one in outcomes:
        report.add(one)
    lines = [describe_outcome(one) for one in outcomes]
    text = json.dumps([report.to_json(), *lines], ensure_ascii=False)
    assert text.encode().count(b'"?"') >= 2
