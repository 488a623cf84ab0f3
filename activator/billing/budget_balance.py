"""One hard budget's money in the period that runs, in picounits: what is known to be spent, what is
held here, what is left of that.

`held` is what this activator may dispose of and no other: without others all that the ledger has
not seen spent, else what was borrowed (`budget_leases.py`). It is always own + reserved + left:

- own: cost of records that were written here and are not part of `ledger` yet,
- reserved: worst cases of the calls that run,
- left: what the next call may reserve.

Owner: the event loop; every method is synchronous, so no lock is needed. A refused method changes
nothing."""

from __future__ import annotations

from dataclasses import replace
from json.encoder import encode_basestring_ascii as quoted

from activator.billing.periods import Period, period_at
from activator.billing.segments import Cursor
from activator.billing.usage import as_picos, cost_text
from pilotlight.protocol import BudgetRecord, BudgetState


class BudgetBalance:
    """See the module.

    Attributes:
        since: the `turn` of all budgets at which this period began here: calls that were opened
        before it belong to the one before. is_shared: other activators spend from the same budget.
        is_stale: the ledger was not asked yet for what was spent before this budget was heard of.
        tenant_mark: stands in every record of its tenant. mark: records before this place of the
        journal are not in `own` yet, those behind it are; None = all are.
    """

    __slots__ = (
        "amount",
        "held",
        "is_shared",
        "is_stale",
        "ledger",
        "left",
        "mark",
        "own",
        "period",
        "record",
        "since",
        "tenant_mark",
    )

    def __init__(
        self, record: BudgetRecord, *, at_ns: int, turn: int, is_shared: bool, mark: Cursor | None
    ) -> None:
        """Raises ValueError for an amount or a period that is none."""
        self.record = record
        self.amount = _amount(record)
        self.is_shared = is_shared
        self.is_stale = True
        self.mark = mark
        self.tenant_mark = b'"tenant":%b' % quoted(record.tenant).encode()
        self.begin(period_at(record.period, at_ns), turn)

    def __repr__(self) -> str:
        money = (
            f"spent {cost_text(self.spent)}, reserved {cost_text(self.reserved)} of "
            f"{self.record.amount} {self.record.currency}"
        )
        return f"<BudgetBalance {self.record.id} {self.period.name} {money}>"

    @property
    def spent(self) -> int:
        """What is known to be spent: by the ledger, and by our records on their way to it."""
        return self.ledger + self.own

    @property
    def reserved(self) -> int:
        """Worst cases of the calls that run here."""
        return self.held - self.own - self.left

    def begin(self, period: Period, turn: int) -> None:
        """A new period: nothing is spent, and what still runs belongs to the one before."""
        self.period = period
        self.since = turn
        self.ledger = self.own = 0
        self.held = self.left = 0 if self.is_shared else self.amount

    def change(self, record: BudgetRecord) -> None:
        """The same budget with other terms: another amount, of the same period and scope. Raises
        ValueError."""
        amount = _amount(record)
        if not self.is_shared:
            self.held += amount - self.amount
            self.left += amount - self.amount
        elif amount < self.amount:
            self.give_back()  # it may not be there any more: to be borrowed anew
        self.amount, self.record = amount, record

    def covers(
        self, *, tenant: str, environment: str, app: str, function: str, currency: str
    ) -> bool:
        """Whether records of this function are paid from it."""
        mine = self.record
        return (
            (mine.tenant, mine.currency) == (tenant, currency)
            and mine.environment in ("", environment)
            and mine.app in ("", app)
            and mine.function in ("", function)
        )

    def pay(self, picos: int) -> None:
        """A record of this period was written that no reservation stood for."""
        self.own += picos
        self.left -= picos

    def shipped(self, picos: int, ledger: int) -> None:
        """The ledger has `picos` of our own more than before, and `ledger` in all."""
        if self.mark is not None:
            picos = 0  # sent before this budget was heard of, so never counted as its own
        picos = max(0, min(picos, self.own))
        self.own -= picos
        self.ledger, self.is_stale = ledger, False
        if self.is_shared:
            self.held -= picos
            if ledger + self.held > self.amount:
                self.give_back()  # borrowed before it was known that others had spent so much
        else:
            self.left += self.amount - ledger - self.held + picos
            self.held = self.amount - ledger

    def moved(self, picos: int) -> None:
        """`picos` of our own have reached the ledger, which did not say what it has in all."""
        is_stale = self.is_stale
        self.shipped(picos, self.ledger + picos)
        self.is_stale = is_stale

    def lend(self, picos: int) -> None:
        """This much more is held."""
        self.held += picos
        self.left += picos

    def give_back(self) -> None:
        """All that is left is held no more."""
        if self.left > 0:
            self.lend(-self.left)

    def hold_debt(self) -> None:
        """What was paid beyond all that is held is held too: it is spent, nobody else may spend
        it."""
        if self.left < 0:
            self.lend(-self.left)


def spent_of(state: BudgetState) -> tuple[int, int]:
    """`spent` and `batch` in picounits. Raises ValueError for what cannot be true."""
    return as_picos(state.spent), as_picos(state.batch)


def is_same_money(one: BudgetRecord, other: BudgetRecord) -> bool:
    """Whether numbers of one mean the same for the other: only the amount, or whether it is hard,
    differs."""
    return replace(one, amount="0", hard=True) == replace(other, amount="0", hard=True)


def _amount(record: BudgetRecord) -> int:
    picos = as_picos(record.amount)
    if picos < 0:
        raise ValueError(f"amount = {record.amount!r}: must be 0 or more")
    return picos
