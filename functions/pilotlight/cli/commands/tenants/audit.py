"""`pilotlight audit`: show the audit log."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotlight.cli.core.command import command
from pilotlight.cli.core.formatting import NO_VALUE, format_table, format_time, parse_time
from pilotlight.cli.core.session import Session
from pilotlight.errors import InvalidInput

if TYPE_CHECKING:
    from rich.table import Table

    from pilotlight.client.client import Client

LOOK_S = 2.0
"""Polling interval of --follow, in seconds: changes are rare, and a person is watching."""
DEFAULT_LIMIT = 50
MAX_SHOWN = 60
"""Maximum characters of a change in the table; --json prints all."""
_COLUMNS = {
    "at": "time",
    "tenant": "tenant",
    "actor": "who",
    "address": "from",
    "action": "what",
    "subject": "of",
    "change": "change",
}


def register(root: typer.Typer) -> None:
    """Add the command."""
    command(root, "audit")(audit)


def audit(
    session: Session,
    *,
    actor: Annotated[
        str | None, typer.Option(help="Only changes by this key (its id), or by `platform`.")
    ] = None,
    action: Annotated[
        str | None, typer.Option(help="Only this action, such as key.create or 'key.*'.")
    ] = None,
    subject: Annotated[
        str | None, typer.Option(help="Only changes of this subject, as listed.")
    ] = None,
    address: Annotated[str | None, typer.Option(help="Only changes from this IP address.")] = None,
    since: Annotated[
        str | None, typer.Option(help="Only changes since then: 24h or 7d ago, or a date.")
    ] = None,
    until: Annotated[
        str | None, typer.Option(help="Only changes until then: 1h ago, or a date.")
    ] = None,
    tenant: Annotated[
        str | None,
        typer.Option(
            help="Changes of another tenant, or '*' for all tenants; platform administrators only."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of changes.")] = DEFAULT_LIMIT,
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Print oldest first, then new changes until Ctrl-C."),
    ] = False,
) -> None:
    """Show the audit log: who changed what, newest first. Needs an admin key."""
    if follow and until:
        raise InvalidInput("--follow and --until exclude each other", hint="Omit one of them.")
    now = time.time()
    times = {
        name: parse_time(text, now=now)
        for name, text in (("since", since), ("until", until))
        if text
    }
    filters = {
        "actor": actor,
        "action": action,
        "subject": subject,
        "address": address,
        "tenant": tenant,
        **times,
    }
    with session.client() as client:
        if follow:
            for entry in follow_audit_log(client, filters, last=limit, wait=time.sleep):
                print(
                    json.dumps(entry, ensure_ascii=False)
                    if session.is_json
                    else format_entry(entry),
                    flush=True,
                )
            return
        entries = list(client.audit(limit=limit, **filters))
    session.show(entries, lambda: audit_table(entries, every_tenant=tenant is not None))


def follow_audit_log(
    client: Client, filters: Mapping[str, Any], *, last: int, wait: Callable[[float], None]
) -> Iterator[dict[str, Any]]:
    """Yield the `last` entries, oldest first, then each new one; call `wait` between polls."""
    newest: int | None = None
    while True:
        fresh = list(_newer(client, filters, newest, last))
        yield from reversed(fresh)
        newest = fresh[0]["id"] if fresh else newest or 0
        wait(LOOK_S)


def _newer(
    client: Client, filters: Mapping[str, Any], newest: int | None, last: int
) -> Iterator[dict[str, Any]]:
    for entry in client.audit(limit=last if newest is None else None, **filters):
        if newest is not None and entry["id"] <= newest:
            return
        yield entry


def audit_table(entries: list[dict[str, Any]], *, every_tenant: bool) -> Table | str:
    """Format entries as a table; with a tenant column if several tenants are shown."""
    rows = [
        {
            **entry,
            "at": format_time(entry["at"]),
            "tenant": entry["tenant_name"] if every_tenant else None,
            "change": format_change(entry),
        }
        for entry in entries
    ]
    return format_table(rows, _COLUMNS, empty="No changes.")


def format_entry(entry: Mapping[str, Any]) -> str:
    """Format one entry as a line."""
    parts = (
        format_time(entry["at"]),
        entry["tenant_name"],
        entry["actor"],
        entry["address"],
        entry["action"],
        entry["subject"],
        format_change(entry),
    )
    return "  ".join(part or NO_VALUE for part in parts)


def format_change(entry: Mapping[str, Any]) -> str:
    """Format the values before and after a change; of two objects only what differs."""
    before, after = entry["before"], entry["after"]
    if isinstance(before, dict) and isinstance(after, dict):
        differing = [key for key in {**before, **after} if before.get(key) != after.get(key)]
        text = ", ".join(
            f"{key}: {_short(before.get(key))} → {_short(after.get(key))}" for key in differing
        )
    else:
        text = " → ".join(_short(part) for part in (before, after) if part is not None)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


def _short(value: Any) -> str:
    return (
        NO_VALUE
        if value is None
        else value
        if isinstance(value, str)
        else json.dumps(value, ensure_ascii=False)
    )
