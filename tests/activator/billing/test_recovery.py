"""kill -9 at every line: what was opened is closed once, what was submitted is run, what was
finished is delivered."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from activator.billing import journal_format
from activator.billing.journal import Journal
from activator.billing.segments import Cursor, segment_numbers, segment_path
from activator.billing.shipping import Shipper
from pilotlight.spec.pricing import price_duration
from tests.activator.billing_world import (
    RATES,
    SECOND,
    Wall,
    account,
    open_attempt,
    records_on_disk,
)
from tests.fakes.ledger import FakeLedger

ROOT = Path(__file__).parents[3]


def journal_at(directory: Path, *, wall: Wall | None = None) -> Journal:
    return Journal.open(directory, activator="a-1", sync_s=0.0, wall_ns=wall or Wall())[0]


def append_raw(directory: Path, text: bytes) -> None:
    with segment_path(directory, segment_numbers(directory)[-1]).open("ab") as f:
        f.write(text)


def begin(journal: Journal, call: str, *, at_s: float, books: Any) -> Any:
    at_ns = int(at_s * SECOND)
    return open_attempt(
        books, call=call, start_kind="FORK", queued_ms=4, start_ms=5, now_ns=at_ns, at_ns=at_ns
    )


def end(ticket: Any, *, at_s: float, books: Any) -> None:
    books.close(
        ticket, status=200, outcome="ok", now_ns=int(at_s * SECOND), at_ns=int(at_s * SECOND)
    )


def test_an_open_call_is_closed_at_the_last_proof_of_life(tmp_path: Path) -> None:
    wall = Wall(1_000 * SECOND)
    journal = journal_at(tmp_path, wall=wall)
    begin(journal, "c", at_s=1001, books=account(journal))
    wall.now_ns = 1004 * SECOND
    journal.heartbeat()
    journal.abandon()
    wall.now_ns = 9_000 * SECOND
    journal, recovered = Journal.open(tmp_path, activator="a-1", wall_ns=wall)
    [record] = recovered.lost
    assert (record.id, record.outcome, record.start_kind, record.key) == (
        "c/1",
        "lost",
        "FORK",
        "k",
    )
    assert (record.queued_ms, record.start_ms, record.exec_ms, record.billed_ns) == (
        4,
        5,
        3000,
        3 * SECOND,
    )
    assert records_on_disk(tmp_path) == [record.to_json()]
    journal.abandon()
    assert Journal.open(tmp_path, activator="a-1", wall_ns=wall)[1].lost == (), "and only once"


def test_lost_calls_share_their_instance_exactly_as_living_ones_do(tmp_path: Path) -> None:
    journal = journal_at(tmp_path, wall=Wall())
    books, other = account(journal, "i-1"), account(journal, "i-2")
    begin(journal, "a", at_s=1000, books=books)
    ticket = begin(journal, "b", at_s=1010, books=books)  # a alone: 10 s
    begin(journal, "c", at_s=1014, books=books)  # a, b: 2 s each
    end(ticket, at_s=1020, books=books)  # a, b, c: 2 s each
    begin(journal, "z", at_s=1030, books=other)  # a, c: 5 s each, and z says that we lived
    journal.abandon()
    _, recovered = Journal.open(tmp_path, activator="a-1", wall_ns=Wall(5_000 * SECOND))
    billed = {record.call: record.billed_ns / SECOND for record in recovered.lost}
    assert billed == {"a": 19.0, "c": 7.0, "z": 0.0}
    closed = next(r for r in records_on_disk(tmp_path) if r["call"] == "b")
    assert billed["a"] + billed["c"] + closed["billed_ns"] / SECOND == 30.0, (
        "the instance was busy for 30 s"
    )
    for record in recovered.lost:
        assert Decimal(record.cost) == price_duration(
            record.billed_ns, Decimal(record.rate_per_s), RATES.request
        )


def test_a_torn_last_line_is_left_out_and_a_damaged_one_counted(tmp_path: Path) -> None:
    journal = journal_at(tmp_path)
    books = account(journal)
    ticket = begin(journal, "c", at_s=1001, books=books)
    append_raw(tmp_path, b'\x00\x00garbage\n{"t":"O"}\n')
    end(ticket, at_s=1002, books=books)
    begin(journal, "d", at_s=1003, books=books)
    append_raw(tmp_path, b'{"t":"C","at":99999999999999,"u":{"id":"d/1","outc')
    journal.abandon()
    journal, recovered = Journal.open(tmp_path, activator="a-1", wall_ns=Wall())
    assert [r.id for r in recovered.lost] == ["d/1"]
    assert journal.statistics().damaged_lines == 2
    assert [r["id"] for r in records_on_disk(tmp_path)] == ["c/1", "d/1"]
    journal.close()


async def test_submitted_calls_come_back_with_their_attempts(tmp_path: Path) -> None:
    journal = journal_at(tmp_path)
    for name in ("run", "wait", "done", "told"):
        await submit(journal, name)
    begin(journal, "run", at_s=1001, books=account(journal))
    journal.finish("done", {"status": 200})
    journal.delete_call("told")
    journal.abandon()
    journal, recovered = Journal.open(tmp_path, activator="a-1", wall_ns=Wall())
    assert [(h.id, h.attempts) for h in recovered.unfinished] == [("run", 1), ("wait", 0)]
    assert [h.id for h in recovered.undelivered] == ["done"]
    assert journal.payload("wait") == {"name": "wait"}
    assert journal.payload("done") == {"status": 200}
    assert [r.id for r in recovered.lost] == ["run/1"], (
        "its lost attempt is billed, and the next one is number 2"
    )
    journal.close()


async def submit(journal: Journal, name: str) -> None:
    task = asyncio.create_task(journal.submit(name, {"name": name}))
    await asyncio.sleep(0)
    await journal.sync()
    await task


def test_a_recovery_that_dies_is_simply_done_again(tmp_path: Path) -> None:
    wall = Wall()
    journal = journal_at(tmp_path / "a", wall=wall)
    books = account(journal)
    for n in range(5):
        begin(journal, f"c{n}", at_s=1001, books=books)
    journal.abandon()
    wall.pass_s(1000)
    Journal.open(tmp_path / "a", activator="a-1", wall_ns=wall)[0].abandon()
    whole = segment_path(tmp_path / "a", 2).read_bytes()
    want = {record["id"]: record for record in records_on_disk(tmp_path / "a")}
    assert len(want) == 5
    for cut in range(0, len(whole), 97):
        copy = tmp_path / f"cut-{cut}"
        shutil.copytree(tmp_path / "a", copy)
        os.truncate(segment_path(copy, 2), cut)
        wall.pass_s(1)
        Journal.open(copy, activator="a-1", wall_ns=wall)[0].close()
        found = records_on_disk(copy)
        assert {r["id"]: r["billed_ns"] for r in found} == {
            name: r["billed_ns"] for name, r in want.items()
        }
        assert len(found) == 5, "none doubled"


CHILD = """
import asyncio, os, signal, sys, time
from pathlib import Path
from activator.billing.journal import Journal
from activator.billing.shipping import Shipper
from tests.activator.billing_world import account

