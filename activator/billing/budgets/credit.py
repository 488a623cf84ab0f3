"""The balance of a customer's prepaid credit: a hard budget of one period that has no end.

The ledger says how much credit there is in all (`amount`: granted, and neither withdrawn nor
expired), how much of it is used (`spent`), and what is unused of the grants that will expire. A
grant expires here at its time, also while the controller does not answer; what calls that began
before used of it, and the ledger does not have yet, is then missing from `amount` as well as
counted as spent, until their records are in the ledger. So there is never too much."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from activator.billing.budgets.balance import BudgetBalance
from activator.billing.budgets.periods import ROUNDING_NS, Period
from activator.billing.segments import Cursor
from activator.billing.usage_pricing import cost_text, to_picos
from pilotlight import errors
from pilotlight.protocol import CREDIT_PERIOD, BudgetRecord, BudgetState, CreditRecord

FOREVER_NS = 253_402_300_800 * 10**9
"""The year 10000."""


class CreditBalance(BudgetBalance):
    """The balance of one customer's prepaid credit.

    Attributes:
        expiring: when grants expire (wall time), and what the ledger has as unused of each."""

    __slots__ = ("_starts_ns", "_version", "_wanted", "expiring")

    def __init__(
        self, record: CreditRecord, *, at_ns: int, turn: int, is_shared: bool, mark: Cursor | None
    ) -> None:
        """Raises ValueError for an invalid amount."""
        self._starts_ns = round(record.opened_at * 1e6) * 1000 - ROUNDING_NS
        self.expiring: tuple[tuple[int, int], ...] = ()
        self._version, self._wanted = 0, record.version
        super().__init__(record, at_ns=at_ns, turn=turn, is_shared=is_shared, mark=mark)

    def __repr__(self) -> str:
        mine = self.record
        money = f"{cost_text(self.amount - self.spent)} {mine.currency} left"
        return f"<CreditBalance {mine.id} {money}, reserved {cost_text(self.reserved)}>"

    def period_at(self, at_ns: int) -> Period:
        """The only period: from the first grant on."""
        return Period(CREDIT_PERIOD, self._starts_ns, FOREVER_NS)

    def roll(self, at_ns: int, turn: int) -> None:
        """Expire the grants whose time has come."""
        kept = tuple(one for one in self.expiring if one[0] > at_ns)
        expired = sum(unused for _, unused in self.expiring) - sum(unused for _, unused in kept)
        self.expiring = kept
        self.ends_ns = min((expires_ns for expires_ns, _ in kept), default=FOREVER_NS)
        self.set_amount(self.amount - expired)

    def change(self, record: BudgetRecord) -> None:
        """Note that credit was granted or withdrawn: the ledger says how much there is now."""
        assert isinstance(record, CreditRecord)  # as `is_for` requires
        self.record, self._wanted = record, record.version
        self.is_stale = self.is_stale or self._version < record.version

    def is_for(self, record: BudgetRecord) -> bool:
        """Whether this balance is of the same credit."""
        if not isinstance(record, CreditRecord) or not isinstance(self.record, CreditRecord):
            return False
        mine = replace(self.record, amount=record.amount, version=record.version)
        return mine == record

    def last_state(self) -> dict[str, Any]:
        """The ledger's last state, for a start without it (`protocol.BudgetState`)."""
        expiring = [
            [(at_ns + ROUNDING_NS) / 1e9, cost_text(unused)] for at_ns, unused in self.expiring
        ]
        more = {"amount": cost_text(self.amount), "expiring": expiring, "version": self._version}
        return {**super().last_state(), **more}

    def apply_state(self, state: BudgetState, at_ns: int) -> None:
        """Apply what the ledger says of the amount. Raises ValueError, TypeError."""
        amount = to_picos(state.amount)
        self.expiring = tuple(
            (round(at * 1e9) - ROUNDING_NS, to_picos(unused)) for at, unused in state.expiring
        )
        self._version = state.version
        self.set_amount(amount)
        self.roll(at_ns, self.since)

    def shipped(self, picos: int, ledger: int) -> None:
        """Record that `picos` of our own reached the ledger, which now has `ledger` in total."""
        super().shipped(picos, ledger)
        self.is_stale = self._version < self._wanted

    @property
    def name(self) -> str:
        """The credit in a message."""
        return f"the prepaid credit of customer {self.record.customer!r}"

    def detail(self, spent: int) -> dict[str, Any]:
        """What errors say of it."""
        mine = self.record
        return {
            "credit": mine.id,
            "customer": mine.customer,
            "balance": cost_text(self.amount - spent),
            "currency": mine.currency,
        }

    def refusal(self, worst: int, *, spent: int, at_ns: int) -> errors.OverBudget:
        """The error when only more credit helps."""
        mine, left = self.record, self.amount - spent
        why = (
            f"has {cost_text(left)} {mine.currency} left, and this call may cost {cost_text(worst)}"
            if left > 0
            else "is used up"
        )
        return errors.InsufficientCredit(
            f"{self.name} {why}: grant more (`pilotlight customer credit grant`), or give the call "
            f"less time (header pilotlight-timeout)",
            needed=cost_text(worst),
            **self.detail(spent),
        )
