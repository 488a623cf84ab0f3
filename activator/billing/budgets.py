"""Hard budgets: every call reserves its worst case before it runs and pays what it cost, so money
that is not there is not spent.

The worst case of a call is its execution clock (or what is left of its caller's deadline), and the
step in which clocks are looked at, by the instance's whole rate, with the list's minimum and
rounding, and the request's own price; of a language model's, besides, the tokens that its prompt
probably has and all that its answers may have. Processor sharing charges a call for no more than
its own time, and an engine ends an answer where it was told to, so calls alone never bring a budget
above its amount, but for what a prompt is longer than it was estimated, which nobody knows before
an engine has read it. What can, then, is what no reservation stands for:

    overshoot <= sum over instances: rate * max(idle_factor, reserved_factor) * (SETTLE_S + drain)
               + sum over instances: cpu_core_s * cpu_factor * cores that it can get * (SETTLE_S +
               drain)
               + sum over starts:    rate * start_factor * length of the start, and the CPU time of those that fail
               + sum over calls:     rate * (lateness of the execution clock beyond its step + 1 ns for each call beside it)
               + sum over prompts:   token_in * (tokens beyond the estimate; at most max_model_len less the estimate)
               + sum over WebSockets:  rate * 2 s, where one was ended by its clock and its function
               does not answer the close + an hour of storage, and, under a budget that is new, the
               calls that ran when it was made and those that began before
                 the ledger said what had been spent by then (a round trip)

where SETTLE_S (60 s, `loop.SETTLE_EVERY`) is how often idle time is written down, drain how long an
idle instance takes to end, and the clock is late only when the event loop is. Such costs count as
soon as they are written, so the next call sees them.

A call whose worst case fits in what is neither spent nor reserved runs. If it would fit once the
running ones have settled, it is answered 429 and when the first of them must have ended; if not
even then, the budget is spent: 402.

What is spent = what the ledger says + what is written here and not in the ledger yet. A period is a
day or month of the calendar in UTC, begins with the first call (or cost) in it, and is never left
for an earlier one: a clock that steps back stays in the later period. Owner: the event loop; every
method is synchronous, so no lock is needed."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from itertools import islice
from typing import Any, NamedTuple, NoReturn, Protocol

from activator.billing.budget_balance import BudgetBalance, is_same_money, spent_of
from activator.billing.errors import AllowanceNeeded
from activator.billing.periods import period_at, utc_text
from activator.billing.segments import Cursor
from activator.billing.usage import as_picos, cost_text
from activator.llm.token_reservation import TokenReservation
from pilotlight import errors
from pilotlight.pricing import Footprint, Rates, billable_ns, price, rate_per_s
from pilotlight.protocol import BudgetRecord, BudgetState

log = logging.getLogger(__name__)

CLOCK_STEP_NS = 50_000_000
"""Execution clocks are looked at this often (`warm.CLOCK_STEP_S`): a call may run so much longer
than it should."""
MAX_RETRY_S = 3600.0
MAX_LOOKED_AT = 128
"""Of a function's running calls, the oldest: the first to end is among them, unless callers gave
later ones less time."""
MAX_KNOWN_WORST = 64
"""Worst cases that are remembered for a function: each revision has one, and each deadline of a
caller another."""


class Subject(NamedTuple):
    """Whose costs they are: what budgets are told apart by."""

    tenant: str
    environment: str
    app: str
    function: str
    currency: str


class Priced(Protocol):
    """What is asked of a target."""

    @property
    def key(self) -> str:
        """Its revision's key."""
        ...

    @property
    def footprint(self) -> Footprint:
        """What an instance of it occupies."""
        ...


class Lender(Protocol):
    """Who lends what all activators share."""

    async def borrow(self, cover: ApplicableBudgets, purse: BudgetBalance, worst: int) -> None:
        """Have at least `worst` left in the purse. Raises OverBudget, BudgetReserved,
        Unavailable."""
        ...


