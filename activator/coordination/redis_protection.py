"""Refuses at start a Redis that tenants' code could use: it holds quotas, budgets and stored
answers."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redis import connection

from pilotlight.core.settings import SettingsInvalid

_OTHERS_CONNECT = stat.S_IWOTH
"""unix(7): connecting to a socket takes the right to write."""


def require_protected(url: str) -> None:
    """Raise SettingsInvalid for a Redis that any process of this machine can use.

    Workers reach what the machine reaches over TCP, its loopback addresses included: there a
    password is needed. A Unix socket needs one only where other users may connect to it. A socket
    that does not exist yet is not checked."""
    try:
        parts: Mapping[str, Any] = connection.parse_url(url)
    except ValueError as e:
        raise SettingsInvalid(f"activator.redis_url = ***: {e}") from e
    if parts.get("password"):
        return
    path = parts.get("path")
    if path is None:
        raise SettingsInvalid(
            "activator.redis_url = ***: has no password, and workers of all tenants reach Redis "
            "over TCP: set `requirepass` in "
            "redis.conf, write redis://:PASSWORD@host:port/0 into a file and name it in "
            "activator.redis_url_file; or use a Unix "
            "socket (unix://PATH, `unixsocketperm 770` and the group of platform.activator_uid)"
        )
    if others_can_connect(Path(path)):
        raise SettingsInvalid(
            f"activator.redis_url = unix://{path}: every user may connect to this socket, workers "
            f"of all tenants included: set "
            "`unixsocketperm 770` in redis.conf and give it the group of platform.activator_uid, "
            "or set a password (`requirepass`)"
        )


def others_can_connect(path: Path) -> bool:
    """Whether users other than owner and group may connect: by the modes of the socket and of the
    directories above it."""
    try:
        socket = path.resolve(strict=True)
        can_reach = all(folder.stat().st_mode & stat.S_IXOTH for folder in socket.parents)
        return can_reach and bool(socket.stat().st_mode & _OTHERS_CONNECT)
    except OSError:
        return False
