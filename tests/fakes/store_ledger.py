"""The controller's ledger in the test's own process: an activator's records go to a real store."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence

from activator.billing.budgets.sync import parse_states
from activator.billing.errors import LedgerUnavailable
from pilotlight.controller.billing import usage_ingestion
from pilotlight.controller.billing.budgets import spending
from pilotlight.controller.billing.credits import accounts
from pilotlight.controller.database.store import Store
from pilotlight.protocol import BudgetState


class StoreLedger:
    """Accepts records as the controller does.

    Attributes:
        is_away: it does not answer. mute: answers to come that are lost although everything was
            taken. asked: the ids of each request for states, () = all."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.is_away = False
        self.mute = 0
        self.asked: list[tuple[str, ...]] = []

    def __repr__(self) -> str:
        return f"<StoreLedger {'away' if self.is_away else 'there'}>"

    async def accept(self, records: Sequence[bytes]) -> Mapping[str, BudgetState]:
        """Take all, and answer the states of what they fall under."""
        self._require()
        with self.store.write() as write:
            states = usage_ingestion.ingest_usage(write, [json.loads(one) for one in records])[1]
        if self.mute:
            self.mute -= 1
            raise LedgerUnavailable("the answer was lost")
        return _sent(states)

    async def budgets(self, ids: Collection[str] = ()) -> Mapping[str, BudgetState]:
        """The states of all budgets and credit, or of these."""
        self.asked.append(tuple(ids))
        self._require()
        with self.store.write() as write:
            now = write.now
            states = spending.states(write.sql, now=now, ids=ids)
            states |= accounts.states(write.sql, now=now, ids=ids)
        return _sent(states)

    def _require(self) -> None:
        if self.is_away:
            raise LedgerUnavailable("the controller is down")

    async def aclose(self) -> None:
        """Nothing to close."""


def _sent(states: Mapping[str, BudgetState]) -> dict[str, BudgetState]:
    """As they arrive: through JSON."""
    bodies = {name: state.to_json() for name, state in states.items()}
    return parse_states(json.loads(json.dumps(bodies)))
