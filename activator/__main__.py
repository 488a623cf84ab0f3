"""The activator process: settings → objects (`activator.app`) → startup, run, shutdown.

`python -m activator --config platform.yaml [--ready-fd N] [--index I|from-hostname]
[--drain-journal]`"""

from __future__ import annotations

from pilotlight.core.startup import import_gc

# isort: split
import argparse
import asyncio
import gc
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import Generator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import uvloop
from uvicorn.config import Config
from uvicorn.server import Server

from activator.app import ActivatorApp
from activator.autoscaler.heartbeat import HeartbeatLoop
from activator.balancing.throttler_stats import refuse_waiting
from activator.billing.errors import JournalFull, JournalInUse
from activator.billing.journal_drain import drain_journal
from activator.billing.segments import require_unused
from activator.context import ActivatorContext, load_context, own_socket
from activator.coordination.identity import ANY, FROM_HOSTNAME, IdentityInvalid, identity_of
from activator.coordination.state import SharedStateUnreachable
from activator.gateway.gateway import Gateway
from activator.gateway.websocket_frames import CallerSocket
from activator.gateway.websocket_proxy import MAX_MESSAGE_BYTES
from activator.http.connection_limits import ConnectionLimits
from activator.http.server import ClientConnection
from activator.knative.fleet import KnativeFleet
from activator.process_user import leave_root
from activator.quotas.unauthenticated_limit import SharedUnauthenticatedLimit
from activator.settings import ActivatorSettings
from pilotlight import errors
from pilotlight.core import logging_config
from pilotlight.core.background_tasks import cancel_again
from pilotlight.core.dashboard.dashboard_origin import read_dashboard_origin
from pilotlight.core.metrics_server import (
    MetricsAddress,
    MetricsServer,
    metrics_socket,
    metrics_token_file,
)
from pilotlight.core.rpc import grant_group_access
from pilotlight.core.settings import (
    Paths,
    PlatformSettings,
    SettingsInvalid,
    load_section,
    require_defaults,
)
from pilotlight.core.transport.endpoint import TlsCredentials
from pilotlight.core.transport.listeners import serve_on_listener
from pilotlight.core.transport.public_listener import open_functions_socket, open_listeners
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.spec.pricing import PriceSettings
from snapshotter.settings import SnapshotterSettings

import_gc.imported()

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
    """Starts, serves and stops the parts of one activator (`app`) in the right order."""

    def __init__(self, parts: ActivatorApp) -> None:
        self._parts = parts

    async def startup(self) -> None:
        """Join the shared state and load the routes on disk. Raises SharedStateUnreachable."""
        if self._parts.shared is not None:
            await self._parts.shared.join()
            self._parts.metrics.collect_shared(self._parts.shared.statistics)
        self._parts.feed.load()
        log.info("routes on disk %s", dict(self._parts.table.statistics()))

    async def run(self, listeners: Sequence[socket.socket], ready_fd: int | None) -> None:
        """Serve until SIGTERM or SIGINT."""
        server = _Server(
            server_config(self._parts.gateway, self._parts.limits, self._parts.settings),
            elsewhere=self._parts.elsewhere,
        )
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._parts.billing.aclose)
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            background = [
                tasks.create_task(self._parts.feed.follow(), name="feed"),
                tasks.create_task(self._parts.limits.sweep(), name="slow heads"),
            ]
            background += [tasks.create_task(make(), name=name) for name, make in self._parts.early]
            self._parts.health.needs(self._no_routes)
            await self._first_routes()
            # after the feed has delivered them, before any spending
            await self._parts.billing.load_budgets()
            background.append(tasks.create_task(self._parts.billing.run(), name="books"))
            background.append(
                tasks.create_task(self._parts.reconciler.watch(), name="agent events")
            )
            await self._first_instances()
            background.append(tasks.create_task(self._parts.scaler.run(), name="autoscaler"))
            background += self._parts.calls.start(tasks)
            background += [tasks.create_task(make(), name=name) for name, make in self._parts.loops]
            if self._parts.shared is not None and self._parts.siblings is not None:
                keeper = HeartbeatLoop(
                    self._parts.shared,
                    scaler=self._parts.scaler,
                    leases=self._parts.fleet,
                    is_process_alive=self._parts.siblings.is_process_alive,
                )
                background.append(tasks.create_task(keeper.run(), name="membership"))
            serving = tasks.create_task(server.serve(sockets=[*listeners]), name="http")
            await server.wait_started()
            if ready_fd is not None:
                os.write(ready_fd, b"\n")
                os.close(ready_fd)
            log.info(
                "activator serves id=%s address=%s:%d",
                self._parts.site.id,
                *listeners[0].getsockname()[:2],
            )
            _calm_collector()
            await stop.wait()
            await self.drain()
            await self._shutdown(server, serving, background)

    def _no_routes(self) -> str:
        has_routes = self._parts.feed.first_answer.is_set() or self._parts.table.version > 0
        return "" if has_routes else "no routes received from the controller yet, and none on disk"

    async def _first_routes(self) -> None:
        try:
            async with asyncio.timeout(FIRST_ROUTES_S):
                await self._parts.feed.first_answer.wait()
        except TimeoutError:
            log.warning(
                "controller is not reachable yet; serving with the routes on disk version=%d",
                self._parts.table.version,
            )

    async def _first_instances(self) -> None:
        try:
            async with asyncio.timeout(FIRST_INSTANCES_S):
                await self._parts.scaler.reconciled.wait()
        except TimeoutError:
            log.warning("node agent is not reachable yet; serving without its existing instances")

    async def drain(self) -> None:
        """Fail the readiness check for `drain_s` seconds so that load balancers stop sending calls;
        calls are served until then."""
        self._parts.health.is_draining = True
        drain_s = self._parts.settings.drain_s
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
        last_s = max(0.0, self._parts.settings.shutdown_s - LAST_ANSWERS_S)
        bound = asyncio.get_running_loop().call_later(last_s, self._refuse_waiting)
        await serving
        bound.cancel()
        await self._parts.calls.aclose()
        await self._parts.sockets.aclose()
        for task in background:
            task.cancel()
        await self._parts.handovers.aclose()  # first: a cutover starts instances again and again
        await self._parts.scaler.aclose()
        await self._close_shared()
        await self._parts.fleet.aclose()
        await self._parts.feed.aclose()
        await self._parts.control.aclose()
        for close in self._parts.closing:
            await close()
        await cancel_again(background, after_s=LOOPS_END_S)

    def _refuse_waiting(self) -> None:
        refuse_waiting(
            self._parts.scaler.throttlers(),
            errors.Unavailable("this activator is shutting down", retry_after_s=1),
        )

    async def _close_shared(self) -> None:
        # After the throttlers, which release the allowance they requested. Peers may still send
        # requests to this activator, but it has none left to send to them.
        if self._parts.siblings is not None:
            await self._parts.siblings.aclose()
        if isinstance(self._parts.unauthenticated, SharedUnauthenticatedLimit):
            await self._parts.unauthenticated.aclose()
        await self._parts.quotas.aclose()
        if self._parts.shared is not None:
            if isinstance(self._parts.fleet, KnativeFleet):
                # pod ownership depends on membership: the other activators may claim our pods now
                await self._parts.shared.leave()
            await self._parts.shared.aclose()


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
        elsewhere: tuple[socket.socket, TlsCredentials | None] | None = None,
    ) -> None:
        super().__init__(config)
        self._elsewhere = elsewhere
        self._is_up = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Install no handlers: the process handles signals. A server that stopped at the first
        signal would not drain."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._elsewhere is not None:
            await serve_on_listener(self, *self._elsewhere)
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


