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

Owner: the event loop; every method is synchronous, so no lock is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, NoReturn, Protocol, TypeVar

from activator.billing.budgets.balance import BudgetBalance
from activator.billing.usage_pricing import cost_text, to_picos
from pilotlight import errors
from pilotlight.errors import PilotlightError
from pilotlight.spec.pricing import Footprint, Rates, billable_ns, price_duration, rate_per_s

T = TypeVar("T")

CLOCK_STEP_NS = 50_000_000
"""Interval at which execution clocks are checked (`fast_path.CLOCK_STEP_S`): a call may exceed its limit
by this much."""
MAX_KNOWN_WORST = 64
"""Worst cases cached per function: one for each revision and caller deadline."""

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


class BudgetTable(Protocol):
    """What the budgets of one function need of all budgets (`budgets.Budgets`)."""

    generation: int
    turn: int
    lender: BudgetLeaseSource | None

    def roll_period(self, balance: BudgetBalance, at_ns: int) -> None:
        """Begin the period that contains `at_ns`."""

    def charge_later_budgets(
        self, older: ApplicableBudgets, picos: int, at_ns: int, customer: str = ""
    ) -> None:
        """Charge an ended call for `customer` to the budgets that were added while it ran."""

    def earliest_end_s(self, balance: BudgetBalance, at_ns: int) -> float:
        """Seconds until the first running call under this budget must have ended, at least 1."""


class ApplicableBudgets:
    """The budgets that apply to one function, or to its calls for one customer, as of one
    `generation`. `open`: its running calls, and the wall time at which each must end."""

    __slots__ = ("_budgets", "_worst", "balances", "generation", "open", "subject")

    def __init__(
        self,
        budgets: BudgetTable,
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
            if at_ns >= balance.ends_ns:
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
            if at_ns >= balance.ends_ns:
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
            raise balance.refusal(worst, spent=balance.spent, at_ns=at_ns)
        if balance.is_shared:
            raise AllowanceNeeded(self, worst)
        raise self.reserved(balance, worst, at_ns)

    def reserved(self, balance: BudgetBalance, worst: int, at_ns: int) -> errors.BudgetReserved:
        """The error while running calls may use up what is left."""
        retry_s = self._budgets.earliest_end_s(balance, at_ns)
        return errors.BudgetReserved(
            f"what is left of {balance.name} is reserved for running calls; try again "
            f"when one has ended",
            retry_after_s=retry_s,
            reserved=cost_text(balance.reserved),
            needed=cost_text(worst),
            **balance.detail(balance.spent),
        )
