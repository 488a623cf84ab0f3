"""`pilotlight storage …`: what a tenant keeps on the platform's disks, and freeing what nothing
refers to."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotlight.cli.commands.tenants.tenant import format_plan_value
from pilotlight.cli.core.command import Yes, command
from pilotlight.cli.core.formatting import format_bytes, format_table
from pilotlight.cli.core.session import Session

if TYPE_CHECKING:
    from rich.console import RenderableType

KEYS = ("stored_bytes", "pinned_bytes", "builds_at_once", "log_bytes", "functions", "result_bytes")


def register(root: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(
        help="Storage: what you keep, and freeing what nothing refers to.", no_args_is_help=True
    )
    verbs: dict[str, Callable[..., None]] = {"show": show, "collect": collect}
    for name, function in verbs.items():
        command(group, name)(function)
    root.add_typer(group, name="storage")


def show(session: Session) -> None:
    """What your tenant keeps, and what its plan allows."""
    with session.client() as client:
        found = client.own_tenant()
    rows = [
        {"what": key, "used": found["use"].get(key), "limit": found["terms"].get(key)}
        for key in KEYS
    ]
    session.show(rows, lambda: _shown(rows))


def collect(
    session: Session,
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go; change nothing.")
    ] = False,
    now: Annotated[
        bool,
        typer.Option(
            "--now", help="Also what was uploaded a moment ago. No deploy and no push may run."
        ),
    ] = False,
    all_tenants: Annotated[
        bool,
        typer.Option("--all-tenants", help="Of every tenant; for administrators of the platform."),
    ] = False,
    yes: Yes = False,
) -> None:
    """Free uploaded blobs to which no revision, image and name of weights refers. The platform does
    it by itself after a day."""
    if now and not dry_run:
        session.confirm(
            "Free what was uploaded a moment ago, too? A deploy or push that runs now fails then.",
            yes=yes,
        )
    with session.client() as client:
        done = client.collect_storage(
            unused_s=0 if now else None, dry_run=dry_run, all_tenants=all_tenants
        )
    verb = "would be freed" if dry_run else "are freed"
    session.show(done, lambda: f"{done['count']} blobs ({format_bytes(done['size_bytes'])}) {verb}")


def _shown(rows: list[dict[str, Any]]) -> RenderableType:
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