class ApplicableBudgets:
    """The budgets over one function, as of one `generation`; `open` are its running calls by the
    wall time at which they must end."""

    __slots__ = ("_budgets", "_worst", "generation", "open", "purses", "subject")

    def __init__(
        self,
        budgets: Budgets,
        subject: Subject,
        purses: tuple[BudgetBalance, ...],
        open: dict[str, int],
    ) -> None:
        self._budgets = budgets
        self.subject = subject
        self.purses = purses
        self.open = open
        self.generation = budgets.generation
        self._worst: dict[tuple[str, str, int], int] = {}

    def __repr__(self) -> str:
        return (
            f"<Cover {self.subject.app}/{self.subject.function} {len(self.purses)} budgets, "
            f"{len(self.open)} calls>"
        )

    def check(self, worst: int, at_ns: int) -> None:
        """Raises what `reserve` would raise now."""
        for purse in self.purses:
            if at_ns >= purse.period.ends_ns:
                self._budgets.turn_over(purse, at_ns)
            if purse.left < worst:
                self._refuse(purse, worst, at_ns)

    def reserve(self, name: str, worst: int, *, at_ns: int, ends_ns: int) -> int:
        """Set the worst case of a call aside in all of them, or in none; returns the `turn` to give
        back to `settle`.

        Raises OverBudget (402), BudgetReserved (429), and AllowanceNeeded where the others must be
        asked first."""
        self.check(worst, at_ns)
        for purse in self.purses:
            purse.left -= worst
        self.open[name] = ends_ns
        return self._budgets.turn

    def settle(self, name: str, worst: int, actual: int, *, turn: int, at_ns: int) -> None:
        """The call that began at `at_ns` has ended, and its record was written: it cost
        `actual`."""
        self.open.pop(name, None)
        for purse in self.purses:
            if turn >= purse.since:
                purse.left += worst - actual
                purse.own += actual
        if self.generation != self._budgets.generation:
            self._budgets.pay_newer(self, actual, at_ns)

    def release(self, name: str, worst: int, *, turn: int) -> None:
        """The call did not run after all, and there is no record of it."""
        self.open.pop(name, None)
        for purse in self.purses:
            if turn >= purse.since:
                purse.left += worst

    def pay(self, picos: int, at_ns: int) -> None:
        """A record that began at `at_ns` was written for which nothing was reserved."""
        for purse in self.purses:
            if at_ns >= purse.period.ends_ns:
                self._budgets.turn_over(purse, at_ns)
            if at_ns >= purse.period.starts_ns:
                purse.pay(picos)

    async def borrow(self, worst: int) -> None:
        """Have `worst` at hand in each of them. Raises OverBudget, BudgetReserved, Unavailable."""
        for purse in self.purses:
            if purse.left < worst and self._budgets.lender is not None:
                await self._budgets.lender.borrow(self, purse, worst)

    def worst_picos(self, target: Priced, rates: Rates, limit_ns: int) -> int:
        """The most that a call of this target can cost within `limit_ns`. Raises KeyError when its
        accelerator has no price."""
        asked = (target.key, rates.version, limit_ns)
        known = self._worst.get(asked)
        if known is None:
            if len(self._worst) >= MAX_KNOWN_WORST:
                self._worst.clear()
            ns = billable_ns(limit_ns + CLOCK_STEP_NS, rates)
            known = self._worst[asked] = as_picos(
                str(price(ns, rate_per_s(target.footprint, rates), rates.request))
            )
        return known

    def _refuse(self, purse: BudgetBalance, worst: int, at_ns: int) -> NoReturn:
        if purse.spent + worst > purse.amount:
            raise over_budget(purse, worst, spent=purse.spent)
        if purse.is_shared:
            raise AllowanceNeeded(self, worst)
        raise self.reserved(purse, worst, at_ns)

    def reserved(self, purse: BudgetBalance, worst: int, at_ns: int) -> errors.BudgetReserved:
        """The answer while running calls may use up what is left."""
        retry_s = self._budgets.earliest_end_s(purse, at_ns)
        return errors.BudgetReserved(
            f"what is left of {_name(purse)} is set aside for calls that still run; try again "
            f"when one has ended",
            retry_after_s=retry_s,
            reserved=cost_text(purse.reserved),
            needed=cost_text(worst),
            **_detail(purse, purse.spent),
        )


