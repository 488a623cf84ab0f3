"""`pilotlight node …`: list the nodes of a cluster, as reported by their agents."""

from __future__ import annotations

from collections import Counter
from typing import Any

import typer

from pilotlight.cli.core.command import command_group
from pilotlight.cli.core.formatting import format_bytes, format_table, format_time
from pilotlight.cli.core.session import Session

_COLUMNS = {
    "node": "node",
    "pods": "pods",
    "weights": "weights",
    "snapshots": "snapshots",
    "gpus": "gpus",
    "memory": "memory free",
    "version": "version",
    "reported": "reported",
}


def register(root: typer.Typer) -> None:
    """Add the command group."""
    command_group(
        root,
        "node",
        "Show the nodes of a cluster: what they cache, and what is free.",
        {"list": list_},
    )


def list_(session: Session) -> None:
    """List nodes that have reported within the last hour. Platform administrators only."""
    rows = session.request(lambda client: client.nodes())
    empty = "No nodes: the platform runs on a single machine, or no node agent has reported yet."
    session.show(
        rows, lambda: format_table([_format_row(row) for row in rows], _COLUMNS, empty=empty)
    )


def _format_row(row: dict[str, Any]) -> dict[str, Any]:
    products = ", ".join(
        f"{count} x {name}" for name, count in sorted(Counter(row["gpus"]).items())
    )
    return {
        **row,
        "gpus": f"{products} ({row['gpus_free']} free)" if products else "-",
        "memory": f"{format_bytes(row['memory_free_bytes'])} of "
        f"{format_bytes(row['memory_bytes'])}",
        "reported": format_time(row["at"]) + ("" if row["is_fresh"] else " (silent)"),
    }
