"""The benchmarks' own arithmetic: a number that is computed wrongly is worse than none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.burst import Slot, lateness_s
from benchmarks.harness import Report, Row, interleave, options, paired_ratio, percentile
from benchmarks.load import LoadFailed, _from_log
from benchmarks.stack import variant

ROOT = Path(__file__).parent.parent


def _slot(where: str, began_s: float, ended_s: float) -> Slot:
    return Slot(sent_s=0, began_s=began_s, ended_s=ended_s, answered_s=ended_s, where=where, start="FORK")


@pytest.mark.parametrize("q,expected", [(0, 1.0), (50, 2.5), (99, 3.97), (100, 4.0)])
def test_percentiles_are_linear_between_ranks(q: float, expected: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], q) == pytest.approx(expected)


def test_nothing_has_no_percentile() -> None:
    with pytest.raises(ValueError, match="no samples"):
        percentile([], 50)


def test_arms_take_turns_in_alternating_order() -> None:
    order: list[str] = []

    interleave({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3)

    assert "".join(order) == "abbaab"


def test_a_paired_ratio_is_the_median_of_the_rounds_with_an_interval_around_it() -> None:
    ratio = paired_ratio([10, 30, 20], [20, 30, 20])

    assert ratio.value == 1
    assert ratio.low <= ratio.value <= ratio.high


def test_the_json_file_has_machine_rows_and_ratios(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("title")
    report.rows.append(Row.of("embed/FORK", "ms", [1.0, 3.0], note="not in the file"))
    report.ratio("embed_cold_over_fork", 100.0)

    report.finish(options("", ["--json", str(tmp_path / "out.json")]))

    told = json.loads((tmp_path / "out.json").read_text())
    assert told["rows"] == [{"name": "embed/FORK", "unit": "ms", "n": 2, "p50": 2.0, "p99": pytest.approx(2.98)}]
    assert told["ratios"] == {"embed_cold_over_fork": 100.0}
    assert {"cpu", "cores", "memory_gib", "kernel", "python"} <= set(told["machine"])
    assert "embed_cold_over_fork = 100" in capsys.readouterr().out


def test_a_load_with_failed_requests_is_no_measurement(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("1000\t200\t500\n2000\t503\t10\n")

    with pytest.raises(LoadFailed, match="1 of 2 requests failed"):
        _from_log(log, where="socket")


def test_throughput_runs_from_the_first_request_to_the_last_answer(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("1000000\t200\t1000\n1499000\t200\t1000\n")

    assert _from_log(log, where="socket").rps == pytest.approx(4.0)


def test_calls_that_follow_each_other_closely_are_not_late() -> None:
    slots = [_slot("a", 0.0, 0.1), _slot("b", 0.05, 0.15), _slot("a", 0.1, 0.2), _slot("b", 0.15, 0.25)]

    assert lateness_s(slots) == pytest.approx([0, 0, 0, 0])


def test_a_call_that_waits_while_an_instance_is_idle_is_late() -> None:
    slots = [_slot("a", 0.0, 0.1), _slot("b", 0.0, 0.1), _slot("a", 0.1, 0.2), _slot("a", 0.2, 0.3)]

    assert lateness_s(slots)[3] == pytest.approx(0.1)


def test_an_example_can_be_measured_under_another_name_and_other_options() -> None:
    source = (ROOT / "examples" / "embed.py").read_text()

    changed = variant(source, app="bench-embed", scaledown_window=2, snapshot=False)

    assert 'pilotlight.App("bench-embed"' in changed
    assert "@app.cls(snapshot=False, scaledown_window=2, weights=minilm" in changed
    assert "scaledown_window=60" not in changed
    compile(changed, "embed.py", "exec")


def test_a_source_without_an_app_cannot_be_measured_under_another_name() -> None:
    with pytest.raises(ValueError, match="0 apps"):
        variant("x = 1\n", app="other")
