"""The journal: one line before, one after, on the disk when it says so, and no bigger than it must
be."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
from decimal import Decimal
from pathlib import Path

import pytest

from activator.billing import journal_format
from activator.billing.errors import JournalFull, JournalInUse
from activator.billing.journal import Journal
from activator.billing.segments import Cursor, segment_numbers, segment_path
from pilotlight.errors import Conflict, NotFound
from pilotlight.protocol import UsageRecord
from pilotlight.spec.pricing import price_duration
from tests.activator.billing_world import (
    SECOND,
    Wall,
    account,
    open_attempt,
    records_on_disk,
    template,
)


def journal_at(
    directory: Path, *, wall: Wall | None = None, segment_bytes: int = 64 * 1024**2
) -> Journal:
    return Journal.open(
        directory, activator="a-1", segment_bytes=segment_bytes, sync_s=0.0, wall_ns=wall or Wall()
    )[0]


def open_call(journal: Journal, call: str, *, instance: str = "i-1") -> None:
    journal.open_call(
        template(instance),
        call=call,
        attempt=1,
        start_kind="FORK",
        at_ns=1000 * SECOND,
        queued_ms=1,
        start_ms=2,
        virtual_ns=0,
    )


def test_a_call_becomes_one_complete_record(tmp_path: Path) -> None:
    journal = journal_at(tmp_path)
    books = account(journal)
    ticket = open_attempt(
        books,
        call='r"1',
        key="k-1",
        method="embed",
        start_kind="FORK",
        queued_ms=3,
        start_ms=12,
        at_ns=1000 * SECOND,
    )
    bill = books.close(
        ticket,
        status=200,
        outcome="ok",
        now_ns=SECOND // 2,
        at_ns=1000 * SECOND + SECOND // 2,
        bytes_in=10,
        bytes_out=20,
    )
    assert (bill.exec_ms, bill.billed_ns, bill.cost) == (500, SECOND // 2, "0.002001000000")
    [body] = records_on_disk(tmp_path)
    record = UsageRecord.from_json(body)
    assert (record.id, record.call, record.method, record.key, record.outcome) == (
        'r"1/1',
        'r"1',
        "embed",
        "k-1",
        "ok",
    )
    assert (record.queued_ms, record.start_ms, record.exec_ms, record.started_at) == (
        3,
        12,
        500,
        1000.0,
    )
    assert Decimal(record.cost) == price_duration(
        record.billed_ns, Decimal(record.rate_per_s), Decimal("0.000001")
    )
    unset = {
        "caller",
        "corrects",
        "note",
        "experiment",
        "arm",
        "unit",
        "degraded",
        "tokens_cached",
        "finish",
        "first_token_ms",
        "parent",
        "customer",
    }
    assert set(body) | unset == set(UsageRecord.__dataclass_fields__), (
        "nothing else is left to a default"
    )
    journal.close()


def test_idle_time_becomes_records_of_its_own_kind(tmp_path: Path) -> None:
    journal = journal_at(tmp_path)
    books = account(journal, free_ns=60 * SECOND)
    assert books.settle_idle(now_ns=60 * SECOND, at_ns=1060 * SECOND) == 0
    assert books.settle_idle(now_ns=70 * SECOND, at_ns=1070 * SECOND) == 1
    books.reserve(is_reserved=True, now_ns=70 * SECOND)
    assert books.settle_idle(now_ns=80 * SECOND, at_ns=1080 * SECOND) == 1
    idle, reserved = records_on_disk(tmp_path)
    assert (idle["kind"], idle["started_at"], idle["billed_ns"], idle["outcome"], idle["key"]) == (
        "IDLE",
        1060.0,
        10 * SECOND,
        "span",
        "",
    )
    assert (reserved["kind"], reserved["started_at"]) == ("RESERVED", 1070.0)
    assert idle["id"] != reserved["id"]
    assert Decimal(idle["cost"]) == Decimal("0.02"), "10 s at 0.004, times the idle factor of 0.5"
    journal.close()


def test_the_template_is_written_once_per_segment(tmp_path: Path) -> None:
    journal = journal_at(tmp_path)
    shared = template()
    for n in range(3):
        journal.open_call(
            shared,
            call=f"c{n}",
            attempt=1,
            start_kind="WARM",
            at_ns=1,
            queued_ms=0,
            start_ms=0,
            virtual_ns=0,
        )
    kinds = [json.loads(line)["t"] for line in segment_path(tmp_path, 1).read_bytes().splitlines()]
    assert kinds == ["J", "T", "O", "O", "O"]
    assert repr(journal).endswith("segment 1, 3 open, 0 held, 0 unshipped>")
    journal.close()


def test_an_attempt_cannot_be_open_twice_nor_closed_twice(tmp_path: Path) -> None:
    journal = journal_at(tmp_path)
    open_call(journal, "c")
    with pytest.raises(Conflict):
        open_call(journal, "c", instance="i-2")
    journal.close_call("c/1", b'{"id":"c/1"}', at_ns=5, virtual_ns=0)
    with pytest.raises(KeyError):
        journal.close_call("c/1", b'{"id":"c/1"}', at_ns=5, virtual_ns=0)
    journal.close()


def test_a_directory_has_one_owner(tmp_path: Path) -> None:
    journal = journal_at(tmp_path)
    with pytest.raises(JournalInUse, match=r"belongs to process \d+"):
        journal_at(tmp_path)
    journal.close()
    journal_at(tmp_path).close()


class FullDisk:
    """No file of this process may grow beyond `size` bytes: the kernel writes what fits and refuses
    the rest."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __enter__(self) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self._size, self._before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._before)


