"""The platform on this machine: which file configures it, where it lives, whether it runs.

`<home>/platform.lock` is locked (flock(2)) for as long as a supervisor lives, so "is it running?"
has an exact answer even after a kill -9; its text says which process, which configuration and which
URL."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pilotlight.core.dashboard.dashboard_origin import DASHBOARD_PATH, read_dashboard_origin
from pilotlight.core.settings import Paths, PlatformSettings, SettingsInvalid, load_section
from pilotlight.errors import Conflict, InvalidInput, NotFound

DEFAULT_LISTEN = "127.0.0.1:8700"
CONFIG_VARIABLE = "PILOTLIGHT_PLATFORM"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPlatform:
    """A configured platform, running or not.

    Attributes:
        config: its platform.yaml; it may not exist (then every default holds).
        paths: home and run directories.
        listen: `host:port` of the activator.
    """

    config: Path
    paths: Paths
    listen: str

    @property
    def url(self) -> str:
        """The address that users on this machine call."""
        host, _, port = self.listen.rpartition(":")
        return f"http://{ {'0.0.0.0': '127.0.0.1', '[::]': '[::1]', '': '127.0.0.1'}.get(host, host) }:{port}"

    @property
    def dashboard(self) -> str:
        """Where the dashboard is: at an origin of its own (`controller.dashboard_url`), or under
        `url`. Raises InvalidInput."""
        try:
            origin = read_dashboard_origin(self.config)
        except SettingsInvalid as e:
            raise InvalidInput(str(e)) from e
        return (origin.url if origin is not None else self.url) + DASHBOARD_PATH

    @property
    def lock_file(self) -> Path:
        """Locked while a supervisor lives."""
        return self.paths.home / "platform.lock"

    @property
    def logs(self) -> Path:
        """Log files of the four processes and of a detached supervisor."""
        return self.paths.home / "logs"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningPlatform:
    """What a live supervisor wrote about itself."""

    pid: int
    config: str
    url: str
    run: str


def find_platform(
    *, config: Path | None, home: Path | None, environ: Mapping[str, str], cwd: Path
) -> LocalPlatform:
    """The platform that is meant: `config`, else $PILOTLIGHT_PLATFORM, else that of `home`, else
    `platform.yaml` here, else defaults.

    Raises InvalidInput when the file is named but missing, or broken.
    """
    named = config or (Path(environ[CONFIG_VARIABLE]) if environ.get(CONFIG_VARIABLE) else None)
    if named is not None and not named.exists():
        raise InvalidInput(
            f"there is no configuration file {named}",
            hint="Correct --config, or leave it out to use the defaults.",
        )
    nearby = [*([home / "platform.yaml"] if home else []), cwd / "platform.yaml"]
    file = named or next((candidate for candidate in nearby if candidate.exists()), None)
    settings = _platform_section(file)
    if home is not None:
        settings = dataclasses.replace(settings, home=str(home))
    paths = Paths.of(settings, environ)
    effective = (file or paths.home / "platform.yaml").resolve()
    if file is None and home is None:
        paths = Paths.of(_platform_section(effective), environ)
    return LocalPlatform(config=effective, paths=paths, listen=_listen(effective))


def configure(platform: LocalPlatform, *, listen: str | None, home: Path | None) -> LocalPlatform:
    """Write the configuration with the overrides to `<home>/platform.yaml`; without any, keep the
    file as it is."""
    platform.paths.make()
    target = platform.paths.home / "platform.yaml"
    if listen is None and home is None:
        if not platform.config.exists():
            target.write_text(
                "# Every setting has its default; platform.yaml of the source lists them.\n"
            )
        return platform
    if listen is not None:
        require_listen_address(listen)
    sections = _sections(platform.config)
    if home is not None:
        sections["platform"] = {
            **(sections.get("platform") or {}),
            "home": str(platform.paths.home),
        }
    if listen is not None:
        sections["activator"] = {**(sections.get("activator") or {}), "listen": listen}
    target.write_text(
        "# Written by `pilotlight up` from its options.\n"
        + yaml.safe_dump(sections, sort_keys=False)
    )
    return dataclasses.replace(platform, config=target, listen=listen or platform.listen)


def require_listen_address(listen: str) -> None:
    """Raises InvalidInput unless `listen` is host:port with a port of 1 to 65535."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidInput(
            f"--listen {listen!r} is not an address",
            hint=f"Write host:port, such as {DEFAULT_LISTEN}.",
        )


class HomeLock:
    """Held by the one supervisor of a home; released by the kernel when its process ends."""

    def __init__(self, platform: LocalPlatform) -> None:
        self._platform = platform
        self._descriptor = -1

    def acquire(self) -> None:
        """Raises Conflict, naming home and process, when another supervisor has it."""
        self._descriptor = os.open(
            self._platform.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise _conflict(self._platform, _read(self._platform.lock_file)) from None
        me = {
            "pid": os.getpid(),
            "config": str(self._platform.config),
            "url": self._platform.url,
            "run": str(self._platform.paths.run),
        }
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(me).encode(), 0)

    def release(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def find_running(platform: LocalPlatform) -> RunningPlatform | None:
    """The live supervisor of this home, or None."""
    try:
        descriptor = os.open(platform.lock_file, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read(platform.lock_file)
    finally:
        os.close(descriptor)
    return None


def with_active_config(platform: LocalPlatform) -> LocalPlatform:
    """`platform` with the configuration that its processes were started with, while they run."""
    if (found := find_running(platform)) is None:
        return platform
    config = Path(found.config)
    return dataclasses.replace(platform, config=config, listen=_listen(config))


def refuse_running(platform: LocalPlatform) -> None:
    """Raises Conflict, naming home and process, when a supervisor already runs there."""
    if (other := find_running(platform)) is not None:
        raise _conflict(platform, other)


def require_running(platform: LocalPlatform) -> RunningPlatform:
    """`find_running`, or NotFound that says how to start one."""
    if (found := find_running(platform)) is None:
        raise NotFound(
            f"no platform runs in {platform.paths.home}",
            hint="Start one with `pilotlight up`, or name its --home.",
        )
    return found


def _conflict(platform: LocalPlatform, other: RunningPlatform | None) -> Conflict:
    who = f"process {other.pid}, {other.url}" if other else "another process"
    return Conflict(
        f"a platform already runs in {platform.paths.home} ({who})",
        hint="Use it, stop it with `pilotlight down`, or choose another --home and --listen.",
    )


def _read(file: Path) -> RunningPlatform | None:
    try:
        return RunningPlatform(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _platform_section(file: Path | None) -> PlatformSettings:
    try:
        return load_section(PlatformSettings, "platform", file)
    except SettingsInvalid as e:
        raise InvalidInput(
            str(e), hint="Correct that line; docs/operations.md lists every setting."
        ) from e


def _sections(file: Path) -> dict[str, Any]:
    try:
        return yaml.safe_load(file.read_text()) or {}
    except FileNotFoundError:
        return {}


def activator_count(file: Path) -> int:
    """How many activators the configuration asks for; a value that is no number is left for the
    activator to refuse."""
    return _count(_sections(file).get("activator") or {})


def _count(activator: dict[str, Any]) -> int:
    count = activator.get("activators", 1)
    return count if isinstance(count, int) and count > 0 else 1


def _listen(file: Path) -> str:
    section = _sections(file).get("activator")
    return str((section or {}).get("listen") or DEFAULT_LISTEN)
