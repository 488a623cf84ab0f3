"""The fake engine on a Unix socket, in the test's own event loop: an instance of a function that is
a language model."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import uvicorn

from tests.fakes.engine.app import make_app
from tests.fakes.engine.engine import EngineFake


class _Noting:
    """Notes what an application is sent."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        parts: list[bytes] = []

        async def noted() -> Any:
            message = await receive()
            parts.append(message.get("body", b""))
            if (
                message["type"] == "http.request"
                and not message.get("more_body")
                and (body := b"".join(parts))
            ):
                self.bodies.append(json.loads(body))
            return message

        self.paths.append(scope["path"])
        await self._app(scope, noted, send)


class ServedEngine:
    """Serves `engine` at `path` until closed. What crashes it ends all of it, as it would a
    process.

    Attributes:
        bodies, paths: what it was sent, in order.
    """

    def __init__(self, path: Path, **engine: Any) -> None:
        """`engine`: options of its EngineFake."""
        self.path = path
        self.engine = EngineFake(crash=self._break, take_all_memory=self._break, **engine)
        self._listener = socket.socket(socket.AF_UNIX)
        noting = _Noting(make_app(self.engine))
        self.bodies, self.paths = noting.bodies, noting.paths
        config = uvicorn.Config(
            noting,
            loop="none",
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=1,
        )
        config.load()
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)

    def __repr__(self) -> str:
        return f"<ServedEngine {self.engine!r}>"

    async def start(self) -> ServedEngine:
        """Listen."""
        self._listener.bind(str(self.path))
        self._listener.listen(128)
        self._listener.setblocking(False)
        await self._server.startup(sockets=[self._listener])
        return self

    async def die(self) -> None:
        """As after kill -9: the socket stays behind, every connection breaks."""
        self._break()
        await asyncio.sleep(0)

    def _break(self) -> None:
        self.engine.dead = True
        for server in self._server.servers:
            server.close()
        for connection in list(self._server.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()

    async def aclose(self) -> None:
        """`die`, and wait until what it still did has ended."""
        await self.die()
        tasks = list(self._server.server_state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()
