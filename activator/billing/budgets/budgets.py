"""All hard budgets and prepaid credit: which of them apply to a call (`applicable.py`), and what
the feed and the ledger say of them.

Spent = what the ledger reports + local records that are not in the ledger yet. A period is a
calendar day or month in UTC. It begins with the first call (or cost) in it, and never reverts to an
earlier one: if a clock steps back, the later period stays. Owner: the event loop; every method is
synchronous, so no lock is needed."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from itertools import islice
from typing import Any

from activator.billing.budgets.applicable import (
    AllowanceNeeded,
    ApplicableBudgets,
    BudgetLeaseSource,
    CustomerRegistrar,
    CustomerUnknown,
    PricedCall,
    Subject,
)
from activator.billing.budgets.balance import (
    BudgetBalance,
    RecordCosts,
    spent_of,
)
from activator.billing.budgets.credit import CreditBalance
from activator.billing.segments import Cursor
from activator.billing.usage_pricing import to_picos
from activator.customers.scopes import CustomerScopes
from activator.quotas.token_reservation import TokenReservation
from pilotlight.protocol import BudgetRecord, BudgetState, CreditRecord
from pilotlight.spec.identifiers import ANY_CUSTOMER
from pilotlight.spec.pricing import Rates, price_duration

log = logging.getLogger(__name__)

MAX_RETRY_S = 3600.0
MAX_LOOKED_AT = 128
"""Number of a function's oldest running calls to inspect: the first to end is among them, unless
callers gave later ones less time."""

MAX_COVERS = 20_000
"""Functions, and customers with budgets of their own, whose applicable budgets are kept."""


class Budgets:
    """All hard budgets. `generation` changes with every change of a budget, `turn` with every
    period that begins."""

    def __init__(
        self, *, is_shared: bool = False, wall_ns: Callable[[], int] = time.time_ns
    ) -> None:
        """`is_shared`: other activators spend from the same budgets, so money is borrowed before it
        is spent (`leases.py`)."""
        self._is_shared = is_shared
        self._wall_ns = wall_ns
        self._balances: dict[str, BudgetBalance] = {}
        self._of: dict[tuple[str, str], dict[str, BudgetBalance]] = {}
        """By tenant and customer."""
        self._customers = CustomerScopes()
        self._retired: dict[str, BudgetBalance] = {}
        self._retired_at: tuple[Cursor, int] | None = None
        self._answers = 0
        self._covers: dict[Subject, ApplicableBudgets] = {}
        self.generation = 0
        self.turn = 0
        self.lender: BudgetLeaseSource | None = None
        self.registrar: CustomerRegistrar | None = None
        self.end_of_journal: Callable[[], Cursor] = Cursor
        self.on_news: Callable[[], None] = _ignore

    def __repr__(self) -> str:
        return f"<Budgets {len(self._balances)} hard, generation {self.generation}>"

    # -- updates from the feed ---------------------------------------------------------------------
    def apply(self, id: str, record: BudgetRecord | None) -> None:
        """Add, change or (None) remove a budget or credit. Soft budgets are ignored: they stop
        nothing. Raises ValueError for an invalid budget."""
        self.generation += 1
        self._customers.apply(id, record)
        if record is None or not record.hard or record.customer == ANY_CUSTOMER:
            self._retire(id)
            return
        known = self._balances.get(id) or self._restore_retired(id)
        if known is not None and known.is_for(record):
            known.change(record)
            self._store(id, known)
        else:
            self._store(id, self._new(record))
        self.on_news()

    def _new(self, record: BudgetRecord) -> BudgetBalance:
        terms: dict[str, Any] = {
            "at_ns": self._wall_ns(),
            "turn": self.turn,
            "is_shared": self._is_shared,
            "mark": self.end_of_journal(),
        }
        if isinstance(record, CreditRecord):
            return CreditBalance(record, **terms)
        return BudgetBalance(record, **terms)

    def _store(self, id: str, balance: BudgetBalance) -> None:
        record = balance.record
        self._balances[id] = balance
        self._of.setdefault((record.tenant, record.customer), {})[id] = balance

    def _retire(self, id: str) -> None:
        if self._retired_at != self._moment():
            self._retired.clear()
            self._retired_at = self._moment()
        if (gone := self._balances.pop(id, None)) is not None:
            self._retired[id] = gone
            of = gone.record.tenant, gone.record.customer
            del self._of[of][id]
            if not self._of[of]:
                del self._of[of]

    def _restore_retired(self, id: str) -> BudgetBalance | None:
        """Restore a budget that was removed because the feed restarts. Nothing was written or
        shipped since, so its balance is still correct."""
        return self._retired.pop(id, None) if self._retired_at == self._moment() else None

    def _moment(self) -> tuple[Cursor, int]:
        return self.end_of_journal(), self._answers

    # -- calls -------------------------------------------------------------------------------------
    def cover(self, subject: Subject) -> ApplicableBudgets:
        """The budgets that apply to a function, or to its calls for a customer."""
        known = self._covers.get(subject)
        if known is None or known.generation != self.generation:
            if known is None and len(self._covers) >= MAX_COVERS:
                self._covers = {one: c for one, c in self._covers.items() if c.open}
            known = self._covers[subject] = ApplicableBudgets(
                self, subject, self._applicable(subject), known.open if known is not None else {}
            )
        return known

    def _applicable(self, subject: Subject) -> tuple[BudgetBalance, ...]:
        of = {(subject.tenant, ""), (subject.tenant, subject.customer)}
        return tuple(
            balance
            for one in sorted(of)
            for balance in self._of.get(one, {}).values()
            if balance.covers(**subject._asdict())
        )

    def cover_customer(self, cover: ApplicableBudgets, customer: str) -> ApplicableBudgets:
        """The budgets that apply to a call for this customer of a function with this cover. Raises
        CustomerUnknown for a customer that gets some with its first call."""
        subject = cover.subject
        if not self._customers.has(subject.tenant):
            return cover
        if self.registrar is not None and self._customers.lacks(subject, customer):
            raise CustomerUnknown(cover, self.registrar, customer)
        if (subject.tenant, customer) not in self._of:
            return cover  # nothing is kept for it
        return self.cover(subject._replace(customer=customer))

    def is_spent(
        self, subject: Subject, target: PricedCall, rates: Rates, *, limit_ns: int
    ) -> bool:
        """Whether not even one call of this target could run in this period with nothing reserved.
        Then nothing is kept warm for it."""
        cover = self.cover(subject)
        for balance in cover.balances:
            self._roll_period_if_due(balance)
        return bool(cover.balances) and cover.worst_picos(target, rates, limit_ns) > min(
            p.amount - p.spent for p in cover.balances
        )

    def check(
        self,
        subject: Subject,
        target: PricedCall,
        rates: Rates,
        *,
        limit_ns: int,
        tokens: TokenReservation | None = None,
        customer: str = "",
    ) -> None:
        """Refuse a call before it waits for a slot or has an instance started. Raises OverBudget,
        BudgetReserved."""
        cover = self.cover(subject)
        with contextlib.suppress(AllowanceNeeded):  # obtained when there is a slot
            if customer:
                cover = self.cover_customer(cover, customer)
            if cover.balances:
                worst = cover.worst_picos(target, rates, limit_ns)
                if tokens is not None:
                    worst += token_picos(rates, tokens.estimated_in, tokens.max_out)
                cover.check(worst, self._wall_ns())

    def roll_period(self, balance: BudgetBalance, at_ns: int) -> None:
        """Begin the period that contains `at_ns`."""
        self.turn += 1
        balance.roll(at_ns, self.turn)

    def charge_later_budgets(
        self, older: ApplicableBudgets, picos: int, at_ns: int, customer: str = ""
    ) -> None:
        """Charge an ended call for `customer` to the budgets that were added while it ran."""
        for balance in self._applicable(older.subject._replace(customer=customer)):
            if balance not in older.balances and at_ns >= balance.period.starts_ns:
                balance.charge(picos)

    def earliest_end_s(self, balance: BudgetBalance, at_ns: int) -> float:
        """Seconds until the first running call under this budget must have ended, at least 1."""
        firsts = [
            min(islice(c.open.values(), MAX_LOOKED_AT))
            for c in self._covers.values()
            if c.open and balance in c.balances
        ]
        return min(MAX_RETRY_S, max(1.0, (min(firsts) - at_ns) / 1e9)) if firsts else 1.0

    # -- ledger ------------------------------------------------------------------------------------
    @property
    def balances(self) -> Mapping[str, BudgetBalance]:
        """The balances, by budget id."""
        return self._balances

    def apply_answer(self, states: Mapping[str, BudgetState], records: Sequence[bytes]) -> None:
        """Apply the budget states that the ledger returned when it accepted `records`."""
        self._answers += 1
        unstated = []
        for budget, balance in self._balances.items():
            state = states.get(budget)
            self._roll_period_if_due(balance)
            if state is not None and state.period == balance.period.name:
                try:
                    ledger, batch = spent_of(state)
                    balance.apply_state(state, self._wall_ns())
                except (ValueError, TypeError) as e:
                    log.error("invalid budget state budget=%s error=%s", budget, e)
                else:
                    balance.shipped(batch, ledger)
                    continue
            # only one of the clocks is past midnight: our part is what we sent
            if state is not None or balance.own:
                unstated.append(balance)
        sent = RecordCosts(unstated)
        for record in records if unstated else ():
            sent.add(record)
        for balance in unstated:
            balance.record_shipped(sent.picos[balance.record.id])

    def apply_states(self, states: Mapping[str, BudgetState]) -> None:
        """Apply the states of all budgets, read while no records were being sent."""
        for budget, balance in self._balances.items():
            self._roll_period_if_due(balance)
            state = states.get(budget)
            if state is None or state.period != balance.period.name:
                # read again later: the controller does not know the budget yet, or only one of the
                # clocks is past midnight
                continue
            try:
                ledger, _ = spent_of(state)
                balance.apply_state(state, self._wall_ns())
                balance.shipped(0, ledger)
            except (ValueError, TypeError) as e:
                log.error("invalid budget state budget=%s error=%s", budget, e)

    def _roll_period_if_due(self, balance: BudgetBalance) -> None:
        now_ns = self._wall_ns()
        if now_ns >= balance.ends_ns:
            self.roll_period(balance, now_ns)


def token_picos(rates: Rates, tokens_in: int, tokens_out: int) -> int:
    """Price of these tokens in picounits."""
    return to_picos(
        str(
            price_duration(0, Decimal(0), tokens_in * rates.token_in + tokens_out * rates.token_out)
        )
    )


def _ignore() -> None:
    """Default of `on_news`: do nothing."""
