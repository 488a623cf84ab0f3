"""A uvicorn server that leaves signals to pytest, and ends as soon as nothing is left to be served.

uvicorn looks ten times a second whether it shall end, pauses for 0.1 s when it does, and looks as
often whether its connections have gone: a fifth of a second for each test that has a server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn

LOOK_S = 0.005


class QuietServer(uvicorn.Server):
    """See the module."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them."""
        yield

    async def main_loop(self) -> None:
        """Wait for `should_exit`."""
        await self.on_tick(0)  # the headers of all responses
        while not self.should_exit:
            await asyncio.sleep(LOOK_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End in uvicorn's order, without its pauses."""
        for closing in (*self.servers, *(sockets or ())):
            closing.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while self.server_state.connections or self.server_state.tasks:
                    await asyncio.sleep(LOOK_S)
                for server in self.servers:
                    await server.wait_closed()
        except TimeoutError:
            for task in self.server_state.tasks:
                task.cancel()
        await self.lifespan.shutdown()
