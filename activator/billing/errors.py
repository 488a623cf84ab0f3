"""Errors of the money path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pilotlight.errors import PilotlightError, StorageFull

if TYPE_CHECKING:
    from activator.billing.budgets import ApplicableBudgets


class JournalFull(StorageFull):
    """Raised when the journal's disk did not take a line: the call is refused before dispatch, so
    nothing runs unbilled."""

    type = "journal-full"
    status = 503


class JournalInUse(PilotlightError):
    """Raised when another process owns the journal's directory; the message names directory and
    process."""

    type = "journal-in-use"


class LedgerUnavailable(PilotlightError):
    """Raised by a `Ledger` that could not be reached or could not answer: the same records are sent
    again later."""

    type = "ledger-unavailable"
    status = 503


class LedgerRefused(PilotlightError):
    """Raised by a `Ledger` that answered that a record in the batch is wrong: sending it again as
    it is cannot help."""

    type = "ledger-refused"
    status = 502


class AllowanceNeeded(PilotlightError):
    """Raised when a call must wait until money was borrowed from what all activators share. Never
    leaves the activator."""

    type = "allowance-needed"
    status = 503

    def __init__(self, cover: ApplicableBudgets, worst: int) -> None:
        super().__init__(
            "the other activators must be asked for a part of the budget", retry_after_s=1
        )
        self.cover = cover
        self.worst = worst