directory, deadly = Path(sys.argv[1]), int(sys.argv[2])
steps = 0

def step(name):
    global steps
    steps += 1
    if steps == deadly:
        os.kill(os.getpid(), signal.SIGKILL)

def counted(call, name):
    def inner(*args, **kwargs):
        step(name + " before")
        result = call(*args, **kwargs)
        step(name + " after")
        return result
    return inner

# Every system call of the money path that changes the disk is a step, before and after.
for name in ("write", "fdatasync", "fsync", "ftruncate"):
    setattr(os, name, counted(getattr(os, name), name))
Path.replace = counted(Path.replace, "replace")
Path.unlink = counted(Path.unlink, "unlink")

class Ledger:
    async def accept(self, records):
        with (directory / "ledger").open("ab") as f:
            f.write(b"".join(r + b"\\n" for r in records))
        return {}

def say(word):
    with (directory / "told").open("a") as f:
        f.write(word + "\\n")

async def main():
    journal, recovered = Journal.open(directory, activator="a-1", sync_s=0, segment_bytes=1500)
    shipper = Shipper(journal, Ledger())
    books = account(journal)
    for n in range(int(sys.argv[3])):
        now = time.monotonic_ns()
        tickets = []
        for name in (f"x{n}", f"y{n}"):
            tickets.append(books.open(call=name, attempt=1, key="k", method="", start_kind="WARM", queued_ms=0, start_ms=0,
                                      now_ns=now, at_ns=time.time_ns()))
            say("dispatched " + name)
        waiting = asyncio.create_task(journal.submit(f"s{n}", {"n": n}))
        await asyncio.sleep(0)
        await journal.sync()
        await waiting
        say(f"accepted s{n}")
        for ticket in tickets:
            books.close(ticket, status=200, outcome="ok", now_ns=time.monotonic_ns(), at_ns=time.time_ns())
            say("answered " + ticket.call)
        if n % 2:
            journal.finish(f"s{n}", {"status": n})
            say(f"finished s{n}")
        await shipper.flush()
        await journal.sync()
    journal.close()
    print(steps)

