"""`pilotlight feedback …`: report the outcome of a call."""

from __future__ import annotations

from typing import Annotated

import typer

from pilotlight.cli.core.command import command_group
from pilotlight.cli.core.formatting import parse_pairs
from pilotlight.cli.core.session import Session
from pilotlight.errors import InvalidInput


def register(root: typer.Typer) -> None:
    """Add the command group."""
    command_group(
        root,
        "feedback",
        "Report the outcome of calls, for canaries, experiments and objectives.",
        {"send": send},
    )


def send(
    session: Session,
    call: Annotated[
        str,
        typer.Argument(
            metavar="ID", help="X-Request-Id of the response, or the id of a submitted call."
        ),
    ],
    metrics: Annotated[
        list[str] | None,
        typer.Argument(metavar="[METRIC=NUMBER…]", help="Such as rating=4 accuracy=0.93."),
    ] = None,
    label: Annotated[str | None, typer.Option(help="Such as good or thumbs-down.")] = None,
) -> None:
    """Report the outcome of a call as metrics and a label.

    Each metric and the label count once per call. Feedback may arrive some weeks after the call.
    """
    given = parse_pairs(metrics or [], option="metric")
    if not given and label is None:
        raise InvalidInput(
            "no metric or label was given", hint="Pass METRIC=NUMBER, or --label TEXT."
        )
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidInput(
                f"metric {name!r} = {value!r} is not a number", hint="Pass text with --label."
            )
    body = session.request(lambda client: client.feedback(call, label=label, metrics=given))
    session.show(body, lambda: _sentence(call, replayed=body["replayed"], waiting=body["waiting"]))


def _sentence(call: str, *, replayed: bool, waiting: bool) -> str:
    if replayed:
        return f"{call}: already recorded"
    return (
        f"{call}: recorded; it takes effect when the call's record arrives"
        if waiting
        else f"{call}: recorded"
    )
