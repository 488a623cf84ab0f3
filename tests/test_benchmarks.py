"""The benchmarks' own arithmetic: a number that is computed wrongly is worse than none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import admission, ingest, ledger, loading, neighbours, page_cache, tenancy
from benchmarks.burst import Slot, lateness_s
from benchmarks.checkpoints import ONE_GB, TINY, checkpoint
from benchmarks.harness import Report, Row, interleave, options, paired_ratio, percentile
from benchmarks.load import LoadFailed, Request, _from_log
from benchmarks.orders import OrderFailed, hired
from benchmarks.origin import sum_sent
from benchmarks.stack import variant
from pilotlight.controller.billing import usage_ingestion
from pilotlight.controller.database.store import Store
from weight_cache.tensors.header import read_tensors

ROOT = Path(__file__).parent.parent


def _slot(where: str, began_s: float, ended_s: float) -> Slot:
    return Slot(
        sent_s=0, began_s=began_s, ended_s=ended_s, answered_s=ended_s, where=where, start="FORK"
    )


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


def test_the_json_file_has_machine_rows_and_ratios(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report("title")
    report.rows.append(Row.of("embed/FORK", "ms", [1.0, 3.0], note="not in the file"))
    report.ratio("embed_cold_over_fork", 100.0)

    report.finish(options("", ["--json", str(tmp_path / "out.json")]))

    told = json.loads((tmp_path / "out.json").read_text())
    assert told["rows"] == [
        {"name": "embed/FORK", "unit": "ms", "n": 2, "p50": 2.0, "p99": pytest.approx(2.98)}
    ]
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
    slots = [
        _slot("a", 0.0, 0.1),
        _slot("b", 0.05, 0.15),
        _slot("a", 0.1, 0.2),
        _slot("b", 0.15, 0.25),
    ]

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


def test_a_checkpoint_is_a_safetensors_file_of_its_shape(tmp_path: Path) -> None:
    made = checkpoint(TINY, home=tmp_path)

    tensors = read_tensors(made.file)

    assert [(t.name, t.shape) for t in tensors] == list(TINY.tensors())
    assert tensors[0].name == made.first
    assert [p.name for p in made.directory.iterdir()] == ["model.safetensors"]


def test_checkpoints_of_another_seed_have_other_bytes(tmp_path: Path) -> None:
    assert (
        checkpoint(TINY, home=tmp_path).file.read_bytes()
        != checkpoint(TINY, seed=1, home=tmp_path).file.read_bytes()
    )


def test_the_origin_counts_bytes_of_answered_gets_of_the_paths_asked_for() -> None:
    log = (
        "GET 206 100 /bench/aa/a\nHEAD 200 0 /bench/aa/a\nGET 200 7 /bench/bb/b\nGET 404 153 "
        "/bench/barrier\n"
    )

    assert sum_sent(log) == 107
    assert sum_sent(log, {"/bench/aa/a"}) == 100


def test_a_file_that_was_dropped_is_not_in_memory_until_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(4 * 1024**2))
    if page_cache.is_on_tmpfs(file):
        with pytest.raises(page_cache.StillCached, match="lies on a tmpfs: set TMPDIR"):
            page_cache.drop([file], within_s=0.0)
        return

    page_cache.drop([file])
    dropped = page_cache.resident_share(file)
    page_cache.warm([file])

    assert dropped == 0
    assert page_cache.resident_share(file) == 1


def test_a_file_that_somebody_has_mapped_cannot_be_dropped_unnoticed(tmp_path: Path) -> None:
    import mmap

    file = tmp_path / "file"
    file.write_bytes(bytes(1024**2))
    with file.open("rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        sum(mapping[:: mmap.PAGESIZE])

        with pytest.raises(page_cache.StillCached, match="100% stayed"):
            page_cache.drop([file], within_s=0)


SCRIPT = """
import json, sys
for line in sys.stdin:
    order = json.loads(line)
    print("noise")
    print("answer " + json.dumps({"error": "cannot"} if order.get("fail") else order), flush=True)
