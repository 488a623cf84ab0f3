"""What a worker in a pod finds of its node: the files of its function's environment, and how they
are laid out there."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from snapshotter.checkpointing.api import SnapshotApi
from snapshotter.errors import Unsupported
from snapshotter.images.oci.container_images import ContainerImages
from snapshotter.pods.entry.pod_entry import Brought
from snapshotter.pods.entry.processes import NODE_DIRECTORY
from snapshotter.slots import launch_plan
from snapshotter.slots.launch_plan import Plan, Sources
from snapshotter.snapshots.components import SnapshotComponents
from snapshotter.types import LaunchSpec

SCRATCH_DIRECTORY = Path("/scratch")
"""The pod's own disk (`pilotlight.kubernetes.manifests.pod`)."""
_WORK = "p-"


class PodEnvironments:
    """Environments of this node for workers in pods. Owner: the event loop."""

    def __init__(
        self,
        snapshots: SnapshotApi,
        *,
        runtime: Mapping[str, Path],
        directory: Path,
        container_images: ContainerImages | None = None,
        node_directory: Path = NODE_DIRECTORY,
    ) -> None:
        """`directory`: private directory on this node for launch files. Others: see
        `restoring.PodRestores`."""
        self._snapshots = snapshots
        self._runtime = runtime
        self._directory = directory
        self._container_images = container_images
        self.node_directory = node_directory
        for left in directory.glob(f"{_WORK}*"):  # leftovers of an agent that was killed
            shutil.rmtree(left, ignore_errors=True)

    def __repr__(self) -> str:
        return f"<PodEnvironments {self._directory}>"

    async def pull(self, spec: LaunchSpec) -> None:
        """Pull the container image of a function. Raises BundleUnavailable."""
        if self._container_images is not None and spec.image and spec.container_image:
            await self._container_images.ensure(spec.container_image, tenant=spec.tenant)

    def stock(self) -> SnapshotComponents:
        """The node's images and snapshots. Raises Unsupported."""
        stock = self._snapshots.stock
        if stock is None:
            raise Unsupported(
                f"this node shows pods no environments: {self._snapshots.selector.why_not}"
            )
        return stock

    def sources(self, spec: LaunchSpec, code: Path, weights: Mapping[str, Path]) -> Sources:
        """Where the files of a worker are. Raises BundleUnavailable, Unsupported."""
        layout = self.stock().images.layout_of(spec)
        return Sources(layout=layout, code=code, weights=weights, runtime=self._runtime)

    def brought(self, spec: LaunchSpec, sources: Sources, plan: Plan, **others: Any) -> Brought:
        """What the agent provides in a pod for a planned worker. `others`: see `Brought`."""
        if sources.layout.rootfs is not None:
            others["rootfs"] = sources.layout.rootfs
            others["kept"] = [str(self.node_directory), str(SCRATCH_DIRECTORY)]
            others["driver"] = bool(spec.gpu)
        return Brought(
            binds=plan.order["binds"],
            uid=spec.uid or 0,
            writable_bytes=plan.order["writable_bytes"],
            python=plan.order["python"],
            **others,
        )

    @contextlib.contextmanager
    def planned(self, spec: LaunchSpec, sources: Sources) -> Iterator[tuple[Plan, Path]]:
        """How a worker finds its files, and a directory with its launch file."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        limits = launch_plan.limits(spec, uid=spec.uid, limits_memory=True, limits_pids=True)
        with _work_directory(self._directory) as work:
            plan = launch_plan.plan(
                spec, sources, directory=work, uid=spec.uid, namespaced=True, limits=limits
            )
            (work / "launch.json").write_text(json.dumps(plan.launch_file))
            (work / "launch.json").chmod(0o444)
            yield plan, work


@contextlib.contextmanager
def _work_directory(directory: Path) -> Iterator[Path]:
    work = directory / f"{_WORK}{secrets.token_hex(8)}"
    work.mkdir(mode=0o755)
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
