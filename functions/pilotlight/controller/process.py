"""The controller process: lock, migrate, listen, serve, and shut down in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Coroutine, Iterator, Mapping
from pathlib import Path

import anyio.to_thread
from sqlalchemy.exc import SQLAlchemyError
from uvicorn.config import Config
from uvicorn.server import Server

from pilotlight.controller import http_app
from pilotlight.controller.batches.runner import BatchRunner
from pilotlight.controller.billing import billing_jobs
from pilotlight.controller.billing.budgets import spending
from pilotlight.controller.context import Context
from pilotlight.controller.database import feed
from pilotlight.controller.database.change_notifier import ChangeNotifier
from pilotlight.controller.database.store import Store
from pilotlight.controller.deployments import app_leases
from pilotlight.controller.drift import loop as drift_loop
from pilotlight.controller.experiments import guardrails
from pilotlight.controller.identity import sessions, tenants
from pilotlight.controller.kubernetes.node_reports import NodeReports
from pilotlight.controller.node_snapshots.register import SnapshotRegister
from pilotlight.controller.predictions import storage as prediction_storage
from pilotlight.controller.registry import snapshot_gc
from pilotlight.controller.retention import history, images, revisions
from pilotlight.controller.rollouts.loop import RolloutController
from pilotlight.controller.scheduling import dispatch_queue, scheduler, submitted_calls
from pilotlight.controller.server import idempotency, leader
from pilotlight.controller.server.database_lock import ControllerLock
from pilotlight.controller.server.health import Probes
from pilotlight.controller.server.metrics import Metrics
from pilotlight.controller.server.node_backend import NodeBackend
from pilotlight.controller.server.process_user import OpenedResources
from pilotlight.controller.settings import ControllerConfig
from pilotlight.controller.slo import loop as slo_loop
from pilotlight.controller.tenant_deletion.deleter import TenantDeleter
from pilotlight.controller.usage_archive.archiver import UsageArchiver
from pilotlight.controller.webhooks import deliveries, delivery_worker
from pilotlight.controller.weights import blob_gc, node_cache
from pilotlight.controller.weights.blobs import BlobStore
from pilotlight.core.background_tasks import cancel_all
from pilotlight.core.disk_floor import DiskFloor, no_floor
from pilotlight.core.metrics_server import metrics_socket
from pilotlight.core.object_store.errors import ObjectStoreError
from pilotlight.core.transport.endpoint import TlsCredentials
from pilotlight.core.transport.listeners import serve_on_listener
from pilotlight.errors import PilotlightError
from snapshotter.client import AgentClient
from snapshotter.errors import SnapshotterError
from weight_cache.client import WeightCacheClient
from weight_cache.errors import WeightCacheError

log = logging.getLogger(__name__)

DRAIN_S = 5
"""How long requests in flight have at shutdown; long polls and followed logs are cut at once, and
their clients reconnect."""
JANITOR_S = 600.0
RETENTION_S = 3600.0
"""Interval of applying retentions of days."""
EXPIRE_BATCH = 1000
MEASURE_S = 30.0
"""Interval of measuring budgets for the metrics: twice Prometheus' scrape interval."""


async def serve(
    config: ControllerConfig, opened: OpenedResources, *, ready_fd: int | None = None
) -> None:
    """Run until SIGTERM or SIGINT. Raises AlreadyRunning, SettingsInvalid, OSError."""
    paths = config.paths
    files = BlobStore.of(config.platform, config.paths, limit_bytes=config.settings.blob_max_bytes)
    notifier = ChangeNotifier()
    store = Store(config.database_url, clock=time.time, on_fed=notifier.ring)
    nodes = NodeReports()
    agent, register = _node_backend(config, store, nodes)
    cache = WeightCacheClient(paths.socket_for_controller("weight_cache"))
    metrics = Metrics()
    lock = ControllerLock(paths.home / "controller.lock", store.engine, descriptor=opened.lock)
    try:
        async with leader.as_leader(
            lock, waits=config.settings.standby, metrics=metrics, address=opened.metrics
        ):
            opened = opened.completed(config)
            await anyio.to_thread.run_sync(store.migrate)
            await anyio.to_thread.run_sync(_publish_plans, store, config)
            await anyio.to_thread.run_sync(billing_jobs.initialise_billing, store, config)
            files.sweep()
            context = _context(
                config,
                opened,
                store=store,
                files=files,
                notifier=notifier,
                agent=agent,
                cache=cache,
                metrics=metrics,
                nodes=nodes,
                register=register,
            )
            await _run(context, opened, ready_fd)
    finally:
        await agent.aclose()
        await cache.aclose()
        await files.objects.aclose()
        store.close()


