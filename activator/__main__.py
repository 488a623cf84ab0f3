"""The activator process: settings → objects → startup, run, shutdown.

`python -m activator --config platform.yaml [--ready-fd N] [--index I]`
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import uvicorn
import uvloop
from prometheus_client import start_http_server

from activator.admission import ProcessQueue, StrangerLimit
from activator.billing.books import Books, ControllerLedger
from activator.billing.errors import JournalFull, JournalInUse
from activator.billing.redis_money import RedisMoney
from activator.calls import SubmittedCalls
from activator.control import ControlPlane
from activator.dispatch import Dispatcher
from activator.edge import EdgeLimits
from activator.entry import Entrance
from activator.fairness.gate import Gate
from activator.fairness.terms import share_of
from activator.feed import FeedFollower
from activator.fleet import NodeFleet
from activator.gateway import Gateway
from activator.metrics import Metrics
from activator.passthrough import Passthrough
from activator.quotas.process import ProcessQuotas
from activator.quotas.redis_store import RedisQuotas
from activator.quotas.store import QuotaStore
from activator.routes import RouteTable, Target
from activator.scaler import Scaler
from activator.settings import ActivatorSettings
from activator.shared.keeper import Keeper
from activator.shared.redis_state import RedisState, platform_id
from activator.shared.state import SharedStateUnreachable
from activator.shared.strangers import SharedStrangerLimit
from activator.siblings import Siblings, socket_of
from activator.throttler import Throttler
from pilotlight.pricing import PriceSettings
from pilotlight.seal import PlatformKey
from weight_cache.settings import Paths, PlatformSettings, SettingsInvalid, load

log = logging.getLogger("activator")

FIRST_ROUTES_S = 5.0
"""How long to wait for the controller at start before going on with the routes on disk."""
FIRST_INSTANCES_S = 2.0
"""How long to wait for the node agent at start before going on without the instances that are ours: calls start others beside them."""
BACKLOG = 4096
KEEP_ALIVE_S = 75
GC_YOUNG = 50_000
"""New containers before the youngest generation is looked at: a thousand calls instead of fifteen."""
SHUTDOWN_S = 30.0


class Activator:
    """One activator: everything it is made of, in the order in which it is made."""

    def __init__(self, *, settings: ActivatorSettings, prices: PriceSettings, paths: Paths, index: int) -> None:
        self.id = f"a-{index}"
        self.home = paths.home / "activator" / self.id
        self.home.mkdir(parents=True, exist_ok=True)
        key = PlatformKey.load_or_create(paths.home / "platform.key")
        controller = paths.socket("controller")
        self.settings = settings
        self.metrics = Metrics(series=settings.metrics_series)
        self.table = RouteTable(prices.lists(), key)
        self.metrics.collect_tenants(self.table.tenant_names)
        self.quotas = _quota_store(settings, key, self.id)
        self.entrance = Entrance(table=self.table, store=self.quotas, settings=settings)
        self.feed = FeedFollower(table=self.table, socket=controller, token=key.token, log_path=self.home / "routes.ndjson")
        self.fleet = NodeFleet(
            socket=paths.socket("snapshotter"), lessee=self.id, share_of=lambda tenant: share_of(self.table, tenant)
        )  # fmt: skip
        self.books = Books(
            directory=self.home, activator=self.id, sync_s=settings.journal_sync_s, free_idle_s=settings.scaledown_window_s,
            ledger=ControllerLedger(socket=controller, token=key.token, activator=self.id),
            money=_shared_money(settings, key, self.id), is_open_without_money=settings.is_open_without_redis("budget"),
            is_served_unbilled=settings.journal_full == "serve", on_unbilled=self.metrics.unbilled,
        )  # fmt: skip
        self.table.on_budget = self.books.budgets.apply
        self.queue = ProcessQueue(settings.max_queued)
        self.metrics.collect_waiting(self.queue.counts)
        self.gate = Gate(self.table)
        self.shared = _shared_state(settings, key, self.id)
        rate_per_s = settings.unauthenticated_per_s
        self.strangers = SharedStrangerLimit(self.shared, rate_per_s=rate_per_s) if self.shared else StrangerLimit(rate_per_s=rate_per_s)
        self.socket = socket_of(paths.run, index) if settings.activators > 1 else None
        self.siblings = Siblings(paths.run, index=index, count=settings.activators) if settings.activators > 1 else None

        def make_throttler(target: Target) -> Throttler:
            return Throttler(
                target,
                fleet=self.fleet,
                queue=self.queue,
                secret_env=self.table.secret_env,
                observer=self.metrics,
                account=self.books.account,
                allowance=self.shared,
                gate=self.gate,
            )

        self.scaler = Scaler(
            table=self.table,
            fleet=self.fleet,
            make_throttler=make_throttler,
            gate=self.gate,
            may_run=lambda target: not self.books.is_spent(target),
        )
        self.metrics.collect_instances(self.scaler.states)
        self.metrics.collect_journal(self.books.lag)
        self.dispatcher = Dispatcher(throttler_of=self.scaler.throttler_of, may_pay=self.books.check)
        self.control = ControlPlane(
            controller, table=self.table, strangers=self.strangers, catch_up=self.feed.catch_up,
            others_catch_up=self.siblings.catch_up if self.siblings is not None else None,
        )  # fmt: skip
        self.calls = SubmittedCalls(
            books=self.books, dispatcher=self.dispatcher, table=self.table, entrance=self.entrance, control=self.control, settings=settings,
            metrics=self.metrics, controller=controller, token=key.token, siblings=self.siblings,
        )  # fmt: skip
        self.limits = EdgeLimits(
            max_per_address=settings.max_connections_per_address,
            max_head_bytes=settings.max_header_bytes,
            head_timeout_s=settings.header_timeout_s,
        )
        self.gateway = Gateway(
            settings=settings,
            table=self.table,
            entrance=self.entrance,
            strangers=self.strangers,
            dispatcher=self.dispatcher,
            calls=self.calls,
            scaler=self.scaler,
            passthrough=Passthrough(dispatcher=self.dispatcher, metrics=self.metrics),
            control=self.control,
            metrics=self.metrics,
        )

    async def startup(self) -> None:
        """Be a member, and know the routes on disk. Raises SharedStateUnreachable."""
        if self.shared is not None:
            await self.shared.join()
            self.metrics.collect_shared(self.shared.statistics)
        self.feed.load()
        log.info("routes on disk %s", dict(self.table.statistics()))

    async def run(self, listener: socket.socket, ready_fd: int | None) -> None:
        """Serve until SIGTERM or SIGINT."""
        server = _Server(self._uvicorn_config())
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.books.aclose)
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            background = [
                tasks.create_task(self.feed.follow(), name="feed"),
                tasks.create_task(self.limits.sweep(), name="slow heads"),
            ]
            await self._first_routes()
            await self.books.load_budgets()  # after the feed has named them, before anything is spent
            background.append(tasks.create_task(self.books.run(), name="books"))
            background.append(tasks.create_task(self.scaler.watch(), name="agent events"))
            await self._first_instances()
            background.append(tasks.create_task(self.scaler.run(), name="autoscaler"))
            background += self.calls.start(tasks)
            if isinstance(self.quotas, RedisQuotas):
                background.append(tasks.create_task(self.quotas.run(), name="quotas"))
            if self.shared is not None and self.siblings is not None:
                keeper = Keeper(self.shared, scaler=self.scaler, leases=self.fleet, is_process_alive=self.siblings.is_process_alive)
                background.append(tasks.create_task(keeper.run(), name="membership"))
            sockets = [listener] if self.socket is None else [listener, listen_unix(self.socket)]
            serving = tasks.create_task(server.serve(sockets=sockets), name="http")
            await server.wait_started()
            if ready_fd is not None:
                os.write(ready_fd, b"\n")
                os.close(ready_fd)
            log.info("activator serves id=%s address=%s:%d", self.id, *listener.getsockname()[:2])
            _calm_collector()
            await stop.wait()
            await self._shutdown(server, serving, background)

    async def _first_routes(self) -> None:
        try:
            async with asyncio.timeout(FIRST_ROUTES_S):
                await self.feed.first_answer.wait()
        except TimeoutError:
            log.warning("controller is not there yet; serving with the routes on disk version=%d", self.table.version)

    async def _first_instances(self) -> None:
        try:
            async with asyncio.timeout(FIRST_INSTANCES_S):
                await self.scaler.reconciled.wait()
        except TimeoutError:
            log.warning("node agent is not there yet; serving without the instances that it may have")

    async def _shutdown(self, server: _Server, serving: asyncio.Task[None], background: list[asyncio.Task[None]]) -> None:
        # First no new requests and those in flight to their end: they need routes, throttlers and the journal. Then the loops. The journal
        # closes last (it is outermost on the exit stack), because every ended call writes to it.
        server.should_exit = True
        await serving
        await self.calls.aclose()
        for task in background:
            task.cancel()
        await self.scaler.aclose()
        await self._close_shared()
        await self.fleet.aclose()
        await self.feed.aclose()
        await self.control.aclose()

    async def _close_shared(self) -> None:
        # After the throttlers: they give back what they had asked for. Siblings may still be asking us, but no request is left to ask them.
        if self.siblings is not None:
            await self.siblings.aclose()
        if isinstance(self.strangers, SharedStrangerLimit):
            await self.strangers.aclose()
        await self.quotas.aclose()
        if self.shared is not None:
            await self.shared.aclose()

    def _uvicorn_config(self) -> uvicorn.Config:
        return uvicorn.Config(
            self.gateway,
            loop="none",
            http=self.limits.protocol(),
            ws="websockets-sansio",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(SHUTDOWN_S),
        )


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers, and with an event for "it serves"."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._is_up = asyncio.Event()

    def install_signal_handlers(self) -> None:
        """Signals are the process's business."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._is_up.set()

    async def wait_started(self) -> None:
        """Returns once it accepts connections."""
        await self._is_up.wait()


