"""Keeps budgets and ledger together: asked at the start, after each batch, and now and then; kept
on disk for a start without a controller.

`retry_budget.json` is a copy of the ledger's last answers, written before the checkpoint that goes
with them: dying in between counts a batch twice until it is sent again, and never not at all."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from activator.billing.budgets import Budgets, picos_under
from activator.billing.errors import LedgerUnavailable
from activator.billing.journal import Journal
from activator.billing.shipping import unshipped_records
from activator.billing.usage import cost_text
from pilotlight.protocol import BudgetState

log = logging.getLogger(__name__)

STATES_NAME = "budgets.json"
FIRST_STATES_S = 2.0
"""How long a start waits for the ledger's word before it goes on with what is on disk."""
REFRESH_S = 30.0
"""What others spend, and corrections, are heard of with our own next batch; without one, after this
long."""
RETRY_S = 1.0


class BudgetSource(Protocol):
    """Who knows where all budgets stand."""

    async def budgets(self) -> Mapping[str, BudgetState]:
        """By id. Raises LedgerUnavailable."""
        ...


class BudgetStates:
    """See the module. `lock` is the shipper's: who holds it has no records on their way. Owner: the
    event loop."""

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
        stale = sum(purse.is_stale for purse in self._budgets.purses.values())
        return f"<BudgetStates {len(self._budgets.purses)} budgets, {stale} not heard of>"

    async def load(self) -> None:
        """At the start, before there are calls: the ledger's word, or else the last one that is on
        disk."""
        async with self._lock:
            try:
                async with asyncio.timeout(FIRST_STATES_S):
                    states = await self._source.budgets()
            except (LedgerUnavailable, TimeoutError) as e:
                states = load_states(self._path)
                log.warning(
                    "budgets go on as they were last known budgets=%d error=%s", len(states), e
                )
                self._budgets.take_states(states)
                for purse in self._budgets.purses.values():
                    purse.is_stale = True
            else:
                self._budgets.take_states(states)
            await self.count_own()

    async def run(self) -> None:
        """Ask again when there are new budgets, and every REFRESH_S, until cancelled."""
        while True:
            if not any(purse.is_stale for purse in self._budgets.purses.values()):
                self._news.clear()
            try:
                async with asyncio.timeout(REFRESH_S):
                    await self._news.wait()
            except TimeoutError:
                pass  # time to ask again
            if self._budgets.purses and not await self.refresh():
                await asyncio.sleep(RETRY_S)

    async def refresh(self) -> bool:
        """Ask the ledger. False when it does not answer, or has not heard of a budget yet."""
        async with self._lock:
            await self.count_own()
            try:
                self._budgets.take_states(await self._source.budgets())
            except LedgerUnavailable as e:
                log.warning("the ledger does not say where budgets stand: %s", e)
                return False
            await self._save()
        return not any(purse.is_stale for purse in self._budgets.purses.values())

    async def count_own(self) -> None:
        """Count what budgets that were just heard of owe for the records before them that were not
        shipped."""
        for end in sorted(
            {purse.mark for purse in self._budgets.purses.values() if purse.mark is not None}
        ):
            new = [purse for purse in self._budgets.purses.values() if purse.mark == end]
            owed = [0] * len(new)
            async for record in unshipped_records(self._journal, end):
                owed = [
                    picos + picos_under(purse, record)
                    for picos, purse in zip(owed, new, strict=True)
                ]
            for purse, picos in zip(new, owed, strict=True):
                purse.pay(picos)
                purse.mark = None

    async def accepted(self, states: Mapping[str, BudgetState], records: Sequence[bytes]) -> None:
        """The ledger took these records."""
        self._budgets.take_answer(states, records)
        if states:
            await self._save()

    async def _save(self) -> None:
        known = {
            budget: {"period": purse.period.name, "spent": cost_text(purse.ledger)}
            for budget, purse in self._budgets.purses.items()
            if not purse.is_stale
        }
        try:
            await asyncio.to_thread(save_states, self._path, known)
        except OSError as e:
            log.warning("states of budgets not kept on disk: %s", e)


def parse_states(body: Any) -> dict[str, BudgetState]:
    """States by budget id from JSON values; what is none is left out, and the rest still counts."""
    states: dict[str, BudgetState] = {}
    for budget, state in body.items() if isinstance(body, dict) else ():
        try:
            states[str(budget)] = BudgetState(
                period=str(state["period"]),
                spent=str(state["spent"]),
                batch=str(state.get("batch", "0")),
            )
        except (KeyError, TypeError, AttributeError) as e:
            log.error("state of a budget is not understood budget=%s error=%r", budget, e)
    return states


def load_states(path: Path) -> dict[str, BudgetState]:
    """What `save_states` wrote; nothing when that is missing or damaged."""
    try:
        return parse_states(json.loads(path.read_bytes()))
    except (FileNotFoundError, ValueError):
        return {}


def save_states(path: Path, states: Mapping[str, Mapping[str, str]]) -> None:
    """Write them whole or not at all. Blocks on the disk; raises OSError."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(states))
    fresh.replace(path)
