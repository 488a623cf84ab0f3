"""Hard budgets shared by several activators: each borrows money before it spends it, and together
they never hold more than the budget's amount.

For each budget and period the store keeps `base`, the highest spending that any activator has read
from the ledger, and each activator's claim beyond it: its own costs not yet in the ledger, the
reservations of its running calls, and its unused borrowed money. A claim is granted, atomically,
only while base + all claims <= amount, so the activators together cannot overspend between two
claims. A cost that reaches the ledger leaves its activator's claim in the same step in which `base`
includes it.

An activator borrows for some dozens of calls at once, so that few calls need a round trip. It
returns what was not used between two rounds. The claim of a dead activator does not expire: its
unshipped records are real costs, and its next process states them again.

A store that lost its data grants nothing until `grace_s` after the first claim, while every living
activator states its claims again in its next round. (The claim of an activator that is dead at that
time, its unshipped records, is missing until it restarts.) While the store does not answer, nothing
is granted: calls use the money that is left here and are then answered 503, or
(`without_redis.budget: open`) each activator continues as if it were the only one.

The store uses whole micro-units, because it computes in binary floating point. Claims are rounded
up, amounts down."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from activator.billing.budgets.applicable import ApplicableBudgets
from activator.billing.budgets.balance import BudgetBalance
from activator.billing.budgets.budgets import Budgets
from activator.coordination.state import SharedStateUnreachable
from pilotlight import errors

log = logging.getLogger(__name__)

PICOS_PER_MICRO = 10**6
ROUND_S = 0.5
"""Interval between two rounds that state changed claims."""
CALLS_AT_ONCE = 64
"""Number of worst-case costs that are borrowed in one round trip, if there is enough money."""
LONGEST_NS = 366 * 86_400 * 10**9
"""The store keeps a claim on prepaid credit, which has no period, for this long after the last
one."""
MAX_YOUNG_WAITS = 3
UNREACHABLE_PAUSE_S = 0.5
"""After a failed request the store is not asked for this long, so that calls do not each wait for a
timeout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetClaim:
    """A member's claim on one budget, and its request for more. In micro-units.

    Attributes:
        held: the member's claim now, which replaces its previous one.
        need, want: the least and the most that it requests in addition; 0 = none.
        ends_ns: the period's end in wall time; the claim is not needed after it."""

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
    """The store's answer to a claim.

    Attributes:
        granted: 0, or between `need` and `want`.
        base: the highest spending that any member has read from the ledger.
        wait_s: how long the store, after a loss of data, grants nothing.
        epoch: changes when the store loses its data."""

    granted: int
    base: int
    wait_s: float
    epoch: str


class BudgetLeaseStore(Protocol):
    """The store that members share. It has one atomic operation."""

    async def claim(self, claim: BudgetClaim) -> BudgetGrant:
        """State a claim and request more. Raises SharedStateUnreachable; the store may have
        processed the claim nevertheless, and the next claim corrects that."""

    async def aclose(self) -> None:
        """Close the connections."""


