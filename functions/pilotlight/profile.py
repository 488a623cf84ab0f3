"""Profiles (platform URL, API key, environment) in `~/.pilotlight.toml`, overridden by environment
variables.

    active = "default"

    [profiles.default]
    url = "http://127.0.0.1:8700"
    api_key = "…"
    environment = "main"

The file is the first of `$PILOTLIGHT_CONFIG`, `~/.pilotlight.toml`,
`$XDG_CONFIG_HOME/pilotlight/config.toml` that exists; it is written atomically with mode 0600.
`PILOTLIGHT_PROFILE` selects a profile; `PILOTLIGHT_URL`, `PILOTLIGHT_API_KEY` and
`PILOTLIGHT_ENVIRONMENT` override its fields individually, so continuous integration needs no file.

A URL may name a Unix socket, `unix:///run/…/http.sock`: functions reach their platform's public API
this way, with the variable set for them. An instance without an API key has a profile of its own:
it calls functions through its own socket, `calls:///run/…/<instance>.sock`, without a key."""

from __future__ import annotations

import contextlib
import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pilotlight.core.durability import write_durably
from pilotlight.core.transport.calls_socket import (
    CALLS_VARIABLE,
    INSTANCE_VARIABLE,
    calls_socket_here,
)
from pilotlight.errors import Forbidden, InvalidInput
from pilotlight.spec.identifiers import DEFAULT_ENVIRONMENT, require_name

DEFAULT_URL = "http://127.0.0.1:8700"
"""Default address of `pilotlight up`, unless platform.yaml has another."""
DEFAULT_PROFILE = "default"
_UNIX = "unix://"
_CALLS = "calls://"
_WAY_OUT = (
    "set PILOTLIGHT_API_KEY, and PILOTLIGHT_URL where it is not set, in a secret of the function"
)

