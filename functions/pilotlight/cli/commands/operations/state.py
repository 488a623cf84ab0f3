"""`pilotlight state backup`, `state load` and `state drill`: back up and restore the state of a
local platform."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pilotlight.cli.core.command import Yes, command_group
from pilotlight.cli.core.formatting import format_bytes, format_time
from pilotlight.cli.core.session import Session
from pilotlight.errors import Conflict, InvalidInput

if TYPE_CHECKING:
    from pilotlight.cli.supervisor.local_platform import LocalPlatform


def register(root: typer.Typer) -> None:
    """Add the command group."""
    command_group(
        root,
        "state",
        "Back up the local platform's state, load a backup, and test backups.",
        {"backup": backup, "load": load, "drill": drill},
    )


def backup(
    session: Session,
    file: Annotated[
        Path,
        typer.Argument(help="File to write. It contains keys: protect it like a password."),
    ],
) -> None:
    """Back up apps, keys, secrets, ledger, blobs and journals. The platform may be running."""
    from pilotlight.cli.commands.operations import backup as archive
    from pilotlight.cli.supervisor import local_platform

    platform = local_platform.with_active_config(session.platform())
    _refuse_external(platform.config)
    elsewhere = _blobs_elsewhere(platform)
    done = archive.save_backup(platform.paths.home, file, now=time.time(), blobs_at=elsewhere)
    written = f"{done.files} files, {format_bytes(done.size_bytes)}, written to {file}"
    if elsewhere:
        written += (
            f"\nThe backup does not include blobs, which are stored at {elsewhere}: back them up "
            f"with that store's tools."
        )
    session.show({"file": str(file), **dataclasses.asdict(done)}, lambda: written)


def load(
    session: Session,
    file: Annotated[Path, typer.Argument(help="File written by `state backup`.")],
    yes: Yes = False,
) -> None:
    """Load a backup into the platform's home. The platform must be stopped.

    State in the home is moved aside, not deleted.
    """
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
    loaded = f"{done.files} files, saved {format_time(done.created_at)}, loaded into {home}"
    here = _blobs_elsewhere(platform)
    if done.blobs_at != here:
        loaded += (
            f"\nThe backup's blobs are at {done.blobs_at or home / 'blobs'}, but this platform "
            f"stores blobs at {here or home / 'blobs'}: "
        )
        loaded += "copy them there, or change platform.blobs."
    session.show({"home": str(home), **dataclasses.asdict(done)}, lambda: loaded)


def drill(session: Session) -> None:
    """Test that a backup can be loaded: back up, load into a temporary home, verify the ledger.

    Prints the recovery point (RPO) and recovery time (RTO).
    """
    import tempfile

    from pilotlight.cli.commands.operations import state_drill as drilling
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
            f"RPO {done.rpo_s:.2f} s (plus the time since the last backup), "
            f"RTO {done.rto_s:.2f} s\n"
            f"saved {format_bytes(done.size_bytes)} in {done.backup_s:.2f} s, loaded in "
            f"{done.load_s:.2f} "
            f"s, verified in {done.verify_s:.2f} s\n"
            f"{done.records} records ({money}) and {done.invoices} invoices agree; {done.later} "
            f"records arrived during the backup"
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
            "the controller's database is PostgreSQL, which this command does not support",
            hint="Use pg_dump and pg_restore.",
        )
