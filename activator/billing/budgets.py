"""Hard budgets: every call reserves its worst-case cost before it runs and then pays its actual
cost, so that a budget cannot be overspent.

The worst case of a call is its execution clock (or the rest of its caller's deadline) plus the step
at which clocks are checked, at the instance's whole rate, with the price list's minimum and
rounding, plus the price per request. For a language model it includes the estimated tokens of the
prompt and the maximum of output tokens. Processor sharing charges a call for no more than its own
time, and an engine stops at the requested token limit, so calls alone never exceed a budget, except
for prompt tokens beyond the estimate, which are not known before an engine has read the prompt.
Only costs without a reservation can exceed it:

    overshoot <= sum over instances: rate * max(idle_factor, reserved_factor) * (SETTLE_S + drain)
               + sum over instances: cpu_core_s * cpu_factor * cores that it can get * (SETTLE_S +
               drain)
               + sum over starts:    rate * start_factor * length of the start, and the CPU time of those that fail
               + sum over calls:     rate * (lateness of the execution clock beyond its step + 1 ns for each call beside it)
               + sum over prompts:   token_in * (tokens beyond the estimate; at most max_model_len less the estimate)
               + sum over WebSockets:  rate * 2 s, where one was ended by its clock and its function
               does not answer the close + an hour of storage, and, under a new budget, the
               calls that ran when it was made and those that began before
                 the ledger said what had been spent by then (a round trip)

where SETTLE_S (60 s, `autoscaler_loop.SETTLE_EVERY`) is how often idle time is recorded, drain how
long an idle instance takes to end, and the clock is late only when the event loop is. Such costs
count as soon as they are written, so the next call sees them.

A call runs if its worst case fits in what is neither spent nor reserved. If it would fit once the
running calls have settled, it is answered 429 with the time at which the first of them must have
ended; otherwise the budget is spent: 402.

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
from typing import NamedTuple, NoReturn, Protocol, TypeVar

from activator.billing.budget_balance import (
    BudgetBalance,
    RecordCosts,
    budget_detail,
    budget_name,
    is_same_money,
    over_budget,
    spent_of,
)
from activator.billing.periods import period_at
from activator.billing.segments import Cursor
from activator.billing.usage_pricing import cost_text, to_picos
from activator.customers.scopes import CustomerScopes
from activator.quotas.token_reservation import TokenReservation
from pilotlight import errors
from pilotlight.errors import PilotlightError
from pilotlight.protocol import BudgetRecord, BudgetState
from pilotlight.spec.identifiers import ANY_CUSTOMER
from pilotlight.spec.pricing import Footprint, Rates, billable_ns, price_duration, rate_per_s

log = logging.getLogger(__name__)

T = TypeVar("T")

CLOCK_STEP_NS = 50_000_000
"""Interval at which execution clocks are checked (`fast_path.CLOCK_STEP_S`): a call may exceed its limit
by this much."""
MAX_RETRY_S = 3600.0
MAX_LOOKED_AT = 128
"""Number of a function's oldest running calls to inspect: the first to end is among them, unless
callers gave later ones less time."""
MAX_KNOWN_WORST = 64
"""Worst cases cached per function: one for each revision and caller deadline."""


MAX_COVERS = 20_000
"""Functions, and customers with budgets of their own, whose applicable budgets are kept."""
MAX_BORROWINGS = 8
"""Most attempts to borrow: a function has a few budgets above it, each may need to be borrowed
from, and other calls may use the borrowed amount first."""


class AllowanceNeeded(PilotlightError):
    """Raised when a call must wait until its activator has borrowed from the budget that all
    activators share. Internal to the activator."""

    type = "allowance-needed"
    status = 503

    def __init__(self, cover: ApplicableBudgets, worst: int) -> None:
        super().__init__("the activator must first borrow from the shared budget", retry_after_s=1)
        self.cover = cover
        self.worst = worst

    async def obtain(self) -> None:
        """Borrow. Raises what `ApplicableBudgets.borrow` raises."""
        await self.cover.borrow(self.worst)


class CustomerUnknown(AllowanceNeeded):
    """Raised when a call must wait until its customer has the budgets that each customer gets.
    Internal to the activator."""

    def __init__(
        self, cover: ApplicableBudgets, registrar: CustomerRegistrar, customer: str
    ) -> None:
        super().__init__(cover, 0)
        self._registrar = registrar
        self._customer = customer

    async def obtain(self) -> None:
        """Have the budgets made. Raises Unavailable, TooManyRequests."""
        await self._registrar.register(self.cover.subject.tenant, self._customer)


async def borrow_and_retry(reserve: Callable[[], T]) -> T:
    """Call `reserve`, which reserves money, again after each borrowing that it needs. Raises what
    it raises, and what `ApplicableBudgets.borrow` does."""
    for _ in range(MAX_BORROWINGS):
        try:
            return reserve()
        except AllowanceNeeded as e:
            await e.obtain()
    return reserve()


class Subject(NamedTuple):
    """Whose costs these are: the fields that select budgets. `customer`: "" = none is named."""

    tenant: str
    environment: str
    app: str
    function: str
    currency: str
    customer: str = ""


class PricedCall(Protocol):
    """The properties of a target that determine its price."""

    @property
    def key(self) -> str:
        """Key of its revision."""

    @property
    def footprint(self) -> Footprint:
        """Resources that an instance of it occupies."""


class BudgetLeaseSource(Protocol):
    """Lends money of budgets that all activators share."""

    async def borrow(self, cover: ApplicableBudgets, balance: BudgetBalance, worst: int) -> None:
        """Borrow until at least `worst` is left in the balance. Raises OverBudget, BudgetReserved,
        Unavailable."""


class CustomerRegistrar(Protocol):
    """Makes the budgets that each customer gets."""

    async def register(self, tenant: str, customer: str) -> None:
        """Have those of this customer made, and applied here. Raises Unavailable,
        TooManyRequests."""


class ApplicableBudgets:
    """The budgets that apply to one function, or to its calls for one customer, as of one
    `generation`. `open`: its running calls, and the wall time at which each must end."""

    __slots__ = ("_budgets", "_worst", "balances", "generation", "open", "subject")

    def __init__(
        self,
        budgets: Budgets,
        subject: Subject,
        balances: tuple[BudgetBalance, ...],
        open: dict[str, int],
    ) -> None:
        self._budgets = budgets
        self.subject = subject
        self.balances = balances
        self.open = open
        self.generation = budgets.generation
        self._worst: dict[tuple[str, str, int], int] = {}

    def __repr__(self) -> str:
        return (
            f"<ApplicableBudgets {self.subject.app}/{self.subject.function} {len(self.balances)} budgets, "
            f"{len(self.open)} calls>"
        )

    def check(self, worst: int, at_ns: int) -> None:
        """Raises what `reserve` would raise now."""
        for balance in self.balances:
            if at_ns >= balance.period.ends_ns:
                self._budgets.roll_period(balance, at_ns)
            if balance.left < worst:
                self._refuse(balance, worst, at_ns)

    def reserve(self, name: str, worst: int, *, at_ns: int, ends_ns: int) -> int:
        """Reserve the worst case of a call in all budgets, or in none. Returns the `turn` to pass
        to `settle`.

        Raises OverBudget (402), BudgetReserved (429), and AllowanceNeeded where money must be
        borrowed first."""
        self.check(worst, at_ns)
        for balance in self.balances:
            balance.left -= worst
        self.open[name] = ends_ns
        return self._budgets.turn

    def settle(
        self, name: str, worst: int, actual: int, *, turn: int, at_ns: int, customer: str = ""
    ) -> None:
        """Release the reservation of a call for `customer` that began at `at_ns` and charge its
        `actual` cost, whose record was written."""
        self.open.pop(name, None)
        for balance in self.balances:
            if turn >= balance.since:
                balance.left += worst - actual
                balance.own += actual
        if self.generation != self._budgets.generation:
            self._budgets.charge_later_budgets(self, actual, at_ns, customer)

    def release(self, name: str, worst: int, *, turn: int) -> None:
        """Release the reservation of a call that did not run and has no record."""
        self.open.pop(name, None)
        for balance in self.balances:
            if turn >= balance.since:
                balance.left += worst

    def charge(self, picos: int, at_ns: int) -> None:
        """Charge a record that began at `at_ns` and had no reservation."""
        for balance in self.balances:
            if at_ns >= balance.period.ends_ns:
                self._budgets.roll_period(balance, at_ns)
            if at_ns >= balance.period.starts_ns:
                balance.charge(picos)

    async def borrow(self, worst: int) -> None:
        """Borrow until `worst` is left in each budget. Raises OverBudget, BudgetReserved,
        Unavailable."""
        for balance in self.balances:
            if balance.left < worst and self._budgets.lender is not None:
                await self._budgets.lender.borrow(self, balance, worst)

    def worst_picos(self, target: PricedCall, rates: Rates, limit_ns: int) -> int:
        """The maximum cost of a call of this target within `limit_ns`. Raises KeyError when its
        accelerator has no price."""
        asked = (target.key, rates.version, limit_ns)
        known = self._worst.get(asked)
        if known is None:
            if len(self._worst) >= MAX_KNOWN_WORST:
                self._worst.clear()
            ns = billable_ns(limit_ns + CLOCK_STEP_NS, rates)
            known = self._worst[asked] = to_picos(
                str(price_duration(ns, rate_per_s(target.footprint, rates), rates.request))
            )
        return known

    def _refuse(self, balance: BudgetBalance, worst: int, at_ns: int) -> NoReturn:
        if balance.spent + worst > balance.amount:
            raise over_budget(balance, worst, spent=balance.spent)
        if balance.is_shared:
            raise AllowanceNeeded(self, worst)
        raise self.reserved(balance, worst, at_ns)

    def reserved(self, balance: BudgetBalance, worst: int, at_ns: int) -> errors.BudgetReserved:
        """The error while running calls may use up what is left."""
        retry_s = self._budgets.earliest_end_s(balance, at_ns)
        return errors.BudgetReserved(
            f"what is left of {budget_name(balance)} is reserved for running calls; try again "
            f"when one has ended",
            retry_after_s=retry_s,
            reserved=cost_text(balance.reserved),
            needed=cost_text(worst),
            **budget_detail(balance, balance.spent),
        )


class Budgets:
    """All hard budgets. `generation` changes with every change of a budget, `turn` with every
    period that begins."""

    def __init__(
        self, *, is_shared: bool = False, wall_ns: Callable[[], int] = time.time_ns
    ) -> None:
        """`is_shared`: other activators spend from the same budgets, so money is borrowed before it
        is spent (`budget_leases.py`)."""
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
        """Add, change or (None) remove a budget. Soft budgets are ignored: they stop nothing.
        Raises ValueError for an invalid budget."""
        self.generation += 1
        self._customers.apply(id, record)
        if record is None or not record.hard or record.customer == ANY_CUSTOMER:
            self._retire(id)
            return
        known = self._balances.get(id) or self._restore_retired(id)
        if known is not None and is_same_money(known.record, record):
            known.change(record)
            self._store(id, known)
        else:
            mark = self.end_of_journal()
            self._store(
                id,
                BudgetBalance(
                    record,
                    at_ns=self._wall_ns(),
                    turn=self.turn,
                    is_shared=self._is_shared,
                    mark=mark,
                ),
            )
        self.on_news()

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
        balance.begin(period_at(balance.record.period, at_ns), self.turn)

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
                balance.shipped(0, spent_of(state)[0])
            except (ValueError, TypeError) as e:
                log.error("invalid budget state budget=%s error=%s", budget, e)

    def _roll_period_if_due(self, balance: BudgetBalance) -> None:
        now_ns = self._wall_ns()
        if now_ns >= balance.period.ends_ns:
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
