"""Tenants' namespaces: created before the first function, deleted with the tenant."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict

from pilotlight.controller.kubernetes.applier import Applier
from pilotlight.controller.kubernetes.desired_state import DesiredState
from pilotlight.controller.kubernetes.informers import Informers
from pilotlight.kubernetes import kinds, names
from pilotlight.kubernetes.api_request import ApiRequest
from pilotlight.kubernetes.kinds import Kind
from pilotlight.kubernetes.manifests.labels import Manifest
from pilotlight.kubernetes.manifests.tenant_namespace import (
    CONTROLLER_BINDING,
    Tenancy,
    namespace_manifests,
)

log = logging.getLogger(__name__)

LOOKS, LOOK_S = 30, 0.1
"""Number and interval in seconds of the checks whether a new RoleBinding is effective."""


class Namespaces:
    """Reconciles namespaces. Owner: the reconciler's event loop. One task at a time works on a
    namespace, so that a hundred functions create it once, and compare it again only after a change
    in it (`changed`)."""

    def __init__(self, *, state: DesiredState, mirror: Informers, writer: Applier) -> None:
        self._state = state
        self._mirror = mirror
        self._writer = writer
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._ensured: dict[str, Tenancy] = {}

    async def reconcile(self, place: str) -> None:
        """Create or update the namespace `<tenant id>/<environment>`, or delete it if the tenant
        was deleted. Raises ClusterError, InvalidInput."""
        tenant, _, environment = place.partition("/")
        tenancy = self._state.tenancy(tenant, environment)
        if tenancy is not None:
            if (
                place in self._state.places()
                or self._mirror.get(kinds.NAMESPACE, tenancy.namespace) is not None
            ):
                await self.ensure(tenancy)
            await self._delete_secrets(tenancy)
            return
        async with self._locks[place]:
            for item in self._mirror.items(kinds.NAMESPACE):
                if item["metadata"].get("annotations", {}).get(names.PATH) == place:
                    await self._writer.remove(kinds.NAMESPACE, item)

    def places(self) -> set[str]:
        """Return `<tenant id>/<environment>` of every namespace of ours in the cluster."""
        found = (
            item["metadata"].get("annotations", {}).get(names.PATH)
            for item in self._mirror.items(kinds.NAMESPACE)
        )
        return {place for place in found if place}

    async def _delete_secrets(self, tenancy: Tenancy) -> None:
        """Delete secrets from the cluster that the platform no longer holds."""
        for item in list(self._mirror.secrets(tenancy.namespace)):
            path = item["metadata"].get("annotations", {}).get(names.PATH, "")
            if path.startswith(f"{tenancy.path}/") and not self._state.has_secret(path):
                await self._writer.remove(kinds.SECRET, item)

    def changed(self, namespace: str) -> None:
        """A namespace changed in the cluster, or an object in it that belongs to no function."""
        self._ensured.pop(namespace, None)

    async def ensure(self, tenancy: Tenancy) -> None:
        """Apply the namespace and the objects in it that belong to no function; nothing if they did
        not change since the last time. Raises ClusterError."""
        async with self._locks[tenancy.path]:
            if self._ensured.get(tenancy.namespace) is tenancy:
                return
            self._ensured[tenancy.namespace] = tenancy  # before: a change meanwhile is not missed
            try:
                await self._apply(tenancy)
            except BaseException:
                self._ensured.pop(tenancy.namespace, None)
                raise

    async def _apply(self, tenancy: Tenancy) -> None:
        for manifest in namespace_manifests(tenancy):
            if manifest["kind"] == kinds.ROLE_BINDING.kind:
                is_own = manifest["metadata"]["name"] == CONTROLLER_BINDING
                await apply_binding(self._writer, manifest, grants=kinds.SECRET if is_own else None)
            else:
                await self._writer.put(manifest)


async def apply_binding(writer: Applier, manifest: Manifest, *, grants: Kind | None) -> None:
    """Apply a RoleBinding. Its role is immutable (RBAC): a binding of another role is replaced.

    A new one is waited for until it lets us create objects of the kind `grants` (None: not at all):
    the API server learns of it by a watch and rejects requests until then. After `LOOKS` checks the
    first write reports what is missing."""
    metadata = manifest["metadata"]
    live = await writer.live(kinds.ROLE_BINDING, metadata)
    if live is not None and live.get("roleRef") != manifest["roleRef"]:
        await writer.remove(kinds.ROLE_BINDING, live)
    await writer.put(manifest)
    if live is not None or grants is None:
        return
    deed = ApiRequest(verb="create", kind=grants, namespace=metadata["namespace"])
    for _ in range(LOOKS):
        if await writer.may(deed):
            return
        await asyncio.sleep(LOOK_S)
    log.warning("event=role_binding_without_effect namespace=%s", metadata["namespace"])
