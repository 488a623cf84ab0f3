"""Hard budgets that several activators spend from: each borrows money before it spends it, and all
together never hold more than there is.

For each budget and period the store keeps `base`, the most that any activator has heard from the
ledger, and what each activator claims beyond it: its own costs on their way to the ledger, what its
running calls reserve, and what it borrowed and has left. A claim is granted, atomically, only while
base + all claims <= amount; so whatever activators do afterwards without asking, they spend no more
together. A cost that reaches the ledger leaves its activator's claim in the same step in which
`base` takes it up.

Money is borrowed some dozens of calls at once, so that a call seldom asks; what was not needed
between two beats is given back. What an activator claims does not lapse when it dies: its unshipped
records are real money, and its next life states anew.

A store that lost its memory grants nothing until `grace_s` after its first word, while every living
activator states its claims again with its beat. (An activator that is dead in that moment is missed
until its next life: its unshipped records alone.) A store that does not answer grants nothing:
calls go on with what is left here, and then are answered 503, or (`without_redis.budget: open`)
each activator goes on as if it were alone.

Numbers are whole micro-units there, because the store counts in binary floating point; claims are
rounded up, amounts down."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from activator.billing.budget_balance import BudgetBalance
from activator.billing.budgets import ApplicableBudgets, Budgets, over_budget
from activator.coordination.state import SharedStateUnreachable
from pilotlight import errors

log = logging.getLogger(__name__)

PICOS_PER_MICRO = 10**6
BEAT_S = 0.5
"""Between two statements of what changed."""
CALLS_AT_ONCE = 64
"""Worst cases that are borrowed together, where there is enough: a round trip for so many calls."""
MAX_YOUNG_WAITS = 3
AWAY_S = 0.5
"""After the store did not answer it is not asked for so long: a call must not wait for each
timeout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetClaim:
    """What a member states of one budget, and asks for. In micro-units.

    Attributes:
        held: what the member holds now, in place of what it said before.
        need, want: the least and the most that it asks for on top; 0 = it only states.
        ends_ns: the period's end in wall time: afterwards nobody needs it.
    """

    budget: str
    period: str
    amount: int
    base: int
    held: int
    need: int
    want: int
    ends_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetGrant:
    """The answer.

    Attributes:
        granted: 0, or between `need` and `want`.
        base: the most that anybody heard from the ledger.
        wait_s: the store lost its memory, and grants nothing for so long.
        epoch: changes when the store loses its memory.
    """

    granted: int
    base: int
    wait_s: float
    epoch: str


class BudgetLeaseStore(Protocol):
    """What members share; one verb, atomic."""

    async def claim(self, claim: BudgetClaim) -> BudgetGrant:
        """State, and ask. Raises SharedStateUnreachable; then it may have been heard all the same,
        and the next statement mends it."""
        ...

    async def aclose(self) -> None:
        """Close the connections."""
        ...


