"""`pilotlight doctor`: check this machine, the configuration and the platform, and suggest
fixes."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import os
import secrets
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pilotlight.cli.commands.operations.check_result import (
    BROKEN,
    LEAST_DISK_BYTES,
    NOTE,
    OK,
    CheckResult,
)
from pilotlight.cli.commands.operations.doctor_node import node
from pilotlight.cli.core.command import command
from pilotlight.cli.core.formatting import format_bytes
from pilotlight.cli.core.session import Session
from pilotlight.core.transport.public_listener import open_listeners
from pilotlight.errors import PilotlightError, Unauthenticated, Unavailable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pilotlight.cli.supervisor.local_platform import LocalPlatform
    from pilotlight.core.object_store import ObjectStore
    from pilotlight.profile import Profile

_STORE_TIMEOUT_S = 5.0
_PROBE_S = 30.0
"""Time limit for three requests to the blob store, each tried at most twice."""
_PARTS = {
    "SDK and CLI": ("cloudpickle", "httpx", "pathspec", "yaml", "rich", "typer"),
    "platform (extra `server`)": (
        "fastapi",
        "uvicorn",
        "sqlalchemy",
        "alembic",
        "cryptography",
        "jsonschema_rs",
        "prometheus_client",
    ),
}


def register(root: typer.Typer) -> None:
    """Add the command."""
    command(root, "doctor")(doctor)


def doctor(
    session: Session,
    *,
    cluster: Annotated[
        bool,
        typer.Option("--cluster", help="Check the Kubernetes cluster of platform.yaml instead."),
    ] = False,
    role: Annotated[
        str,
        typer.Option(
            help="With --cluster: whose permissions to check: operator (you), controller, activator "
            "or autoscaler."
        ),
    ] = "operator",
) -> None:
    """Check this machine, the configuration and the platform, and suggest fixes.

    The exit status is 1 if something is broken.
    """
    if cluster:
        from pilotlight.cli.commands.operations.doctor_cluster import examine_cluster

        if not examine_cluster(session, role=role):
            raise typer.Exit(1)
        return
    findings = [*machine(), *settings(session), *node(session)]
    session.show([dataclasses.asdict(f) for f in findings], lambda: _table(findings))
    if any(f.state == BROKEN for f in findings):
        raise typer.Exit(1)


def machine() -> Iterator[CheckResult]:
    """Check interpreter, operating system and installed packages."""
    version = ".".join(str(part) for part in sys.version_info[:3])
    new_enough = sys.version_info >= (3, 11)
    yield CheckResult(
        what="Python",
        state=OK if new_enough else BROKEN,
        detail=f"{version} at {sys.executable}",
        way_out="Use Python 3.11 or newer.",
    )
    yield interpreter_build()
    linux = sys.platform == "linux"
    way_out = "Only the SDK and the CLI work here: set PILOTLIGHT_URL to a platform on Linux."
    yield CheckResult(
        what="operating system", state=OK if linux else NOTE, detail=sys.platform, way_out=way_out
    )
    for part, modules in _PARTS.items():
        missing = [name for name in modules if importlib.util.find_spec(name) is None]
        detail = f"not installed: {', '.join(missing)}" if missing else "installed"
        yield CheckResult(
            what=part,
            state=BROKEN if missing else OK,
            detail=detail,
            way_out="Run pip install 'pilotlight[all]', or `make setup` in a checkout.",
        )


def interpreter_build() -> CheckResult:
    """Check whether the interpreter was built with profile-guided optimisation.

    Distributions' packages (below /usr) are, Debian's without the option in their record."""
    asked = str(sysconfig.get_config_var("CONFIG_ARGS") or "")
    is_optimised = "--enable-optimizations" in asked or sys.base_prefix == "/usr"
    return CheckResult(
        what="Python's build",
        state=OK if is_optimised else NOTE,
        detail="optimised"
        if is_optimised
        else f"{sys.base_prefix} was built without --enable-optimizations: calls may take more CPU",
        way_out="Use a distribution's Python, or build one with `PYTHON_CONFIGURE_OPTS="
        "'--enable-optimizations --with-lto' pyenv install`.",
    )


def settings(session: Session) -> Iterator[CheckResult]:
    """Check configuration, directories, address, profile and its key."""
    from pilotlight.cli.supervisor.local_platform import with_active_config

    try:
        platform = with_active_config(session.platform())
    except PilotlightError as e:
        yield CheckResult(
            what="configuration", state=BROKEN, detail=str(e), way_out=str(e.detail.get("hint", ""))
        )
        return
    shown = (
        str(platform.config)
        if platform.config.exists()
        else "no file: all settings have their defaults"
    )
    yield CheckResult(what="configuration", state=OK, detail=shown)
    yield _disk(platform)
    yield blobs(platform)
    yield _sockets(platform)
    yield _address(platform)
    yield activators(platform)
    yield controller(platform)
    try:
        profile = session.profile()
    except PilotlightError as e:
        yield CheckResult(
            what="profile",
            state=BROKEN,
            detail=str(e),
            way_out="Correct the profile file, or pass another with --profile-file.",
        )
        return
    has_key = "with a key" if profile.api_key else "without a key"
    way_out = (
        "Run `pilotlight up`, which writes a key to ~/.pilotlight.toml, or set PILOTLIGHT_API_KEY."
    )
    detail = f"{profile.url} {has_key}, environment {profile.environment}"
    yield CheckResult(
        what="profile", state=OK if profile.api_key else NOTE, detail=detail, way_out=way_out
    )
    if profile.api_key:
        yield api_key(profile)


def api_key(profile: Profile) -> CheckResult:
    """Try the profile's key at its platform."""
    from pilotlight.client.client import Client

    what = "API key"
    try:
        with Client(profile, retry_budget_s=0.0) as client:
            me = client.whoami()
        tenant = me["tenant"]["name"]
        detail = f"valid for {profile.url}: {me['key']}, scope {me['scope']}, tenant {tenant}"
    except Unavailable as e:
        return CheckResult(
            what=what,
            state=NOTE,
            detail=f"could not be tried: {e}",
            way_out="Start the platform, or correct the profile's url.",
        )
    except (PilotlightError, KeyError, TypeError, ValueError) as e:
        state = "expired" if isinstance(e, Unauthenticated) and "expired" in str(e) else "refused"
        return CheckResult(
            what=what,
            state=BROKEN,
            detail=f"{state} by {profile.url}: {e}",
            way_out="Pass another --profile, or create a key: `pilotlight token create`, on the "
            "platform's machine with --local.",
        )
    if me["suspended"]:
        return CheckResult(
            what=what,
            state=BROKEN,
            detail=f"{detail}, which is suspended",
            way_out="Ask a platform administrator to resume the tenant.",
        )
    return CheckResult(what=what, state=OK, detail=detail)


