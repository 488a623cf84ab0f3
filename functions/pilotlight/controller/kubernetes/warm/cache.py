"""The cluster's pods and the pool's Deployments, kept current by watches, and what was written
since: a watch lags behind our own writes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable
from typing import Self

from pilotlight.controller.kubernetes.informers import Informers, is_older
from pilotlight.controller.kubernetes.warm.choice import annotation, is_over, label
from pilotlight.kubernetes import names
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.kinds import DEPLOYMENT, POD, Kind
from pilotlight.kubernetes.reflector import Reflector
from pilotlight.kubernetes.watch_events import Object, WatchChange

_ATTEMPT, _TENANT = "attempt", "tenant"


class PoolCache:
    """A context manager. Owner: the leader's event loop. `cluster`: whose objects these are.

    Of other kinds than pods and Deployments it has what `informers` have."""

    def __init__(
        self, cluster: Cluster, informers: Informers, *, on_change: Callable[[], None]
    ) -> None:
        settings = cluster.settings
        self.cluster = cluster
        self.namespace = names.warm_namespace(settings)
        self._informers = informers
        self._on_change = on_change
        self._written: dict[tuple[Kind, str], Object] = {}
        selector = f"{names.MANAGED_BY}={names.manager_of(settings)}"
        indexes = {
            _ATTEMPT: lambda pod: [found] if (found := annotation(pod, names.ATTEMPT)) else [],
            _TENANT: lambda pod: [found] if (found := label(pod, names.TENANT)) else [],
        }
        self._pods = Reflector(
            cluster, POD, selector=selector, indexes=indexes, on_change=self._listener(POD)
        )
        self._deployments = Reflector(
            cluster,
            DEPLOYMENT,
            namespace=self.namespace,
            selector=selector,
            on_change=self._listener(DEPLOYMENT),
        )
        self._is_following = False
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self._stack = contextlib.AsyncExitStack()

    def __repr__(self) -> str:
        return f"<PoolCache {self._pods!r} {self._deployments!r}>"

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._pods)
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self._stack.aclose()

    async def wait_synced(self, timeout_s: float) -> None:
        """Wait until all pods are known. Raises ClusterError."""
        await self._pods.wait_synced(timeout_s)

    async def follow_deployments(self, timeout_s: float) -> None:
        """Begin to watch Deployments, once the right to do so is there. Raises ClusterError."""
        if not self._is_following:
            self._is_following = True
            await self._stack.enter_async_context(self._deployments)
        await self._deployments.wait_synced(timeout_s)

    @property
    def is_synced(self) -> bool:
        """Whether all pods are known."""
        return self._pods.is_synced

    def pods(self) -> Iterable[Object]:
        """The pods of the pool, promoted ones included."""
        return [self._newest(POD, pod) for pod in self._pods.items(self.namespace)]

    def deployments(self) -> Iterable[Object]:
        """The Deployments of the pool."""
        return self._deployments.items()

    def pods_of(self, tenant: str) -> list[Object]:
        """All pods of a tenant, in any namespace, those that were just claimed included."""
        seen = {pod["metadata"]["uid"]: pod for pod in self._pods.by(_TENANT, tenant)}
        new = [pod for pod in self._written.values() if label(pod, names.TENANT) == tenant]
        return list({**seen, **{pod["metadata"]["uid"]: pod for pod in new}}.values())

    def of_attempt(self, attempt: str, *, exclude: Collection[str] = ()) -> Object | None:
        """The pod that was claimed for a start, and has not ended, other than those with the uids
        `exclude`; None if there is none."""
        for pod in (*self._written.values(), *self._pods.by(_ATTEMPT, attempt)):
            pod = self._newest(POD, pod)
            is_other = annotation(pod, names.ATTEMPT) != attempt or is_over(pod)
            if not is_other and pod["metadata"]["uid"] not in exclude:
                return pod
        return None

    async def wait_pod(
        self, name: str, holds: Callable[[Object | None], bool], *, timeout_s: float
    ) -> Object | None:
        """Wait until a pod of the pool (None: there is none) is as `holds` says, or the time is
        over; returns its newest known version."""
        changed = asyncio.Event()
        self._waiting.setdefault(name, set()).add(changed)
        try:
            async with asyncio.timeout(timeout_s):
                while not holds(self.get(POD, name, self.namespace)):
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            pass
        finally:
            self._waiting[name].discard(changed)
            if not self._waiting[name]:
                del self._waiting[name]
        return self.get(POD, name, self.namespace)

    # -- as an Applier uses it ---------------------------------------------------------------------
    def get(self, kind: Kind, name: str, namespace: str | None = None) -> Object | None:
        """The newest known version of an object."""
        if kind not in (POD, DEPLOYMENT):
            return self._informers.get(kind, name, namespace)
        reflector = self._pods if kind == POD else self._deployments
        found = reflector.get(name, namespace)
        return self._newest(kind, found) if found is not None else self._written.get((kind, name))

    def note(self, kind: Kind, item: Object) -> None:
        """Keep the response to a write."""
        if kind in (POD, DEPLOYMENT):
            self._written[kind, item["metadata"]["name"]] = item
        else:
            self._informers.note(kind, item)

    def forget(self, kind: Kind, name: str, namespace: str | None = None) -> None:
        """Forget an object that was deleted."""
        self._written.pop((kind, name), None)
        if kind not in (POD, DEPLOYMENT):
            self._informers.forget(kind, name, namespace)

    def _newest(self, kind: Kind, item: Object) -> Object:
        written = self._written.get((kind, item["metadata"]["name"]))
        return written if written is not None and is_older(item, written) else item

    def _listener(self, kind: Kind) -> Callable[[WatchChange], None]:
        def changed(change: WatchChange) -> None:
            if change.type != "SYNCED" and change.key[0] == self.namespace:
                written = self._written.get((kind, change.key[1]))
                if written is not None and (
                    change.type == "DELETED" or not is_older(change.object, written)
                ):
                    del self._written[kind, change.key[1]]
                for waiting in self._waiting.get(change.key[1], ()):
                    waiting.set()
                self._on_change()

        return changed