def _calm_collector() -> None:
    """Leave what start-up made out of every collection, and collect seldom: a call makes dozens of objects and no lasting cycle."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_YOUNG, 20, 50)


def listen(settings: ActivatorSettings) -> socket.socket:
    """The listening socket. Raises OSError when the address is taken."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if settings.activators > 1:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((settings.host.strip("[]"), settings.port))
    listener.setblocking(False)
    return listener


def listen_unix(path: Path) -> socket.socket:
    """The socket at which the other activators of this machine ask us; what an earlier life left there is replaced."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.setblocking(False)
    return listener


def _shared_state(settings: ActivatorSettings, key: PlatformKey, member: str) -> RedisState | None:
    """None for a lone activator: it asks nobody."""
    if settings.activators == 1 or settings.redis_url is None:
        return None
    return RedisState(settings.redis_url, platform=platform_id(key.token), member=member)


def _quota_store(settings: ActivatorSettings, key: PlatformKey, member: str) -> QuotaStore:
    """Where quotas are counted. Redis need not be there yet: `activator.without_redis` says what happens until it is."""
    if not settings.counts_in_redis or settings.redis_url is None:
        return ProcessQuotas()
    return RedisQuotas(settings.redis_url, platform=platform_id(key.token), member=member, is_open=settings.is_open_without_redis)


def _shared_money(settings: ActivatorSettings, key: PlatformKey, member: str) -> RedisMoney | None:
    """None where no other activator spends from the same budgets."""
    if not settings.counts_in_redis or settings.redis_url is None:
        return None
    return RedisMoney(settings.redis_url, platform=platform_id(key.token), member=member)


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="activator", description="The data plane of pilotlight.")
    parser.add_argument("--config", type=Path, default=None, help="platform.yaml")
    parser.add_argument("--ready-fd", type=int, default=None, help="descriptor that gets a newline once requests are served")
    parser.add_argument("--index", type=int, default=0, help="which activator of this machine, from 0")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    os.umask(0o077)  # what we write is nobody else's, unless its mode is set by hand
    arguments = _arguments(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    for chatty in ("httpx", "httpcore", "uvicorn.error", "websockets"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        platform = load(PlatformSettings, "platform", arguments.config)
        settings = load(ActivatorSettings, "activator", arguments.config)
        prices = load(PriceSettings, "prices", arguments.config)
    except SettingsInvalid as e:
        sys.exit(f"activator: {e}")
    if not 0 <= arguments.index < settings.activators:
        sys.exit(f"activator: --index {arguments.index}: must be from 0 to {settings.activators - 1} (activator.activators)")
    paths = Paths.of(platform, os.environ).make()
    try:
        listener = listen(settings)
    except OSError as e:
        sys.exit(f"activator: cannot listen on {settings.listen}: {e.strerror}: is another platform running? Set activator.listen")
    try:
        activator = Activator(settings=settings, prices=prices, paths=paths, index=arguments.index)
    except JournalInUse as e:
        sys.exit(f"activator: a-{arguments.index} is already served: {e}")
    except JournalFull as e:
        sys.exit(f"activator: {e}")
    if (address := settings.metrics_address(arguments.index)) is not None:
        host, port = address
        try:
            start_http_server(port, host, registry=activator.metrics.registry)
        except OSError as e:
            sys.exit(f"activator: cannot serve metrics on {host}:{port}: {e.strerror}: set activator.metrics_listen")

    async def life() -> None:
        await activator.startup()
        await activator.run(listener, arguments.ready_fd)

    try:
        uvloop.run(life())
    except SharedStateUnreachable as e:
        sys.exit(f"activator: {e}")


if __name__ == "__main__":
    main()
