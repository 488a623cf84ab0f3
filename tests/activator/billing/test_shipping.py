"""Every record reaches the ledger once, whatever the ledger, the disk or the process do."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from activator.billing.errors import LedgerUnavailable
from activator.billing.journal import Journal
from activator.billing.segments import CHECKPOINT_NAME, load_checkpoint
from activator.billing.shipping import REFUSED_NAME, Shipper, read_batch, usage_body
from tests.activator.billing_world import SECOND, Wall, account, open_attempt
from tests.fakes.ledger import FakeLedger


def journal_at(
    directory: Path, *, segment_bytes: int = 64 * 1024**2, wall: Wall | None = None
) -> Journal:
    return Journal.open(
        directory, activator="a-1", segment_bytes=segment_bytes, sync_s=0.0, wall_ns=wall or Wall()
    )[0]


def make_calls(journal: Journal, names: range, *, at_ns: int = 1000 * SECOND) -> None:
    books = account(journal, f"i-{names.start}")
    for n in names:
        ticket = open_attempt(books, call=f"c{n}", now_ns=n, at_ns=at_ns)
        books.close(ticket, status=200, outcome="ok", now_ns=n, at_ns=at_ns)


def ids(names: range) -> set[str]:
    return {f"c{n}/1" for n in names}


async def test_records_arrive_in_batches_and_the_checkpoint_follows(tmp_path: Path) -> None:
    journal, ledger = journal_at(tmp_path), FakeLedger()
    make_calls(journal, range(2500))
    shipper = Shipper(journal, ledger)
    assert shipper.lag().records == 2500
    assert await shipper.flush() == 2500
    assert ledger.records.keys() == ids(range(2500))
    assert max(ledger.batches) <= 1000
    assert load_checkpoint(tmp_path) == journal.shipped
    assert repr(shipper) == "<Shipper 0 records, 0.0 s behind, 0 refused>"
    assert await shipper.flush() == 0
    journal.close()


async def test_a_ledger_that_is_away_loses_nothing_and_the_lag_shows(tmp_path: Path) -> None:
    wall = Wall()
    journal, ledger = journal_at(tmp_path, wall=wall), FakeLedger(away=3)
    shipper = Shipper(journal, ledger, gather_s=0, first_backoff_s=0, wall_ns=wall)
    make_calls(journal, range(10), at_ns=wall.now_ns)
    wall.pass_s(12)
    with pytest.raises(LedgerUnavailable):
        await shipper.flush()
    assert (shipper.lag().records, shipper.lag().seconds) == (10, 12.0)
    task = asyncio.create_task(shipper.run())
    await ledger.has_taken.wait()
    await journal.sync()
    # the checkpoint is written in a thread, between the ledger's answer and the lag
    while shipper.lag().records:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert ledger.records.keys() == ids(range(10))
    assert shipper.lag().seconds == 0
    journal.close()


async def test_an_answer_that_was_lost_means_sent_twice_and_counted_once(tmp_path: Path) -> None:
    journal, ledger = journal_at(tmp_path), FakeLedger(mute=1)
    make_calls(journal, range(5))
    shipper = Shipper(journal, ledger)
    with pytest.raises(LedgerUnavailable):
        await shipper.flush()
    await shipper.flush()
    assert (ledger.received, len(ledger.records)) == (10, 5)
    journal.close()


async def test_a_new_process_ships_what_the_last_one_did_not(tmp_path: Path) -> None:
    journal, ledger = journal_at(tmp_path), FakeLedger()
    make_calls(journal, range(5))
    await Shipper(journal, ledger).flush()
    make_calls(journal, range(5, 8))
    journal.close()
    journal = journal_at(tmp_path)
    make_calls(journal, range(8, 10))
    assert journal.statistics().unshipped == 5
    assert await Shipper(journal, ledger).flush() == 5
    assert ledger.received == 10
    assert ledger.records.keys() == ids(range(10))
    journal.close()


async def test_a_lost_checkpoint_only_sends_again(tmp_path: Path) -> None:
    journal, ledger = journal_at(tmp_path), FakeLedger()
    make_calls(journal, range(5))
    await Shipper(journal, ledger).flush()
    journal.close()
    (tmp_path / CHECKPOINT_NAME).write_text("{torn")
    journal = journal_at(tmp_path)
    await Shipper(journal, ledger).flush()
    assert ledger.records.keys() == ids(range(5))
    journal.close()


async def test_shipping_follows_the_journal_over_its_segments(tmp_path: Path) -> None:
    journal, ledger = journal_at(tmp_path, segment_bytes=3000), FakeLedger()
    for start in range(0, 60, 10):
        make_calls(journal, range(start, start + 10))
        await journal.sync()
    assert journal.current_segment > 3
    await Shipper(journal, ledger).flush()
    assert ledger.records.keys() == ids(range(60))
    make_calls(journal, range(60, 61))
    assert [json.loads(r)["id"] for r in read_batch(journal).records] == ["c60/1"]
    journal.close()


async def test_a_refused_record_is_put_aside_and_holds_nobody_up(tmp_path: Path) -> None:
    journal, ledger = journal_at(tmp_path), FakeLedger(wrong=frozenset({"c3/1"}))
    make_calls(journal, range(8))
    shipper = Shipper(journal, ledger)
    await shipper.flush()
    assert ledger.records.keys() == ids(range(8)) - {"c3/1"}
    assert json.loads((tmp_path / REFUSED_NAME).read_bytes())["id"] == "c3/1"
    assert (shipper.refused, shipper.lag().records) == (1, 0)
    journal.close()


def test_the_body_of_a_batch_is_json() -> None:
    assert json.loads(usage_body("a-1", [b'{"id":"x"}', b'{"id":"y"}'])) == {
        "activator": "a-1",
        "records": [{"id": "x"}, {"id": "y"}],
    }
    assert json.loads(usage_body("a-1", [])) == {"activator": "a-1", "records": []}
