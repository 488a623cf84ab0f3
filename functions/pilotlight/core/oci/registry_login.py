"""Logins to registries, in a file as `docker login` and secrets of type
`kubernetes.io/dockerconfigjson` keep it.

Sources: docker-login(1), "Credential stores"; containers-auth.json(5)."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pilotlight.core.oci.image_reference import Repository

DOCKER_HUB = "docker.io"
HUB_KEYS = ("https://index.docker.io/v1/", "index.docker.io")
_MAX_FILE_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """A user name with a password, or an identity token, which is exchanged for access tokens."""

    user: str = ""
    password: str = ""
    identity_token: str = ""

    def __repr__(self) -> str:
        return f"<Login {self.user or 'by identity token'}>"


def read_logins(path: Path) -> Mapping[str, Any]:
    """The document in the file. Raises OSError; ValueError that names the file."""
    with path.open("rb") as file:
        raw = file.read(_MAX_FILE_BYTES + 1)
    try:
        document = json.loads(raw)
    except ValueError as e:
        raise ValueError(f"{path} is not JSON: {e}") from e
    if not isinstance(document, dict):
        raise ValueError(f"{path} is not a JSON object")
    return document


def stored_login(document: Mapping[str, Any], repository: Repository) -> Login | None:
    """The login for a repository's registry in the document; None if there is none. Raises
    ValueError that names the entry."""
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
            raise ValueError(f"auths[{key!r}].auth is not base64 of user:password") from e
        user, _, password = text.rstrip("\0").partition(":")
        if user:
            return Login(user=user, password=password)
    return None


def _keys(repository: Repository) -> list[str]:
    """Keys of a repository, the most specific first: containers-auth.json(5) permits paths."""
    parts = [repository.host, *repository.name.split("/")]
    names = ["/".join(parts[:length]) for length in range(len(parts), 0, -1)]
    hub = list(HUB_KEYS) if repository.host == DOCKER_HUB else []
    return [*names, f"https://{repository.host}", *hub]
