"""The reconciler: watches desired and live objects and works until they agree. It writes nothing
when nothing changed.

It is level-triggered: after any change, the whole function is reconciled. A failing function backs
off exponentially and does not delay others. While namespaces of another platform are in the cluster
under our name (`foreign_namespaces`), it writes nothing at all: a new database is not a desired
state of what an earlier one made."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import anyio.to_thread
from sqlalchemy.exc import SQLAlchemyError

from pilotlight.controller.database import feed, platform_identity
from pilotlight.controller.database.change_notifier import ChangeNotifier
from pilotlight.controller.database.platform_identity import PlatformIdentity
from pilotlight.controller.database.store import Store
from pilotlight.controller.kubernetes import function_status
from pilotlight.controller.kubernetes.applier import Applier
from pilotlight.controller.kubernetes.desired_state import DesiredState
from pilotlight.controller.kubernetes.function_reconciler import FunctionReconciler
from pilotlight.controller.kubernetes.function_status import FunctionStatus, FunctionStatuses, Phase
from pilotlight.controller.kubernetes.informers import Informers
from pilotlight.controller.kubernetes.namespaces import Namespaces
from pilotlight.controller.kubernetes.ownership import (
    FOREIGN,
    ClusterOwnership,
    foreign_namespaces,
    owner_of,
)
from pilotlight.controller.kubernetes.workqueue import WorkQueue
from pilotlight.errors import InvalidInput
from pilotlight.kubernetes import kinds, names
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.errors import ClusterError
from pilotlight.kubernetes.kinds import Kind
from pilotlight.kubernetes.watch_events import WatchChange

log = logging.getLogger(__name__)

_PAGE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileLimits:
    """Concurrency and intervals of the reconciler; all in seconds except `workers`.

    Attributes:
        workers: functions reconciled concurrently.
        first_retry_s, most_retry_s: first and longest pause after a failure; it doubles in between.
        most_away_s: the longest pause while the API server does not answer; all functions share it.
        feed_s: interval of reading the feed without a notification (another process may have
            written).
        sync_s: timeout of the first listing, after which the cause of the delay is reported.
    """

    workers: int = 16
    first_retry_s: float = 0.5
    most_retry_s: float = 60.0
    most_away_s: float = 5.0
    feed_s: float = 5.0
    sync_s: float = 30.0


class Reconciler:
    """Reconciles functions while this controller leads. Owner: one event loop."""

    def __init__(
        self,
        cluster: Cluster,
        state: DesiredState,
        *,
        store: Store,
        notifier: ChangeNotifier,
        statuses: FunctionStatuses,
        pace: ReconcileLimits | None = None,
        wall: Callable[[], float] = time.time,
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        """Create a reconciler; `run` starts it.

        Args:
            state: its platform, who we are, is read again with the feed.
            may_write: called before each write: whether this controller is still the only leader.
        """
        self._store = store
        self._notifier = notifier
        self._statuses = statuses
        self._pace = pace or ReconcileLimits()
        self._wall = wall
        self._seq = 0
        self._synced = asyncio.Event()
        self._loaded = asyncio.Event()
        self.state = state
        self.work = WorkQueue()
        self.mirror = Informers(cluster, on_change=self._changed)
        self.writer = Applier(cluster, self.mirror, owns=self._owns, may_write=may_write)
        self._namespaces = Namespaces(state=self.state, mirror=self.mirror, writer=self.writer)
        self._functions = FunctionReconciler(
            state=self.state,
            mirror=self.mirror,
            writer=self.writer,
            namespaces=self._namespaces,
            wall=wall,
        )

    def __repr__(self) -> str:
        return f"<Reconciler {self.state!r} {self.work!r} {self._statuses!r} {self.writer!r}>"

    @property
    def may_change(self) -> bool:
        """Whether desired and live objects are known, and none is of another platform."""
        ownership = self._statuses.ownership
        is_ours = ownership is not None and not ownership.foreign
        return self._synced.is_set() and is_ours

    async def wait_synced(self) -> None:
        """Wait until desired and live objects are known."""
        await self._synced.wait()

    async def run(self) -> None:
        """Run until cancelled."""
        async with self.mirror, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(), name="reconciler feed")
            await self._until_synced()
            self._synced.set()
            self._check_ownership()
            self._sweep()
            for number in range(self._pace.workers):
                tasks.create_task(self._labour(), name=f"reconciler {number}")

    async def _until_synced(self) -> None:
        """Wait until all live objects are known; nothing is written before. An error becomes the
        status of every function."""
        while True:
            try:
                await self._loaded.wait()
                await self.mirror.wait_synced(self._pace.sync_s)
            except ClusterError as e:
                log.warning("event=cluster_not_listed error=%s", e)
                for function in self.state.functions:
                    self._set_status(function, function_status.status_from_error(e))
            else:
                return

    async def _follow(self) -> None:
        while True:
            ring = self._notifier.next_change()
            try:
                await self._read()
            except SQLAlchemyError as e:
                # the database is unreachable: the next round retries
                log.error("event=feed_not_read error=%r", e)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pace.feed_s):
                    await ring.wait()

    async def _read(self) -> None:
        """Read all pages before applying any: between two pages of a full read, most functions
        would seem to be deleted."""
        self.state.platform = await anyio.to_thread.run_sync(self._identity)
        pages = [await anyio.to_thread.run_sync(self._page, self._seq)]
        while pages[-1].more:
            pages.append(await anyio.to_thread.run_sync(self._page, pages[-1].seq))
        self._seq = pages[-1].seq
        tenants = set(self.state.tenants)
        for page in pages:
            self.work.add_all(self.state.take(page))
        gone = tenants - set(self.state.tenants)  # their functions may have been deleted before
        self.work.add_all(
            place for place in self._namespaces.places() if place.partition("/")[0] in gone
        )
        self._loaded.set()
        self._check_ownership()

    def _identity(self) -> PlatformIdentity:
        with self._store.read() as sql:
            return platform_identity.read(sql)

    def _owns(self, platform: str) -> bool:
        return self.state.platform.owns(platform)

    def _check_ownership(self) -> None:
        """Look whose namespaces are in the cluster; when the last foreign one has gone or was
        adopted, reconcile everything."""
        if not self._synced.is_set():
            return
        before = self._statuses.ownership
        foreign = foreign_namespaces(self.mirror.items(kinds.NAMESPACE), owns=self._owns)
        now = ClusterOwnership(platform=self.state.platform.id, foreign=foreign)
        self._statuses.ownership = now
        if before is not None and before.foreign == foreign:
            return
        if foreign:
            log.error("event=not_reconciling reason=%s message=%s", FOREIGN, now.message)
            self.work.add_all(self.state.functions)
        elif before is not None and before.foreign:
            log.warning("event=reconciling_again platform=%s", now.platform)
            self._sweep()

    def _page(self, after: int) -> feed.Page:
        with self._store.read() as sql:
            return feed.read(sql, after=after, limit=_PAGE)

    def _sweep(self) -> None:
        """Enqueue everything: functions that the platform knows, and objects of functions that it
        does not."""
        self.work.add_all(self.state.functions)
        self.work.add_all(self.state.places())
        self.work.add_all(self._namespaces.places())
        self.work.add_all(set(self.mirror.functions()) - set(self.state.functions))

    def _changed(self, kind: Kind, change: WatchChange) -> None:
        """Enqueue what an object of ours belongs to when it changed in the cluster."""
        metadata = change.object.get("metadata") or {}
        labels = metadata.get("labels") or {}
        if change.type == "SYNCED":
            return
        if kind == kinds.NAMESPACE and not self._is_only_ours(change):
            self._check_ownership()
        if kind == kinds.NAMESPACE and change.type == "DELETED":
            self.work.add_all(self._named(metadata["name"]))
        if function := labels.get(names.FUNCTION_ID):
            self.work.add(function)
            return
        is_namespace = kind == kinds.NAMESPACE
        self._namespaces.changed(str(metadata["name" if is_namespace else "namespace"]))
        if labels.get(names.TENANT):
            place = f"{labels[names.TENANT]}/{labels.get(names.ENVIRONMENT, '')}"
            self.work.add(place)
            if kind == kinds.SECRET:
                self.work.add_all(self._in(place))

    def _is_only_ours(self, change: WatchChange) -> bool:
        """Whether a change of a namespace leaves whose objects are in the cluster as it was."""
        ownership = self._statuses.ownership
        return self._owns(owner_of(change.object)) and not (ownership and ownership.foreign)

    def _named(self, namespace: str) -> list[str]:
        """The functions, and their tenant's environment, whose namespace has that name: the deleted
        one may have been another tenant's."""
        named: list[str] = []
        for route in self.state.functions.values():
            tenancy = self.state.tenancy(route.tenant, route.environment)
            if tenancy is not None and tenancy.namespace == namespace:
                named += [route.id, f"{route.tenant}/{route.environment}"]
        return named

    def _in(self, place: str) -> list[str]:
        return [
            route.id
            for route in self.state.functions.values()
            if f"{route.tenant}/{route.environment}" == place
        ]

    async def _labour(self) -> None:
        while True:
            key = await self.work.take()
            try:
                await self._reconcile_key(key)
            except ClusterError as e:
                self._failed(key, e)
            except InvalidInput as e:
                self._refused(key, e)
            except (AttributeError, KeyError, TypeError, ValueError) as e:
                # an object that someone else wrote, with an unexpected structure
                log.exception("event=not_understood key=%s", key)
                self._failed(
                    key,
                    ClusterError(
                        f"an object in the cluster has an unexpected structure: {e!r}",
                        reason="NotUnderstood",
                    ),
                )

    async def _reconcile_key(self, key: str) -> None:
        ownership = self._statuses.ownership
        if ownership is not None and ownership.foreign:
            status = FunctionStatus(phase=Phase.FAILED, reason=FOREIGN, message=ownership.message)
            self._set_status(key, status)
            self.work.done(key)
            return
        if "/" in key:
            await self._namespaces.reconcile(key)
            self.work.done(key)
            return
        outcome = await self._functions.reconcile(key)
        if outcome.status is None:
            self._statuses.drop(key)
        else:
            self._statuses.set(key, outcome.status, now=self._wall())
        self.work.done(key, again_s=outcome.again_s)

    def _failed(self, key: str, error: ClusterError) -> None:
        status = function_status.status_from_error(error)
        most_s = (
            self._pace.most_away_s if status.phase is Phase.PENDING else self._pace.most_retry_s
        )
        pause_s = self.work.failed(
            key,
            first_s=self._pace.first_retry_s,
            most_s=most_s,
            at_least_s=min(error.retry_after_s or 0.0, self._pace.most_retry_s),
        )
        log.warning(
            "event=not_reconciled key=%s pause_s=%.1f reason=%s error=%s",
            key,
            pause_s,
            status.reason,
            status.message,
        )
        self._set_status(key, status)

    def _refused(self, key: str, error: InvalidInput) -> None:
        """Report a declaration that cannot exist in a cluster. Only a change to it helps, which
        arrives by the feed or a restart."""
        hint = error.detail.get("hint", "")
        log.warning("event=not_reconciled key=%s reason=Invalid error=%s", key, error)
        self._set_status(
            key,
            FunctionStatus(
                phase=Phase.FAILED, reason="Invalid", message=f"{error}. {hint}".rstrip()
            ),
        )
        self.work.done(key)

    def _set_status(self, key: str, status: FunctionStatus) -> None:
        """Set a function's status with the generation that it describes."""
        route = self.state.functions.get(key)
        if route is not None:
            generation = int(route.document.get("generation") or 0)
            self._statuses.set(key, replace(status, generation=generation), now=self._wall())
