"""What few records say (arm, unit, what answered instead), and records of copies: in the journal,
after its recovery, and priced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from activator.billing.budgets.budgets import Budgets
from activator.billing.instance_account import InstanceAccount
from activator.billing.instance_time import BillingTerms
from activator.billing.journal import Journal
from activator.billing.segments import Cursor, segment_numbers
from activator.billing.usage_pricing import encode_optional_fields
from activator.quotas.token_reservation import TokenReservation
from pilotlight.protocol import UsageRecord
from tests.activator.billing_world import (
    FOOTPRINT,
    RATES,
    SECOND,
    Wall,
    account,
    budget,
    open_attempt,
    records_on_disk,
    subject,
)
from tests.fakes.reference_prices import price_usage

ARM = encode_optional_fields(experiment="x-1", arm='bold"', unit="00ff" * 4)


def opened(books: InstanceAccount, call: str, **more: Any) -> Any:
    use = TokenReservation(estimated_in=3, max_out=4, began_ns=0)
    return books.open(
        tokens=use,
        call=call,
        attempt=1,
        key="k",
        method="",
        start_kind="WARM",
        queued_ms=0,
        start_ms=0,
        now_ns=0,
        at_ns=0,
        **more,
    )


def closed(books: InstanceAccount, ticket: Any) -> Any:
    ticket.tokens.on_usage(3, 4)
    return books.close(ticket, status=200, outcome="ok", now_ns=SECOND, at_ns=SECOND)


def test_a_mark_is_members_of_json_and_nothing_where_there_is_nothing_to_say() -> None:
    assert encode_optional_fields(experiment="", arm="") == ""
    assert json.loads("{" + ARM[1:] + "}") == {
        "experiment": "x-1",
        "arm": 'bold"',
        "unit": "00ff" * 4,
    }


def test_the_arm_is_on_the_record_of_a_call_that_ended_and_of_one_that_was_lost(
    tmp_path: Path,
) -> None:
    wall = Wall(SECOND)
    journal = Journal.open(tmp_path, activator="a-1", sync_s=0.0, wall_ns=wall)[0]
    books = account(journal)
    closed(books, opened(books, "done", mark=ARM))
    opened(books, "lost", mark=ARM + encode_optional_fields(degraded="cached"))
    opened(books, "plain")
    journal.abandon()
    journal, recovered = Journal.open(tmp_path, activator="a-1", wall_ns=wall)
    journal.abandon()
    records = {record["call"]: record for record in records_on_disk(tmp_path)}
    assert {
        call: (r.get("experiment"), r.get("arm"), r.get("unit"))
        for call, r in records.items()
        if call != "plain"
    } == {
        "done": ("x-1", 'bold"', "00ff" * 4),
        "lost": ("x-1", 'bold"', "00ff" * 4),
    }
    assert {record.call: record.degraded for record in recovered.lost} == {
        "lost": "cached",
        "plain": "",
    }
    assert records["plain"]["arm"] == ""


async def test_what_is_carried_over_to_a_new_segment_keeps_its_mark(tmp_path: Path) -> None:
    wall = Wall(SECOND)
    journal = Journal.open(tmp_path, activator="a-1", segment_bytes=2000, sync_s=0.0, wall_ns=wall)[
        0
    ]
    books = account(journal)
    opened(books, "long", mark=ARM)
    first = journal.current_segment
    for n in range(40):
        closed(books, opened(books, f"c{n}"))
        await journal.sync()
        journal.mark_shipped(
            Cursor(segment=journal.current_segment), count=1, oldest_unshipped_ns=None
        )
    assert first not in segment_numbers(tmp_path)
    journal.abandon()
    journal, recovered = Journal.open(tmp_path, activator="a-1", wall_ns=wall)
    journal.abandon()
    (lost,) = recovered.lost
    assert (lost.call, lost.experiment, lost.arm, lost.unit) == ("long", "x-1", 'bold"', "00ff" * 4)


def test_a_copy_costs_nothing_asks_no_budget_and_its_price_can_be_checked(tmp_path: Path) -> None:
    budgets = Budgets()
    budgets.apply("b-1", budget(amount="0.0000001"))
    journal = Journal.open(tmp_path, activator="a-1", sync_s=0.0, wall_ns=Wall(SECOND))[0]
    books = account(journal, budgets=budgets)
    bill = closed(
        books,
        opened(books, "copied-shadow", is_shadow=True, mark=encode_optional_fields(arm="~shadow")),
    )
    journal.abandon()
    (body,) = records_on_disk(tmp_path)
    record = UsageRecord.from_json(body)
    assert (bill.picos, record.kind, record.cost, record.arm) == (
        0,
        "SHADOW",
        "0.000000000000",
        "~shadow",
    )
    assert record.billed_ns == SECOND
    assert price_usage(record, RATES) == 0


def test_what_came_up_for_copies_is_free_until_it_answers_a_call(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, activator="a-1", sync_s=0.0, wall_ns=Wall(SECOND))[0]
    books = InstanceAccount(
        journal,
        subject=subject(),
        terms=BillingTerms(footprint=FOOTPRINT, rates=RATES, free_ns=0, is_free=True),
        started_ns=0,
    )
    books.started(start_kind="COLD", billed_ns=5 * SECOND, at_ns=5 * SECOND)
    closed(books, opened(books, "copied-shadow", is_shadow=True))
    assert books.settle_idle(now_ns=100 * SECOND, at_ns=100 * SECOND) == 0
    ticket = open_attempt(books, call="asked", now_ns=200 * SECOND, at_ns=200 * SECOND)
    books.close(ticket, status=200, outcome="ok", now_ns=201 * SECOND, at_ns=201 * SECOND)
    assert books.settle_idle(now_ns=300 * SECOND, at_ns=300 * SECOND) == 1
    journal.abandon()
    billed = {record["kind"]: record["billed_ns"] for record in records_on_disk(tmp_path)}
    assert billed == {"SHADOW": SECOND, "CALL": SECOND, "IDLE": 99 * SECOND}