def activators(platform: LocalPlatform) -> CheckResult:
    """Check whether activators, which parse untrusted input, run (or would run) without root."""
    from snapshotter.linux.process_user import ProcessUser

    def obstacle() -> str:
        assert uid is not None
        return ProcessUser(
            uid=uid, enters=tuple(path for path in (platform.paths.run,) if path.is_dir())
        ).obstacle()

    uid = platform.paths.activator_uid
    return _user(platform, "activator", uid, obstacle)


def controller(platform: LocalPlatform) -> CheckResult:
    """Check whether the controller, which has the keys and the database, runs without root."""

    def obstacle() -> str:
        from pilotlight.controller.server.process_user import startup_obstacle
        from pilotlight.controller.settings import ControllerConfig
        from pilotlight.core.settings import SettingsInvalid

        try:
            config = ControllerConfig.read(platform.config if platform.config.exists() else None)
        except SettingsInvalid as e:
            return str(e)
        return startup_obstacle(dataclasses.replace(config, paths=platform.paths))

    return _user(platform, "controller", platform.paths.controller_uid, obstacle)


def _user(
    platform: LocalPlatform, process: str, uid: int | None, obstacle: Callable[[], str]
) -> CheckResult:
    from pilotlight.core.settings import PlatformSettings

    what = f"{process}'s user"
    if os.geteuid() != 0:
        return CheckResult(
            what=what, state=OK, detail=f"uid {os.geteuid()}, like the whole platform"
        )
    if uid is None:
        way_out = (
            f"Set platform.{process}_uid, or omit it: its default is "
            f"{getattr(PlatformSettings(), f'{process}_uid')}."
        )
        return CheckResult(
            what=what, state=NOTE, detail=f"root: platform.{process}_uid is null", way_out=way_out
        )
    if (running_as := _uid_of(platform, process)) is not None and running_as != 0:
        return CheckResult(what=what, state=OK, detail=f"uid {running_as}, without root")
    try:
        why = obstacle()
    except OSError as e:
        return CheckResult(
            what=what,
            state=BROKEN,
            detail=str(e),
            way_out=f"Find the processes that run as uid {uid} (ps -u {uid}) and stop them.",
        )
    if why:
        return CheckResult(
            what=what,
            state=NOTE,
            detail=f"root: {why}",
            way_out="Remove the obstacle and restart the platform.",
        )
    if running_as == 0:
        return CheckResult(
            what=what,
            state=NOTE,
            detail="root",
            way_out=f"Find the reason in <home>/logs/{process}.log (`runs as root reason=`).",
        )
    return CheckResult(what=what, state=OK, detail=f"uid {uid}, without root")


