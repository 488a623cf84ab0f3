"""`pilotlight storage …`: show a tenant's storage, and free unreferenced blobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotlight.cli.commands.tenants.tenant import format_plan_value
from pilotlight.cli.core.command import Yes, command_group
from pilotlight.cli.core.formatting import format_bytes, format_table
from pilotlight.cli.core.session import Session

if TYPE_CHECKING:
    from rich.console import RenderableType

KEYS = (
    "stored_bytes",
    "pinned_bytes",
    "builds_at_once",
    "log_bytes",
    "functions",
    "result_bytes",
    "volume_files",
)


def register(root: typer.Typer) -> None:
    """Add the command group."""
    command_group(
        root,
        "storage",
        "Show your tenant's storage, and free unreferenced blobs.",
        {"show": show, "collect": collect},
    )


def show(session: Session) -> None:
    """Show what your tenant stores, and the limits of its plan."""
    found = session.request(lambda client: client.own_tenant())
    rows = [
        {"what": key, "used": found["use"].get(key), "limit": found["terms"].get(key)}
        for key in KEYS
    ]
    session.show(rows, lambda: _render(rows))


def collect(
    session: Session,
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be freed; change nothing.")
    ] = False,
    now: Annotated[
        bool,
        typer.Option(
            "--now", help="Include recent uploads. No deploy or weights push may be in progress."
        ),
    ] = False,
    all_tenants: Annotated[
        bool,
        typer.Option("--all-tenants", help="Blobs of all tenants; platform administrators only."),
    ] = False,
    yes: Yes = False,
) -> None:
    """Free uploaded blobs that no revision, image or weights refer to.

    The platform does this automatically after a day.
    """
    if now and not dry_run:
        session.confirm(
            "Free recent uploads too? A deploy or weights push in progress will fail.",
            yes=yes,
        )
    done = session.request(
        lambda client: client.collect_storage(
            unused_s=0 if now else None, dry_run=dry_run, all_tenants=all_tenants
        )
    )
    verb = "would be freed" if dry_run else "freed"
    session.show(done, lambda: f"{done['count']} blobs ({format_bytes(done['size_bytes'])}) {verb}")


def _render(rows: list[dict[str, Any]]) -> RenderableType:
    columns = {"what": "what", "used": "used", "limit": "limit"}
    texts = [
        {
            **row,
            "used": format_plan_value(row["what"], row["used"]),
            "limit": format_plan_value(row["what"], row["limit"]),
        }
        for row in rows
    ]
    return format_table(texts, columns, empty="")
