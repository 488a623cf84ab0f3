"""Starts, serves, drains and stops the objects of one activator (`activator.app`), in order."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import signal
import socket
from collections.abc import Generator, Sequence
from contextlib import AsyncExitStack, contextmanager

from uvicorn.config import Config
from uvicorn.server import Server

from activator.app import ActivatorApp
from activator.autoscaler.heartbeat import HeartbeatLoop
from activator.balancing.throttler_stats import refuse_waiting
from activator.gateway.gateway import Gateway
from activator.gateway.websocket_frames import CallerSocket
from activator.gateway.websocket_proxy import MAX_MESSAGE_BYTES
from activator.http.connection_limits import ConnectionLimits
from activator.http.server import ClientConnection
from activator.knative.fleet import KnativeFleet
from activator.quotas.unauthenticated_limit import SharedUnauthenticatedLimit
from activator.settings import ActivatorSettings
from pilotlight import errors
from pilotlight.core.background_tasks import cancel_again
from pilotlight.core.transport.endpoint import TlsCredentials
from pilotlight.core.transport.listeners import serve_on_listener

log = logging.getLogger("activator")

FIRST_ROUTES_S = 5.0
"""How long to wait for the controller at start before going on with the routes on disk."""
FIRST_INSTANCES_S = 2.0
"""How long to wait for the node agent at start before serving without the instances that this
activator leases: calls then start additional ones."""
BACKLOG = 4096
KEEP_ALIVE_S = 75
GC_YOUNG = 50_000
"""New container objects before a collection of the youngest generation: about a thousand calls
instead of fifteen."""
LAST_ANSWERS_S = 2.0
"""Seconds before the end of the shutdown at which waiting calls are answered with 503 instead of
being cut off."""
LOOPS_END_S = 5.0
"""How long background loops may take to end after cancellation. Loops that are still running are
then logged and cancelled again."""


class Activator:
    """Starts, serves and stops one activator. Owner: the event loop."""

    def __init__(self, app: ActivatorApp) -> None:
        self._app = app

    async def startup(self) -> None:
        """Join the shared state and load the routes on disk. Raises SharedStateUnreachable."""
        if self._app.shared is not None:
            await self._app.shared.join()
            self._app.metrics.collect_shared(self._app.shared.statistics)
        self._app.feed.load()
        log.info("routes on disk %s", dict(self._app.table.statistics()))

    async def run(self, listeners: Sequence[socket.socket], ready_fd: int | None) -> None:
        """Serve until SIGTERM or SIGINT."""
        server = _Server(
            server_config(self._app.gateway, self._app.limits, self._app.settings),
            sibling_listener=self._app.sibling_listener,
        )
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._app.billing.aclose)
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            background = [
                tasks.create_task(self._app.feed.follow(), name="feed"),
                tasks.create_task(self._app.limits.sweep(), name="slow heads"),
            ]
            background += [
                tasks.create_task(make(), name=name) for name, make in self._app.early_loops
            ]
            self._app.health.needs(self._no_routes)
            await self._first_routes()
            # after the feed has delivered them, before any spending
            await self._app.billing.load_budgets()
            background.append(tasks.create_task(self._app.billing.run(), name="books"))
            background.append(tasks.create_task(self._app.reconciler.watch(), name="agent events"))
            await self._first_instances()
            background.append(tasks.create_task(self._app.scaler.run(), name="autoscaler"))
            background += self._app.calls.start(tasks)
            background += [tasks.create_task(make(), name=name) for name, make in self._app.loops]
            if self._app.shared is not None and self._app.siblings is not None:
                heartbeat = HeartbeatLoop(
                    self._app.shared,
                    scaler=self._app.scaler,
                    leases=self._app.fleet,
                    is_process_alive=self._app.siblings.is_process_alive,
                )
                background.append(tasks.create_task(heartbeat.run(), name="membership"))
            serving = tasks.create_task(server.serve(sockets=[*listeners]), name="http")
            await server.wait_started()
            if ready_fd is not None:
                os.write(ready_fd, b"\n")
                os.close(ready_fd)
            log.info(
                "activator serves id=%s address=%s:%d",
                self._app.context.id,
                *listeners[0].getsockname()[:2],
            )
            _calm_collector()
            await stop.wait()
            await self.drain()
            await self._shutdown(server, serving, background)

    def _no_routes(self) -> str:
        has_routes = self._app.feed.first_answer.is_set() or self._app.table.version > 0
        return "" if has_routes else "no routes received from the controller yet, and none on disk"

    async def _first_routes(self) -> None:
        try:
            async with asyncio.timeout(FIRST_ROUTES_S):
                await self._app.feed.first_answer.wait()
        except TimeoutError:
            log.warning(
                "controller is not reachable yet; serving with the routes on disk version=%d",
                self._app.table.version,
            )

    async def _first_instances(self) -> None:
        try:
            async with asyncio.timeout(FIRST_INSTANCES_S):
                await self._app.scaler.reconciled.wait()
        except TimeoutError:
            log.warning("node agent is not reachable yet; serving without its existing instances")

    async def drain(self) -> None:
        """Fail the readiness check for `drain_s` seconds so that load balancers stop sending calls;
        calls are served until then."""
        self._app.health.is_draining = True
        drain_s = self._app.settings.drain_s
        if drain_s:
            log.info("activator drains drain_s=%g", drain_s)
            await asyncio.sleep(drain_s)

    async def _shutdown(
        self, server: _Server, serving: asyncio.Task[None], background: list[asyncio.Task[None]]
    ) -> None:
        # First stop accepting requests and finish those in flight: they need routes, throttlers and
        # the journal. Then stop the loops. The journal closes last (it is outermost on the exit
        # stack), because every ended call writes to it.
        server.should_exit = True
        last_s = max(0.0, self._app.settings.shutdown_s - LAST_ANSWERS_S)
        bound = asyncio.get_running_loop().call_later(last_s, self._refuse_waiting)
        await serving
        bound.cancel()
        await self._app.calls.aclose()
        await self._app.sockets.aclose()
        for task in background:
            task.cancel()
        await self._app.cutovers.aclose()  # first: a cutover starts instances again and again
        await self._app.scaler.aclose()
        await self._close_shared()
        await self._app.fleet.aclose()
        await self._app.feed.aclose()
        await self._app.control.aclose()
        for close in self._app.closing:
            await close()
        await cancel_again(background, after_s=LOOPS_END_S)

    def _refuse_waiting(self) -> None:
        refuse_waiting(
            self._app.scaler.throttlers(),
            errors.Unavailable("this activator is shutting down", retry_after_s=1),
        )

    async def _close_shared(self) -> None:
        # After the throttlers, which release the allowance they requested. Peers may still send
        # requests to this activator, but it has none left to send to them.
        if self._app.siblings is not None:
            await self._app.siblings.aclose()
        if isinstance(self._app.unauthenticated, SharedUnauthenticatedLimit):
            await self._app.unauthenticated.aclose()
        await self._app.quotas.aclose()
        if self._app.shared is not None:
            if isinstance(self._app.fleet, KnativeFleet):
                # pod ownership depends on membership: the other activators may claim our pods now
                await self._app.shared.leave()
            await self._app.shared.aclose()


def server_config(
    gateway: Gateway, limits: ConnectionLimits[ClientConnection], settings: ActivatorSettings
) -> Config:
    """Return how the gateway is served."""
    return Config(
        gateway,
        loop="none",
        http=ClientConnection.bound_to(limits),
        ws=CallerSocket,
        ws_max_size=MAX_MESSAGE_BYTES,
        ws_per_message_deflate=False,  # one frame may expand to a thousand times its size
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(settings.shutdown_s),
    )


class _Server(Server):
    """uvicorn without its own signal handlers, and with an event that is set once it serves."""

    def __init__(
        self,
        config: Config,
        *,
        sibling_listener: tuple[socket.socket, TlsCredentials | None] | None = None,
    ) -> None:
        super().__init__(config)
        self._sibling_listener = sibling_listener
        self._is_up = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Install no handlers: the process handles signals. A server that stopped at the first
        signal would not drain."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._sibling_listener is not None:
            await serve_on_listener(self, *self._sibling_listener)
        self._is_up.set()

    async def wait_started(self) -> None:
        """Return once the server accepts connections."""
        await self._is_up.wait()


def _calm_collector() -> None:
    """Exclude objects made at start-up from garbage collection, and collect rarely: a call makes
    dozens of objects and no lasting cycle."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_YOUNG, 20, 50)
