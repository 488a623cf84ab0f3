"""Prints log lines of apps and instances in the terminal."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotlight.cli.core.formatting import parse_time
from pilotlight.cli.core.session import Session
from pilotlight.core.logging_config import dump_json

if TYPE_CHECKING:
    from rich.text import Text

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until Ctrl-C.")]
Since = Annotated[
    str | None, typer.Option(help="Start: 5m or 2h ago, or a time such as 2026-11-21T10:00.")
]
Tail = Annotated[int | None, typer.Option(min=0, help="Only the last N matching lines.")]
OfCall = Annotated[str | None, typer.Option("--call", help="Only lines of this call.")]
OfInstance = Annotated[str | None, typer.Option("--instance", help="Only lines of this instance.")]


def print_logs(
    session: Session,
    *,
    app: str | None = None,
    function: str | None = None,
    instance: str | None = None,
    call: str | None = None,
    since: str | None = None,
    tail: int | None = None,
    follow: bool = False,
) -> None:
    """Request log lines and print them as they arrive."""
    start = parse_time(since, now=time.time()) if since else None
    with session.client() as client:
        lines = client.logs(
            app=app,
            function=function,
            instance=instance,
            call=call,
            since=start,
            tail=tail,
            follow=follow,
        )
        _print(session, lines)


def _print(session: Session, lines: Iterable[Mapping[str, Any]]) -> None:
    console = session.console()
    found = False
    for line in lines:
        found = True
        if session.is_json:
            print(dump_json(line), flush=True)
        else:
            console.print(format_log_line(line), soft_wrap=True)
    if not found:
        session.say(
            "No lines. A single machine keeps lines for a while after an instance stops; a cluster "
            "keeps them only as long as the pod exists."
        )


def _short(instance: str) -> str:
    """Ten distinctive characters: the first ones of an instance id, the last ones of a pod's name,
    which begins with the function's name."""
    return (
        instance[:10] if len(instance) <= 10 or instance.startswith("i-") else f"…{instance[-9:]}"
    )


def format_log_line(line: Mapping[str, Any]) -> Text:
    """Format a line as `10:02:11.034 i-3f2a1c… text`; standard error is yellow."""
    from rich.text import Text

    from pilotlight.core.terminal import program_output

    at = line.get("time")
    clock = (
        dt.datetime.fromtimestamp(at, tz=dt.UTC).astimezone().strftime("%H:%M:%S.%f")[:-3]
        if isinstance(at, int | float)
        else ""
    )
    out = Text()
    out.append(f"{clock} ", style="dim")
    out.append(f"{_short(str(line.get('instance') or '')):<10} ", style="cyan")
    out.append_text(program_output(line))
    return out
