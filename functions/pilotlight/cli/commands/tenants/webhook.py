"""`pilotlight webhook …`: manage webhooks, show their deliveries and send test events."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from pilotlight.cli.commands.tenants.budget import show_example
from pilotlight.cli.core.command import Yes, command_group
from pilotlight.cli.core.formatting import format_table
from pilotlight.cli.core.session import Session

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Name, as shown by `pilotlight webhook list`.")
]
_COLUMNS = {
    "name": "name",
    "url": "url",
    "sent_events": "events",
    "created_at": "created",
    "created_by": "by",
}
_DELIVERY_COLUMNS = {
    "id": "id",
    "event": "event",
    "at": "time",
    "state": "state",
    "attempts": "attempts",
    "next_attempt_at": "next attempt",
    "error": "error",
}


def register(root: typer.Typer) -> None:
    """Add the command group."""
    command_group(
        root,
        "webhook",
        "Manage webhooks for events of calls, rollouts, objectives and experiments.",
        {
            "set": set_,
            "list": list_,
            "delete": delete,
            "test": test,
            "deliveries": deliveries,
        },
    )


def set_(
    session: Session,
    *,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="Name; calls select it with `Pilotlight-Webhook: NAME`."
        ),
    ],
    url: Annotated[
        str,
        typer.Argument(metavar="URL", help="URL to which events are posted (Standard Webhooks)."),
    ],
    event: Annotated[
        list[str] | None,
        typer.Option(
            help="Events to send: call.finished, rollout.*, slo.*, experiment.* or *; may be "
            "repeated. Default: only the end of calls that name the webhook."
        ),
    ] = None,
    new_secret: Annotated[
        bool, typer.Option("--new-secret", help="Replace the signing secret.")
    ] = False,
) -> None:
    """Create or change a webhook."""
    body = session.request(
        lambda client: client.set_webhook(name, url, events=event or (), new_secret=new_secret)
    )
    session.show(
        body,
        lambda: (
            f"{name} receives {_sent_events(body)}; test it with `pilotlight webhook test {name}`"
        ),
    )
    if body["secret"]:
        session.say(f"signing secret, shown only once: {body['secret']}")


def list_(session: Session) -> None:
    """List the environment's webhooks."""
    rows = session.request(lambda client: client.webhooks())
    session.show(
        rows,
        lambda: format_table(
            [{**row, "sent_events": _sent_events(row)} for row in rows],
            _COLUMNS,
            empty="No webhooks.",
        ),
    )


def delete(session: Session, name: Name, yes: Yes = False) -> None:
    """Delete a webhook. Pending deliveries are discarded."""
    session.confirm(f"Delete the webhook {name}? Pending deliveries are discarded.", yes=yes)
    session.request(lambda client: client.delete_webhook(name))
    session.show({"name": name, "deleted": True}, lambda: f"{name} is deleted")


def test(session: Session, name: Name) -> None:
    """Send a signed test event to a webhook and show the response.

    The exit status is 1 if the delivery fails.
    """
    show_example(session, session.request(lambda client: client.test_webhook(name)))


def deliveries(
    session: Session,
    name: Name,
    failed: Annotated[bool, typer.Option("--failed", help="Only failed deliveries.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of deliveries.")] = 50,
) -> None:
    """List deliveries to a webhook, newest first."""
    rows = session.request(
        lambda client: client.deliveries(name, failed=True if failed else None, limit=limit)
    )
    session.show(
        rows,
        lambda: format_table(
            [_delivery(row) for row in rows], _DELIVERY_COLUMNS, empty="No deliveries yet."
        ),
    )


def _sent_events(row: dict[str, Any]) -> str:
    return ", ".join(row["events"]) or "calls that name it"


def _delivery(row: dict[str, Any]) -> dict[str, Any]:
    waits = "pending" if row["next_attempt_at"] is not None else "failed"
    return {**row, "state": waits if row["delivered_at"] is None else "delivered"}