class BudgetLeaser:
    """Borrows for one member (`budgets.BudgetLeaseSource`). Owner: the event loop. One lock per
    budget keeps its claims in order."""

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
        self._paused_until = -1.0
        self.is_reachable = True

    def __repr__(self) -> str:
        return (
            f"<BudgetLeaser {len(self._stated)} "
            f"budgets{'' if self.is_reachable else ', store unreachable'}>"
        )

    # -- calls -------------------------------------------------------------------------------------
    async def borrow(self, cover: ApplicableBudgets, balance: BudgetBalance, worst: int) -> None:
        """Borrow until `worst` is available in the balance. Raises OverBudget, BudgetReserved,
        Unavailable."""
        for _ in range(MAX_YOUNG_WAITS):
            async with self._lock(balance):
                if balance.left >= worst:
                    return
                try:
                    grant = await self._request(balance, worst)
                except SharedStateUnreachable as e:
                    self._borrow_without_store(cover, balance, worst, e)
                    return
                if balance.left >= worst:
                    return
                if not grant.wait_s:
                    raise self._refusal(cover, balance, worst, grant)
            # without the lock: this budget's claim must be stated meanwhile
            await asyncio.sleep(grant.wait_s)
        raise errors.Unavailable(
            "the activators are restoring their budget claims: try again", retry_after_s=1
        )

    async def _request(self, balance: BudgetBalance, worst: int) -> BudgetGrant:
        balance.record_debt()
        need = worst - balance.left
        return await self._claim(
            balance, need=_up(need), want=_up(max(need, CALLS_AT_ONCE * worst))
        )

    def _refusal(
        self, cover: ApplicableBudgets, balance: BudgetBalance, worst: int, grant: BudgetGrant
    ) -> errors.PilotlightError:
        spent = max(balance.spent, grant.base * PICOS_PER_MICRO)
        if spent + worst > balance.amount:
            return balance.refusal(worst, spent=spent, at_ns=self._wall_ns())
        return cover.reserved(balance, worst, self._wall_ns())

    def _borrow_without_store(
        self,
        cover: ApplicableBudgets,
        balance: BudgetBalance,
        worst: int,
        why: SharedStateUnreachable,
    ) -> None:
        if not self._is_open:
            raise errors.Unavailable(
                f"the activators cannot agree on what is left of a shared budget: "
                f"{why} (activator.without_redis.budget)",
                retry_after_s=1,
            ) from why
        room = balance.amount - balance.ledger - balance.held
        if balance.left + room < worst:
            raise (
                balance.refusal(worst, spent=balance.spent, at_ns=self._wall_ns())
                if balance.spent + worst > balance.amount
                else cover.reserved(balance, worst, self._wall_ns())
            )
        balance.grant(worst - balance.left)

    # -- rounds ------------------------------------------------------------------------------------
    async def run(self) -> None:
        """State changed claims and return unused money, until cancelled."""
        while True:
            await self.state_claims()
            await asyncio.sleep(ROUND_S)

    async def state_claims(self) -> None:
        """One round over the budgets. At least one claim is stated, to detect a loss of the store's
        data; after a loss, all are."""
        epoch = self._epoch
        balances = list(self._budgets.balances.values())
        for gone in self._seen.keys() - self._budgets.balances.keys():
            del self._seen[gone]
            self._stated.pop(gone, None)
            self._locks.pop(gone, None)
        try:
            for balance in balances:
                self._release_if_unused(balance)
                if self._stated.get(balance.record.id) != _statement(balance):
                    await self._state(balance, is_due=False)
            if balances and epoch == self._epoch:
                holding = [balance for balance in balances if balance.held]
                if holding:
                    await self._state(holding[0], is_due=True)
            if epoch != self._epoch:
                for balance in balances:
                    await self._state(balance, is_due=True)
        except SharedStateUnreachable:
            return  # logged once by `_claim`; the next round retries

    def _release_if_unused(self, balance: BudgetBalance) -> None:
        """Return the unused money of a budget that did not change since the last round."""
        used = (balance.spent, balance.reserved)
        lock = self._locks.get(balance.record.id)
        if self._seen.get(balance.record.id) == used and not (lock is not None and lock.locked()):
            balance.release_unused()
        self._seen[balance.record.id] = used

    async def _state(self, balance: BudgetBalance, *, is_due: bool) -> None:
        async with self._lock(balance):
            balance.record_debt()
            if is_due or self._stated.get(balance.record.id) != _statement(balance):
                await self._claim(balance, need=0, want=0)

    # -- the store ---------------------------------------------------------------------------------
    async def _claim(self, balance: BudgetBalance, *, need: int, want: int) -> BudgetGrant:
        if self._clock() < self._paused_until and need:
            raise SharedStateUnreachable(
                "the store of shared budgets did not answer the previous request"
            )
        period, statement = balance.period, _statement(balance)
        claim = BudgetClaim(
            budget=balance.record.id,
            period=period.name,
            amount=balance.amount // PICOS_PER_MICRO,
            base=_up(balance.ledger),
            held=_up(balance.held),
            need=need,
            want=want,
            ends_ns=min(period.ends_ns, self._wall_ns() + LONGEST_NS),
        )
        try:
            grant = await self._store.claim(claim)
        except SharedStateUnreachable as e:
            self._stated.pop(balance.record.id, None)
            self._paused_until = self._clock() + UNREACHABLE_PAUSE_S
            if self.is_reachable:
                log.warning(
                    "budget store unreachable, spending only money already borrowed error=%s", e
                )
            self.is_reachable = False
            raise
        self.is_reachable, self._paused_until = True, -1.0
        # the store has lost its data: all claims must be stated again
        if grant.epoch != self._epoch:
            self._epoch = grant.epoch
            self._stated.clear()
        if balance.period == period:
            picos = grant.granted * PICOS_PER_MICRO
            balance.grant(picos)
            # The claim as the store knows it. Changes made while the answer was on its way must
            # still be stated.
            self._stated[balance.record.id] = *statement[:-1], statement[-1] + picos
        return grant

    def _lock(self, balance: BudgetBalance) -> asyncio.Lock:
        return self._locks.setdefault(balance.record.id, asyncio.Lock())

    async def aclose(self) -> None:
        """Return the unused money, if the store is reachable, and close."""
        for balance in self._budgets.balances.values():
            balance.release_unused()
        await self.state_claims()
        await self._store.aclose()


def granted(*, room: int, need: int, want: int) -> int:
    """How much a store grants of `room`: nothing when it is below `need`; beyond `need` at most an
    eighth of the room, so that others get a share."""
    return 0 if room < need else min(room, max(need, min(want, room // 8)))


def _statement(balance: BudgetBalance) -> tuple[str, int, int, int]:
    return balance.period.name, balance.amount, balance.ledger, balance.held


def _up(picos: int) -> int:
    return max(0, -(-picos // PICOS_PER_MICRO))
