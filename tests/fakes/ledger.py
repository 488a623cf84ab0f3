"""A ledger in memory that can be away, lose its answers, and refuse records."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from activator.billing.budgets.balance import BudgetBalance, picos_under
from activator.billing.budgets.periods import period_at
from activator.billing.errors import LedgerRefused, LedgerUnavailable
from activator.billing.usage_pricing import cost_text
from pilotlight.protocol import BudgetRecord, BudgetState
from pilotlight.spec.record_json import canonical_json


class FakeLedger:
    """Accepts each id once, as the real one does.

    Attributes:
        away: answers to come that are `LedgerUnavailable`, nothing taken. mute: answers to come
        that are lost although everything was taken. wrong: ids it refuses for good. has_taken: set
        once records were taken. known: budgets that it knows, hard ones or not. names_all: its
        answers name all budgets, and not only those whose running period a record falls in. now_ns:
        its clock, which decides what period runs.
    """

    def __init__(
        self,
        *,
        away: int = 0,
        mute: int = 0,
        wrong: frozenset[str] = frozenset(),
        now_ns: int = 1_000 * 10**9,
    ) -> None:
        self.known: dict[str, BudgetRecord] = {}
        self.now_ns = now_ns
        self.names_all = False
        self.away = away
        self.mute = mute
        self.wrong = wrong
        self.records: dict[str, dict[str, Any]] = {}
        self.received = 0
        self.batches: list[int] = []
        self.has_taken = asyncio.Event()

    def __repr__(self) -> str:
        return f"<FakeLedger {len(self.records)} records of {self.received} received>"

    async def accept(self, records: Sequence[bytes]) -> Mapping[str, BudgetState]:
        """Take all or none; where the budgets stand that they fall under."""
        if self.away:
            self.away -= 1
            raise LedgerUnavailable("the controller is down")
        bodies = [json.loads(record) for record in records]
        if any(body["id"] in self.wrong for body in bodies):
            raise LedgerRefused("a record is wrong")
        self.batches.append(len(bodies))
        self.received += len(bodies)
        for body in bodies:
            self.records.setdefault(body["id"], body)
        self.has_taken.set()
        if self.mute:
            self.mute -= 1
            raise LedgerUnavailable("the answer was lost")
        states = {name: self._state(budget, records) for name, budget in self.known.items()}
        return {
            name: state
            for name, state in states.items()
            if self.names_all or state.batch != cost_text(0)
        }

    async def budgets(self, ids: Collection[str] = ()) -> Mapping[str, BudgetState]:
        """Where all budgets stand, or these."""
        if self.away:
            self.away -= 1
            raise LedgerUnavailable("the controller is down")
        named = {name: one for name, one in self.known.items() if not ids or name in ids}
        return {name: self._state(budget, []) for name, budget in named.items()}

    def _state(self, budget: BudgetRecord, batch: Sequence[bytes]) -> BudgetState:
        purse = BudgetBalance(budget, at_ns=self.now_ns, turn=0, is_shared=False, mark=None)
        spent = sum(picos_under(purse, canonical_json(body)) for body in self.records.values())
        sent = sum(picos_under(purse, record) for record in batch)
        return BudgetState(
            period=period_at(budget.period, self.now_ns).name,
            spent=cost_text(spent),
            batch=cost_text(sent),
        )

    async def aclose(self) -> None:
        """Nothing to close."""
