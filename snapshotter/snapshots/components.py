"""A node's components that create and restore snapshots, shared by the rest of this package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from snapshotter.criu.bundle import CriuBundle
from snapshotter.criu.processes import Criu
from snapshotter.slots.launch_plan import ImageStore
from snapshotter.snapshots.catalog import Catalog
from snapshotter.snapshots.identity import Identity, NodeIdentity, identity_of
from snapshotter.snapshots.mapped_files import BindMounts
from snapshotter.snapshots.remote_copies import RemoteCopies
from snapshotter.types import GpuGrant, LaunchSpec


@dataclass(frozen=True, kw_only=True)
class SnapshotComponents:
    """The shared components; holds no state.

    Attributes:
        kdat: CRIU's cached kernel features, put into each slot to avoid detecting them again; None:
            CRIU detects them.
        kit: CRIU's files for slots with a tenant's root file system.
        remote: copies in the object store; None: disabled.
    """

    catalogue: Catalog
    criu: Criu
    kit: CriuBundle
    kdat: Path | None
    images: ImageStore
    node: NodeIdentity
    remote: RemoteCopies | None

    def describe(
        self, launch: LaunchSpec, gpus: GpuGrant | None = None
    ) -> tuple[Identity, BindMounts]:
        """The identity required of a snapshot of `launch` on these GPUs, and the host paths of the
        files that its process maps. Raises OSError."""
        layout = self.images.layout_of(launch)
        pairs = [
            (str(layout.prefix), "python"),
            *((str(site), f"env/{i}") for i, site in enumerate(layout.site)),
        ]
        rootfs = "" if layout.rootfs is None else str(layout.rootfs)
        return identity_of(launch, self.node, layout, gpus), BindMounts.of(
            pairs, built_image=launch.image is not None, rootfs=rootfs
        )