def listen(settings: ActivatorSettings, passed: Sequence[int] = ()) -> list[socket.socket]:
    """Return the listening sockets: those whose descriptors a supervisor `passed`, else newly
    opened ones. Raises OSError when an address is in use."""
    if passed:
        return [socket.socket(fileno=descriptor) for descriptor in passed]
    return open_listeners(settings.listen, is_shared=settings.activators > 1)


def listen_unix(path: Path) -> socket.socket:
    """Open the socket at which the other activators of this machine reach this one, replacing a
    socket left by an earlier process."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    grant_group_access(path)
    listener.setblocking(False)
    return listener


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="activator", description="The data plane of pilotlight.")
    parser.add_argument("--config", type=Path, default=None, help="platform.yaml")
    parser.add_argument(
        "--ready-fd",
        type=int,
        default=None,
        help="descriptor that gets a newline once requests are served",
    )
    parser.add_argument(
        "--listen-fd",
        type=int,
        action="append",
        default=[],
        help="bound socket to serve at, instead of activator.listen",
    )
    parser.add_argument(
        "--index",
        default="0",
        help=f"which activator, from 0; {FROM_HOSTNAME}: the number at the end of the host name",
    )
    parser.add_argument(
        "--drain-journal",
        action="store_true",
        help="ship the contents of that activator's journal, then exit",
    )
    return parser.parse_args(argv)


def _drain_journal(
    paths: Paths, index: int, platform: PlatformSettings, settings: ActivatorSettings
) -> str | None:
    """Ship the journal. Returns None when the controller has all of it, else what is left or why it
    failed."""
    try:
        site = load_context(paths, index, platform)
        require_unused(site.home)
        leave_root(site, platform, settings)
        done = uvloop.run(
            drain_journal(
                site.home, activator=site.id, controller=site.controller, token=site.key.token
            )
        )
    except JournalInUse as e:
        return f"activator: the journal of a-{index} is in use, stop its activator first: {e}"
    except (JournalFull, SettingsInvalid) as e:
        return f"activator: {e}"
    log.info("journal drained id=%s %s", site.id, done)
    return (
        f"activator: not all of {site.id}'s journal was shipped to the controller; run it again: "
        f"{done.left}"
        if done.left
        else None
    )


def _metrics_address(
    paths: Paths, platform: PlatformSettings, settings: ActivatorSettings, offset: int
) -> MetricsAddress:
    """`offset`: number of this activator on this machine, added to the port of
    `activator.metrics_listen`."""
    return MetricsAddress(
        socket_path=metrics_socket(paths, f"activator-{offset}" if offset else "activator"),
        listen=settings.metrics_listen_of(offset),
        token_file=metrics_token_file(platform, paths),
        setting="activator.metrics_listen"
        + (f" (activator {offset} counts up from it)" if offset else ""),
    )


def _open_sockets(
    site: ActivatorContext,
    platform: PlatformSettings,
    settings: ActivatorSettings,
    listeners: list[socket.socket],
    *,
    offset: int,
    is_given: bool,
) -> MetricsAddress:
    """Open the sockets in <run>, which only its owner may create: for metrics, for the other
    activators, and for functions unless a supervisor passed one (`is_given`). Raises
    JournalInUse."""
    require_unused(site.home)
    if not is_given and settings.activators == 1 and platform.fleet == "local":
        listeners.append(open_functions_socket(site.paths.socket_for_functions))
    if (own := own_socket(settings, site)) is not None:
        listeners.append(listen_unix(own))
    return _metrics_address(site.paths, platform, settings, offset).opened()


def _settings(platform: PlatformSettings, config: Path | None) -> ActivatorSettings:
    """Load section `activator`. Raises SettingsInvalid, also for a Redis that workers could use
    where tenants have their own uids, and for settings that have no effect on this fleet."""
    settings = load_section(ActivatorSettings, "activator", config)
    if settings.redis_url is not None and os.geteuid() == 0 and platform.fleet == "local":
        from activator.coordination.redis_protection import require_protected

        require_protected(settings.redis_url)
    if platform.fleet == "local":
        require_defaults(
            "activator", settings, ("agents_listen",), why="only node agents of a cluster use it"
        )
    if settings.freeze_idle_s is not None and platform.fleet != "local":
        raise SettingsInvalid(
            f"activator.freeze_idle_s = {settings.freeze_idle_s:g}: pods cannot be frozen: remove "
            f"the setting, or write null"
        )
    return settings


def _configure_logging() -> None:
    logging_config.configure_logging("%(asctime)s %(levelname)s %(name)s %(message)s")
    for name in ("httpx", "httpcore", "uvicorn.error", "websockets"):
        logging.getLogger(name).setLevel(logging.WARNING)


async def _live(
    parts: ActivatorApp,
    metrics: MetricsAddress,
    listeners: Sequence[socket.socket],
    ready_fd: int | None,
) -> None:
    activator = Activator(parts)
    await activator.startup()
    exposed = await MetricsServer(registry=parts.metrics.registry, in_thread=True).serve(metrics)
    try:
        await activator.run(listeners, ready_fd)
    finally:
        for server in exposed:
            server.close()


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    os.umask(0o077)  # files are private to this user unless their mode is set explicitly
    arguments = _arguments(sys.argv[1:] if argv is None else argv)
    _configure_logging()
    try:
        platform = load_section(PlatformSettings, "platform", arguments.config)
        settings = _settings(platform, arguments.config)
        load_section(SnapshotterSettings, "snapshotter", arguments.config).check_uids(platform)
        prices = load_section(PriceSettings, "prices", arguments.config)
    except SettingsInvalid as e:
        sys.exit(f"activator: {e}")
    try:
        cluster = (
            load_section(ClusterSettings, "cluster", arguments.config)
            if platform.fleet == "knative"
            else None
        )
        most = ANY if arguments.drain_journal else settings.activators
        identity = identity_of(arguments.index, hostname=socket.gethostname(), activators=most)
    except (SettingsInvalid, IdentityInvalid) as e:
        sys.exit(f"activator: {e}")
    paths = Paths.of(platform, os.environ).make()
    if arguments.drain_journal:
        sys.exit(_drain_journal(paths, identity.index, platform, settings))
    try:
        listeners = listen(settings, arguments.listen_fd)
    except OSError as e:
        sys.exit(
            f"activator: cannot listen on {e.strerror}: is another platform running? Set "
            f"activator.listen"
        )
    try:
        site, dashboard = (
            load_context(paths, identity.index, platform),
            read_dashboard_origin(arguments.config),
        )
        offset, is_given = (
            0 if identity.is_alone_here else identity.index,
            bool(arguments.listen_fd),
        )
        metrics = _open_sockets(
            site, platform, settings, listeners, offset=offset, is_given=is_given
        )
        leave_root(site, platform, settings)
        parts = ActivatorApp(
            settings=settings, prices=prices, site=site, cluster=cluster, dashboard=dashboard
        )
    except JournalInUse as e:
        sys.exit(f"activator: a-{identity.index} is already served: {e}")
    except (JournalFull, SettingsInvalid) as e:
        sys.exit(f"activator: {e}")
    try:
        uvloop.run(_live(parts, metrics, listeners, arguments.ready_fd))
    except (SharedStateUnreachable, SettingsInvalid) as e:
        sys.exit(f"activator: {e}")


if __name__ == "__main__":
    main()
