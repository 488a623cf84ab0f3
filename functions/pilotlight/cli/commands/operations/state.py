"""`pilotlight state backup`, `state load` and `state drill`: the embedded platform's state as one
file."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pilotlight.cli.core.command import Yes, command
from pilotlight.cli.core.formatting import format_bytes, format_time
from pilotlight.cli.core.session import Session
from pilotlight.errors import Conflict, InvalidInput

if TYPE_CHECKING:
    from pilotlight.cli.supervisor.local_platform import LocalPlatform


def register(root: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(help="Save and load the platform's state.", no_args_is_help=True)
    command(group, "backup")(backup)
    command(group, "load")(load)
    command(group, "drill")(drill)
    root.add_typer(group, name="state")


def backup(
    session: Session,
    file: Annotated[
        Path, typer.Argument(help="File to write; it holds keys, keep it like a password.")
    ],
) -> None:
    """Save apps, keys, secrets, ledger, blobs and journals, while the platform runs or not."""
    from pilotlight.cli.commands.operations import backup as archive
    from pilotlight.cli.supervisor import local_platform

    platform = local_platform.with_active_config(session.platform())
    _refuse_external(platform.config)
    elsewhere = _blobs_elsewhere(platform)
    done = archive.save_backup(platform.paths.home, file, now=time.time(), blobs_at=elsewhere)
    written = f"{done.files} files, {format_bytes(done.size_bytes)}, written to {file}"
    if elsewhere:
        written += (
            f"\nWithout blobs: they lie at {elsewhere}, and must be kept there or copied "
            f"with that store's own tools."
        )
    session.show({"file": str(file), **dataclasses.asdict(done)}, lambda: written)


def load(
    session: Session,
    file: Annotated[Path, typer.Argument(help="File that `state backup` wrote.")],
    yes: Yes = False,
) -> None:
    """Put a saved state into this home; what is there is set aside. The platform must be down."""
    from pilotlight.cli.commands.operations import backup as archive
    from pilotlight.cli.supervisor import local_platform

    platform = session.platform()
    if (found := local_platform.find_running(platform)) is not None:
        raise Conflict(
            f"a platform runs in {platform.paths.home} (process {found.pid})",
            hint="Stop it first: `pilotlight down`.",
        )
    _refuse_external(platform.config)
    home = platform.paths.home
    done = archive.load_backup(file, home, replace=yes, now=time.time())
    loaded = f"{done.files} files, saved {format_time(done.created_at)}, are in {home}"
    here = _blobs_elsewhere(platform)
    if done.blobs_at != here:
        loaded += (
            f"\nIts blobs lie at {done.blobs_at or home / 'blobs'}; this platform looks for "
            f"them at {here or home / 'blobs'}: "
        )
        loaded += "copy them there, or correct platform.blobs."
    session.show({"home": str(home), **dataclasses.asdict(done)}, lambda: loaded)


def drill(session: Session) -> None:
    """Prove that a backup can be loaded: save, load into a scratch home, verify the ledger; prints
    RPO and RTO."""
    import tempfile

    from pilotlight.cli.commands.operations import drill as drilling
    from pilotlight.cli.supervisor import local_platform

    platform = local_platform.with_active_config(session.platform())
    _refuse_external(platform.config)
    home = platform.paths.home
    with tempfile.TemporaryDirectory(prefix=".pilotlight-drill-", dir=home.parent) as scratch:
        done = drilling.run_drill(
            home, Path(scratch), clock=time.time, blobs_at=_blobs_elsewhere(platform)
        )
    money = (
        ", ".join(f"{amount} {currency}" for currency, amount in done.totals.items()) or "nothing"
    )
    session.show(
        dataclasses.asdict(done),
        lambda: (
            f"RPO {done.rpo_s:.2f} s (and the time since the last backup), RTO {done.rto_s:.2f} s\n"
            f"saved {format_bytes(done.size_bytes)} in {done.backup_s:.2f} s, loaded in "
            f"{done.load_s:.2f} "
            f"s, verified in {done.verify_s:.2f} s\n"
            f"{done.records} records ({money}) and {done.invoices} invoices agree; {done.later} "
            f"records came while it was saved"
        ),
    )


def _blobs_elsewhere(platform: LocalPlatform) -> str | None:
    from pilotlight.cli.commands.operations.backup import external_blob_location
    from pilotlight.core.settings import PlatformSettings, load_section

    return external_blob_location(
        load_section(PlatformSettings, "platform", platform.config), platform.paths.home
    )


def _refuse_external(config: Path) -> None:
    import yaml

    try:
        sections = yaml.safe_load(config.read_text()) or {}
    except FileNotFoundError:
        return
    url = (sections.get("controller") or {}).get("database_url")
    if url and not str(url).startswith("sqlite:"):
        raise InvalidInput(
            "the controller's database is PostgreSQL, which this does not save",
            hint="Use pg_dump and pg_restore for it.",
        )
