"""The real controller's application on a loopback port, over a database of its own, without a node:
for the command line and the client."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import uvicorn

from pilotlight.client.client import Client
from pilotlight.controller import http_app
from pilotlight.controller.context import Context
from pilotlight.controller.database.change_notifier import ChangeNotifier
from pilotlight.controller.database.store import Store
from pilotlight.controller.kubernetes.function_status import FunctionStatuses
from pilotlight.controller.kubernetes.warm.status import WarmPods
from pilotlight.controller.server.metrics import Metrics
from pilotlight.controller.settings import ControllerConfig, ControllerSettings
from pilotlight.controller.weights.blobs import BlobStore
from pilotlight.core.crypto import PlatformKey
from pilotlight.core.object_store import DirectoryStore
from pilotlight.core.oidc.settings import Issuer
from pilotlight.core.settings import Paths
from pilotlight.profile import Profile
from snapshotter.client import AgentClient
from tests.fakes.databases import owned_sqlite
from tests.fakes.quiet_server import QuietServer
from weight_cache.client import WeightCacheClient

CLOCK_S = 1_800_000_000.0


class ServedController:
    """A context manager; `key` is the first admin key. `now` may be moved by the test; the server's
    thread reads it.

    `statuses`, `warm_pods`: what a leader would say of functions and pods in a cluster. `token`: what processes of
    the platform show it."""

    def __init__(
        self,
        home: Path,
        *,
        unix_socket: Path | None = None,
        settings: ControllerSettings | None = None,
        issuers: Mapping[str, Issuer] | None = None,
        secrets: Mapping[str, str] | None = None,
    ) -> None:
        """`unix_socket`: where it listens as well, for an activator. `issuers`: by which people sign
        in, as they are when it begins, with the `secrets` of our clients there."""
        self._settings = settings or ControllerSettings()
        self._issuers = issuers if issuers is not None else {}
        self._secrets = secrets or {}
        self.now = CLOCK_S
        self.statuses = FunctionStatuses()
        self.warm_pods = WarmPods()
        url, self.key = owned_sqlite(home / "controller.db", now=self.now)
        self.store = Store(url, clock=lambda: self.now)
        self._paths = Paths(home=home, run=home)
        self._platform_key = PlatformKey.load_or_create(home / "platform.key")
        self.token = self._platform_key.token
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._socket]
        if unix_socket is not None:
            self._sockets.append(socket.create_server(str(unix_socket), family=socket.AF_UNIX))
        self._server: uvicorn.Server | None = None
        self._serving = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), name="served controller"
        )

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def environ(self, key: str | None = None) -> dict[str, str]:
        """What a command line needs to ask it."""
        return {
            "PILOTLIGHT_URL": self.url,
            "PILOTLIGHT_API_KEY": key or self.key,
            "NO_COLOR": "1",
            "COLUMNS": "300",
            "HOME": str(self._paths.home),
        }

    def client(self, key: str | None = None) -> Client:
        """A client of it; the caller closes it."""
        return Client(
            Profile(url=self.url, api_key=key or self.key, environment="main"), retry_budget_s=5.0
        )

    def __enter__(self) -> Self:
        self._thread.start()
        self._serving.wait()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._server is not None:
            self._server.should_exit = True
        self._thread.join()
        for listener in self._sockets:
            listener.close()
        self.store.close()

    async def _serve(self) -> None:
        agent, cache = (
            AgentClient(self._paths.socket("snapshotter")),
            WeightCacheClient(self._paths.socket("weight_cache")),
        )
        files = BlobStore(
            objects=DirectoryStore(self._paths.home / "blobs"),
            incoming=self._paths.home / "blobs" / "incoming",
            limit_bytes=1_000_000,
        )
        bell = ChangeNotifier()
        context = Context(
            config=ControllerConfig(
                settings=self._settings,
                paths=self._paths,
                trust="isolated",
                uid_base=20_000,
                issuers=self._issuers,
                issuer_secrets=self._secrets,
            ),
            store=self.store,
            files=files,
            key=self._platform_key,
            agent=agent,
            cache=cache,
            notifier=bell,
            metrics=Metrics(),
            clock=lambda: self.now,
            statuses=self.statuses,
            warm_pods=self.warm_pods,
        )
        settings = uvicorn.Config(
            http_app.build_app(context), lifespan="off", log_config=None, access_log=False
        )
        self._server = _Server(settings, bell)
        # the socket listens already: who connects before uvicorn accepts waits in its backlog
        self._serving.set()
        try:
            await self._server.serve(sockets=self._sockets)
        finally:
            await context.issuers.aclose()
            await agent.aclose()
            await cache.aclose()


class _Server(QuietServer):
    """Ends the open streams first, as the controller's own server does."""

    def __init__(self, config: uvicorn.Config, bell: ChangeNotifier) -> None:
        super().__init__(config)
        self._notifier = bell

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._notifier.close()
        await super().shutdown(sockets)
