"""The local platform: its configuration file, its directories, and whether it runs.

A supervisor holds a lock on `<home>/platform.lock` (flock(2)) while it lives, so whether the
platform runs is known exactly even after a kill -9. The file contains the supervisor's pid,
configuration and URL."""

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

from pilotlight.cli.supervisor.changed_settings import changed_settings, read_sections
from pilotlight.core.dashboard.dashboard_origin import DASHBOARD_PATH, read_dashboard_origin
from pilotlight.core.settings import Paths, PlatformSettings, SettingsInvalid, load_section
from pilotlight.errors import Conflict, InvalidInput

DEFAULT_LISTEN = "127.0.0.1:8700"
CONFIG_VARIABLE = "PILOTLIGHT_PLATFORM"
_INVALID_HINT = "Correct that setting; docs/how-to/operate.md lists all settings."


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPlatform:
    """A configured platform, running or not.

    Attributes:
        config: its platform.yaml; if the file does not exist, all defaults apply.
        paths: home and run directories.
        listen: `host:port` of the activator.
    """

    config: Path
    paths: Paths
    listen: str

    @property
    def url(self) -> str:
        """The platform's URL for users on this machine."""
        host, _, port = self.listen.rpartition(":")
        return f"http://{ {'0.0.0.0': '127.0.0.1', '[::]': '[::1]', '': '127.0.0.1'}.get(host, host) }:{port}"

    @property
    def dashboard(self) -> str:
        """URL of the dashboard: under `controller.dashboard_url` if it is set, else under `url`.
        Raises InvalidInput."""
        try:
            origin = read_dashboard_origin(self.config)
        except SettingsInvalid as e:
            raise InvalidInput(str(e)) from e
        return (origin.url if origin is not None else self.url) + DASHBOARD_PATH

    @property
    def config_summary(self) -> str:
        """One sentence: the configuration that holds, and one in the home that does not."""
        own = self.paths.home / "platform.yaml"
        if not self.config.exists():
            return "no configuration file: all settings have their defaults"
        if self.config == own.resolve() or not own.exists():
            return f"configuration: {self.config}"
        return f"configuration: {self.config} ({own} is not read)"

    @property
    def lock_file(self) -> Path:
        """The lock file, locked while a supervisor lives."""
        return self.paths.home / "platform.lock"

    @property
    def logs(self) -> Path:
        """Directory of the log files of the four processes and of a detached supervisor."""
        return self.paths.home / "logs"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningPlatform:
    """What a running supervisor recorded in the lock file."""

    pid: int
    config: str
    url: str
    run: str


def find_platform(
    *, config: Path | None, home: Path | None, environ: Mapping[str, str], cwd: Path
) -> LocalPlatform:
    """Find the platform's configuration, the first of: `config`, or `platform.yaml` in `home`;
    $PILOTLIGHT_PLATFORM; `platform.yaml` in `cwd`; `<home>/platform.yaml`. Without any, all
    defaults apply.

    Raises InvalidInput if a named file is missing, or if the file is invalid.
    """
    own = home / "platform.yaml" if home is not None else None
    named = config
    if named is None and (own is None or not own.exists()) and environ.get(CONFIG_VARIABLE):
        named = Path(environ[CONFIG_VARIABLE])
    if named is not None and not named.exists():
        raise InvalidInput(
            f"there is no configuration file {named}",
            hint="Correct --config or $PILOTLIGHT_PLATFORM, or omit it to use the defaults.",
        )
    candidates = [each for each in (own, cwd / "platform.yaml") if each is not None]
    file = named or next((each for each in candidates if each.exists()), None)
    settings = _platform_section(file)
    if home is not None:
        settings = dataclasses.replace(settings, home=str(home))
    paths = Paths.of(settings, environ)
    effective = (file or paths.home / "platform.yaml").resolve()
    if file is None and home is None:
        paths = Paths.of(_platform_section(effective), environ)
    return LocalPlatform(config=effective, paths=paths, listen=_listen(effective))


def configure(platform: LocalPlatform, *, listen: str | None, home: Path | None) -> LocalPlatform:
    """Write what differs from the defaults, and the overrides, to `<home>/platform.yaml`; without
    overrides, keep the file as it is. Raises InvalidInput."""
    platform.paths.make()
    target = platform.paths.home / "platform.yaml"
    if listen is None and home is None:
        if not platform.config.exists():
            target.write_text(
                "# All settings have their defaults; platform.yaml of the source lists them.\n"
            )
        return platform
    if listen is not None:
        require_listen_address(listen)
    try:
        sections = changed_settings(platform.config)
    except SettingsInvalid as e:
        raise InvalidInput(str(e), hint=_INVALID_HINT) from e
    if home is not None:
        sections.setdefault("platform", {})["home"] = str(platform.paths.home)
    if listen is not None:
        sections.setdefault("activator", {})["listen"] = listen
    target.write_text(
        "# Written by `pilotlight up` from its options; what is not here has its default.\n"
        + yaml.safe_dump(sections, sort_keys=False)
    )
    return dataclasses.replace(platform, config=target, listen=listen or platform.listen)


def require_listen_address(listen: str) -> None:
    """Raise InvalidInput unless `listen` is host:port with a port from 1 to 65535."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidInput(
            f"--listen {listen!r} is not an address",
            hint=f"Write host:port, such as {DEFAULT_LISTEN}.",
        )


class HomeLock:
    """Lock of a home, held by its one supervisor. The kernel releases it when the process ends."""

    def __init__(self, platform: LocalPlatform) -> None:
        self._platform = platform
        self._descriptor = -1

    def acquire(self, *, keeps_record: bool = False) -> None:
        """Acquire the lock and record this process as the supervisor, unless `keeps_record`. Raises
        Conflict, which names home and process, if another supervisor holds it."""
        self._descriptor = os.open(
            self._platform.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise _conflict(self._platform, _read(self._platform.lock_file)) from None
        if keeps_record:
            return
        me = {
            "pid": os.getpid(),
            "config": str(self._platform.config),
            "url": self._platform.url,
            "run": str(self._platform.paths.run),
        }
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(me).encode(), 0)

    def release(self) -> None:
        """Release the lock. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def find_running(platform: LocalPlatform) -> RunningPlatform | None:
    """The running supervisor of this home, or None."""
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


def last_run(platform: LocalPlatform) -> RunningPlatform | None:
    """What the last supervisor of this home recorded, running or not; None if there was none."""
    return _read(platform.lock_file)


def with_active_config(platform: LocalPlatform) -> LocalPlatform:
    """Return `platform` with the configuration of its running processes, if it runs."""
    if (found := find_running(platform)) is None:
        return platform
    config = Path(found.config)
    return dataclasses.replace(platform, config=config, listen=_listen(config))


def refuse_running(platform: LocalPlatform) -> None:
    """Raise Conflict, which names home and process, if a supervisor already runs in this home."""
    if (other := find_running(platform)) is not None:
        raise _conflict(platform, other)


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
        raise InvalidInput(str(e), hint=_INVALID_HINT) from e


def activator_count(file: Path) -> int:
    """Number of activators in the configuration; 1 if the value is invalid, which the activator
    then rejects."""
    return _count(read_sections(file).get("activator") or {})


def _count(activator: dict[str, Any]) -> int:
    count = activator.get("activators", 1)
    return count if isinstance(count, int) and count > 0 else 1


def _listen(file: Path) -> str:
    section = read_sections(file).get("activator")
    return str((section or {}).get("listen") or DEFAULT_LISTEN)
