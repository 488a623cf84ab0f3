"""Servers that are away for a while, and come back on the port that they had."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator

from tests.fakes.kubernetes.server import ApiServer


@contextlib.asynccontextmanager
async def away(server: ApiServer) -> AsyncIterator[None]:
    """It is away in the block. Its port is kept: the kernel would give it to the next who asks for
    any port."""
    await server.stop()
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", server.port))  # who connects is refused: nobody listens
        try:
            yield
        finally:
            await server.start()
