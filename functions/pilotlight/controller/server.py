"""The process: lock, migrate, listen, serve, and stop in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path

import anyio.to_thread
import uvicorn
from sqlalchemy.exc import SQLAlchemyError

from pilotlight.addresses import serve_at, tcp_listener
from pilotlight.controller import (
    application,
    bookkeeping,
    budgets,
    calls,
    deliverer,
    deliveries,
    due,
    feed,
    garbage,
    holdings,
    idempotency,
    planner,
    standby,
    tenants,
)
from pilotlight.controller.agents import Agent, agent_of
from pilotlight.controller.bell import Bell
from pilotlight.controller.blobs import BlobFiles
from pilotlight.controller.cluster import loop as cluster
from pilotlight.controller.context import Context
from pilotlight.controller.experiments import guard as experiments
from pilotlight.controller.lock import ControllerLock
from pilotlight.controller.metrics import Metrics
from pilotlight.controller.objectives import loop as objectives
from pilotlight.controller.probes import Probes
from pilotlight.controller.rollouts import loop as rollouts
from pilotlight.controller.settings import ControllerConfig
from pilotlight.controller.store import Store
from pilotlight.errors import PilotlightError
from pilotlight.seal import key_in, key_of
from snapshotter.errors import SnapshotterError
from weight_cache.addresses import Credentials
from weight_cache.client import WeightCacheClient
from weight_cache.errors import WeightCacheError

log = logging.getLogger(__name__)

DRAIN_S = 5
"""At the end, requests in flight have this long; long polls and followed logs are cut at once and come back by themselves."""
JANITOR_S = 600.0
EXPIRE_BATCH = 1000
MEASURE_S = 30.0
"""Between two looks at budgets for the metrics: twice what Prometheus scrapes."""


async def serve(config: ControllerConfig, *, ready_fd: int | None = None) -> None:
    """Run until SIGTERM or SIGINT. Raises AlreadyRunning, SettingsInvalid."""
    paths = config.paths.make()
    files = BlobFiles.of(config.platform, config.paths, limit_bytes=config.settings.blob_max_bytes)
    bell = Bell()
    store = Store(config.database_url, clock=time.time, on_fed=bell.ring)
    agent = agent_of(config)
    cache = WeightCacheClient(paths.socket("weight_cache"))
    metrics, settings = Metrics(), config.settings
    lock = ControllerLock(paths.home / "controller.lock", store.engine)
    try:
        async with standby.at_work(lock, waits=settings.standby, metrics=metrics, listen=settings.metrics_listen):
            await anyio.to_thread.run_sync(store.migrate)
            await anyio.to_thread.run_sync(_publish_plans, store, config)
            await anyio.to_thread.run_sync(bookkeeping.open_books, store, config)
            files.sweep()
            context = _context(config, store=store, files=files, bell=bell, agent=agent, cache=cache, metrics=metrics)
            await _run(context, paths.socket("controller"), ready_fd)
    finally:
        await agent.aclose()
        await cache.aclose()
        await files.objects.aclose()
        store.close()


def _publish_plans(store: Store, config: ControllerConfig) -> None:
    with store.write() as write:
        tenants.publish_all(write, plans=config.plans)


def _context(
    config: ControllerConfig, *, store: Store, files: BlobFiles, bell: Bell, agent: Agent, cache: WeightCacheClient, metrics: Metrics
) -> Context:
    return Context(
        config=config,
        store=store,
        files=files,
        key=key_of(config.platform, config.paths),
        node_key=key_in("controller.node_key_file", node_key_file) if (node_key_file := config.settings.node_key_file) else None,
        agent=agent,
        cache=cache,
        bell=bell,
        metrics=metrics,
        clock=time.time,
    )


async def _run(context: Context, path: Path, ready_fd: int | None) -> None:
    settings = uvicorn.Config(
        application.build(context),
        http="httptools",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=DRAIN_S,
        timeout_keep_alive=75,
    )
    server = _Server(settings, bell=context.bell, ready_fd=ready_fd, listen=_elsewhere(context))
    exposed_at = context.config.paths.run / "metrics-controller.sock"
    exposed = await context.metrics.expose(socket_path=exposed_at, listen=context.config.settings.metrics_listen)
    tasks = [asyncio.create_task(run(context), name=name) for name, run in _LOOPS.items()]
    for task in tasks:
        task.add_done_callback(_tell_end)
    context.metrics.probes = Probes(store=context.store, is_serving=lambda: server.started and not server.should_exit, tasks=tasks)
    listener = _listen(path)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    loop.add_signal_handler(signal.SIGHUP, context.bell.ring)  # another process has written to the database: followers look again
    try:
        log.info("event=serving socket=%s database=%r", path, context.store)
        await server.serve(sockets=[listener])
    finally:
        # The socket's name goes first: who connects now is told at once that nobody is here.
        _unlisten(path)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for one in exposed:
            one.close()
        _unlisten(exposed_at)


def _elsewhere(context: Context) -> tuple[socket.socket, Credentials | None] | None:
    """Where other machines reach us, and what we show them; None = nowhere. Raises SettingsInvalid."""
    listen = context.config.settings.listen
    if listen is None:
        return None
    credentials = Credentials.of(context.config.platform)
    return tcp_listener("controller.listen", listen), credentials


def _listen(path: Path) -> socket.socket:
    # Bound under another name and renamed: nobody ever meets a socket that does not listen, or has a wider mode.
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(fresh))
    fresh.chmod(0o600)
    listener.listen(1024)
    fresh.rename(path)
    return listener


def _unlisten(path: Path) -> None:
    path.unlink(missing_ok=True)


def _tell_end(task: asyncio.Task[None]) -> None:
    """These run as long as we do: one that ends by itself is a defect, and must not be found out by a bill that never came."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("event=task_ended task=%s", task.get_name(), exc_info=error)


