"""The balance of one hard budget in the current period, in picounits.

`held` is the money that only this activator may spend: without other activators, everything that
the ledger does not count as spent; otherwise what it has borrowed (`budget_leases.py`). It is
always own + reserved + left:

- own: cost of local records that are not part of `ledger` yet,
- reserved: worst cases of the running calls,
- left: what the next call may reserve.

Owner: the event loop; every method is synchronous, so no lock is needed. A method that raises
changes nothing."""

from __future__ import annotations

from dataclasses import replace
from json.encoder import encode_basestring_ascii as quoted

from activator.billing.periods import Period, period_at
from activator.billing.segments import Cursor
from activator.billing.usage_pricing import cost_text, to_picos
from pilotlight.protocol import BudgetRecord, BudgetState


class BudgetBalance:
    """The balance of one budget in its current period.

    Attributes:
        since: the `turn` of all budgets at which this period began here. Calls opened before it
            belong to the previous period.
        is_shared: other activators spend from the same budget.
        is_stale: the ledger has not reported yet what was spent before this budget was added.
        tenant_mark: text that occurs in every record of its tenant.
        mark: records before this journal position are not in `own` yet, later ones are; None = all
            are."""

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
        """Raises ValueError for an invalid amount or period."""
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
        """Known spending: that in the ledger, and that of local records not shipped yet."""
        return self.ledger + self.own

    @property
    def reserved(self) -> int:
        """Worst cases of the calls that run here."""
        return self.held - self.own - self.left

    def begin(self, period: Period, turn: int) -> None:
        """Begin a new period with nothing spent. Running calls belong to the previous one."""
        self.period = period
        self.since = turn
        self.ledger = self.own = 0
        self.held = self.left = 0 if self.is_shared else self.amount

    def change(self, record: BudgetRecord) -> None:
        """Change the amount of the budget; period and scope stay the same. Raises ValueError."""
        amount = _amount(record)
        if not self.is_shared:
            self.held += amount - self.amount
            self.left += amount - self.amount
        elif amount < self.amount:
            self.release_unused()  # may exceed the new amount: borrow again
        self.amount, self.record = amount, record

    def covers(
        self, *, tenant: str, environment: str, app: str, function: str, currency: str
    ) -> bool:
        """Whether records of this function are charged to this budget."""
        mine = self.record
        return (
            (mine.tenant, mine.currency) == (tenant, currency)
            and mine.environment in ("", environment)
            and mine.app in ("", app)
            and mine.function in ("", function)
        )

    def charge(self, picos: int) -> None:
        """Charge a record of this period that had no reservation."""
        self.own += picos
        self.left -= picos

    def shipped(self, picos: int, ledger: int) -> None:
        """Record that `picos` of our own reached the ledger, which now has `ledger` in total."""
        if self.mark is not None:
            picos = 0  # sent before this budget was added, so never part of `own`
        picos = max(0, min(picos, self.own))
        self.own -= picos
        self.ledger, self.is_stale = ledger, False
        if self.is_shared:
            self.held -= picos
            if ledger + self.held > self.amount:
                self.release_unused()  # borrowed before the spending of others was known
        else:
            self.left += self.amount - ledger - self.held + picos
            self.held = self.amount - ledger

    def record_shipped(self, picos: int) -> None:
        """Record that `picos` of our own reached the ledger, whose total is unknown."""
        is_stale = self.is_stale
        self.shipped(picos, self.ledger + picos)
        self.is_stale = is_stale

    def grant(self, picos: int) -> None:
        """Add this much to what is held."""
        self.held += picos
        self.left += picos

    def release_unused(self) -> None:
        """Return all unused money."""
        if self.left > 0:
            self.grant(-self.left)

    def record_debt(self) -> None:
        """Add debt to what is held: it is spent already, so others must not spend it."""
        if self.left < 0:
            self.grant(-self.left)


def spent_of(state: BudgetState) -> tuple[int, int]:
    """`spent` and `batch` in picounits. Raises ValueError for invalid amounts."""
    return to_picos(state.spent), to_picos(state.batch)


def is_same_money(one: BudgetRecord, other: BudgetRecord) -> bool:
    """Whether the balance of one budget is valid for the other: they differ only in amount and
    hardness."""
    return replace(one, amount="0", hard=True) == replace(other, amount="0", hard=True)


def _amount(record: BudgetRecord) -> int:
    picos = to_picos(record.amount)
    if picos < 0:
        raise ValueError(f"amount = {record.amount!r}: must be 0 or more")
    return picos
