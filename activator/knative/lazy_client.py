"""A client of the cluster that connects with its first use, so that an activator starts without its
API server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol

from activator.knative.deletion_cost import PodPatcher
from activator.knative.pod_watcher import PodListener
from pilotlight.kubernetes.kinds import Kind
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.kubernetes.watch_events import WatchChange

if TYPE_CHECKING:
    from pilotlight.kubernetes.cluster import Cluster


class Access(PodListener, PodPatcher, Protocol):
    """The part of `pilotlight.kubernetes.cluster.Cluster` that is used here."""

    @property
    def away_s(self) -> float:
        """For how many seconds the API server has not answered."""

    async def delete(
        self,
        kind: Kind,
        name: str,
        namespace: str | None,
        *,
        uid: str | None = None,
        grace_s: int | None = None,
    ) -> Any:
        """Delete an object."""


class LazyCluster:
    """A cluster client that connects on first use. Owner: the event loop. Raises ClusterError."""

    def __init__(self, settings: ClusterSettings) -> None:
        self._settings = settings
        self._cluster: Cluster | None = None

    def __repr__(self) -> str:
        return f"<LazyCluster {self._cluster!r}>"

    @property
    def away_s(self) -> float:
        """For how many seconds the API server has not answered, see Cluster."""
        return self._cluster.away_s if self._cluster is not None else 0.0

    async def connected(self) -> Cluster:
        """The client with credentials; no request is sent yet. Raises BadCredentials."""
        if self._cluster is None:
            # this import takes a second, and activators on a single machine do not need it
            from pilotlight.kubernetes.cluster import Cluster

            self._cluster = await Cluster.connect(
                self._settings, tolerated=self._settings.tolerated_warnings
            )
        return self._cluster

    async def watch(
        self, kind: Kind, namespace: str | None = None, selector: str = ""
    ) -> AsyncGenerator[WatchChange, None]:
        """Watch objects, see Cluster."""
        cluster = await self.connected()
        async with aclosing(cluster.watch(kind, namespace, selector)) as changes:
            async for change in changes:
                yield change

    async def patch(
        self, kind: Kind, name: str, namespace: str | None, body: Any
    ) -> Mapping[str, Any]:
        """Send a merge patch, see Cluster."""
        return await (await self.connected()).patch(kind, name, namespace, body)

    async def delete(
        self,
        kind: Kind,
        name: str,
        namespace: str | None,
        *,
        uid: str | None = None,
        grace_s: int | None = None,
    ) -> Any:
        """Delete an object, see Cluster."""
        return await (await self.connected()).delete(
            kind, name, namespace, uid=uid, grace_s=grace_s
        )

    async def aclose(self) -> None:
        """Close the connections."""
        if self._cluster is not None:
            await self._cluster.aclose()
