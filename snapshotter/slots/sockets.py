"""Sockets and small files in a slot's directory, and connections to the shim."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pilotlight.core.rpc import grant_group_access

_BACKLOG = 4096
"""Connections that queue in the kernel while an instance starts (further limited by
net.core.somaxconn)."""


def seen(future: asyncio.Future[Any]) -> None:
    """Mark a future's exception as retrieved, so that asyncio does not log it."""
    if future.done() and not future.cancelled():
        future.exception()


def listen(path: Path) -> socket.socket:
    """An instance's listening socket, created before the worker exists so that connections queue.
    Access is limited to users of its directory."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        listener.bind(str(path))
        grant_group_access(path)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def connect(path: Path) -> socket.socket:
    """A connection to a shim. Raises OSError if it does not listen."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    return connection


def write_json(path: Path, body: Mapping[str, Any], mode: int = 0o600) -> None:
    """Write a small file of a slot with exactly this mode. No fsync: a slot does not survive a
    reboot."""
    fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, mode)
    with os.fdopen(fd, "w") as f:
        os.fchmod(fd, mode)
        json.dump(body, f)
