"""Detection, once at the agent's start, of whether this node supports snapshots: settings, root, a
CRIU that passes its self test, a key."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from pilotlight.core.disk_floor import DiskFloor
from pilotlight.core.object_store import ObjectStore, open_store
from pilotlight.core.settings import Paths, SettingsInvalid
from snapshotter.criu.bundle import make_bundle
from snapshotter.criu.errors import CriuError
from snapshotter.criu.self_test import self_test
from snapshotter.errors import Unsupported
from snapshotter.gpus.inventory import GpuInventory
from snapshotter.node_reports import ApprovedCopy
from snapshotter.settings import SnapshotterSettings
from snapshotter.slots.launch_plan import ImageStore
from snapshotter.snapshots.catalog import Catalog
from snapshotter.snapshots.components import SnapshotComponents
from snapshotter.snapshots.identity import node_identity
from snapshotter.snapshots.manifest import SnapshotsOff, signing_key
from snapshotter.snapshots.remote_copies import RemoteCopies
from snapshotter.snapshots.stored import CatalogLocked


class SnapshotsDisabled(Exception):
    """Raised when this node cannot create and restore snapshots; the message gives the reason and
    the remedy."""


class SnapshotDependencies(Protocol):
    """The required subset of `agent.dependencies.AgentDependencies`."""

    @property
    def images(self) -> ImageStore: ...
    @property
    def runtime(self) -> Mapping[str, Path]: ...
    @property
    def namespaces(self) -> bool: ...
    @property
    def criu_cache(self) -> Path | None: ...
    @property
    def gpus(self) -> GpuInventory: ...
    @property
    def s3_client(self) -> str: ...
    @property
    def disk_floor_bytes(self) -> int | None: ...
    @property
    def key_file(self) -> Path | None: ...
    @property
    def copies_at(self) -> str | None: ...
    @property
    def approved_copies(self) -> dict[str, ApprovedCopy] | None: ...


async def open_components(
    paths: Paths, settings: SnapshotterSettings, given: SnapshotDependencies
) -> SnapshotComponents:
    """Create the components that snapshots need. Raises SnapshotsDisabled, SettingsInvalid."""
    if not settings.snapshots:
        raise SnapshotsDisabled("disabled in platform.yaml (snapshotter.snapshots: false)")
    if not given.namespaces:
        raise SnapshotsDisabled(
            "slots without namespaces cannot be restored: run the agent as root"
        )
    directory = paths.home / "node" / "snapshots"
    try:
        key = signing_key(paths.home, given.key_file)
        test = await self_test(
            cache=given.criu_cache or paths.home / "node" / "criu", environ=os.environ
        )
        criu = test.criu()
        kit = await make_bundle(criu.binary, paths.home / "node" / "criu")
        node = await asyncio.to_thread(
            node_identity,
            runtime=given.runtime,
            criu_version=test.version,
            criu_sha256=test.sha256,
            gpus=[{"name": m, "driver": given.gpus.driver} for m in given.gpus.models],
        )
        catalogue = await asyncio.to_thread(
            _catalogue,
            directory,
            key,
            settings.snapshot_max_bytes,
            DiskFloor(directory, given.disk_floor_bytes),
        )
    except (SnapshotsOff, CatalogLocked, CriuError, Unsupported, OSError) as e:
        raise SnapshotsDisabled(str(e)) from e
    return SnapshotComponents(
        catalogue=catalogue,
        criu=criu,
        kit=kit,
        kdat=test.kdat,
        images=given.images,
        node=node,
        remote=remote_copies(settings, given, catalogue),
    )


def remote_copies(
    settings: SnapshotterSettings, given: SnapshotDependencies, catalogue: Catalog
) -> RemoteCopies | None:
    """The copies in the object store; None if there is none. Raises SettingsInvalid."""
    store = _copies(settings.snapshot_store or given.copies_at, given.s3_client)
    if store is None:
        return None
    return RemoteCopies(
        store,
        catalogue,
        approved=given.approved_copies,
        bytes_per_s=settings.snapshot_upload_bytes_per_s,
    )


def _copies(where: str | None, s3_client: str) -> ObjectStore | None:
    try:
        return (
            None
            if where is None
            else open_store(where, setting="snapshotter.snapshot_store", client=s3_client)
        )
    except ValueError as e:
        raise SettingsInvalid(str(e)) from e


def _catalogue(directory: Path, key: bytes, max_bytes: int | None, floor: DiskFloor) -> Catalog:
    return Catalog(directory, key=key, max_bytes=max_bytes, floor=floor)