class _Server(uvicorn.Server):
    """uvicorn, with our signals, a listener for other machines, and one newline on `ready_fd` once it serves."""

    def __init__(
        self, config: uvicorn.Config, *, bell: Bell, ready_fd: int | None, listen: tuple[socket.socket, Credentials | None] | None
    ) -> None:
        super().__init__(config)
        self._listen = listen
        self._bell = bell
        self._ready_fd = ready_fd

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `_run`: uvicorn would raise them again at the end, and an orderly stop would look like a kill."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then tell whoever started us."""
        await super().startup(sockets)
        if self._listen is not None:
            await serve_at(self, *self._listen)
        if self._ready_fd is not None:
            os.write(self._ready_fd, b"\n")
            os.close(self._ready_fd)
            self._ready_fd = None

    def stop(self) -> None:
        """Stop accepting, release the long polls, finish the rest."""
        self._bell.close()
        self.should_exit = True


async def _keep_tidy(context: Context) -> None:
    while True:
        try:
            await anyio.to_thread.run_sync(_tidy, context)
        except (PilotlightError, SQLAlchemyError) as e:
            log.error("event=janitor_failed error=%r", e)  # a full disk, a lost database: the next round tries again
        try:
            await garbage.sweep(context.agent, context.store)
        except (SnapshotterError, SQLAlchemyError) as e:
            log.info("event=snapshots_not_swept error=%r", e)  # the agent is away, or not up yet
        try:
            await holdings.sweep(context.cache, context.store)
        except (WeightCacheError, SQLAlchemyError) as e:
            log.info("event=pins_not_swept error=%r", e)
        await asyncio.sleep(JANITOR_S)


async def _measure_budgets(context: Context) -> None:
    while True:
        try:
            for (tenant, budget), share in (await anyio.to_thread.run_sync(_shares, context)).items():
                context.metrics.budget_used(tenant, budget, share)
        except SQLAlchemyError as e:
            log.error("event=budgets_not_measured error=%r", e)
        await asyncio.sleep(MEASURE_S)


def _shares(context: Context) -> dict[tuple[str, str], float]:
    with context.store.read() as sql:
        return budgets.shares(sql, now=context.clock())


def _tidy(context: Context) -> None:
    now = context.clock()
    with context.store.write() as write:
        feed.purge(write, before=now - feed.TOMBSTONE_TTL_S)
        deliveries.purge(write, now=now)
        due.purge(write, now=now)
        idempotency.purge(write, now=now)
    expired = EXPIRE_BATCH
    while expired == EXPIRE_BATCH:  # in batches, so that nobody waits long for the write lock
        with context.store.write() as write:
            expired = calls.expire(write, now=now, limit=EXPIRE_BATCH)


_LOOPS: Mapping[str, Callable[[Context], Coroutine[None, None, None]]] = {
    "janitor": _keep_tidy,
    "deliverer": deliverer.deliver,
    "planner": planner.keep,
    "budgets": _measure_budgets,
    "bookkeeping": bookkeeping.keep,
    "rollouts": rollouts.run,
    "experiments": experiments.run,
    "objectives": objectives.run,
    "cluster": cluster.run,
}
"""What runs for as long as the process does, by the name of its task; each goes on after its errors."""
