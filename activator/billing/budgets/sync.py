"""Keeps budgets consistent with the ledger: reads their state at the start, after each batch, and
periodically, and stores it on disk for a start without a controller.

`budgets.json` is a copy of the ledger's last answers, written before the checkpoint that belongs to
them. A crash in between counts a batch twice until it is sent again; it never omits one."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from activator.billing.budgets.balance import RecordCosts
from activator.billing.budgets.budgets import Budgets
from activator.billing.errors import LedgerUnavailable
from activator.billing.journal import Journal
from activator.billing.shipping import unshipped_records
from pilotlight.protocol import BudgetState

log = logging.getLogger(__name__)

STATES_NAME = "budgets.json"
FIRST_STATES_S = 2.0
"""How long a start waits for the ledger before it uses the states on disk."""
REFRESH_S = 30.0
"""Spending of other activators and corrections arrive with the next own batch, or without one after
this long."""
RETRY_S = 1.0
MAX_NAMED = 50
"""Most budgets of which the states are read apart from those of all others."""


class BudgetSource(Protocol):
    """Source of the state of all budgets."""

    async def budgets(self, ids: Collection[str] = ()) -> Mapping[str, BudgetState]:
        """States by budget id, of these or () = of all. Raises LedgerUnavailable."""


class BudgetStates:
    """Synchronizes budgets with the ledger. `lock` is the shipper's: while it is held, no records
    are being sent. Owner: the event loop."""

    def __init__(
        self, budgets: Budgets, *, journal: Journal, source: BudgetSource, lock: asyncio.Lock
    ) -> None:
        self._budgets = budgets
        self._journal = journal
        self._source = source
        self._lock = lock
        self._path = journal.directory / STATES_NAME
        self._news = asyncio.Event()
        budgets.end_of_journal = lambda: journal.end
        budgets.on_news = self._news.set

    def __repr__(self) -> str:
        stale = sum(balance.is_stale for balance in self._budgets.balances.values())
        return f"<BudgetStates {len(self._budgets.balances)} budgets, {stale} stale>"

    async def load(self) -> None:
        """Load the states before calls are served: from the ledger, or else from disk."""
        async with self._lock:
            try:
                async with asyncio.timeout(FIRST_STATES_S):
                    states = await self._source.budgets()
            except (LedgerUnavailable, TimeoutError) as e:
                states = load_states(self._path)
                log.warning(
                    "ledger unreachable, using the last known budget states budgets=%d error=%s",
                    len(states),
                    e,
                )
                self._budgets.apply_states(states)
                for balance in self._budgets.balances.values():
                    balance.is_stale = True
            else:
                self._budgets.apply_states(states)
            await self.count_own()

    async def run(self) -> None:
        """Read the states of what is new or has changed, and every REFRESH_S those of all, until
        cancelled."""
        clock = asyncio.get_running_loop().time
        due_at = clock() + REFRESH_S
        while True:
            if not self._stale():
                self._news.clear()
            try:
                async with asyncio.timeout_at(due_at):
                    await self._news.wait()
            except TimeoutError:
                pass  # a refresh is due
            ids = self._stale()
            if not ids or len(ids) > MAX_NAMED or clock() >= due_at:
                ids, due_at = [], clock() + REFRESH_S
            if self._budgets.balances and not await self.refresh(ids):
                await asyncio.sleep(RETRY_S)

    def _stale(self) -> list[str]:
        return [name for name, one in self._budgets.balances.items() if one.is_stale]

    async def refresh(self, ids: Collection[str] = ()) -> bool:
        """Read the states of these budgets, () = of all, from the ledger. Returns False when it
        does not answer, or does not know a budget yet."""
        async with self._lock:
            await self.count_own()
            try:
                self._budgets.apply_states(await self._source.budgets(ids))
            except LedgerUnavailable as e:
                log.warning("cannot read budget states from the ledger: %s", e)
                return False
            await self._save()
        return not self._stale()

    async def count_own(self) -> None:
        """Charge new budgets for the unshipped records that were written before them."""
        for end in sorted(
            {
                balance.mark
                for balance in self._budgets.balances.values()
                if balance.mark is not None
            }
        ):
            new = [balance for balance in self._budgets.balances.values() if balance.mark == end]
            owed = RecordCosts(new)
            async for record in unshipped_records(self._journal, end):
                owed.add(record)
            for balance in new:
                balance.charge(owed.picos[balance.record.id])
                balance.mark = None

    async def accepted(self, states: Mapping[str, BudgetState], records: Sequence[bytes]) -> None:
        """Apply the states that the ledger returned when it accepted these records."""
        self._budgets.apply_answer(states, records)
        if states:
            await self._save()

    async def _save(self) -> None:
        known = {
            budget: balance.last_state()
            for budget, balance in self._budgets.balances.items()
            if not balance.is_stale
        }
        try:
            await asyncio.to_thread(save_states, self._path, known)
        except OSError as e:
            log.warning("cannot save budget states: %s", e)


def parse_states(body: Any) -> dict[str, BudgetState]:
    """Parse states by budget id from JSON values. Invalid ones are logged and skipped."""
    states: dict[str, BudgetState] = {}
    for budget, state in body.items() if isinstance(body, dict) else ():
        try:
            states[str(budget)] = BudgetState(
                period=str(state["period"]),
                spent=str(state["spent"]),
                batch=str(state.get("batch", "0")),
                amount=str(state.get("amount", "")),
                expiring=tuple((float(at), str(one)) for at, one in state.get("expiring", ())),
                version=int(state.get("version", 0)),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            log.error("invalid budget state budget=%s error=%r", budget, e)
    return states


def load_states(path: Path) -> dict[str, BudgetState]:
    """Read the file of `save_states`. Empty when it is missing or damaged."""
    try:
        return parse_states(json.loads(path.read_bytes()))
    except (FileNotFoundError, ValueError):
        return {}


def save_states(path: Path, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the states atomically. Blocks on the disk; raises OSError."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(states))
    fresh.replace(path)