def _node_backend(
    config: ControllerConfig, store: Store, nodes: NodeReports
) -> tuple[NodeBackend, SnapshotRegister | None]:
    """Return the agent for this platform's fleet, and on a cluster the register of snapshots. Does
    not connect yet."""
    if config.platform.fleet == "knative":
        # importing it takes about a second, and a single machine does not need it
        from pilotlight.controller.kubernetes.cluster_backend import ClusterBackend

        backend = ClusterBackend(config.cluster)
        backend.register = SnapshotRegister(
            store, nodes, backend.has_pod, max_bytes=config.cluster.snapshot_copies_bytes
        )
        return backend, backend.register
    return AgentClient(config.paths.socket_for_controller("snapshotter")), None


def _publish_plans(store: Store, config: ControllerConfig) -> None:
    with store.write() as write:
        tenants.publish_all(write, plans=config.plans)


def _context(
    config: ControllerConfig,
    opened: OpenedResources,
    *,
    store: Store,
    files: BlobStore,
    notifier: ChangeNotifier,
    agent: NodeBackend,
    cache: WeightCacheClient,
    metrics: Metrics,
    nodes: NodeReports,
    register: SnapshotRegister | None,
) -> Context:
    return Context(
        config=config,
        store=store,
        files=files,
        key=opened.key,
        node_key=opened.node_key,
        agent=agent,
        cache=cache,
        notifier=notifier,
        metrics=metrics,
        clock=time.time,
        nodes=nodes,
        register=register,
        database_floor=_database_floor(store, config),
    )


def _database_floor(store: Store, config: ControllerConfig) -> DiskFloor:
    """Return the floor of the disk that SQLite grows on; another machine's database has its own
    operator."""
    url = store.engine.url
    is_file = url.get_backend_name() == "sqlite" and url.database
    return (
        DiskFloor(Path(url.database).parent, config.platform.disk_floor_bytes)
        if is_file and url.database
        else no_floor()
    )


async def _run(context: Context, opened: OpenedResources, ready_fd: int | None) -> None:
    settings = Config(
        http_app.build_app(context),
        http="httptools",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=DRAIN_S,
        timeout_keep_alive=75,
    )
    server = _Server(
        settings,
        notifier=context.notifier,
        ready_fd=ready_fd,
        listen=_remote_listener(context, opened),
    )
    exposed = await context.metrics.expose(opened.metrics)
    tasks = [
        asyncio.create_task(work, name=name) for name, work in _background_tasks(context).items()
    ]
    for task in tasks:
        task.add_done_callback(_log_task_end)
    context.metrics.probes = Probes(
        store=context.store,
        is_serving=lambda: server.started and not server.should_exit,
        tasks=tasks,
    )
    path = context.config.paths.socket("controller")
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    # another process has written to the database: followers read again
    loop.add_signal_handler(signal.SIGHUP, context.notifier.ring)
    try:
        log.info("event=serving socket=%s database=%r", path, context.store)
        await server.serve(sockets=[opened.listener])
    finally:
        # The socket is closed, so new connections fail at once. Its name is removed first.
        _remove_socket(path)
        await cancel_all(tasks)
        await context.issuers.aclose()
        for one in exposed:
            one.close()
        _remove_socket(metrics_socket(context.config.paths, "controller"))


def _remote_listener(
    context: Context, opened: OpenedResources
) -> tuple[socket.socket, TlsCredentials | None] | None:
    """Return the listener for other machines and its TLS credentials; None = no listener. Raises
    SettingsInvalid."""
    return (
        None
        if opened.elsewhere is None
        else (opened.elsewhere, TlsCredentials.of(context.config.platform))
    )


def _remove_socket(path: Path) -> None:
    # without root, this fails in root's directory; the next controller replaces the socket
    with contextlib.suppress(PermissionError):
        path.unlink(missing_ok=True)


def _log_task_end(task: asyncio.Task[None]) -> None:
    """Log a background task that failed: it is a defect, which should not be discovered by a
    missing invoice."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("event=task_ended task=%s", task.get_name(), exc_info=error)


class _Server(Server):
    """uvicorn with our signal handlers, a listener for other machines, and one newline on
    `ready_fd` once it serves."""

    def __init__(
        self,
        config: Config,
        *,
        notifier: ChangeNotifier,
        ready_fd: int | None,
        listen: tuple[socket.socket, TlsCredentials | None] | None,
    ) -> None:
        super().__init__(config)
        self._listen = listen
        self._notifier = notifier
        self._ready_fd = ready_fd

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `_run`: uvicorn would raise them again at the end, so that an orderly
        shutdown would look like a kill."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then notify the parent process."""
        await super().startup(sockets)
        if self._listen is not None:
            await serve_on_listener(self, *self._listen)
        if self._ready_fd is not None:
            os.write(self._ready_fd, b"\n")
            os.close(self._ready_fd)
            self._ready_fd = None

    def stop(self) -> None:
        """Stop accepting connections, release long polls, finish other requests."""
        self._notifier.close()
        self.should_exit = True


