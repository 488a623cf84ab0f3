"""`pilotlight up`, `down` and `status`: start, stop and inspect the local platform."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotlight.cli.core.command import command
from pilotlight.cli.core.saved_profiles import free_profile_name, save_profile
from pilotlight.cli.core.session import Session

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pilotlight.cli.supervisor.local_platform import LocalPlatform
    from pilotlight.cli.supervisor.supervisor import Notice

_DOWN_WAIT_S = 120.0
"""Maximum time that `down` waits: four grace periods of 30 s."""


def register(app: typer.Typer) -> None:
    """Add the three commands."""
    command(app, "up")(up)
    command(app, "down")(down)
    command(app, "status")(status)


def up(
    session: Session,
    listen: Annotated[
        str | None,
        typer.Option(
            help="Address to listen on, host:port; overrides and updates platform.yaml in the home."
        ),
    ] = None,
    detach: Annotated[
        bool,
        typer.Option(
            "--detach",
            "-d",
            help="Run in the background: return once the platform is up. Stop it with `pilotlight "
            "down`.",
        ),
    ] = False,
) -> None:
    """Start the platform on this machine and supervise its processes until Ctrl-C."""
    from pilotlight.cli.supervisor import local_platform, run_platform

    os.umask(0o077)  # files are private unless their mode is set explicitly
    platform = session.platform()
    local_platform.refuse_running(platform)  # before anything is written
    platform = local_platform.configure(platform, listen=listen, home=session.options.home)
    session.say(platform.config_summary)
    os.environ.update(run_platform.process_environment(platform))
    key = run_platform.prepare_home(platform)

    def announce_up() -> None:
        # only once it serves: a start that fails must not change a login
        key_file = save_key(platform, session, key)[0] if key else None
        _announce_up(session, platform, key_file)

    if detach:
        for notice in run_platform.detach(platform):
            _print_notice(session, notice)
        announce_up()
        return
    asyncio.run(
        run_platform.supervise(
            platform, announce=lambda notice: _print_notice(session, notice), started=announce_up
        )
    )


def save_key(platform: LocalPlatform, session: Session, key: str) -> tuple[Path, str]:
    """Write the first admin key to the profile file; return the file and the profile's name: the
    given one, `default`, or `local-<port>` if the default profile has another platform's key."""
    from pilotlight import profile
    from pilotlight.cli.supervisor.run_platform import unsaved_key_file

    port = platform.listen.rpartition(":")[2]
    given = session.options.profile
    name = given or free_profile_name(
        session, platform.url, preferred=profile.DEFAULT_PROFILE, otherwise=f"local-{port}"
    )
    saved = save_profile(
        session,
        profile.Profile(url=platform.url, api_key=key),
        name=name,
        activate=name == profile.DEFAULT_PROFILE or given is not None,
    )
    unsaved_key_file(platform).unlink(missing_ok=True)
    return saved, name


def down(
    session: Session,
    all_instances: Annotated[
        bool,
        typer.Option(
            "--all-instances/--keep-instances",
            help="Stop instances too, or keep them for the next `up` to adopt.",
        ),
    ] = True,
) -> None:
    """Stop the platform on this machine after calls in flight have finished.

    If its supervisor was killed, end what it left: processes, instances, control groups. Where
    nothing runs there is nothing to do, and the exit status is 0.
    """
    from pilotlight.cli.supervisor import local_platform, stale_processes

    platform = session.platform()
    if (found := local_platform.find_running(platform)) is None:
        _end_leftovers(session, platform, keep_instances=not all_instances)
        return
    session.say(f"stopping the platform in {platform.paths.home} (process {found.pid})")
    ask = signal.SIGTERM if all_instances else signal.SIGUSR1
    drained = stale_processes.terminate(found.pid, grace_s=_DOWN_WAIT_S, first=ask)
    body = {"home": str(platform.paths.home), "pid": found.pid, "drained": drained}
    session.show(
        body, lambda: "stopped" if drained else f"killed: it did not stop within {_DOWN_WAIT_S:g} s"
    )


