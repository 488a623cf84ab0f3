"""What deploy says of each function."""

from __future__ import annotations

from typing import Any

import pytest

from pilotlight.cli.commands.apps.start_report import StartReport, summarize_start

TEMPLATE = {"phases_ms": {"boot": 100.0, "enter": 5300.0}, "threads": []}
READY = {
    "state": "READY",
    "id": "sn-1",
    "cold_ms": 5400.0,
    "restore_ms": 120.0,
    "image_bytes": 61_200_000,
    "heap_bytes": 40_000_000,
}


def proof(snapshot: Any = None, **body: Any) -> StartReport:
    whole = {
        "template": TEMPLATE,
        "start_kind": "FORK",
        "start_ms": 21.0,
        "snapshot": snapshot,
        **body,
    }
    return summarize_start("embed", whole, waited_ms=9)


def test_it_says_how_cold_how_restored_and_how_forked() -> None:
    assert str(proof()) == "cold 5.40 s → fork 21 ms"
    assert str(proof(READY)) == "cold 5.40 s → restore 120 ms → fork 21 ms; image 61 MB"
    assert list(proof(READY).remarks()) == []


def test_a_template_that_was_restored_itself_says_nothing_about_cold() -> None:
    again = proof(
        READY | {"cold_ms": 5000.0},
        template={"phases_ms": {"slot": 3.0, "restore": 90.0}, "threads": []},
    )
    assert str(again).startswith("cold 5.00 s → restore")


@pytest.mark.parametrize(
    "snapshot, how",
    [(READY, "each instance is restored from its snapshot"), (None, "each start is COLD")],
)
def test_threads_are_named_with_what_follows_from_them(snapshot: Any, how: str) -> None:
    threaded = proof(
        snapshot, template={"phases_ms": {"boot": 100.0}, "threads": ["tqdm"]}, start_kind="WAKE"
    )
    assert list(threaded.remarks()) == [
        f"it cannot be forked, because it started threads or processes: tqdm; {how}"
    ]
    assert threaded.fork_ms is None


def test_each_refusal_is_named_with_its_line() -> None:
    reasons = [
        {
            "kind": "connection",
            "fd": 7,
            "what": "TCP to 10.0.0.2:443",
            "where": "app.py:12",
            "message": "close the connection, or open it in enter(snap=False)",
        },
        {
            "kind": "secret",
            "what": "DB_URL",
            "where": None,
            "message": "DB_URL is a secret: read it in enter(snap=False)",
        },
    ]
    told = list(proof({"refused": reasons}).remarks())
    assert told == [
        "no snapshot: close the connection, or open it in enter(snap=False) (app.py:12)",
        "no snapshot: DB_URL is a secret: read it in enter(snap=False)",
    ]
    assert str(proof({"refused": reasons})) == "cold 5.40 s → fork 21 ms"


@pytest.mark.parametrize(
    "snapshot, remark",
    [
        ({"off": "no CRIU here"}, "no snapshot: no CRIU here"),
        (
            {"off": "no snapshot of f-1@v1-a: needs root: run it as root"},
            "no snapshot: needs root: run it as root",
        ),
        ({"failed": "disk full"}, "no snapshot: disk full; it starts by FORK and COLD"),
        (
            {**READY, "state": "QUARANTINED", "reason": "another answer"},
            "its snapshot sn-1 is quarantined: another answer; it starts by FORK and COLD",
        ),
    ],
)
def test_what_else_keeps_it_from_being_restored(snapshot: Any, remark: str) -> None:
    assert (list(proof(snapshot).remarks()), proof(snapshot).restore_ms) == ([remark], None)


def test_a_large_heap_is_said_with_its_reason() -> None:
    heavy = proof(
        {
            **READY,
            "heap_bytes": 1_310_000_000,
            "heap_why": "the image carries 1,310 MB of memory: 1,300 MB large regions",
        }
    )
    (remark,) = heavy.remarks()
    assert remark == "the image carries 1,310 MB of memory: 1,300 MB large regions"
    (unexplained,) = proof({**READY, "heap_bytes": 1_310_000_000}).remarks()
    assert "pilotlight.Weights" in unexplained
