"""What a worker reports is checked for types and sizes before shim or agent use it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from snapshotter.shim import messages, seqpacket

POINT: dict[str, Any] = {
    "threads": [],
    "phases_ms": {"boot": 1.0},
    "joins": True,
    "obstacles": [],
    "listens": [],
    "connections_inside": 0,
    "imports": {"modules": [], "ended": ""},
    "answers": {},
}
OBSTACLE = {
    "kind": "connection",
    "fd": 7,
    "what": "TCP to 10.0.0.2:443",
    "where": "app.py:3",
    "message": "close it",
}


@pytest.mark.parametrize("said", [None, [], {"made up": 1.0}, {"wake": "soon"}, {"wake": True}])
def test_phases_that_no_worker_has_name_no_metric(said: object) -> None:
    assert messages.phases_of(said) == {}


def test_phases_of_a_worker_are_milliseconds() -> None:
    assert messages.phases_of({"fork": 3, "wake": 0.5, "x" * 1000: 1}) == {"fork": 3.0, "wake": 0.5}


@pytest.mark.parametrize(
    "ms", ["-5000", "NaN", "Infinity", "-Infinity", "1" + "0" * 400, "604800001"]
)
def test_a_phase_that_is_no_duration_of_a_start_is_left_out(ms: str) -> None:
    assert messages.phases_of(json.loads(f'{{"fork": {ms}, "wake": 2.5}}')) == {"wake": 2.5}


def test_a_snapshot_point_is_as_it_was_said() -> None:
    said = {
        **POINT,
        "threads": ["loader"],
        "obstacles": [OBSTACLE],
        "listens": ["127.0.0.1:80"],
        "connections_inside": 2,
        "imports": {
            "modules": [["torch", 3.5, []], ["torch.nn", 0.0, [["numpy", 1.5], ["yaml", 0.5]]]],
            "ended": "it is over",
        },
        "answers": {"embed": ["00ff", "list"]},
    }
    assert messages.point_of({**said, "event": "snapshot_point", "more": "x"}) == said


def test_what_a_snapshot_point_leaves_out_is_empty() -> None:
    assert messages.point_of({"threads": []}) == {**POINT, "phases_ms": {}, "joins": False}


def test_a_list_of_imports_ends_at_what_is_no_module_name() -> None:
    for name in ("os; import sys", "a" * 200, "..", "", "torch.nn.\n"):
        modules = [["torch", 1.0], [name, 1.0], ["numpy", 1.0]]
        point = messages.point_of({"threads": [], "imports": {"modules": modules}})
        assert point["imports"]["modules"] == [["torch", 1.0, []]]
        modules = [["torch", 1.0, [["yaml", 0.5], [name, 0.5], ["numpy", 0.5]]]]
        point = messages.point_of({"threads": [], "imports": {"modules": modules}})
        assert point["imports"]["modules"] == [["torch", 1.0, [["yaml", 0.5]]]]


def test_imports_and_their_parts_have_one_bound() -> None:
    modules = [[f"m{n}", 1.0, [["part", 0.5]] * 99] for n in range(6)]
    point = messages.point_of({"threads": [], "imports": {"modules": modules}})
    assert [name for name, *_ in point["imports"]["modules"]] == ["m0", "m1", "m2", "m3"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"threads": None},
        {"threads": [5]},
        {"listens": 5},
        {"listens": [[]]},
        {"obstacles": {}},
        {"obstacles": [5]},
        {"obstacles": [{"kind": []}]},
        {"obstacles": [{"fd": "3"}]},
        {"connections_inside": []},
        {"connections_inside": True},
        {"connections_inside": -1},
        {"connections_inside": 10**400},
        {"imports": []},
        {"imports": {"modules": {}}},
        {"imports": {"modules": [["torch"]]}},
        {"imports": {"modules": [["torch", -1]]}},
        {"imports": {"modules": [[5, 1.0]]}},
        {"imports": {"modules": [["torch", 1.0, 5]]}},
        {"imports": {"modules": [["torch", 1.0, [["yaml"]]]]}},
        {"imports": {"modules": [["torch", 1.0, [["yaml", "x"]]]]}},
        {"answers": []},
        {"answers": {"go": "00"}},
        {"answers": {"go": ["00", 5]}},
    ],
)
def test_a_snapshot_point_with_values_of_other_types_is_a_value_error(
    wrong: dict[str, Any],
) -> None:
    with pytest.raises(ValueError, match=r"integer|list|string|object|descriptor"):
        messages.point_of({**POINT, **wrong})


def test_a_long_snapshot_point_is_cut_to_what_fits_into_a_message() -> None:
    point = messages.point_of(
        {
            **POINT,
            "threads": ["t" * 90] * 900,
            "obstacles": [{**OBSTACLE, "message": "m" * 9000}] * 90,
        }
    )
    assert (len(point["threads"]), len(point["obstacles"])) == (200, 24)
    assert len(seqpacket.encode(point)) < seqpacket.MAX_DATAGRAM_BYTES / 2


def test_a_snapshot_point_that_is_long_after_all_is_refused() -> None:
    with pytest.raises(ValueError, match="bytes"):
        messages.point_of({**POINT, "threads": ["\U0001f525" * 64] * 200})


@pytest.mark.parametrize("wrong", [{"ok": 1}, {"error": "no"}, {"notes": 5}, {"notes": [5]}])
def test_a_proof_with_values_of_other_types_is_a_value_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"validation|list|string"):
        messages.proved_of({"ok": True, "error": None, "notes": [], "phases_ms": {}, **wrong})


def test_the_error_of_a_proof_is_cut() -> None:
    proved = messages.proved_of(
        {"ok": False, "error": {"type": "T", "message": "m" * 90_000, "pad": [[]]}, "phases_ms": {}}
    )
    assert proved["error"] == {"type": "T", "message": "m" * 8192}


@pytest.mark.parametrize("status", [None, "0", 0x7F, -1, 1 << 16, 10**400, True])
def test_what_is_no_wait_status_is_a_value_error(status: object) -> None:
    with pytest.raises(ValueError, match="status"):
        messages.status_of(status)
