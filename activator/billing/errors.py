"""Errors of billing."""

from __future__ import annotations

from pilotlight.errors import PilotlightError, StorageFull


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
