"""`pilotlight webhook …`: who is told of an environment's events, what was told, and trying one
out."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotlight.cli.core.command import Yes, command
from pilotlight.cli.core.formatting import format_table
from pilotlight.cli.core.session import Session

if TYPE_CHECKING:
    from rich.console import RenderableType

Name = Annotated[str, typer.Argument(metavar="NAME", help="As `pilotlight webhook list` shows it.")]
_COLUMNS = {
    "name": "name",
    "url": "url",
    "told": "events",
    "created_at": "since",
    "created_by": "by",
}
_DELIVERY_COLUMNS = {
    "id": "id",
    "event": "event",
    "at": "happened",
    "state": "state",
    "attempts": "attempts",
    "next_attempt_at": "next attempt",
    "error": "error",
}


def register(root: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(
        help="Webhooks: who is told of calls that end, rollouts, objectives and experiments.",
        no_args_is_help=True,
    )
    verbs: dict[str, Callable[..., None]] = {
        "set": set_,
        "list": list_,
        "delete": delete,
        "test": test,
        "deliveries": deliveries,
    }
    for name, function in verbs.items():
        command(group, name)(function)
    root.add_typer(group, name="webhook")


def set_(
    session: Session,
    *,
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="What calls name it by: `Pilotlight-Webhook: NAME`."),
    ],
    url: Annotated[
        str, typer.Argument(metavar="URL", help="Where messages are posted (Standard Webhooks).")
    ],
    event: Annotated[
        list[str] | None,
        typer.Option(
            help="call.finished, rollout.*, slo.*, experiment.* or *; several times. None: calls "
            "that name it."
        ),
    ] = None,
    new_secret: Annotated[
        bool, typer.Option("--new-secret", help="Replace the secret that messages are signed with.")
    ] = False,
) -> None:
    """Make a webhook, or change it."""
    with session.client() as client:
        body = client.set_webhook(name, url, events=event or (), new_secret=new_secret)
    session.show(
        body, lambda: f"{name} is told of {_told(body)}; try it: `pilotlight webhook test {name}`"
    )
    if body["secret"]:
        session.say(f"{body['secret']} signs its messages; shown this one time")


def list_(session: Session) -> None:
    """The webhooks of the environment."""
    with session.client() as client:
        rows = client.webhooks()
    session.show(
        rows,
        lambda: format_table(
            [{**row, "told": _told(row)} for row in rows], _COLUMNS, empty="No webhooks."
        ),
    )


def delete(session: Session, name: Name, yes: Yes = False) -> None:
    """Delete a webhook; what it was not told yet it is not told any more."""
    session.confirm(
        f"Delete the webhook {name}? What it was not told yet it will not be told.", yes=yes
    )
    with session.client() as client:
        client.delete_webhook(name)
    session.show({"name": name, "deleted": True}, lambda: f"{name} is deleted")


def test(session: Session, name: Name) -> None:
    """Post a signed example to a webhook, and say what became of it."""
    with session.client() as client:
        body = client.test_webhook(name)
    session.show(body, lambda: _tested(body))
    if body["error"] is not None:
        raise typer.Exit(1)


def deliveries(
    session: Session,
    name: Name,
    failed: Annotated[bool, typer.Option("--failed", help="Only what was given up.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most so many.")] = 50,
) -> None:
    """What a webhook was told, or could not be, newest first."""
    with session.client() as client:
        rows = client.deliveries(name, failed=True if failed else None, limit=limit)
    session.show(
        rows,
        lambda: format_table(
            [_delivery(row) for row in rows], _DELIVERY_COLUMNS, empty="Nothing yet."
        ),
    )


def _told(row: dict[str, Any]) -> str:
    return ", ".join(row["events"]) or "calls that name it"


def _delivery(row: dict[str, Any]) -> dict[str, Any]:
    waits = "waits" if row["next_attempt_at"] is not None else "given up"
    return {**row, "state": waits if row["delivered_at"] is None else "delivered"}


def _tested(body: dict[str, Any]) -> RenderableType:
    from rich.text import Text

    head = f"answered {body['status']}" if body["status"] else "no answer"
    end = "taken" if body["error"] is None else body["error"]
    sent = "\n".join(f"{name}: {value}" for name, value in body["headers"].items())
    return Text(
        f"{head} after {body['elapsed_ms']} ms: {end}\n\nPOST "
        f"{body['url']}\n{sent}\n\n{json.dumps(json.loads(body['body']), indent=2)}"
    )
