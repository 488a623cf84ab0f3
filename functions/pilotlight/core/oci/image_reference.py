"""References of container images: `registry.example/team/images@sha256:…`.

Source: OCI Distribution Specification 1.1, "Pulling manifests"; the grammar of host names is that
of github.com/distribution/reference."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

MAX_REPOSITORY_CHARACTERS = 255
"""Longest name that registries and container runtimes accept, host included."""
_MAX_IMAGE_CHARACTERS = MAX_REPOSITORY_CHARACTERS + 1 + 128
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-f:]+\])(?::[0-9]{1,5})?"
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"({_HOST})((?:/{_PART})+)\Z")
_TAG = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
_IMAGE = re.compile(
    rf"(?:(?P<host>{_HOST})/)?{_PART}(?:/{_PART})*(?::{_TAG}|@sha256:[0-9a-f]{{64}})?\Z"
)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository of a registry: its host, with the port if one is given, and its name there.

    `str()` is `host/name`."""

    host: str
    name: str

    def __str__(self) -> str:
        return f"{self.host}/{self.name}"

    @property
    def is_loopback(self) -> bool:
        """Whether the host is this machine itself, by its address or as `localhost`."""
        host = self.host.rpartition(":")[0] if re.search(r":[0-9]+\Z", self.host) else self.host
        try:
            return ipaddress.ip_address(host.strip("[]")).is_loopback
        except ValueError:
            return host == "localhost"

    def holds(self, other: Repository) -> bool:
        """Whether `other` is this repository or below it."""
        return self.host == other.host and f"{other.name}/".startswith(f"{self.name}/")


def parse_repository(text: str) -> Repository:
    """Parse `host/name`. Raises ValueError."""
    match = _REPOSITORY.match(text) if len(text) <= MAX_REPOSITORY_CHARACTERS else None
    if match is None or not ("." in match[1] or ":" in match[1] or match[1] == "localhost"):
        raise ValueError(
            f"{text[:300]!r} is not a repository: must be host[:port]/name, such as "
            f"registry.example/functions, with lower-case letters, digits, '.', '_' and '-' in the "
            f"name, and at most {MAX_REPOSITORY_CHARACTERS} characters"
        )
    return Repository(match[1], match[2].removeprefix("/"))


def parse_reference(text: str) -> tuple[Repository, str]:
    """Parse `host/name@sha256:<64 hex digits>` into repository and digest. Raises ValueError."""
    name, _, digest = text.rpartition("@")
    if not _DIGEST.match(digest):
        raise ValueError(f"{text[:400]!r} does not end in a digest: must be host/name@sha256:…")
    return parse_repository(name), digest


def check_image_name(text: object) -> str:
    """Return `[host/]name[:tag]` or `[host/]name@sha256:…` unchanged: what `docker pull` takes.
    Raises ValueError."""
    if not isinstance(text, str) or len(text) > _MAX_IMAGE_CHARACTERS or not _IMAGE.match(text):
        raise ValueError(
            f"{str(text)[:300]!a} is not the name of a container image: must be "
            f"[host/]name[:tag] or [host/]name@sha256:…, such as python:3.12-slim"
        )
    return text


def is_on_loopback(image: str) -> bool:
    """Whether the registry of an image (as `check_image_name`) is on this machine."""
    match = _IMAGE.match(image)
    return match is not None and Repository(match["host"] or "", "").is_loopback
