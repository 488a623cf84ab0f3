"""Errors of billing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pilotlight.errors import PilotlightError, StorageFull

if TYPE_CHECKING:
    from activator.billing.budgets import ApplicableBudgets


class JournalFull(StorageFull):
    """Raised when the journal's disk does not accept a line. The call is refused before dispatch,
    so that nothing runs unbilled."""

    type = "journal-full"
    status = 503


class JournalInUse(PilotlightError):
    """Raised when another process owns the journal's directory. The message names both."""

    type = "journal-in-use"


class LedgerUnavailable(PilotlightError):
    """Raised by a `Ledger` that cannot be reached or cannot answer. The same records are sent again
    later."""

    type = "ledger-unavailable"
    status = 503


class LedgerRefused(PilotlightError):
    """Raised by a `Ledger` that rejects a record of the batch. Sending the same batch again cannot
    succeed."""

    type = "ledger-refused"
    status = 502


class AllowanceNeeded(PilotlightError):
    """Raised when a call must wait until its activator has borrowed from the budget that all
    activators share. Internal to the activator."""

    type = "allowance-needed"
    status = 503

    def __init__(self, cover: ApplicableBudgets, worst: int) -> None:
        super().__init__("the activator must first borrow from the shared budget", retry_after_s=1)
        self.cover = cover
        self.worst = worst
