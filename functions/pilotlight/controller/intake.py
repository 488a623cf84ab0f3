"""Ingestion of usage records: into the ledger, the budget alerts and the experiment exposures, in
one transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pilotlight.controller import budgets, ledger
from pilotlight.controller.experiments import exposures
from pilotlight.controller.ledger import Added
from pilotlight.controller.store import Write
from pilotlight.protocol import BudgetState


def take(write: Write, rows: Sequence[Mapping[str, Any]]) -> tuple[Added, dict[str, BudgetState]]:
    """Add records (JSON values, see `ledger.add_rows`). Also returns what was spent of each budget
    that covers some of them."""
    added = ledger.add_rows(write, rows)
    if added.in_experiments:
        exposures.take(write, added.in_experiments)
    return added, budgets.after_usage(write, new=added.spent, batch=added.batch)
