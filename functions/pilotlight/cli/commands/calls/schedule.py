"""`pilotlight schedule …`: when functions call themselves, pausing that, and calling at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from pilotlight.cli.core.command import command
from pilotlight.cli.core.formatting import format_table
from pilotlight.cli.core.session import Session
from pilotlight.errors import InvalidInput
from pilotlight.spec.identifiers import parse_function_path

Target = Annotated[str, typer.Argument(metavar="APP/FUNCTION", help="Whose schedule.")]
Number = Annotated[
    int, typer.Option("--number", "-n", min=0, help="Which of its schedules, as listed.")
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
    """Add the group."""
    group = typer.Typer(help="Schedules: when functions call themselves.", no_args_is_help=True)
    verbs: dict[str, Callable[..., None]] = {
        "list": list_,
        "pause": pause,
        "resume": resume,
        "run-now": run_now,
    }
    for name, function in verbs.items():
        command(group, name)(function)
    root.add_typer(group, name="schedule")


def list_(
    session: Session, app: Annotated[str | None, typer.Option(help="Of this app only.")] = None
) -> None:
    """Schedules of deployed functions, with their next times."""
    with session.client() as client:
        rows = client.schedules(app=app)
    empty = "No schedules: declare one with @app.function(schedule=pilotlight.Cron('0 6 * * *'))."
    session.show(rows, lambda: format_table([_row(row) for row in rows], _COLUMNS, empty=empty))


def pause(session: Session, target: Target, number: Number = 0) -> None:
    """Call no more until it is resumed, whatever is deployed meanwhile."""
    app, function = _split(target)
    with session.client() as client:
        body = client.pause_schedule(app, function, number)
    session.show(
        body, lambda: f"{target} #{number} is paused; what passes meanwhile is not made up for"
    )


def resume(session: Session, target: Target, number: Number = 0) -> None:
    """Go on with its next time."""
    from pilotlight.cli.core.formatting import format_time

    app, function = _split(target)
    with session.client() as client:
        body = client.resume_schedule(app, function, number)
    when = (
        "its app is stopped: it goes on when that is deployed again"
        if body["next_at"] is None
        else f"next {format_time(body['next_at'])}"
    )
    session.show(body, lambda: f"{target} #{number} goes on: {when}")


def run_now(session: Session, target: Target, number: Number = 0) -> None:
    """Make its call at once, beside the plan."""
    app, function = _split(target)
    with session.client() as client:
        call_id = client.run_schedule(app, function, number)
    session.show({"id": call_id}, lambda: call_id)
    session.say(f"`pilotlight call get {call_id} --wait` has its result")


def _split(target: str) -> tuple[str, str]:
    try:
        app, function, method = parse_function_path(target)
    except ValueError as e:
        raise InvalidInput(str(e), hint="See them: `pilotlight schedule list`.") from e
    if method:
        raise InvalidInput(
            f"{target!r} names a method",
            hint="Schedules are a class's: write APP/CLASS and --number.",
        )
    return app, function


def _row(row: dict[str, Any]) -> dict[str, Any]:
    when = row["cron"] or f"every {row['period_s']:g} s"
    state = "paused" if row["is_paused"] else "stopped" if row["next_at"] is None else "active"
    return {**row, "name": f"{row['app']}/{row['function']}", "when": when, "state": state}
