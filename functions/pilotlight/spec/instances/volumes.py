"""Volumes that the instances of a function have mounted, and where each is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pilotlight.errors import InvalidInput
from pilotlight.spec.identifiers import require_name

MAX_VOLUMES = 16
MAX_MOUNT_BYTES = 256
RESERVED_ROOTS = frozenset(
    {"bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "nix"}
    | {"proc", "run", "sbin", "sys", "tmp", "usr", "var"}
)
"""Directories at the top of a slot that are the platform's or the image's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeSpec:
    """A volume of the environment, by `name`, mounted writable at `path`."""

    name: str
    path: str

    def __post_init__(self) -> None:
        require_name("volume", self.name, parameter="volumes")
        check_mount_path(self.path)


def check_mount_path(path: str) -> str:
    """Return the path at which a volume may be mounted, without a slash at its end. Raises
    InvalidInput."""
    at = path.rstrip("/")
    parts = at.split("/")[1:]
    if not at.startswith("/") or not parts or len(at.encode()) > MAX_MOUNT_BYTES:
        raise InvalidInput(
            f"volumes: {path[:80]!r}: must be an absolute path of at most {MAX_MOUNT_BYTES} bytes, "
            f"such as /data",
            parameter="volumes",
        )
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise InvalidInput(
            f"volumes: {path[:80]!r}: must have no empty parts, '.' or '..'", parameter="volumes"
        )
    if parts[0] in RESERVED_ROOTS:
        raise InvalidInput(
            f"volumes: {path[:80]!r}: /{parts[0]} belongs to the platform: mount it at "
            f"another path, such as /data",
            parameter="volumes",
        )
    return at


def check_mounts(volumes: Sequence[VolumeSpec]) -> None:
    """Raise InvalidInput where there are too many, or two have one name, or paths that hide each
    other."""
    if len(volumes) > MAX_VOLUMES:
        raise InvalidInput(
            f"volumes: {len(volumes)} mounts, at most {MAX_VOLUMES}", parameter="volumes"
        )
    paths = [f"{volume.path}/" for volume in volumes]
    names = [volume.name for volume in volumes]
    if len(set(names)) != len(names):
        raise InvalidInput("volumes: a volume is mounted twice: mount it once", parameter="volumes")
    for path in paths:
        if inside := [one for one in paths if one != path and one.startswith(path)]:
            raise InvalidInput(
                f"volumes: {inside[0]} is below {path}, which is a volume", parameter="volumes"
            )
    if len(set(paths)) != len(paths):
        raise InvalidInput("volumes: two volumes have one path", parameter="volumes")
