"""The user's logins to registries, as `docker login`, `podman login` and their like keep them.

Sources: docker-login(1), "Credential stores" and "Credential helpers" (docker.com);
containers-auth.json(5)."""

from __future__ import annotations

import base64
import binascii
import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pilotlight.errors import InvalidInput
from pilotlight.spec.image_reference import Repository

DOCKER_HUB = "docker.io"
_HUB_KEYS = ("https://index.docker.io/v1/", "index.docker.io")
_HELPER = re.compile(r"[A-Za-z0-9._-]+\Z")
_HELPER_TIMEOUT_S = 60.0
"""A helper may ask the user to unlock a keyring."""
_MAX_FILE_BYTES = 1024 * 1024
_TOKEN_USER = "<token>"
"""A helper's user name for an identity token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """A user name with a password, or an identity token, which is exchanged for access tokens."""

    user: str = ""
    password: str = ""
    identity_token: str = ""

    def __repr__(self) -> str:
        return f"<Login {self.user or 'by identity token'}>"


def find_login(repository: Repository, environ: Mapping[str, str]) -> Login | None:
    """Return the login for a repository's registry; None if there is none. Raises InvalidInput for
    a file or a helper that cannot be read."""
    for path in _files(environ):
        if (document := _document(path)) is None:
            continue
        if (helper := _helper(document, repository)) is not None:
            if (login := _ask(helper, repository, environ)) is not None:
                return login
        elif (login := _stored(document, repository, path)) is not None:
            return login
    return None


def _files(environ: Mapping[str, str]) -> Iterator[Path]:
    if named := environ.get("REGISTRY_AUTH_FILE"):
        yield Path(named)
    home = Path(environ.get("HOME") or "~").expanduser()
    yield Path(environ.get("DOCKER_CONFIG") or home / ".docker") / "config.json"
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        yield Path(runtime) / "containers" / "auth.json"
    yield Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "containers" / "auth.json"


def _document(path: Path) -> Mapping[str, Any] | None:
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as e:
        raise InvalidInput(f"{path} cannot be read: {e.strerror or e}") from e
    try:
        document = json.loads(raw)
    except ValueError as e:
        raise InvalidInput(f"{path} is not JSON: {e}") from e
    if not isinstance(document, dict):
        raise InvalidInput(f"{path} is not a JSON object")
    return document


def _keys(repository: Repository) -> list[str]:
    """Keys of a repository, the most specific first: containers-auth.json(5) permits paths."""
    parts = [repository.host, *repository.name.split("/")]
    names = ["/".join(parts[:length]) for length in range(len(parts), 0, -1)]
    hub = list(_HUB_KEYS) if repository.host == DOCKER_HUB else []
    return [*names, f"https://{repository.host}", *hub]


def _helper(document: Mapping[str, Any], repository: Repository) -> str | None:
    helpers = document.get("credHelpers")
    named = helpers.get(repository.host) if isinstance(helpers, dict) else None
    helper = named or document.get("credsStore")
    return str(helper) if helper else None


def _stored(document: Mapping[str, Any], repository: Repository, path: Path) -> Login | None:
    logins = document.get("auths")
    if not isinstance(logins, dict):
        return None
    plain = {str(key).rstrip("/"): value for key, value in logins.items()}
    for key in _keys(repository):
        entry = plain.get(key.rstrip("/"))
        if not isinstance(entry, dict):
            continue
        if token := entry.get("identitytoken"):
            return Login(identity_token=str(token))
        try:
            text = base64.b64decode(str(entry.get("auth", "")), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError) as e:
            raise InvalidInput(f"{path}: auths[{key!r}].auth is not base64 of user:password") from e
        user, _, password = text.rstrip("\0").partition(":")
        if user:
            return Login(user=user, password=password)
    return None


def _ask(helper: str, repository: Repository, environ: Mapping[str, str]) -> Login | None:
    """Run a credential helper. One that does not know the registry ends with status 1."""
    if not _HELPER.match(helper):
        raise InvalidInput(f"credential helper {helper!r}: its name may not contain a path")
    program = f"docker-credential-{helper}"
    server = _HUB_KEYS[0] if repository.host == DOCKER_HUB else repository.host
    try:
        done = subprocess.run(
            [program, "get"],
            input=server.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=dict(environ),
            timeout=_HELPER_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise InvalidInput(
            f"the credential helper {program} of registry {repository.host} failed: {e}",
            hint="Install it, or remove it from ~/.docker/config.json and log in again.",
        ) from e
    if done.returncode != 0:
        return None
    try:
        found = json.loads(done.stdout)
        user, secret = str(found["Username"]), str(found["Secret"])
    except (ValueError, KeyError, TypeError) as e:
        raise InvalidInput(f"{program} did not return a login: {e!r}") from e
    return (
        Login(identity_token=secret) if user == _TOKEN_USER else Login(user=user, password=secret)
    )
