"""Tenants' namespaces: there before any function is applied, and gone with the tenant."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from pilotlight.cluster import kinds, names
from pilotlight.cluster.manifests.tenancy import Tenancy, namespace_manifests
from pilotlight.controller.cluster.mirror import Mirror
from pilotlight.controller.cluster.state import PlatformState
from pilotlight.controller.cluster.writing import Writer


class Namespaces:
    """Owner: the reconciler's event loop. One namespace is worked on by one task at a time, so that a hundred functions make it once."""

    def __init__(self, *, state: PlatformState, mirror: Mirror, writer: Writer) -> None:
        self._state = state
        self._mirror = mirror
        self._writer = writer
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def reconcile(self, place: str) -> None:
        """`<tenant id>/<environment>`: as wanted, or gone with its tenant. Raises ClusterError, InvalidInput."""
        tenant, _, environment = place.partition("/")
        tenancy = self._state.tenancy(tenant, environment)
        if tenancy is not None:
            if place in self._state.places():
                await self.ensure(tenancy)
            await self._forget_secrets(place)
            return
        async with self._locks[place]:
            for item in self._mirror.items(kinds.NAMESPACE):
                if item["metadata"].get("annotations", {}).get(names.PATH) == place:
                    await self._writer.remove(kinds.NAMESPACE, item)

    async def _forget_secrets(self, place: str) -> None:
        """Values that the platform does not hold any more are not kept in the cluster either."""
        for item in list(self._mirror.items(kinds.SECRET)):
            path = item["metadata"].get("annotations", {}).get(names.PATH, "")
            if path.startswith(f"{place}/") and not self._state.has_secret(path):
                await self._writer.remove(kinds.SECRET, item)

    async def ensure(self, tenancy: Tenancy) -> None:
        """The namespace and what is in it besides functions. Raises ClusterError."""
        async with self._locks[tenancy.path]:
            for manifest in namespace_manifests(tenancy):
                await self._writer.put(manifest)