asyncio.run(main())
"""


def run_child(directory: Path, deadly: int) -> subprocess.CompletedProcess[str]:
    directory.mkdir()
    env = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'functions'}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.run(
        [sys.executable, "-c", CHILD, str(directory), str(deadly), "4"],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def said(directory: Path) -> dict[str, set[str]]:
    path = directory / "told"
    words: dict[str, set[str]] = {
        "dispatched": set(),
        "answered": set(),
        "accepted": set(),
        "finished": set(),
    }
    for text in path.read_text().splitlines() if path.exists() else []:
        verb, name = text.split()
        words[verb].add(name)
    return words


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_killed_at_any_step_no_record_is_lost_or_doubled(tmp_path: Path) -> None:
    whole = run_child(tmp_path / "whole", -1)
    assert whole.returncode == 0, whole.stderr
    steps = int(whole.stdout)
    assert steps > 60
    chosen = range(1, steps + 1, max(1, steps // 40))
    for deadly in chosen:
        directory = tmp_path / f"kill-{deadly}"
        dead = run_child(directory, deadly)
        assert dead.returncode == -signal.SIGKILL, (deadly, dead.stderr)
        await assert_nothing_lost(directory)


async def assert_nothing_lost(directory: Path) -> None:
    told = said(directory)
    ledger = FakeLedger()
    arrived = (
        (directory / "ledger").read_bytes().splitlines() if (directory / "ledger").exists() else []
    )
    await ledger.accept(arrived)
    journal, recovered = Journal.open(directory, activator="a-1")
    await Shipper(journal, ledger).flush()
    calls = Counter(record["call"] for record in ledger.records.values())
    assert set(calls.values()) <= {1}
    assert told["dispatched"] <= calls.keys(), "whatever was dispatched is billed"
    for name in told["answered"]:
        assert ledger.records[f"{name}/1"]["outcome"] == "ok", (
            "an answered call is never billed as lost"
        )
    held = {h.id for h in recovered.unfinished} | {h.id for h in recovered.undelivered}
    assert told["accepted"] <= held, "whoever was told 202 is still known"
    assert told["finished"] <= {h.id for h in recovered.undelivered}
    for h in (*recovered.unfinished, *recovered.undelivered):
        assert journal.payload(h.id)["status" if h.is_finished else "n"] == int(h.id[1:])
    journal.close()


def test_lines_are_what_the_table_says() -> None:
    line = journal_format.opened(
        n=1, call="c", attempt=2, start_kind="WARM", at_ns=3, queued_ms=4, start_ms=5, virtual_ns=6
    )
    assert json.loads(line) == {
        "t": "O",
        "n": 1,
        "c": "c",
        "a": 2,
        "k": "WARM",
        "at": 3,
        "q": 4,
        "s": 5,
        "v": 6,
    }
    close = journal_format.closed(b'{"id":"c/2"}', at_ns=12, virtual_ns=7)[:-1]
    assert (journal_format.record_of(close), journal_format.at_of(close)) == (b'{"id":"c/2"}', 12)
    assert journal_format.parse(b"\x00") is None
    assert journal_format.parse(b'{"x":1}') is None


def test_segments_of_an_older_life_are_kept_until_shipped(tmp_path: Path) -> None:
    journal = journal_at(tmp_path)
    books = account(journal)
    end(begin(journal, "c", at_s=1001, books=books), at_s=1002, books=books)
    journal.abandon()
    journal = journal_at(tmp_path)
    assert segment_numbers(tmp_path) == [1, 2]
    assert journal.statistics().unshipped == 1
    assert journal.shipped == Cursor()
    journal.close()
