"""Records come in: into the ledger, and what they cost into the alerts of budgets, in one transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pilotlight.controller import budgets, ledger
from pilotlight.controller.ledger import Added
from pilotlight.controller.store import Write
from pilotlight.protocol import BudgetState


def take(write: Write, rows: Sequence[Mapping[str, Any]]) -> tuple[Added, dict[str, BudgetState]]:
    """Add records (JSON values, see `ledger.add_rows`); returns also what was spent of each budget that they fall under."""
    added = ledger.add_rows(write, rows)
    return added, budgets.after_usage(write, new=added.spent, batch=added.batch)
