"""The user's logins to registries, as `docker login`, `podman login` and their like keep them.

Sources: docker-login(1), "Credential stores" and "Credential helpers" (docker.com);
containers-auth.json(5)."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pilotlight.core.oci.image_reference import Repository
from pilotlight.core.oci.registry_login import (
    DOCKER_HUB,
    HUB_KEYS,
    Login,
    read_logins,
    stored_login,
)
from pilotlight.errors import InvalidInput

_HELPER = re.compile(r"[A-Za-z0-9._-]+\Z")
_HELPER_TIMEOUT_S = 60.0
"""A helper may ask the user to unlock a keyring."""
_TOKEN_USER = "<token>"
"""A helper's user name for an identity token."""


def find_login(repository: Repository, environ: Mapping[str, str]) -> Login | None:
    """Return the login for a repository's registry; None if there is none. Raises InvalidInput for
    a file or a helper that cannot be read."""
    for path in _files(environ):
        if (document := _document(path)) is None:
            continue
        if (helper := _helper(document, repository)) is not None:
            if (login := _run_helper(helper, repository, environ)) is not None:
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
        return read_logins(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as e:
        raise InvalidInput(f"{path} cannot be read: {e.strerror or e}") from e
    except ValueError as e:
        raise InvalidInput(str(e)) from e


def _helper(document: Mapping[str, Any], repository: Repository) -> str | None:
    helpers = document.get("credHelpers")
    named = helpers.get(repository.host) if isinstance(helpers, dict) else None
    helper = named or document.get("credsStore")
    return str(helper) if helper else None


def _stored(document: Mapping[str, Any], repository: Repository, path: Path) -> Login | None:
    try:
        return stored_login(document, repository)
    except ValueError as e:
        raise InvalidInput(f"{path}: {e}") from e


def _run_helper(helper: str, repository: Repository, environ: Mapping[str, str]) -> Login | None:
    """Run a credential helper. One that does not know the registry ends with status 1."""
    if not _HELPER.match(helper):
        raise InvalidInput(f"credential helper {helper!r}: its name may not contain a path")
    program = f"docker-credential-{helper}"
    server = HUB_KEYS[0] if repository.host == DOCKER_HUB else repository.host
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
