"""The balance of one hard budget in the current period, in picounits.

`held` is the money that only this activator may spend: without other activators, everything that
the ledger does not count as spent; otherwise what it has borrowed (`leases.py`). It is
always own + reserved + left:

- own: cost of local records that are not part of `ledger` yet,
- reserved: worst cases of the running calls,
- left: what the next call may reserve.

Owner: the event loop; every method is synchronous, so no lock is needed. A method that raises
changes nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from activator.billing.budgets.periods import Period, period_at, utc_text
from activator.billing.segments import Cursor
from activator.billing.usage_pricing import cost_text, to_picos
from pilotlight import errors
from pilotlight.protocol import BudgetRecord, BudgetState

_SUBJECT = ("tenant", "environment", "app", "function", "currency", "customer")
"""The fields of a usage record that select budgets."""


class BudgetBalance:
    """The balance of one budget in its current period.

    Attributes:
        ends_ns: when `roll` is due: at the end of the period.
        since: the `turn` of all budgets at which this period began here. Calls opened before it
            belong to the previous period.
        is_shared: other activators spend from the same budget.
        is_stale: the ledger has not reported yet what was spent before this budget was added.
        record_mark: text that occurs in every record that it covers: of its tenant, or of its
            customer.
        mark: records before this journal position are not in `own` yet, later ones are; None = all
            are."""

    __slots__ = (
        "amount",
        "ends_ns",
        "held",
        "is_shared",
        "is_stale",
        "ledger",
        "left",
        "mark",
        "own",
        "period",
        "record",
        "record_mark",
        "since",
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
        name = "customer" if record.customer else "tenant"
        self.record_mark = f'"{name}":{quoted(getattr(record, name))}'.encode()
        self.begin(self.period_at(at_ns), turn)

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
        self.ends_ns = period.ends_ns
        self.since = turn
        self.ledger = self.own = 0
        self.held = self.left = 0 if self.is_shared else self.amount

    def period_at(self, at_ns: int) -> Period:
        """The period that contains `at_ns`. Raises ValueError for an unknown kind."""
        return period_at(self.record.period, at_ns)

    def roll(self, at_ns: int, turn: int) -> None:
        """Begin the period that contains `at_ns`, which is not before `ends_ns`."""
        self.begin(self.period_at(at_ns), turn)

    def change(self, record: BudgetRecord) -> None:
        """Change the amount of the budget; period and scope stay the same. Raises ValueError."""
        self.set_amount(_amount(record))
        self.record = record

    def is_for(self, record: BudgetRecord) -> bool:
        """Whether this balance is valid for the budget: it differs only in amount and hardness."""
        mine = replace(self.record, amount=record.amount, hard=record.hard)
        return mine == record

    def last_state(self) -> dict[str, Any]:
        """The ledger's last state, for a start without it (`protocol.BudgetState`)."""
        return {"period": self.period.name, "spent": cost_text(self.ledger)}

    def apply_state(self, state: BudgetState, at_ns: int) -> None:
        """Apply what the ledger says of the amount: nothing, it is that of the record."""

    def set_amount(self, amount: int) -> None:
        """Change the amount. What exceeds it is spent or reserved already."""
        if not self.is_shared:
            self.held += amount - self.amount
            self.left += amount - self.amount
        elif amount < self.amount:
            self.release_unused()  # may exceed the new amount: borrow again
        self.amount = amount

    def covers(
        self,
        *,
        tenant: str,
        environment: str,
        app: str,
        function: str,
        currency: str,
        customer: str,
    ) -> bool:
        """Whether records of this function are charged to this budget."""
        mine = self.record
        return (
            (mine.tenant, mine.currency) == (tenant, currency)
            and mine.environment in ("", environment)
            and mine.app in ("", app)
            and mine.function in ("", function)
            and mine.customer in ("", customer)
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

    # -- what callers are answered ----------------------------------------------------------------
    @property
    def name(self) -> str:
        """The budget in a message."""
        mine = self.record
        of = "/".join(part for part in (mine.app, mine.function) if part)
        if mine.customer:
            of = f"customer {mine.customer!r}{f' for {of}' if of else ''}"
        return (
            f"the budget of {mine.amount} {mine.currency} a {mine.period} of {of or 'the tenant'}"
        )

    def detail(self, spent: int) -> dict[str, Any]:
        """What errors say of it."""
        customer = self.record.customer
        return {
            "budget": self.record.id,
            **({"customer": customer} if customer else {}),
            "period": self.period.name,
            "amount": self.record.amount,
            "spent": cost_text(spent),
            "until": utc_text(self.period.ends_ns),
        }

    def refusal(self, worst: int, *, spent: int, at_ns: int) -> errors.OverBudget:
        """The error when waiting within the period does not help."""
        why = (
            "is spent"
            if spent >= self.amount
            else f"has {cost_text(self.amount - spent)} left, and this call may cost "
            f"{cost_text(worst)}"
        )
        return errors.OverBudget(
            f"{self.name} {why}: the next period begins at {utc_text(self.period.ends_ns)}; raise "
            f"the budget (`pilotlight budget set`), or give the call less time (header "
            f"pilotlight-timeout)",
            retry_after_s=max(1.0, (self.period.ends_ns - at_ns) / 1e9),
            needed=cost_text(worst),
            **self.detail(spent),
        )


class RecordCosts:
    """Sums of what usage records (as JSON) cost to each of these budgets. A customer's are looked
    up by the customer of a record, because there may be thousands of them.

    Attributes:
        picos: by the id of the budget."""

    def __init__(self, balances: Iterable[BudgetBalance]) -> None:
        self.picos: dict[str, int] = {}
        self._plain: list[BudgetBalance] = []
        self._named: dict[bytes, list[BudgetBalance]] = {}
        for balance in balances:
            self.picos[balance.record.id] = 0
            if balance.record.customer:
                self._named.setdefault(balance.record.customer.encode(), []).append(balance)
            else:
                self._plain.append(balance)

    def __repr__(self) -> str:
        return f"<RecordCosts of {len(self.picos)} budgets>"

    def add(self, record: bytes) -> None:
        """Add a record."""
        found = _CUSTOMER.search(record) if self._named else None
        theirs = self._named.get(found[1], ()) if found is not None else ()
        for balance in (*self._plain, *theirs):
            self.picos[balance.record.id] += picos_under(balance, record)


_CUSTOMER = re.compile(rb'"customer":"([^"]+)"')


def picos_under(balance: BudgetBalance, record: bytes) -> int:
    """Cost of a usage record (as JSON) to this budget in its period; 0 when the budget does not
    apply to it."""
    if balance.record_mark not in record:
        return 0  # unparsed: most records are other tenants'
    body = json.loads(record)
    if not balance.covers(**{name: str(body.get(name, "")) for name in _SUBJECT}):
        return 0
    started_ns = int(float(body["started_at"]) * 1e9)
    return (
        to_picos(str(body["cost"]))
        if balance.period.starts_ns <= started_ns < balance.period.ends_ns
        else 0
    )


def spent_of(state: BudgetState) -> tuple[int, int]:
    """`spent` and `batch` in picounits. Raises ValueError for invalid amounts."""
    return to_picos(state.spent), to_picos(state.batch)


def _amount(record: BudgetRecord) -> int:
    picos = to_picos(record.amount)
    if picos < 0:
        raise ValueError(f"amount = {record.amount!r}: must be 0 or more")
    return picos
