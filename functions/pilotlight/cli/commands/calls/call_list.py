"""`pilotlight call list` and `pilotlight call redrive`: list submitted calls and retry dead
letters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pilotlight.cli.core.formatting import format_milliseconds, format_table
from pilotlight.errors import InvalidInput

if TYPE_CHECKING:
    from pilotlight.cli.core.session import Session
    from pilotlight.client.client import Client
    from pilotlight.protocol import CallRecord

DEAD = "DEAD"
"""Selects dead letters in lists; the state of their records is FAILED."""
STATES = ("QUEUED", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED", DEAD)
_COLUMNS = {
    "id": "id",
    "name": "function",
    "state": "state",
    "status": "status",
    "attempts": "attempts",
    "submitted_at": "submitted",
    "took": "exec",
    "schedule": "schedule",
    "webhook": "webhook",
}


def list_calls(
    session: Session, client: Client, *, app: str | None, state: str | None, limit: int
) -> None:
    """List submitted calls, newest first. Raises InvalidInput."""
    wanted = None if state is None else state.upper()
    if wanted is not None and wanted not in STATES:
        raise InvalidInput(
            f"there is no state {state!r}", hint=f"Write one of {', '.join(STATES)}."
        )
    found = client.calls(app=app, state=wanted, limit=limit)
    shown = [{**record.to_json(), "result": None} for record in found]
    empty = "No dead letters." if wanted == DEAD else "No submitted calls."
    session.show(
        shown, lambda: format_table([_row(record) for record in found], _COLUMNS, empty=empty)
    )
    if any(record.is_dead for record in found):
        session.say(
            "retry a dead letter with `pilotlight call redrive ID`, all of them with `pilotlight "
            "call redrive --all`"
        )


def redrive(
    session: Session,
    client: Client,
    call_id: str | None,
    *,
    everything: bool,
    app: str | None,
    yes: bool,
) -> None:
    """Retry one dead letter, or all of them. Raises InvalidInput, Conflict."""
    if (call_id is None) != everything:
        raise InvalidInput(
            "pass either the id of a dead letter or --all",
            hint="For example: `pilotlight call redrive req-…`, or `pilotlight call redrive --all "
            "--app search`.",
        )
    if call_id is not None:
        client.redrive(call_id)
        session.show(
            {"calls": [call_id]},
            lambda: (
                f"{call_id} is retried; get its result with `pilotlight call get {call_id} --wait`"
            ),
        )
        return
    of = f" of {app}" if app else ""
    session.confirm(
        f"Retry all dead letters{of}? Each runs again with its original arguments.", yes=yes
    )
    sent = client.redrive_all(app=app)
    session.show({"calls": sent}, lambda: f"{len(sent)} dead letters{of} are retried")


def format_attempt(record: CallRecord) -> str:
    """Format the number of attempts of a call: `3`, or `3 (dead letter)` if it waits as one."""
    return f"{record.attempt}{' (dead letter)' if record.is_dead else ''}"


def _row(record: CallRecord) -> dict[str, Any]:
    path = f"{record.function}.{record.method}" if record.method else record.function
    took = format_milliseconds(record.exec_ms) if record.exec_ms else None
    return {
        **record.to_json(),
        "name": f"{record.app}/{path}",
        "attempts": format_attempt(record),
        "took": took,
        "status": record.status or None,
    }
