"""`pilotlight logs`: print the output of an app's instances."""

from __future__ import annotations

from typing import Annotated

import typer

from pilotlight.cli.core.command import command
from pilotlight.cli.core.logs import Follow, OfCall, OfInstance, Since, Tail, print_logs
from pilotlight.cli.core.session import Session


def register(root: typer.Typer) -> None:
    """Add the command."""
    command(root, "logs")(logs)


def logs(
    session: Session,
    *,
    target: Annotated[
        str, typer.Argument(metavar="APP[/FUNCTION]", help="An app, or one of its functions.")
    ],
    follow: Follow = False,
    since: Since = None,
    tail: Tail = None,
    call: OfCall = None,
    instance: OfInstance = None,
) -> None:
    """Print the output of an app's instances, including stopped ones."""
    app, _, function = target.partition("/")
    print_logs(
        session,
        app=app,
        function=function or None,
        instance=instance,
        call=call,
        since=since,
        tail=tail,
        follow=follow,
    )
