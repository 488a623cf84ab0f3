"""Writes to the cluster: apply changed manifests and delete objects that this platform manages."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from pilotlight.controller.kubernetes.ownership import owner_of
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
    """Raised when the existing object is not managed by this platform, or belongs to another of its
    resources. The object is left unchanged."""


class NotLeading(ClusterError):
    """Raised instead of writing when another controller may be the leader."""


class Unread(enum.Enum):
    """Type of `UNREAD`."""

    UNREAD = "unread"


UNREAD = Unread.UNREAD
"""The caller has not looked for the live object."""


class ObjectCache(Protocol):
    """What an Applier compares with, such as `informers.Informers`."""

    def get(self, kind: Kind, name: str, namespace: str | None = None) -> Object | None:
        """The newest known version of an object; None if it is not known or not ours."""

    def note(self, kind: Kind, item: Object) -> None:
        """Keep the response to a write."""

    def forget(self, kind: Kind, name: str, namespace: str | None = None) -> None:
        """Forget an object that was deleted."""


class Applier:
    """Writes to one cluster while `may_write` allows it. `writes` counts the changes."""

    def __init__(
        self,
        cluster: Cluster,
        mirror: ObjectCache,
        *,
        owns: Callable[[str], bool],
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        """`owns`: whether objects of the platform with that id (`owner_of`) are ours."""
        self.writes = 0
        self._owns = owns
        self._may_write = may_write
        self._cluster = cluster
        self._mirror = mirror
        self._manager = names.manager_of(cluster.settings)

    def __repr__(self) -> str:
        return f"<Applier {self.writes} writes>"

    async def put(self, manifest: Manifest, *, live: Object | Unread | None = UNREAD) -> Object:
        """Apply the manifest, unless the live object matches it already. Raises ClusterError.

        Args:
            live: what `live` returned just now, where it was called already."""
        kind, metadata = kind_of(manifest), manifest["metadata"]
        if isinstance(live, Unread):
            live = await self.live(kind, metadata)
        if live is not None and is_as_wanted(manifest, live):
            return live
        self._require_leading()
        try:
            result = await self._cluster.apply(manifest)
        except ManifestWarned as e:  # the API server applied it
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
        """Return the live object of that name if it is ours and represents the same resource; None
        if there is none. Raises NameTaken, NamespaceEnding."""
        name, namespace = metadata["name"], metadata.get("namespace")
        found = self._mirror.get(kind, name, namespace)
        if found is None:
            # the cache holds only managed objects
            found = await self._cluster.get(kind, name, namespace)
        if found is None:
            return None
        if (
            kind == NAMESPACE
            and found["metadata"].get("deletionTimestamp")
            and self._is_ours(found)
        ):  # also if it was another tenant's of that name
            raise NamespaceEnding(
                f"namespace {name} is being deleted: it is created again after the deletion, which "
                f"can take half of the longest timeout of the functions that had pods in it"
            )
        require_ownership(kind, found, metadata, manager=self._manager, owns=self._owns)
        return found

    async def label(self, kind: Kind, live: Object, labels: Mapping[str, str]) -> None:
        """Set labels of a managed object whose content must not change. Raises ClusterError."""
        metadata = live["metadata"]
        if labels.items() <= (metadata.get("labels") or {}).items():
            return
        self._require_leading()
        body = {
            "metadata": {"labels": dict(labels), "resourceVersion": metadata["resourceVersion"]}
        }
        result = await self._cluster.patch(kind, metadata["name"], metadata.get("namespace"), body)
        self.writes += 1
        self._mirror.note(kind, result)

    async def annotate(
        self, kind: Kind, live: Object, annotations: Mapping[str, str | None]
    ) -> None:
        """Set annotations of a managed object, and remove those that are None. Raises
        ClusterError."""
        if not annotations:
            return
        self._require_leading()
        metadata = live["metadata"]
        body = {"metadata": {"annotations": dict(annotations)}}
        result = await self._cluster.patch(kind, metadata["name"], metadata.get("namespace"), body)
        self.writes += 1
        self._mirror.note(kind, result)
        log.info(
            "event=annotated kind=%s namespace=%s name=%s annotations=%s",
            kind,
            metadata.get("namespace", ""),
            metadata["name"],
            dict(annotations),
        )

    async def may(self, deed: ApiRequest) -> bool:
        """Whether our credentials permit the request. Raises ClusterError."""
        return await self._cluster.may(deed)

    async def remove(self, kind: Kind, item: Object) -> None:
        """Delete a managed object, only if its uid still matches. Raises ClusterError."""
        metadata = item["metadata"]
        if not self._is_ours(item) or metadata.get("deletionTimestamp"):
            return
        self._require_leading()
        try:
            await self._cluster.delete(
                kind, metadata["name"], metadata.get("namespace"), uid=metadata.get("uid")
            )
        except Conflict:
            return  # another object has the name now: its own change event is handled
        except Forbidden:
            if not await self._is_ending(metadata.get("namespace")):
                raise
            return  # our RoleBinding was deleted first; the object is deleted with the namespace
        self.writes += 1
        self._mirror.forget(kind, metadata["name"], metadata.get("namespace"))
        log.info(
            "event=deleted kind=%s namespace=%s name=%s",
            kind,
            metadata.get("namespace", ""),
            metadata["name"],
        )

    def _is_ours(self, item: Object) -> bool:
        is_managed = item["metadata"].get("labels", {}).get(names.MANAGED_BY) == self._manager
        return is_managed and self._owns(owner_of(item))

    async def _is_ending(self, namespace: str | None) -> bool:
        found = await self._cluster.get(NAMESPACE, namespace) if namespace else None
        return namespace is not None and (found is None or "deletionTimestamp" in found["metadata"])

    def _require_leading(self) -> None:
        if not self._may_write():
            raise NotLeading("another controller may be the leader: it completes the work")


def require_ownership(
    kind: Kind,
    found: Mapping[str, Any],
    wanted: Mapping[str, Any],
    *,
    manager: str,
    owns: Callable[[str], bool],
) -> None:
    """Raise NameTaken unless this platform created `found`, for the same function, revision, secret
    or namespace."""
    metadata = found["metadata"]
    where = "/".join(part for part in (metadata.get("namespace"), metadata["name"]) if part)
    if metadata.get("labels", {}).get(names.MANAGED_BY) != manager:
        raise NameTaken(
            f"{kind.kind} {where} exists and is not managed by this platform: it was not changed. "
            "Rename it, or set another cluster.namespace_prefix"
        )
    if not owns(platform := owner_of(found)):
        raise NameTaken(
            f"{kind.kind} {where} belongs to another platform ({platform}): it was not changed. "
            f"Delete it, or take it over: pilotlight cluster adopt {platform}"
        )
    for key in (names.PATH, names.KEY):
        mine, theirs = (
            wanted.get("annotations", {}).get(key),
            metadata.get("annotations", {}).get(key),
        )
        if mine is not None and theirs is not None and mine != theirs:
            raise NameTaken(
                f"{kind.kind} {where} already represents {theirs}, and {mine} would have the same "
                "name: rename one of them"
            )
