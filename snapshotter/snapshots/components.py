"""What a node has that makes and restores snapshots: the parts that all others here share."""

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
from snapshotter.types import LaunchSpec


@dataclass(frozen=True, kw_only=True)
class SnapshotComponents:
    """Parts, not state.

    Attributes:
        kdat: what CRIU found out about this kernel, put into each slot so that it is not found out
        again; None: it looks for itself. kit: of CRIU for slots whose file system is a tenant's.
        remote: None: copies go nowhere and come from nowhere.
    """

    catalogue: Catalog
    criu: Criu
    kit: CriuBundle
    kdat: Path | None
    images: ImageStore
    node: NodeIdentity
    remote: RemoteCopies | None

    def describe(self, launch: LaunchSpec) -> tuple[Identity, BindMounts]:
        """What a snapshot of `launch` must be of, and where the files lie here that its process
        maps. Raises OSError."""
        layout = self.images.layout(launch.image, launch.engine, uid=launch.uid)
        pairs = [
            (str(layout.prefix), "python"),
            *((str(site), f"env/{i}") for i, site in enumerate(layout.site)),
        ]
        rootfs = "" if layout.rootfs is None else str(layout.rootfs)
        return identity_of(launch, self.node, layout), BindMounts.of(
            pairs, built_image=launch.image is not None, rootfs=rootfs
        )