def test_on_a_full_disk_a_call_is_refused_and_no_half_line_stays(tmp_path: Path) -> None:
    journal = journal_at(tmp_path)
    books = account(journal)
    size = segment_path(tmp_path, 1).stat().st_size
    with FullDisk(size + 20), pytest.raises(JournalFull) as refused:
        open_attempt(books, call="c")
    assert (refused.value.status, refused.value.retry_after_s) == (503, 5)
    assert segment_path(tmp_path, 1).stat().st_size == size
    assert books.meter.in_flight == 0
    open_attempt(books, call="c")
    journal.close()


def test_a_close_without_room_waits_in_memory_and_nothing_new_is_opened(tmp_path: Path) -> None:
    journal = journal_at(tmp_path)
    books = account(journal)
    ticket = open_attempt(books, call="c")
    with FullDisk(segment_path(tmp_path, 1).stat().st_size):
        books.close(ticket, status=200, outcome="ok", now_ns=9, at_ns=9)
        assert journal.statistics().deferred == 1
        with pytest.raises(JournalFull):
            open_call(journal, "d")
        journal.heartbeat()
    open_call(journal, "d")
    assert journal.statistics().deferred == 0
    assert [r["id"] for r in records_on_disk(tmp_path)] == ["c/1"]
    journal.close()


def test_the_heartbeat_is_written_only_while_calls_are_open(tmp_path: Path) -> None:
    wall = Wall()
    journal = journal_at(tmp_path, wall=wall)
    journal.heartbeat()
    open_call(journal, "c")
    wall.pass_s(7)
    journal.heartbeat()
    texts = segment_path(tmp_path, 1).read_bytes().splitlines()
    assert [journal_format.parse(t) for t in texts if b'"H"' in t] == [
        {"t": "H", "at": 1007 * SECOND}
    ]
    journal.close()


async def test_a_submitted_call_is_on_the_disk_when_submit_returns(tmp_path: Path) -> None:
    journal = journal_at(tmp_path)
    task = asyncio.create_task(journal.run())
    await asyncio.gather(*(journal.submit(f"c{n}", {"body": n}) for n in range(20)))
    assert journal.statistics().syncs < 20, "one sync serves many"
    assert journal.payload("c7") == {"body": 7}
    with pytest.raises(Conflict):
        await journal.submit("c7", {})
    journal.finish("c7", {"status": 200})
    assert journal.payload("c7") == {"status": 200}
    journal.delete_call("c7")
    with pytest.raises(NotFound):
        journal.payload("c7")
    assert journal.statistics().held_calls == 19
    task.cancel()
    await asyncio.wait([task])
    journal.close()


@pytest.mark.parametrize("death", ["before its result", "with its result", "in the next turn"])
async def test_a_submitted_calls_record_and_result_are_lost_together_or_not_at_all(
    tmp_path: Path, death: str
) -> None:
    journal = journal_at(tmp_path)
    books = account(journal)
    task = asyncio.create_task(journal.run())
    await journal.submit("c", {})
    ticket = open_attempt(books, call="c")
    books.close(ticket, status=200, outcome="ok", now_ns=9, at_ns=9)
    assert journal.statistics().deferred == 0, "it does not wait for room"
    if death == "with its result":
        journal.finish("c", {"status": 200})
    elif death == "in the next turn":  # as before another attempt
        await asyncio.sleep(0)
    journal.abandon()
    task.cancel()
    await asyncio.wait([task])

    journal, recovered = Journal.open(tmp_path, activator="a-1")

    outcomes = [record["outcome"] for record in records_on_disk(tmp_path)]
    assert outcomes == (["lost"] if death == "before its result" else ["ok"])
    unfinished = [] if death == "with its result" else ["c"]
    assert [held.id for held in recovered.unfinished] == unfinished
    journal.close()


