"""Import orders, the lists of environment snapshots, and what an agent remembers of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from snapshotter.environments.import_order import Imported, ImportOrder
from snapshotter.environments.records import ImportRecords
from snapshotter.types import LaunchSpec, RevisionKey

TORCH = Imported(name="torch", ms=2000.0)
AUTO = Imported(name="auto", ms=300.0)
SMALL = Imported(name="small", ms=1.0)
BERT = Imported(name="bert", ms=1500.0, parts=(("utils", 1000.0), ("layers", 400.0)))
ORDER = ImportOrder((TORCH, AUTO, SMALL, BERT))


@pytest.mark.parametrize(
    "modules, ms",
    [
        ([], 0.0),
        (["torch"], 2000.0),
        (["torch", "auto", "small", "bert"], 3801.0),
        (["torch", "auto", "small", "bert:", "utils"], 3301.0),
        (["torch", "auto", "small", "bert:", "utils", "layers"], 3701.0),
        (["auto"], None),
        (["torch", "small"], None),
        (["torch", "auto:", "utils"], None),
        (["torch", "auto", "small", "bert:", "layers"], None),
        (["torch", "auto", "small", "bert:", "utils", "layers", "more"], None),
        (["torch", "auto", "small", "bert", "more"], None),
        (["torch", "auto", "small", "bert", "more:"], None),
    ],
)
def test_a_list_saves_what_its_imports_took_where_the_order_begins_with_it(
    modules: list[str], ms: float | None
) -> None:
    assert ORDER.ms_of(modules) == ms
    assert ORDER.begins_with(modules) is (ms is not None)


def test_where_imports_differ_the_last_one_is_opened_then_that_one_then_none() -> None:
    opened = ["torch", "auto", "small", "bert:", "utils", "layers"]
    assert ORDER.shorter(ORDER.names, 1) == opened
    assert ORDER.shorter(opened, 1) == ["torch"]
    assert ORDER.shorter(ORDER.names, 3) == opened
    assert ORDER.shorter(opened, 3) == ["torch", "auto", "small"]
    assert ORDER.shorter(["torch"], 0) == []
    assert ImportOrder((BERT, SMALL)).shorter(["bert", "small"], 0) == ["bert"]


@pytest.mark.parametrize("kept", range(5))
def test_each_list_to_try_saves_less_than_the_one_before(kept: int) -> None:
    saved, modules, tried = 4000.0, ORDER.names, 0
    while modules:
        took = ORDER.ms_of(modules) or 0.0
        assert 100 <= took < saved
        saved, modules, tried = took, ORDER.shorter(modules, kept), tried + 1
    assert tried < 6


def launch(revision: str, name: str = "go") -> LaunchSpec:
    return LaunchSpec(
        revision=RevisionKey(revision),
        trust_domain="t",
        uid=20001,
        bundle="",
        image=None,
        entry={"module": "app", "qualname": name},
        memory_bytes=1,
        cpu=1.0,
        startup_timeout_s=1.0,
    )


def test_a_boot_whose_imports_were_made_ahead_forgets_no_parts(tmp_path: Path) -> None:
    records = ImportRecords(tmp_path / "imports.json")
    records.learn(launch("f-1@v1"), ORDER)
    records.learn(launch("f-1@v2"), ImportOrder.of_names(ORDER.names))
    known = records.order(RevisionKey("f-1@v3"))
    assert known is not None
    assert known.begins_with(["torch", "auto", "small", "bert:", "utils"])


def test_of_a_new_function_those_like_it_tell_which_list_saves_most(tmp_path: Path) -> None:
    records = ImportRecords(tmp_path / "imports.json")
    records.learn(launch("f-1@v1", "embed"), ORDER)
    for n in range(2, 5):
        records.learn(launch(f"f-{n}@v1", "add"), ImportOrder((TORCH,)))
    long = ORDER.names
    assert records.saving_ms(launch("f-9@v1", "embed"), long) == 3801
    assert records.saving_ms(launch("f-9@v1", "embed"), ["torch"]) == 2000
    assert records.saving_ms(launch("f-9@v1", "add"), long) < 0
    # like none of them: what suits all
    assert records.saving_ms(launch("f-9@v1", "new"), ["torch"]) == 8000
    assert records.saving_ms(launch("f-9@v1", "new"), long) == 3801 - 3 * 400


def test_a_report_of_an_older_worker_has_no_parts() -> None:
    report = {"modules": [["torch", 2.0], ["bert", 3.0, [["utils", 1.0]]]]}
    assert ImportOrder.of(report).ms_of(["torch", "bert:", "utils"]) == 3.0


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff", b"7", b"[1]", b'{"a": 1}', b'[{"image": "x"}]', b'[{"image": 1, "b": 2}]'],
)
def test_rubbish_in_the_file_of_images_switches_none_off(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "imports.json"
    file.write_bytes(content)
    assert ImportRecords(file).off == ()
