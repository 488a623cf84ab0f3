"""Accepts connections on a listener that the process inherited."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from typing import Any


async def serve_listener(
    loop: asyncio.AbstractEventLoop,
    protocol_factory: Callable[[], asyncio.BaseProtocol],
    listener: socket.socket,
    *,
    backlog: int,
) -> asyncio.Server:
    """Serve connections to `listener`, a Unix or TCP socket that is already bound.

    Since Python 3.13 an event loop removes the path of a Unix socket when its server is closed, and
    calls stat(2) on it first. This is turned off: the node agent owns and removes the path, and a
    worker may have no access to it."""
    # commands that this process starts would answer the instance's calls in its place
    listener.set_inheritable(False)
    listener.setblocking(False)
    if listener.family != socket.AF_UNIX:
        return await loop.create_server(protocol_factory, sock=listener, backlog=backlog)
    options: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
    return await loop.create_unix_server(
        protocol_factory, sock=listener, backlog=backlog, **options
    )