class BudgetLeaser:
    """A member's borrowing (`retry_budget.Lender`). Owner: the event loop; a lock for each budget
    keeps its statements in order."""

    def __init__(
        self,
        store: BudgetLeaseStore,
        *,
        budgets: Budgets,
        is_open: bool,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`is_open`: while the store does not answer, each activator spends as if it were alone."""
        self._store = store
        self._budgets = budgets
        self._is_open = is_open
        self._clock = clock
        self._wall_ns = wall_ns
        self._locks: dict[str, asyncio.Lock] = {}
        self._stated: dict[str, tuple[str, int, int, int]] = {}
        self._seen: dict[str, tuple[int, int]] = {}
        self._epoch = ""
        self._away_until = -1.0
        self.is_reachable = True

    def __repr__(self) -> str:
        return (
            f"<BudgetLeaser {len(self._stated)} "
            f"budgets{'' if self.is_reachable else ', store unreachable'}>"
        )

    # -- calls -------------------------------------------------------------------------------------
    async def borrow(self, cover: ApplicableBudgets, purse: BudgetBalance, worst: int) -> None:
        """See budgets.Lender."""
        for _ in range(MAX_YOUNG_WAITS):
            async with self._lock(purse):
                if purse.left >= worst:
                    return
                try:
                    grant = await self._ask(purse, worst)
                except SharedStateUnreachable as e:
                    self._go_on_alone(cover, purse, worst, e)
                    return
                if purse.left >= worst:
                    return
                if not grant.wait_s:
                    raise self._refusal(cover, purse, worst, grant)
            # without the lock: what this budget claims is to be stated meanwhile
            await asyncio.sleep(grant.wait_s)
        raise errors.Unavailable(
            "the activators state their budgets anew: try again", retry_after_s=1
        )

    async def _ask(self, purse: BudgetBalance, worst: int) -> BudgetGrant:
        purse.hold_debt()
        need = worst - purse.left
        return await self._claim(purse, need=_up(need), want=_up(max(need, CALLS_AT_ONCE * worst)))

    def _refusal(
        self, cover: ApplicableBudgets, purse: BudgetBalance, worst: int, grant: BudgetGrant
    ) -> errors.PilotlightError:
        spent = max(purse.spent, grant.base * PICOS_PER_MICRO)
        if spent + worst > purse.amount:
            return over_budget(purse, worst, spent=spent)
        return cover.reserved(purse, worst, self._wall_ns())

    def _go_on_alone(
        self,
        cover: ApplicableBudgets,
        purse: BudgetBalance,
        worst: int,
        why: SharedStateUnreachable,
    ) -> None:
        if not self._is_open:
            raise errors.Unavailable(
                f"what is left of a budget is shared by several activators and not known now: "
                f"{why} (activator.without_redis.budget)",
                retry_after_s=1,
            ) from why
        room = purse.amount - purse.ledger - purse.held
        if purse.left + room < worst:
            raise (
                over_budget(purse, worst, spent=purse.spent)
                if purse.spent + worst > purse.amount
                else cover.reserved(purse, worst, self._wall_ns())
            )
        purse.lend(worst - purse.left)

    # -- beats -------------------------------------------------------------------------------------
    async def run(self) -> None:
        """State what changed, and give back what is not needed, until cancelled."""
        while True:
            await self.beat()
            await asyncio.sleep(BEAT_S)

    async def beat(self) -> None:
        """One round over the budgets; everything is stated when the store has lost its memory, and
        one at least to find that out."""
        epoch = self._epoch
        purses = list(self._budgets.purses.values())
        for gone in self._seen.keys() - self._budgets.purses.keys():
            del self._seen[gone]
            self._stated.pop(gone, None)
            self._locks.pop(gone, None)
        try:
            for purse in purses:
                self._rest(purse)
                if self._stated.get(purse.record.id) != _statement(purse):
                    await self._state(purse, is_due=False)
            if purses and epoch == self._epoch:
                holding = [purse for purse in purses if purse.held]
                if holding:
                    await self._state(holding[0], is_due=True)
            if epoch != self._epoch:
                for purse in purses:
                    await self._state(purse, is_due=True)
        except SharedStateUnreachable:
            return  # said once by `_claim`; the next beat tries again

    def _rest(self, purse: BudgetBalance) -> None:
        """Give back what is left of a budget that nobody used since the last beat."""
        used = (purse.spent, purse.reserved)
        lock = self._locks.get(purse.record.id)
        if self._seen.get(purse.record.id) == used and not (lock is not None and lock.locked()):
            purse.give_back()
        self._seen[purse.record.id] = used

    async def _state(self, purse: BudgetBalance, *, is_due: bool) -> None:
        async with self._lock(purse):
            purse.hold_debt()
            if is_due or self._stated.get(purse.record.id) != _statement(purse):
                await self._claim(purse, need=0, want=0)

    # -- the store ---------------------------------------------------------------------------------
    async def _claim(self, purse: BudgetBalance, *, need: int, want: int) -> BudgetGrant:
        if self._clock() < self._away_until and need:
            raise SharedStateUnreachable("the store of shared budgets did not answer a moment ago")
        period, statement = purse.period, _statement(purse)
        claim = BudgetClaim(
            budget=purse.record.id,
            period=period.name,
            amount=purse.amount // PICOS_PER_MICRO,
            base=_up(purse.ledger),
            held=_up(purse.held),
            need=need,
            want=want,
            ends_ns=period.ends_ns,
        )
        try:
            grant = await self._store.claim(claim)
        except SharedStateUnreachable as e:
            self._stated.pop(purse.record.id, None)
            self._away_until = self._clock() + AWAY_S
            if self.is_reachable:
                log.warning("budgets are not shared now; we spend what we have error=%s", e)
            self.is_reachable = False
            raise
        self.is_reachable, self._away_until = True, -1.0
        # the store has forgotten what it was told, whoever finds out
        if grant.epoch != self._epoch:
            self._epoch = grant.epoch
            self._stated.clear()
        if purse.period == period:
            picos = grant.granted * PICOS_PER_MICRO
            purse.lend(picos)
            # What was said and is known there; what has changed while the answer was on its way is
            # still to be said.
            self._stated[purse.record.id] = *statement[:-1], statement[-1] + picos
        return grant

    def _lock(self, purse: BudgetBalance) -> asyncio.Lock:
        return self._locks.setdefault(purse.record.id, asyncio.Lock())

    async def aclose(self) -> None:
        """Give everything back that is left, if the store hears it, and close."""
        for purse in self._budgets.purses.values():
            purse.give_back()
        await self.beat()
        await self._store.aclose()


def granted(*, room: int, need: int, want: int) -> int:
    """What a store grants of `room`: nothing below the need, and beyond it an eighth of the room at
    most, so that others get theirs."""
    return 0 if room < need else min(room, max(need, min(want, room // 8)))


def _statement(purse: BudgetBalance) -> tuple[str, int, int, int]:
    return purse.period.name, purse.amount, purse.ledger, purse.held


def _up(picos: int) -> int:
    return max(0, -(-picos // PICOS_PER_MICRO))
