"""Ingestion of usage records: into the ledger, the budget alerts and the experiment exposures, in
one transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pilotlight.controller.billing import budgets, experiment_exposures, ledger
from pilotlight.controller.billing.ledger import LedgerInsert
from pilotlight.controller.database.store import Write
from pilotlight.protocol import BudgetState


def ingest_usage(
    write: Write, rows: Sequence[Mapping[str, Any]]
) -> tuple[LedgerInsert, dict[str, BudgetState]]:
    """Add records (JSON values, see `ledger.add_rows`). Also returns what was spent of each budget
    that covers some of them."""
    added = ledger.add_rows(write, rows)
    if added.in_experiments:
        experiment_exposures.record_exposures(write, added.in_experiments)
    return added, budgets.after_usage(write, new=added.spent, batch=added.batch)