"""


def test_a_script_does_what_it_is_told_and_says_what_it_cannot() -> None:
    with hired(sys.executable, "-c", SCRIPT) as worker:
        assert worker.ask(n=1) == {"n": 1}
        with pytest.raises(OrderFailed, match="cannot"):
            worker.ask(fail=True)
        assert worker.ask(n=2) == {"n": 2}


def test_ingest_is_compared_with_the_fastest_peer_durable_and_not() -> None:
    report = Report("title")
    took = {
        ingest.OURS: [ingest.Took(transfer_s=1.0, durable_s=1.0)],
        ingest.DISK: [ingest.Took(transfer_s=0.1, durable_s=0.2)],
        "slow": [ingest.Took(transfer_s=4.0, durable_s=5.0)],
        "fast until fsync": [ingest.Took(transfer_s=0.5, durable_s=2.0)],
    }

    ingest.write(report, ONE_GB, 10**9, took, suffix="")

    assert report.ratios == {"ingest_vs_best_peer": 2.0, "ingest_vs_best_peer_without_fsync": 0.5}
    assert {row.name: row.p50 for row in report.rows}[
        "ingest 1GB: fast until fsync, no fsync"
    ] == 2.0


def test_loading_has_its_ratios_per_state_and_size(tmp_path: Path) -> None:
    report = Report("title")
    took = {
        "load_file": [{"first_s": 0.1, "loaded_s": 0.1, "total_s": 0.2}],
        "mapped": [{"first_s": 0.001, "loaded_s": 0.001, "total_s": 0.1}],
        "pool": [{"first_s": 0.1, "loaded_s": 0.1, "total_s": 0.1, "pool_s": 1.0}],
        "preadv_1": [{"loaded_s": 0.2}],
        "preadv_cores": [{"loaded_s": 0.09}],
    }

    loading.write(report, checkpoint(TINY, home=tmp_path), "cold", took, suffix="_4gb")

    assert report.ratios == pytest.approx(
        {
            "first_tensor_load_file_over_mapped_4gb": 100,
            "total_mapped_over_load_file_4gb": 0.5,
            "pool_vs_preadv_cold_4gb": 0.9,
        }
    )


_ENDED = """
import os, signal
from benchmarks import harness
harness.options("any")
try:
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()
finally:
    print("stopped what it started")
"""


def test_a_benchmark_that_is_terminated_stops_what_it_started() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _ENDED],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert ended.stdout == "stopped what it started\n"
    assert ended.stderr.endswith("KeyboardInterrupt\n")


def test_an_admission_is_timed_with_and_without_its_headers_and_when_refused() -> None:
    report = Report("title")

    admission.in_process(report, batches=1)

    assert [row.name for row in report.rows] == [
        "admission in the process: 3 x (rate, at once)",
        "... its RateLimit headers",
        "... refused",
    ]
    assert all(0 < row.p50 < 1000 for row in report.rows)


def test_an_admission_in_redis_is_one_round_trip(redis_url: str) -> None:
    report = Report("title")

    admission.in_redis(report, url=redis_url, batches=2)

    alone, trips, together, shared = report.rows
    # the store tells that its member is alive once a second, however many calls there are
    assert 1 <= trips.p50 < 1.1
    assert shared.p50 <= 1
    assert alone.n == together.n + 100 % admission.CALLERS


def test_a_neighbours_cost_is_the_ratio_of_all_calls_of_both_arms() -> None:
    report = Report("title")
    alone = [[Request(sent_at=0, milliseconds=10.0)], [Request(sent_at=0, milliseconds=10.0)]]
    beside = [[Request(sent_at=0, milliseconds=11.0)], [Request(sent_at=0, milliseconds=11.0)]]

    neighbours.write(
        report,
        "work",
        alone,
        beside,
        beside="a flood",
        key="victim_p99_flooded_over_alone",
        note="",
    )

    assert report.ratios == pytest.approx({"victim_p99_flooded_over_alone": 1.1})
    assert [(row.name, row.p99) for row in report.rows] == [
        ("work, alone", 10.0),
        ("work, beside a flood", 11.0),
    ]


def test_made_up_records_are_ones_that_the_ledger_takes(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'ledger.db'}", clock=lambda: 1e9)
    store.migrate()
    try:
        for batch in ledger.batches("t-1", 1500):
            with store.write() as write:
                added, _ = usage_ingestion.ingest_usage(write, batch)
            assert (added.new, len(added.conflicts)) == (len(batch), 0)
    finally:
        store.close()


def test_a_quick_run_is_smaller_in_every_size() -> None:
    for name in tenancy.Sizes.__dataclass_fields__:
        assert getattr(tenancy.QUICK, name) < getattr(tenancy.FULL, name), name
