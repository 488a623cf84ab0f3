"""Applying what differs, deleting what is ours, and refusing to touch what is somebody else's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from pilotlight.controller.kubernetes.informers import Informers
from pilotlight.kubernetes import names
from pilotlight.kubernetes.api_request import ApiRequest
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.errors import (
    ClusterError,
    Conflict,
    Forbidden,
    ManifestWarned,
    NamespaceEnding,
)
from pilotlight.kubernetes.kinds import NAMESPACE, Kind, kind_of
from pilotlight.kubernetes.manifests.difference import is_as_wanted
from pilotlight.kubernetes.manifests.labels import Manifest
from pilotlight.kubernetes.watch_events import Object

log = logging.getLogger(__name__)


class NameTaken(ClusterError):
    """Raised when an object of that name is not ours, or stands for something else of ours: it is
    left as it is."""


class NotLeading(ClusterError):
    """Raised in place of a write when another controller may lead by now."""


class Applier:
    """Writes to one cluster, as long as `may_write` says so. `writes` counts what was changed."""

    def __init__(
        self, cluster: Cluster, mirror: Informers, *, may_write: Callable[[], bool] = lambda: True
    ) -> None:
        self.writes = 0
        self._may_write = may_write
        self._cluster = cluster
        self._mirror = mirror
        self._manager = names.manager_of(cluster.settings)

    def __repr__(self) -> str:
        return f"<Applier {self.writes} writes>"

    async def put(self, manifest: Manifest) -> Object:
        """Bring an object to what the manifest says; nothing is sent where it is so already. Raises
        ClusterError."""
        kind, metadata = kind_of(manifest), manifest["metadata"]
        live = await self.live(kind, metadata)
        if live is not None and is_as_wanted(manifest, live):
            return live
        self._demand_leading()
        try:
            result = await self._cluster.apply(manifest)
        except ManifestWarned as e:  # it took place
            log.warning(
                "event=applied_with_warnings kind=%s name=%s warnings=%s",
                kind,
                metadata["name"],
                list(e.warnings),
            )
            result = dict(e.result)
        self.writes += 1
        self._mirror.note(kind, result)
        log.info(
            "event=applied kind=%s namespace=%s name=%s",
            kind,
            metadata.get("namespace", ""),
            metadata["name"],
        )
        return result

    async def live(self, kind: Kind, metadata: Mapping[str, Any]) -> Object | None:
        """What is there under that name, if it is ours and stands for the same; None = nothing.
        Raises NameTaken, NamespaceEnding."""
        name, namespace = metadata["name"], metadata.get("namespace")
        found = self._mirror.get(kind, name, namespace)
        if found is None:
            # ours are in the cache: is there another's?
            found = await self._cluster.get(kind, name, namespace)
        if found is None:
            return None
        require_ownership(kind, found, metadata, manager=self._manager)
        if kind == NAMESPACE and found["metadata"].get("deletionTimestamp"):
            raise NamespaceEnding(
                f"namespace {name} is being deleted: it is made anew once it is gone"
            )
        return found

    async def may(self, deed: ApiRequest) -> bool:
        """Whether our credentials have a right. Raises ClusterError."""
        return await self._cluster.may(deed)

    async def remove(self, kind: Kind, item: Object) -> None:
        """Delete an object of ours, this incarnation of it only. Raises ClusterError."""
        metadata = item["metadata"]
        if metadata.get("labels", {}).get(names.MANAGED_BY) != self._manager or metadata.get(
            "deletionTimestamp"
        ):
            return
        self._demand_leading()
        try:
            await self._cluster.delete(
                kind, metadata["name"], metadata.get("namespace"), uid=metadata.get("uid")
            )
        except Conflict:
            return  # another one has its name by now: its own change tells
        except Forbidden:
            if not await self._is_ending(metadata.get("namespace")):
                raise
            return  # our RoleBinding went before it, and it goes with the namespace
        self.writes += 1
        self._mirror.forget(kind, metadata["name"], metadata.get("namespace"))
        log.info(
            "event=deleted kind=%s namespace=%s name=%s",
            kind,
            metadata.get("namespace", ""),
            metadata["name"],
        )

    async def _is_ending(self, namespace: str | None) -> bool:
        found = await self._cluster.get(NAMESPACE, namespace) if namespace else None
        return namespace is not None and (found is None or "deletionTimestamp" in found["metadata"])

    def _demand_leading(self) -> None:
        if not self._may_write():
            raise NotLeading("another controller may lead by now: it does what is left")


def require_ownership(
    kind: Kind, found: Mapping[str, Any], wanted: Mapping[str, Any], *, manager: str
) -> None:
    """Raise NameTaken unless `found` was made by this platform, for the same function, revision,
    secret or namespace."""
    metadata = found["metadata"]
    where = "/".join(part for part in (metadata.get("namespace"), metadata["name"]) if part)
    if metadata.get("labels", {}).get(names.MANAGED_BY) != manager:
        hint = (
            f"Rename it, or give it up: kubectl label {kind} {metadata['name']} "
            f"{names.MANAGED_BY}={manager} hands it over."
        )
        raise NameTaken(
            f"{kind.kind} {where} is there already, and not this platform's: it is left alone. "
            f"{hint}"
        )
    for key in (names.PATH, names.KEY):
        mine, theirs = (
            wanted.get("annotations", {}).get(key),
            metadata.get("annotations", {}).get(key),
        )
        if mine is not None and theirs is not None and mine != theirs:
            raise NameTaken(
                f"{kind.kind} {where} stands for {theirs} already, and {mine} would have the same "
                f"name: rename one of them"
            )