def _uid_of(platform: LocalPlatform, process: str) -> int | None:
    """The uid of a running process; None if it is down."""
    from pilotlight.cli.supervisor.local_platform import find_running
    from pilotlight.cli.supervisor.stale_processes import process_uid
    from pilotlight.core import pid_file

    found = find_running(platform)
    return process_uid(pid_file.read(Path(found.run) / f"{process}.pid")) if found else None


def blobs(platform: LocalPlatform) -> CheckResult:
    """Check whether the blob store can put, get and delete an object."""
    from pilotlight.core.object_store import blob_store
    from pilotlight.core.object_store.errors import ObjectStoreError
    from pilotlight.core.settings import PlatformSettings, SettingsInvalid, load_section

    file = platform.config if platform.config.exists() else None
    try:
        asked = load_section(PlatformSettings, "platform", file)
        store = blob_store(asked, platform.paths, attempts=2, timeout_s=_STORE_TIMEOUT_S)
    except SettingsInvalid as e:
        return CheckResult(
            what="blobs",
            state=BROKEN,
            detail=str(e),
            way_out="Correct platform.blobs in platform.yaml.",
        )
    where = asked.blobs or str(platform.paths.home / "blobs")
    if (directory := store.local_path("probe")) is not None and not directory.parent.exists():
        return CheckResult(what="blobs", state=OK, detail=f"{where}, created by the first upload")
    try:
        asyncio.run(_probe(store))
    except (ObjectStoreError, TimeoutError) as e:
        way_out = (
            "Check platform.blobs, the credentials (AWS_… in the platform's environment) and their "
            "permissions to put, get and delete objects."
        )
        return CheckResult(
            what="blobs", state=BROKEN, detail=f"{where}: {e or 'no answer'!s}", way_out=way_out
        )
    return CheckResult(
        what="blobs", state=OK, detail=f"{where} stores, returns and deletes objects"
    )


async def _probe(store: ObjectStore) -> None:
    """Put, get and delete an object. Raises ObjectStoreError, TimeoutError."""
    from pilotlight.core.object_store.errors import ObjectStoreError

    key, data = f"probe-{secrets.token_hex(8)}", secrets.token_bytes(64)
    try:
        async with asyncio.timeout(_PROBE_S):
            try:
                await store.put(key, data)
                if await store.get(key, max_bytes=len(data)) != data:
                    raise ObjectStoreError(f"{key} was read back with different content")
            finally:
                await store.delete(key)
    finally:
        await store.aclose()


def _disk(platform: LocalPlatform) -> CheckResult:
    place = next(p for p in (platform.paths.home, *platform.paths.home.parents) if p.exists())
    free = shutil.disk_usage(place).free
    writable = os.access(place, os.W_OK)
    state = BROKEN if not writable else NOTE if free < LEAST_DISK_BYTES else OK
    way_out = (
        "Make it writable, or choose another --home."
        if not writable
        else "Free disk space: weights and images need it."
    )
    return CheckResult(
        what="home",
        state=state,
        detail=f"{platform.paths.home}, {format_bytes(free)} free{'' if writable else ', not writable'}",
        way_out=way_out,
    )


def _sockets(platform: LocalPlatform) -> CheckResult:
    short = platform.paths.run.parent != platform.paths.home
    detail = f"{platform.paths.run}{' (the home is too long for socket paths)' if short else ''}"
    return CheckResult(what="sockets", state=OK, detail=detail)


def _address(platform: LocalPlatform) -> CheckResult:
    from pilotlight.cli.supervisor.local_platform import find_running

    if (found := find_running(platform)) is not None:
        return CheckResult(what="address", state=OK, detail=f"{found.url} (this platform)")
    try:
        for each in open_listeners(platform.listen, is_shared=False):
            each.close()
        return CheckResult(what="address", state=OK, detail=f"{platform.listen} is free")
    except (OSError, ValueError) as e:
        return CheckResult(
            what="address",
            state=BROKEN,
            detail=f"{platform.listen}: {e.strerror if isinstance(e, OSError) else e}",
            way_out="Choose another address: `pilotlight up --listen 127.0.0.1:PORT`.",
        )


def _table(findings: list[CheckResult]) -> RenderableType:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    marks = {OK: "[green]ok[/]", NOTE: "[yellow]note[/]", BROKEN: "[red]broken[/]"}
    for f in findings:
        way_out = f"\n{escape(f.way_out)}" if f.way_out and f.state != OK else ""
        table.add_row(marks[f.state], f.what, escape(f.detail) + way_out)
    return table
