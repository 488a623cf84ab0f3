"""Sockets and small files in a slot's directory, and connections to the shim."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pilotlight.core.rpc import grant_group_access
from pilotlight.core.transport.calls_socket import CALLS_DIRECTORY

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


def make_calls_directory(slot: Path, *, is_shown: bool) -> Path:
    """The directory of a slot for sockets by which its instances call other functions. Raises
    OSError.

    The group that may enter the slot's directory, the activators', creates sockets in it.
    `is_shown`: it is mounted in the slot, whose user may enter it, and not list it."""
    directory = slot / CALLS_DIRECTORY
    directory.mkdir(mode=0o700, exist_ok=True)
    folder = slot.stat()
    others = stat.S_IXOTH if is_shown else 0
    if folder.st_mode & stat.S_IXGRP:
        os.chown(directory, -1, folder.st_gid)
        directory.chmod(0o770 | others)
    else:
        directory.chmod(0o700 | others)
    return directory


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
        f.write(json.dumps(body))  # json.dump has no C encoder