class Budgets:
    """All hard budgets. `generation` changes with them, `turn` with every period that begins."""

    def __init__(
        self, *, is_shared: bool = False, wall_ns: Callable[[], int] = time.time_ns
    ) -> None:
        """`is_shared`: other activators spend too, so money is borrowed before it is spent
        (`budget_leases.py`)."""
        self._is_shared = is_shared
        self._wall_ns = wall_ns
        self._purses: dict[str, BudgetBalance] = {}
        self._of_tenant: dict[str, dict[str, BudgetBalance]] = {}
        self._retired: dict[str, BudgetBalance] = {}
        self._retired_at: tuple[Cursor, int] | None = None
        self._answers = 0
        self._covers: dict[Subject, ApplicableBudgets] = {}
        self.generation = 0
        self.turn = 0
        self.lender: Lender | None = None
        self.end_of_journal: Callable[[], Cursor] = Cursor
        self.on_news: Callable[[], None] = _ignore

    def __repr__(self) -> str:
        return f"<Budgets {len(self._purses)} hard, generation {self.generation}>"

    # -- the feed's side ---------------------------------------------------------------------------
    def apply(self, id: str, record: BudgetRecord | None) -> None:
        """A budget is new, was changed, or (None) is gone; soft ones are not kept, they stop
        nothing. Raises ValueError: it is broken."""
        self.generation += 1
        if record is None or not record.hard:
            self._retire(id)
            return
        known = self._purses.get(id) or self._revived(id)
        if known is not None and is_same_money(known.record, record):
            known.change(record)
            self._keep(id, known)
        else:
            mark = self.end_of_journal()
            self._keep(
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

    def _keep(self, id: str, purse: BudgetBalance) -> None:
        self._purses[id] = self._of_tenant.setdefault(purse.record.tenant, {})[id] = purse

    def _retire(self, id: str) -> None:
        if self._retired_at != self._moment():
            self._retired.clear()
            self._retired_at = self._moment()
        if (gone := self._purses.pop(id, None)) is not None:
            self._retired[id] = gone
            del self._of_tenant[gone.record.tenant][id]

    def _revived(self, id: str) -> BudgetBalance | None:
        """A budget that was just taken away because the feed is told anew: nothing was written or
        shipped since, so it still adds up."""
        return self._retired.pop(id, None) if self._retired_at == self._moment() else None

    def _moment(self) -> tuple[Cursor, int]:
        return self.end_of_journal(), self._answers

    # -- the calls' side ---------------------------------------------------------------------------
    def cover(self, subject: Subject) -> ApplicableBudgets:
        """The budgets over a function."""
        known = self._covers.get(subject)
        if known is None or known.generation != self.generation:
            its = self._of_tenant.get(subject.tenant, {})
            purses = tuple(purse for purse in its.values() if purse.covers(**subject._asdict()))
            known = self._covers[subject] = ApplicableBudgets(
                self, subject, purses, known.open if known is not None else {}
            )
        return known

    def is_spent(self, subject: Subject, target: Priced, rates: Rates, *, limit_ns: int) -> bool:
        """Whether not even one call of this target could run in this period, were nothing reserved:
        then nothing is kept warm for it."""
        cover = self.cover(subject)
        for purse in cover.purses:
            self._turn_over_if_due(purse)
        return bool(cover.purses) and cover.worst_picos(target, rates, limit_ns) > min(
            p.amount - p.spent for p in cover.purses
        )

    def check(
        self,
        subject: Subject,
        target: Priced,
        rates: Rates,
        *,
        limit_ns: int,
        tokens: TokenReservation | None = None,
    ) -> None:
        """Refuse a call before it waits for a slot, or has an instance started. Raises OverBudget,
        BudgetReserved."""
        cover = self.cover(subject)
        if cover.purses:
            with contextlib.suppress(AllowanceNeeded):  # asked for when there is a slot
                worst = cover.worst_picos(target, rates, limit_ns)
                if tokens is not None:
                    worst += token_picos(rates, tokens.estimated_in, tokens.max_out)
                cover.check(worst, self._wall_ns())

    def turn_over(self, purse: BudgetBalance, at_ns: int) -> None:
        """The period of `at_ns` begins."""
        self.turn += 1
        purse.begin(period_at(purse.record.period, at_ns), self.turn)

    def pay_newer(self, older: ApplicableBudgets, picos: int, at_ns: int) -> None:
        """A call ended whose cover is not the newest: budgets that came while it ran pay it too."""
        for purse in self.cover(older.subject).purses:
            if purse not in older.purses and at_ns >= purse.period.starts_ns:
                purse.pay(picos)

    def earliest_end_s(self, purse: BudgetBalance, at_ns: int) -> float:
        """Seconds until the first running call under this budget must have ended: 1 at least."""
        firsts = [
            min(islice(c.open.values(), MAX_LOOKED_AT))
            for c in self._covers.values()
            if c.open and purse in c.purses
        ]
        return min(MAX_RETRY_S, max(1.0, (min(firsts) - at_ns) / 1e9)) if firsts else 1.0

    # -- the ledger's side -------------------------------------------------------------------------
    @property
    def purses(self) -> Mapping[str, BudgetBalance]:
        """By budget id."""
        return self._purses

    def take_answer(self, states: Mapping[str, BudgetState], records: Sequence[bytes]) -> None:
        """The ledger accepted `records` and says where the budgets that they fall under stand."""
        self._answers += 1
        for budget, purse in self._purses.items():
            state = states.get(budget)
            self._turn_over_if_due(purse)
            if state is not None and state.period == purse.period.name:
                try:
                    ledger, batch = spent_of(state)
                except (ValueError, TypeError) as e:
                    log.error("state of a budget is not understood budget=%s error=%s", budget, e)
                else:
                    purse.shipped(batch, ledger)
                    continue
            # one clock is past midnight and the other is not: our part is what we sent
            if state is not None or purse.own:
                purse.moved(sum(picos_under(purse, record) for record in records))

    def take_states(self, states: Mapping[str, BudgetState]) -> None:
        """Where all budgets stand, asked while no records were on their way."""
        for budget, purse in self._purses.items():
            self._turn_over_if_due(purse)
            state = states.get(budget)
            if state is None or state.period != purse.period.name:
                # asked again later: the controller has not heard of it, or is on the other side of
                # midnight
                continue
            try:
                purse.shipped(0, spent_of(state)[0])
            except (ValueError, TypeError) as e:
                log.error("state of a budget is not understood budget=%s error=%s", budget, e)

    def _turn_over_if_due(self, purse: BudgetBalance) -> None:
        now_ns = self._wall_ns()
        if now_ns >= purse.period.ends_ns:
            self.turn_over(purse, now_ns)


def token_picos(rates: Rates, tokens_in: int, tokens_out: int) -> int:
    """What so many tokens cost."""
    return as_picos(
        str(price(0, Decimal(0), tokens_in * rates.token_in + tokens_out * rates.token_out))
    )


def picos_under(purse: BudgetBalance, record: bytes) -> int:
    """What a usage record (as JSON) costs this budget in its period; 0 when it does not fall under
    it."""
    if purse.tenant_mark not in record:
        return 0  # unparsed: most records are other tenants'
    body = json.loads(record)
    if not purse.covers(**{name: str(body.get(name)) for name in Subject._fields}):
        return 0
    started_ns = int(float(body["started_at"]) * 1e9)
    return (
        as_picos(str(body["cost"]))
        if purse.period.starts_ns <= started_ns < purse.period.ends_ns
        else 0
    )


def over_budget(purse: BudgetBalance, worst: int, *, spent: int) -> errors.OverBudget:
    """The answer when no wait within the period helps."""
    why = (
        "is spent"
        if spent >= purse.amount
        else f"has {cost_text(purse.amount - spent)} left, and this call may cost "
        f"{cost_text(worst)}"
    )
    return errors.OverBudget(
        f"{_name(purse)} {why}: the next period begins at {utc_text(purse.period.ends_ns)}; raise "
        f"the budget "
        f"(`pilotlight budget set`), or give the call less time (header pilotlight-timeout)",
        needed=cost_text(worst),
        **_detail(purse, spent),
    )


def _name(purse: BudgetBalance) -> str:
    mine = purse.record
    of = "/".join(part for part in (mine.app, mine.function) if part) or "the tenant"
    return f"the budget of {mine.amount} {mine.currency} a {mine.period} of {of}"


def _detail(purse: BudgetBalance, spent: int) -> dict[str, Any]:
    return {
        "budget": purse.record.id,
        "period": purse.period.name,
        "amount": purse.record.amount,
        "spent": cost_text(spent),
        "until": utc_text(purse.period.ends_ns),
    }


def _ignore() -> None:
    """Nobody asked."""