async def _run_janitor(context: Context) -> None:
    while True:
        try:
            await anyio.to_thread.run_sync(_delete_expired, context)
        except (PilotlightError, SQLAlchemyError) as e:
            # for example a full disk or a lost database: retry in the next round
            log.error("event=janitor_failed error=%r", e)
        try:
            await snapshot_gc.sweep(context.agent, context.store)
        except (SnapshotterError, SQLAlchemyError) as e:
            log.info("event=snapshots_not_swept error=%r", e)  # the agent is down or starting
        try:
            await node_cache.sweep(context.cache, context.store)
        except (WeightCacheError, SQLAlchemyError) as e:
            log.info("event=pins_not_swept error=%r", e)
        try:
            await _collect(context)
        except (ObjectStoreError, PilotlightError, SQLAlchemyError) as e:
            log.warning("event=blobs_not_swept error=%r", e)
        await asyncio.sleep(JANITOR_S)


async def _apply_retention(context: Context) -> None:
    days = context.config.settings.history_days
    while True:
        try:
            await history.delete_history(context.store, now=context.clock(), days=days)
            await revisions.prune_revisions(context)
            await images.delete_images(context)
        except (PilotlightError, SQLAlchemyError) as e:
            # a full disk, a lost database: the next round retries
            log.error("event=retention_failed error=%r", e)
        await asyncio.sleep(RETENTION_S)


async def _collect(context: Context) -> None:
    unused_since = context.clock() - context.config.settings.blob_grace_s
    _, deleted = await blob_gc.collect_garbage(
        context.collector, context.store, unused_since=unused_since
    )
    context.metrics.blobs_deleted.inc(deleted.blobs)
    context.metrics.blob_bytes_deleted.inc(deleted.size_bytes)
    await context.volumes.collect_all(before=unused_since)
    await prediction_storage.delete_expired(context)


async def _measure_budgets(context: Context) -> None:
    while True:
        try:
            for (tenant, budget), share in (
                await anyio.to_thread.run_sync(_budget_shares, context)
            ).items():
                context.metrics.set_budget_used(tenant, budget, share)
        except SQLAlchemyError as e:
            log.error("event=budgets_not_measured error=%r", e)
        await asyncio.sleep(MEASURE_S)


def _budget_shares(context: Context) -> dict[tuple[str, str], float]:
    with context.store.read() as sql:
        return spending.shares(sql, now=context.clock())


def _delete_expired(context: Context) -> None:
    now = context.clock()
    with context.store.write() as write:
        feed.purge(write, before=now - feed.TOMBSTONE_TTL_S)
        deliveries.purge(write, now=now)
        dispatch_queue.purge(write, now=now)
        idempotency.purge(write, now=now)
        sessions.purge(write, now=now)
    expired = EXPIRE_BATCH
    while expired == EXPIRE_BATCH:  # in batches, so that other writers do not wait long
        with context.store.write() as write:
            expired = submitted_calls.expire(write, now=now, limit=EXPIRE_BATCH)


def _background_tasks(context: Context) -> Mapping[str, Coroutine[None, None, None]]:
    """Background tasks of the process by name; each continues after errors."""
    config, store, notifier, clock = context.config, context.store, context.notifier, context.clock
    tasks = {
        "janitor": _run_janitor(context),
        "deliverer": delivery_worker.run_delivery_workers(
            store=store,
            key=context.key,
            notifier=notifier,
            metrics=context.metrics,
            clock=clock,
            policy=config.settings.webhooks,
        ),
        "batches": BatchRunner(context).run(),
        "leases": app_leases.run(context),
        "tenants": TenantDeleter(context).run(),
        "retention": _apply_retention(context),
        "archives": UsageArchiver(
            store, context.files.objects, days=config.settings.usage_days, clock=clock
        ).run(),
        "planner": scheduler.run_scheduler(store=store, notifier=notifier, clock=clock),
        "budgets": _measure_budgets(context),
        "bookkeeping": billing_jobs.run_billing_jobs(
            store=store, agent=context.agent, config=config
        ),
        "rollouts": RolloutController(store=store, clock=clock, rates=config.prices.rates()).run(),
        "experiments": guardrails.run(store),
        "drift": drift_loop.run(store=store, clock=clock, metrics=context.metrics),
        "objectives": slo_loop.run(
            store=store, clock=clock, keep_days=config.settings.observations_days
        ),
    }
    if config.platform.fleet == "knative":
        # a platform on one machine does not load the Kubernetes client
        from pilotlight.controller.kubernetes.leader_election import ClusterController

        tasks["cluster"] = ClusterController(
            settings=config.cluster,
            store=store,
            key=context.key,
            node_key=context.node_key,
            notifier=notifier,
            statuses=context.statuses,
            nodes=context.nodes,
            warm_pods=context.warm_pods,
            metrics=context.metrics,
        ).run()
    return tasks
