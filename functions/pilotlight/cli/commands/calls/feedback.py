"""`pilotlight feedback …`: what became of a call."""

from __future__ import annotations

from typing import Annotated

import typer

from pilotlight.cli.core.command import command
from pilotlight.cli.core.formatting import parse_pairs
from pilotlight.cli.core.session import Session
from pilotlight.errors import InvalidInput


def register(root: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(
        help="Feedback: the outcome of a call, for canaries, experiments and objectives.",
        no_args_is_help=True,
    )
    command(group, "send")(send)
    root.add_typer(group, name="feedback")


def send(
    session: Session,
    call: Annotated[
        str,
        typer.Argument(
            metavar="ID", help="X-Request-Id of the call's answer, or a submitted call's id."
        ),
    ],
    metrics: Annotated[
        list[str] | None,
        typer.Argument(metavar="[METRIC=NUMBER…]", help="Such as rating=4 accuracy=0.93."),
    ] = None,
    label: Annotated[str | None, typer.Option(help="Such as good, thumbs-down.")] = None,
) -> None:
    """Tell the outcome of a call: each metric, and the label, counts once; as late as some weeks
    after the call."""
    given = parse_pairs(metrics or [], option="metric")
    if not given and label is None:
        raise InvalidInput(
            "nothing is told of the call", hint="Pass METRIC=NUMBER, or --label TEXT."
        )
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidInput(
                f"metric {name!r} = {value!r} is no number", hint="Words are labels: --label good."
            )
    with session.client() as client:
        body = client.feedback(call, label=label, metrics=given)
    session.show(body, lambda: _sentence(call, replayed=body["replayed"], waiting=body["waiting"]))


def _sentence(call: str, *, replayed: bool, waiting: bool) -> str:
    if replayed:
        return f"{call}: this was known already"
    return (
        f"{call}: noted; it is joined to the call when its record comes"
        if waiting
        else f"{call}: noted"
    )