def _end_leftovers(session: Session, platform: LocalPlatform, *, keep_instances: bool) -> None:
    from pilotlight.cli.supervisor import leftovers

    ended = asyncio.run(
        leftovers.end_leftovers(
            platform,
            keep_instances=keep_instances,
            announce=lambda notice: _print_notice(session, notice),
        )
    )
    if ended.is_empty:
        session.show(
            {"home": str(platform.paths.home), "pid": None, "drained": True},
            lambda: f"no platform runs in {platform.paths.home}: there is nothing to stop",
        )
        return
    body = {
        "home": str(platform.paths.home),
        "pid": ended.supervisor,
        "drained": False,
        "processes": ended.processes,
        "instances": ended.left.instances if ended.left is not None else 0,
        "slots": ended.left.slots if ended.left is not None else 0,
    }
    session.show(
        body,
        lambda: (
            f"its supervisor (process {ended.supervisor}) had been killed: what it left in "
            f"{platform.paths.home} is ended"
        ),
    )


def status(session: Session) -> None:
    """Show whether the platform runs on this machine, its processes and their users.

    The exit status is 1 if the platform is down.
    """
    from pilotlight.cli.supervisor import local_platform
    from pilotlight.cli.supervisor.stale_processes import process_uid

    platform = session.platform()
    found = local_platform.find_running(platform)
    run = Path(found.run) if found else platform.paths.run
    processes = process_states(run, Path(found.config) if found else platform.config)
    body = {
        "running": found is not None,
        "home": str(platform.paths.home),
        "run": str(run),
        "config": found.config if found else str(platform.config),
        "url": found.url if found else platform.url,
        "dashboard": local_platform.with_active_config(platform).dashboard,
        "supervisor_pid": found.pid if found else None,
        "processes": processes,
        "uids": {name: process_uid(pid) for name, pid in processes.items()},
    }
    session.show(body, lambda: _status_table(body))
    if found is None:
        raise typer.Exit(1)


def process_states(run: Path, config: Path) -> dict[str, int | None]:
    """The pid of each process; None if it is down."""
    from pilotlight.cli.supervisor.local_platform import activator_count
    from pilotlight.cli.supervisor.stale_processes import find_stale_pid
    from pilotlight.cli.supervisor.supervisor import platform_processes

    specs = platform_processes(config, activators=activator_count(config))
    return {spec.name: find_stale_pid(run / f"{spec.name}.pid", spec.argv) for spec in specs}


def _status_table(body: dict[str, Any]) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, show_header=False)
    state = "[green]up[/]" if body["running"] else "[red]down[/] (start it with `pilotlight up`)"
    for name, value in {
        "platform": state,
        "url": body["url"],
        "home": body["home"],
        "configuration": body["config"],
    }.items():
        table.add_row(name, value)
    for name, pid in body["processes"].items():
        table.add_row(
            name, f"process {pid}, {_user(body['uids'][name])}" if pid else "[red]down[/]"
        )
    return table


def _user(uid: int | None) -> str:
    return "root" if uid == 0 else f"uid {uid}"


def _print_notice(session: Session, notice: Notice) -> None:
    seconds = f" ({notice.seconds:.2f} s)" if notice.seconds else ""
    with contextlib.suppress(OSError):  # the terminal was closed: stop in order nevertheless
        session.say(f"{notice.process:>12}  {notice.text}{seconds}")


def _announce_up(session: Session, platform: LocalPlatform, key_file: Path | None) -> None:
    body = {
        "url": platform.url,
        "dashboard": platform.dashboard,
        "home": str(platform.paths.home),
        "config": str(platform.config),
        "key_file": str(key_file) if key_file else None,
    }
    session.show(body, lambda: _up_lines(body))


def _up_lines(body: dict[str, Any]) -> RenderableType:
    from rich.text import Text

    key = (
        f"written to {body['key_file']} (only you can read it)"
        if body["key_file"]
        else "created earlier: see ~/.pilotlight.toml; if it is lost, run `pilotlight token create "
        "--local --scope admin`"
    )
    rows = {
        "dashboard": f"{body['dashboard']} (`pilotlight dashboard` opens it signed in)",
        "admin key": key,
        "home": body["home"],
    }
    return Text(
        "\n".join(
            [
                f"pilotlight is up at {body['url']}",
                *(f"  {name:<10} {value}" for name, value in rows.items()),
            ]
        )
    )