async def test_a_submitted_calls_record_without_room_waits_in_memory(tmp_path: Path) -> None:
    journal = journal_at(tmp_path)
    books = account(journal)
    task = asyncio.create_task(journal.run())
    await journal.submit("c", {})
    ticket = open_attempt(books, call="c")
    with FullDisk(segment_path(tmp_path, 1).stat().st_size):
        books.close(ticket, status=200, outcome="ok", now_ns=9, at_ns=9)
        with pytest.raises(JournalFull):
            journal.finish("c", {"status": 200})
        await asyncio.sleep(0)
        assert journal.statistics().deferred == 1
    journal.finish("c", {"status": 200})
    assert journal.payload("c") == {"status": 200}
    assert journal.statistics().deferred == 0
    assert [record["id"] for record in records_on_disk(tmp_path)] == ["c/1"]
    task.cancel()
    await asyncio.wait([task])
    journal.close()


async def test_segments_rotate_and_go_once_shipped_and_closed(tmp_path: Path) -> None:
    journal = journal_at(tmp_path, segment_bytes=2000)
    for n in range(50):
        open_call(journal, f"c{n}")
        journal.close_call(f"c{n}/1", b'{"id":"c%d/1"}' % n, at_ns=5, virtual_ns=0)
        await journal.sync()
    assert len(segment_numbers(tmp_path)) > 5, "nothing goes before it is shipped"
    journal.mark_shipped(
        Cursor(segment=journal.current_segment), count=50, oldest_unshipped_ns=None
    )
    await journal.sync()
    await journal.sync()
    assert segment_numbers(tmp_path) == [journal.current_segment]
    journal.close()


async def test_a_call_that_stays_open_for_ever_does_not_keep_all_segments(tmp_path: Path) -> None:
    journal = journal_at(tmp_path, segment_bytes=2000)
    open_call(journal, "old", instance="i-9")
    await asyncio.gather(journal.submit("held", {"x": 1}), journal.sync())
    for n in range(200):
        open_call(journal, f"c{n}")
        journal.close_call(
            f"c{n}/1", b'{"id":"c%d/1","pad":"%s"}' % (n, b"x" * 100), at_ns=5, virtual_ns=0
        )
        await journal.sync()
        journal.mark_shipped(
            Cursor(segment=journal.current_segment), count=1, oldest_unshipped_ns=None
        )
    assert len(segment_numbers(tmp_path)) < 10
    assert journal.payload("held") == {"x": 1}
    journal.close()
    _, recovered = Journal.open(tmp_path, activator="a-1", wall_ns=Wall())
    assert [r.id for r in recovered.lost] == ["old/1"]
    assert [h.id for h in recovered.unfinished] == ["held"]


async def test_a_disk_that_fails_to_sync_is_told_to_who_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_descriptor: int) -> None:
        raise OSError(errno.EIO, "I/O error")

    journal = journal_at(tmp_path)
    monkeypatch.setattr(os, "fdatasync", fails)
    task = asyncio.create_task(journal.submit("c", {"x": 1}))
    await asyncio.sleep(0)
    assert not await journal.sync()
    with pytest.raises(JournalFull, match="could not be made durable"):
        await task
    assert journal.statistics().sync_errors == 1
    assert journal.statistics().held_calls == 0, "who was not told 202 has nothing here"
    monkeypatch.undo()
    assert await journal.sync()
    journal.close()


async def test_who_waits_for_the_disk_at_shutdown_has_an_answer(tmp_path: Path) -> None:
    journal = journal_at(tmp_path)
    run = asyncio.create_task(journal.run())
    submit = asyncio.create_task(journal.submit("c", {"x": 1}))
    for _ in range(3):
        await asyncio.sleep(0)
    run.cancel()
    await asyncio.wait([run])
    journal.close()
    await asyncio.wait([submit], timeout=30)
    assert submit.done()
