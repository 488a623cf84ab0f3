"""A subject to bill, what a journal on the disk says, and an activator that has budgets: shared by
the tests of the money path."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from activator.billing import journal_format
from activator.billing.budgets.balance import BudgetBalance
from activator.billing.budgets.budgets import Budgets
from activator.billing.budgets.leases import BudgetLeaser
from activator.billing.budgets.sync import BudgetStates
from activator.billing.instance_account import InstanceAccount, OpenRecord
from activator.billing.instance_time import BillingTerms
from activator.billing.journal import Journal
from activator.billing.segments import read_segment, segment_numbers
from activator.billing.shipping import Shipper
from activator.billing.usage_pricing import UsageSubject, UsageTemplate, encode_optional_fields
from pilotlight.protocol import BudgetRecord, BudgetState
from pilotlight.spec.pricing import Footprint, Rates
from tests.fakes.ledger import FakeLedger
from tests.fakes.money_board import BoardMoney, MoneyBoard

RATES = Rates(
    version="test-1",
    cpu_core_s=Decimal("0.001"),
    memory_gib_s=Decimal("0.002"),
    request=Decimal("0.000001"),
    idle_factor=Decimal("0.5"),
)
FOOTPRINT = Footprint(cpu=2.0, memory_bytes=1024**3)
SECOND = 10**9


def subject(instance: str = "i-1") -> UsageSubject:
    return UsageSubject(
        tenant="t-1",
        environment="main",
        app="search",
        function="Embedder",
        function_id="f-1",
        revision="v1-abcdef",
        instance=instance,
    )


def template(instance: str = "i-1") -> UsageTemplate:
    return UsageTemplate(subject(instance), footprint=FOOTPRINT, rates=RATES)


def account(
    journal: Journal,
    instance: str = "i-1",
    *,
    free_ns: int = 60 * SECOND,
    budgets: Budgets | None = None,
    limit_s: float = 10.0,
) -> InstanceAccount:
    return InstanceAccount(
        journal,
        subject=subject(instance),
        terms=BillingTerms(
            footprint=FOOTPRINT, rates=RATES, free_ns=free_ns, limit_ns=int(limit_s * SECOND)
        ),
        started_ns=0,
        budgets=budgets,
    )


def open_attempt(books: InstanceAccount, **changes: Any) -> OpenRecord:
    """Open a first, warm attempt that did not wait; `changes`: what is different of it."""
    plain = {"attempt": 1, "key": "k", "method": "", "start_kind": "WARM", "now_ns": 0, "at_ns": 0}
    return books.open(**{**plain, "queued_ms": 0, "start_ms": 0, **changes})


def budget(id: str = "b-1", *, amount: str = "1", period: str = "day", **more: Any) -> BudgetRecord:
    """A hard budget of the whole tenant."""
    scope = {
        "tenant": "t-1",
        "environment": "",
        "app": "",
        "function": "",
        "currency": "USD",
        "hard": True,
    }
    return BudgetRecord(id=id, amount=amount, period=period, **{**scope, **more})


def records_on_disk(directory: Path) -> list[dict[str, Any]]:
    """Every usage record in every segment, in order."""
    return [
        json.loads(journal_format.record_of(line.text))
        for number in segment_numbers(directory)
        for line in read_segment(directory, number)
        if line.text.startswith(journal_format.CLOSE_MARK)
    ]


class Wall:
    """A wall clock that moves by hand."""

    def __init__(self, now_ns: int = 1_000 * SECOND) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        return self.now_ns

    def pass_s(self, seconds: float) -> int:
        self.now_ns += int(seconds * SECOND)
        return self.now_ns


class Life:
    """One life of an activator: journal, budgets and shipper over a directory that outlives it."""

    def __init__(
        self,
        directory: Path,
        ledger: FakeLedger,
        *,
        wall: Wall,
        segment_bytes: int = 64 * 1024**2,
        board: MoneyBoard | None = None,
    ) -> None:
        """`board`: what it shares with other activators; None = it is alone."""
        self.wall = wall
        self.ledger = ledger
        self.budgets = Budgets(is_shared=board is not None, wall_ns=wall)
        if board is not None:
            store = BoardMoney(board, member=directory.name)
            self.budgets.lender = BudgetLeaser(
                store, budgets=self.budgets, is_open=False, wall_ns=wall
            )
        self.journal = Journal.open(
            directory, activator="a-1", sync_s=0.0, wall_ns=wall, segment_bytes=segment_bytes
        )[0]
        self.shipper = Shipper(
            self.journal,
            ledger,
            before_batch=self._before,
            on_accepted=self._accepted,
            wall_ns=wall,
        )
        self.states = BudgetStates(
            self.budgets, journal=self.journal, source=ledger, lock=self.shipper.lock
        )
        self.books: InstanceAccount = account(
            self.journal, f"i-{wall.now_ns}", budgets=self.budgets
        )
        self.calls = 0

    async def _before(self) -> None:
        await self.states.count_own()

    async def _accepted(self, states: Mapping[str, BudgetState], records: Sequence[bytes]) -> None:
        await self.states.accepted(states, records)

    async def start(self, *records: BudgetRecord) -> BudgetBalance:
        """Hear of budgets and learn what was spent, as the process does before its first call."""
        for record in records:
            self.budgets.apply(record.id, record)
        await self.states.load()
        return self.budgets.balances[records[0].id]

    def open(self, customer: str = "") -> OpenRecord:
        """Open a call."""
        self.calls += 1
        return open_attempt(
            self.books,
            call=f"c{self.wall.now_ns}-{self.calls}",
            now_ns=self.wall.now_ns,
            at_ns=self.wall.now_ns,
            mark=encode_optional_fields(customer=customer),
            customer=customer,
        )

    def call(self, seconds: float = 1.0, customer: str = "") -> int:
        """A whole call; its cost."""
        ticket = self.open(customer)
        at_ns = self.wall.pass_s(seconds)
        return self.books.close(ticket, status=200, outcome="ok", now_ns=at_ns, at_ns=at_ns).picos

    def die(self) -> None:
        """kill -9."""
        self.journal.abandon()