_VARIABLES = {
    "url": "PILOTLIGHT_URL",
    "api_key": "PILOTLIGHT_API_KEY",
    "environment": "PILOTLIGHT_ENVIRONMENT",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One platform, one key, one environment.

    Attributes:
        url: base URL, without a path; or `unix://` and the path of a socket; or `calls://` and the
            path of an instance's socket.
        api_key: sent as bearer token; "" = none.
        environment: sent with every request.
    """

    url: str = DEFAULT_URL
    api_key: str = field(default="", repr=False)
    environment: str = DEFAULT_ENVIRONMENT

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://", f"{_UNIX}/", f"{_CALLS}/")):
            raise InvalidInput(
                f"url = {self.url!r}: must start with http://, https:// or unix:///",
                parameter="url",
            )
        require_name("environment", self.environment)

    @property
    def socket_path(self) -> str | None:
        """The Unix socket to connect to; None = the host and port of `url`."""
        scheme = _CALLS if self.is_instance else _UNIX
        return self.url.removeprefix(scheme) if self.url.startswith(scheme) else None

    @property
    def is_instance(self) -> bool:
        """Whether it is that of an instance, which calls functions through its own socket."""
        return self.url.startswith(_CALLS)

    @property
    def base_url(self) -> str:
        """Base URL of HTTP requests: `url`, or http://localhost for a Unix socket."""
        return self.url if self.socket_path is None else "http://localhost"


def config_path(environ: Mapping[str, str]) -> Path:
    """Path of the profile file (module docstring). It need not exist."""
    if explicit := environ.get("PILOTLIGHT_CONFIG"):
        return Path(explicit)
    home = Path(environ["HOME"]) if environ.get("HOME") else Path.home()
    plain = home / ".pilotlight.toml"
    xdg = Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "pilotlight" / "config.toml"
    return xdg if xdg.exists() and not plain.exists() else plain


def load(environ: Mapping[str, str] | None = None, *, name: str | None = None) -> Profile:
    """Load the selected profile. Raises InvalidInput if the file is invalid or has no such profile,
    Forbidden in an instance that cannot call functions without a key.

    `name` takes precedence over `PILOTLIGHT_PROFILE`, and that over the file's `active`.
    """
    environ = os.environ if environ is None else environ
    path = config_path(environ)
    document = _read(path)
    wanted = name or environ.get("PILOTLIGHT_PROFILE")
    chosen = wanted or _active(document)
    profiles = document.get("profiles", {})
    if wanted and wanted not in profiles:
        raise InvalidInput(
            f"{path} has no profile {wanted!r}; it has: {', '.join(sorted(profiles)) or 'none'}",
            parameter="profile",
        )
    values = _fields(profiles.get(chosen, {}), f"{path}: profiles.{chosen}")
    overrides = {
        key: environ[variable] for key, variable in _VARIABLES.items() if environ.get(variable)
    }
    found = {**values, **overrides}
    if not found.get("api_key") and (own := _instance_url(environ)) is not None:
        found["url"] = own
    return Profile(**found)


def _instance_url(environ: Mapping[str, str]) -> str | None:
    """The URL of the instance that this process is, by which it calls functions without a key; None
    outside a worker. Raises Forbidden where it cannot."""
    if (path := calls_socket_here(environ)) is not None:
        return f"{_CALLS}{path}"
    if CALLS_VARIABLE in environ:
        raise Forbidden(
            "functions can be called while an instance runs a call, and not in enter() before the "
            "snapshot or in the call of an example: call them in a method, give it an example that "
            f"calls none, or {_WAY_OUT}"
        )
    if INSTANCE_VARIABLE in environ:
        raise Forbidden(
            "this instance has no socket to call functions without a key: its function has "
            f"network='none'. With a network, {_WAY_OUT}"
        )
    return None


def selected_name(environ: Mapping[str, str]) -> str:
    """Return the name of the profile that `load` uses."""
    return environ.get("PILOTLIGHT_PROFILE") or _active(_read(config_path(environ)))


def save(
    profile: Profile,
    *,
    name: str = DEFAULT_PROFILE,
    path: Path | None = None,
    activate: bool = True,
) -> Path:
    """Save `profile` under `name`, keep the other profiles, and return the file's path. Mode 0600,
    replaced atomically."""
    path = path or config_path(os.environ)
    document = _read(path)
    profiles: dict[str, Any] = {
        **document.get("profiles", {}),
        name: {f.name: getattr(profile, f.name) for f in fields(profile)},
    }
    active = name if activate else _active(document)
    _replace(path, _render(active, profiles))
    return path


def is_first_time(what: str, *, path: Path) -> bool:
    """Return whether `what` was not asked before, and remember it in `<path>.seen`, beside the
    profile file. Where that cannot be written, everything is new."""
    file = path.with_name(f"{path.name}.seen")
    try:
        seen = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        seen = []
    if what in seen:
        return False
    with contextlib.suppress(OSError):
        _replace(file, "".join(f"{line}\n" for line in (*seen, what)))
    return True


def names(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The profiles in the file, sorted."""
    return tuple(
        sorted(_read(config_path(os.environ if environ is None else environ)).get("profiles", {}))
    )


def _active(document: Mapping[str, Any]) -> str:
    return str(document.get("active", DEFAULT_PROFILE))


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as e:
        raise InvalidInput(f"{path} cannot be read: {e}") from e
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise InvalidInput(f"{path} is not valid TOML: {e}") from e


def _fields(table: Any, where: str) -> dict[str, str]:
    known = [f.name for f in fields(Profile)]
    if not isinstance(table, dict):
        raise InvalidInput(f"{where}: expected a table with {', '.join(known)}")
    for key, value in table.items():
        if key not in known or not isinstance(value, str):
            raise InvalidInput(
                f"{where}.{key} = {value!r}: expected text under one of: {', '.join(known)}",
                parameter=key,
            )
    return table


def _render(active: str, profiles: Mapping[str, Mapping[str, str]]) -> str:
    lines = [f"active = {_quote(active)}"]
    for name, table in sorted(profiles.items()):
        lines += [
            "",
            f"[profiles.{_quote(name)}]",
            *(f"{key} = {_quote(value)}" for key, value in table.items()),
        ]
    return "\n".join(lines) + "\n"


def _quote(text: str) -> str:
    return json.dumps(text)  # a JSON string is a TOML basic string


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, text.encode())
