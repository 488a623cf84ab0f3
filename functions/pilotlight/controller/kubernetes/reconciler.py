"""The reconciler: watches what is wanted and what is there, and works until they agree. It writes
nothing where nothing changed.

It is level-triggered: whatever changed, the function is looked at as a whole. A function that fails
waits longer and longer, and holds up nobody else. Nothing is deleted as long as the platform knows
no tenant at all: an empty database is no wish."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import anyio.to_thread
from sqlalchemy.exc import SQLAlchemyError

from pilotlight.controller.database import feed
from pilotlight.controller.database.change_notifier import ChangeNotifier
from pilotlight.controller.database.store import Store
from pilotlight.controller.kubernetes import function_status
from pilotlight.controller.kubernetes.applier import Applier
from pilotlight.controller.kubernetes.desired_state import DesiredState
from pilotlight.controller.kubernetes.function_reconciler import FunctionReconciler
from pilotlight.controller.kubernetes.function_status import FunctionStatus, FunctionStatuses, Phase
from pilotlight.controller.kubernetes.informers import Informers
from pilotlight.controller.kubernetes.knative_config import read_config
from pilotlight.controller.kubernetes.namespaces import Namespaces
from pilotlight.controller.kubernetes.workqueue import WorkQueue
from pilotlight.core.crypto import PlatformKey
from pilotlight.errors import InvalidInput
from pilotlight.kubernetes import kinds, names
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.errors import ClusterError
from pilotlight.kubernetes.kinds import Kind
from pilotlight.kubernetes.watch_events import WatchChange
from pilotlight.kubernetes.webhook.knative_config import KnativeConfig

log = logging.getLogger(__name__)

_PAGE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileLimits:
    """How fast the reconciler goes; all in seconds but `workers`.

    Attributes:
        workers: functions looked at side by side. first_retry_s, most_retry_s: pause after a
        failure; it doubles from the one to the other. most_away_s: the longest pause while the API
        server does not answer: it is asked by all functions together. feed_s: between two looks at
        the feed when no bell rings (another process may have written). config_s: between two looks
        at Knative's own configuration. sync_s: patience for the first listing, after which it is
        told why there is none.
    """

    workers: int = 16
    first_retry_s: float = 0.5
    most_retry_s: float = 60.0
    most_away_s: float = 5.0
    feed_s: float = 5.0
    config_s: float = 60.0
    sync_s: float = 30.0


class Reconciler:
    """Runs while this controller leads. Owner: one event loop."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        store: Store,
        key: PlatformKey,
        bell: ChangeNotifier,
        statuses: FunctionStatuses,
        pace: ReconcileLimits | None = None,
        wall: Callable[[], float] = time.time,
        may_write: Callable[[], bool] = lambda: True,
        node_key: PlatformKey | None = None,
    ) -> None:
        """See the class.

        Args:
            may_write: asked before each write: whether this is still the only controller that
            leads. node_key: what launch documents are sealed with for the node agents; None: `key`,
            which they have then.
        """
        self._cluster = cluster
        self._store = store
        self._bell = bell
        self._statuses = statuses
        self._pace = pace or ReconcileLimits()
        self._wall = wall
        self._config = KnativeConfig.unknown(cluster.settings.knative_namespace)
        self._seq = 0
        self._loaded = asyncio.Event()
        self.state = DesiredState(settings=cluster.settings, key=key, node_key=node_key)
        self.work = WorkQueue()
        self.mirror = Informers(cluster, on_change=self._changed)
        self.writer = Applier(cluster, self.mirror, may_write=may_write)
        self._namespaces = Namespaces(state=self.state, mirror=self.mirror, writer=self.writer)
        self._functions = FunctionReconciler(
            state=self.state,
            mirror=self.mirror,
            writer=self.writer,
            namespaces=self._namespaces,
            config=lambda: self._config,
            wall=wall,
        )

    def __repr__(self) -> str:
        return f"<Reconciler {self.state!r} {self.work!r} {self._statuses!r} {self.writer!r}>"

    async def run(self) -> None:
        """Until cancelled."""
        async with self.mirror, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(), name="reconciler feed")
            tasks.create_task(self._keep_config(), name="reconciler config")
            await self._until_synced()
            self._sweep()
            for number in range(self._pace.workers):
                tasks.create_task(self._labour(), name=f"reconciler {number}")

    async def _until_synced(self) -> None:
        """Nothing is written before everything that is there is known. What keeps us from it is
        every function's status."""
        while True:
            try:
                await self._loaded.wait()
                await self.mirror.wait_synced(self._pace.sync_s)
            except ClusterError as e:
                log.warning("event=cluster_not_listed error=%s", e)
                for function in self.state.functions:
                    self._tell(function, function_status.status_from_error(e))
            else:
                return

    async def _follow(self) -> None:
        while True:
            ring = self._bell.next_change()
            try:
                await self._read()
            except SQLAlchemyError as e:
                # the database is away: the next round tries again
                log.error("event=feed_not_read error=%r", e)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pace.feed_s):
                    await ring.wait()

    async def _read(self) -> None:
        """Whole, or not at all: between two pages of a fresh start most functions would seem to be
        gone."""
        pages = [await anyio.to_thread.run_sync(self._page, self._seq)]
        while pages[-1].more:
            pages.append(await anyio.to_thread.run_sync(self._page, pages[-1].seq))
        self._seq = pages[-1].seq
        tenants = set(self.state.tenants)
        for page in pages:
            self.work.add_all(self.state.take(page))
        gone = tenants - set(self.state.tenants)  # their functions may have gone before them
        self.work.add_all(
            place for place in self._namespaces.places() if place.partition("/")[0] in gone
        )
        self._loaded.set()

    def _page(self, after: int) -> feed.Page:
        with self._store.read() as sql:
            return feed.read(sql, after=after, limit=_PAGE)

    def _sweep(self) -> None:
        """Look at all there is: what the platform knows, and what is in the cluster although it
        does not."""
        self.work.add_all(self.state.functions)
        self.work.add_all(self.state.places())
        if self.state.tenants:
            self.work.add_all(self._namespaces.places())
            self.work.add_all(set(self.mirror.functions()) - set(self.state.functions))

    async def _keep_config(self) -> None:
        while True:
            self._config = await read_config(self._cluster)
            await asyncio.sleep(self._pace.config_s)

    def _changed(self, kind: Kind, change: WatchChange) -> None:
        """Something of ours changed in the cluster, by whomever."""
        metadata = change.object.get("metadata") or {}
        labels = metadata.get("labels") or {}
        if change.type == "SYNCED":
            return
        if function := labels.get(names.FUNCTION_ID):
            self.work.add(function)
        elif labels.get(names.TENANT):
            place = f"{labels[names.TENANT]}/{labels.get(names.ENVIRONMENT, '')}"
            self.work.add(place)
            if kind == kinds.SECRET or (kind == kinds.NAMESPACE and change.type == "DELETED"):
                self.work.add_all(self._in(place))

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
                await self._look_at(key)
            except ClusterError as e:
                self._failed(key, e)
            except InvalidInput as e:
                self._refused(key, e)
            except (AttributeError, KeyError, TypeError, ValueError) as e:
                # an object that somebody wrote, in a shape that we did not expect
                log.exception("event=not_understood key=%s", key)
                self._failed(
                    key,
                    ClusterError(
                        f"something of it in the cluster has an unexpected shape: {e!r}",
                        reason="NotUnderstood",
                    ),
                )

    async def _look_at(self, key: str) -> None:
        if not self.state.tenants:  # an empty database is no wish
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
        told = function_status.status_from_error(error)
        most_s = self._pace.most_away_s if told.phase is Phase.PENDING else self._pace.most_retry_s
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
            told.reason,
            told.message,
        )
        self._tell(key, told)

    def _refused(self, key: str, error: InvalidInput) -> None:
        """What was declared cannot be in a cluster: only a change of it helps, and that comes by
        the feed, or by a restart."""
        hint = error.detail.get("hint", "")
        log.warning("event=not_reconciled key=%s reason=Invalid error=%s", key, error)
        self._tell(
            key,
            FunctionStatus(
                phase=Phase.FAILED, reason="Invalid", message=f"{error}. {hint}".rstrip()
            ),
        )
        self.work.done(key)

    def _tell(self, key: str, status: FunctionStatus) -> None:
        """A function's status, with what it is about."""
        route = self.state.functions.get(key)
        if route is not None:
            generation = int(route.document.get("generation") or 0)
            self._statuses.set(key, replace(status, generation=generation), now=self._wall())
