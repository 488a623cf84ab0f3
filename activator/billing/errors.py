"""Errors of the money path."""

from __future__ import annotations

from pilotlight.errors import PilotlightError, StorageFull


class JournalFull(StorageFull):
    """Raised when the journal's disk did not take a line: the call is refused before dispatch, so nothing runs unbilled."""

    type = "journal-full"
    status = 503


class JournalInUse(PilotlightError):
    """Raised when another process owns the journal's directory; the message names directory and process."""

    type = "journal-in-use"


class LedgerUnavailable(PilotlightError):
    """Raised by a `Ledger` that could not be reached or could not answer: the same records are sent again later."""

    type = "ledger-unavailable"
    status = 503


class LedgerRefused(PilotlightError):
    """Raised by a `Ledger` that answered that a record in the batch is wrong: sending it again as it is cannot help."""

    type = "ledger-refused"
    status = 502
