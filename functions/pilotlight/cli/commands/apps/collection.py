"""`pilotlight dict …` and `pilotlight queue …`: list and delete dicts and queues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from pilotlight.cli.core.command import Yes, command_group
from pilotlight.cli.core.formatting import format_bytes, format_table, format_time
from pilotlight.cli.core.session import Session
from pilotlight.spec.collection import CollectionKind

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name, as `list` shows it.")]


def register(root: typer.Typer) -> None:
    """Add the command groups."""
    for kind, what in (
        (CollectionKind.DICT, "values by key"),
        (CollectionKind.QUEUE, "values in their order"),
    ):
        command_group(
            root,
            kind.value,
            f"Manage {kind}s: {what} that functions share.",
            {"list": _list(kind), "delete": _delete(kind)},
        )


def _list(kind: CollectionKind) -> Callable[..., None]:
    def list_(session: Session) -> None:
        rows = session.request(lambda client: client.list_collections(kind))
        session.show(rows, lambda: _table(kind, rows))

    list_.__doc__ = f"List the {kind}s of the environment."
    return list_


def _delete(kind: CollectionKind) -> Callable[..., None]:
    def delete(session: Session, name: Name, yes: Yes = False) -> None:
        session.confirm(f"Delete {kind} {name}, with all its values?", yes=yes)
        session.request(lambda client: client.delete_collection(kind, name))
        session.show({"deleted": name}, lambda: f"{kind} {name} deleted")

    delete.__doc__ = f"Delete a {kind} and all its values."
    return delete


def _table(kind: CollectionKind, rows: list[dict[str, Any]]) -> Any:
    texts = [
        {
            **row,
            "size_bytes": format_bytes(row["size_bytes"]),
            "updated_at": format_time(row["updated_at"]),
        }
        for row in rows
    ]
    columns = {
        "name": kind.value,
        "entries": "entries",
        "size_bytes": "size",
        "updated_at": "changed",
    }
    empty = f"no {kind}s: pilotlight.{kind.title()}.from_name(name, create_if_missing=True)"
    return format_table(texts, columns, empty=empty)
