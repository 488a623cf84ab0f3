"""`pilotlight schedule …`: list, pause, resume and run the schedules of functions."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from pilotlight.cli.core.addresses import parse_function
from pilotlight.cli.core.command import command_group
from pilotlight.cli.core.formatting import format_table
from pilotlight.cli.core.session import Session

Target = Annotated[str, typer.Argument(metavar="APP/FUNCTION", help="The scheduled function.")]
Number = Annotated[
    int,
    typer.Option("--number", "-n", min=0, help="Number of the schedule, as listed."),
]
_COLUMNS = {
    "name": "function",
    "number": "#",
    "when": "when",
    "timezone": "time zone",
    "missed": "missed",
    "state": "state",
    "next_at": "next",
    "last_at": "last",
}


def register(root: typer.Typer) -> None:
    """Add the command group."""
    command_group(
        root,
        "schedule",
        "Manage schedules, by which functions are called periodically.",
        {
            "list": list_,
            "pause": pause,
            "resume": resume,
            "run-now": run_now,
        },
    )


def list_(
    session: Session,
    app: Annotated[str | None, typer.Option(help="Only schedules of this app.")] = None,
) -> None:
    """List the schedules of deployed functions with their next run times."""
    rows = session.request(lambda client: client.schedules(app=app))
    empty = "No schedules. Declare one with @app.function(schedule=pilotlight.Cron('0 6 * * *'))."
    session.show(rows, lambda: format_table([_row(row) for row in rows], _COLUMNS, empty=empty))


def pause(session: Session, target: Target, number: Number = 0) -> None:
    """Pause a schedule until it is resumed, even if the app is deployed again."""
    app, function = _split(target)
    body = session.request(lambda client: client.pause_schedule(app, function, number))
    session.show(body, lambda: f"{target} #{number} is paused; runs due meanwhile are skipped")


def resume(session: Session, target: Target, number: Number = 0) -> None:
    """Resume a paused schedule at its next run time."""
    from pilotlight.cli.core.formatting import format_time

    app, function = _split(target)
    body = session.request(lambda client: client.resume_schedule(app, function, number))
    when = (
        "its app is stopped: it runs again when the app is deployed"
        if body["next_at"] is None
        else f"next {format_time(body['next_at'])}"
    )
    session.show(body, lambda: f"{target} #{number} is resumed: {when}")


def run_now(session: Session, target: Target, number: Number = 0) -> None:
    """Run a schedule's call now, in addition to its regular runs."""
    app, function = _split(target)
    call_id = session.request(lambda client: client.run_schedule(app, function, number))
    session.show({"id": call_id}, lambda: call_id)
    session.say(f"get its result with `pilotlight call get {call_id} --wait`")


def _split(target: str) -> tuple[str, str]:
    return parse_function(
        target,
        hint="List schedules with `pilotlight schedule list`.",
        without_method="Schedules belong to the class: write APP/CLASS and --number.",
    )


def _row(row: dict[str, Any]) -> dict[str, Any]:
    when = row["cron"] or f"every {row['period_s']:g} s"
    state = "paused" if row["is_paused"] else "stopped" if row["next_at"] is None else "active"
    return {**row, "name": f"{row['app']}/{row['function']}", "when": when, "state": state}
