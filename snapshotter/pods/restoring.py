"""Restores a worker into a waiting pod, instead of booting one there (`booting`).

    find a validated snapshot → enter the pod (`entry`) → CRIU → GPUs → control channel → pass both
    to the launcher, and leave

After any failure the pod boots cold, and nothing of it remains in the pod. Snapshots are made from
the node's own slots, and a restored worker finds there what it had in its slot, by mounts that the
pod's other processes do not see: the node's interpreter, packages, programs and libraries (CRIU
compares the build ids of what is mapped). The pod's image only needs the directories over which
they are mounted. A function with a container image of its own finds the root file system of that,
which the node has pulled (`container_images`). The GPUs are those that the device plugin gave the
pod.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pilotlight.core.background_tasks import BackgroundTasks
from snapshotter.checkpointing.api import SnapshotApi
from snapshotter.criu import operations
from snapshotter.criu.errors import CriuError, CriuUnavailable
from snapshotter.criu.self_test_sandbox import SandboxProcess
from snapshotter.cuda.devices import Devices, NoDevices
from snapshotter.cuda.errors import CudaLost, CudaRefused
from snapshotter.cuda.gpu_mapping import DeviceRecord
from snapshotter.errors import BundleUnavailable, SnapshotterError, Unsupported
from snapshotter.images.oci.container_images import ContainerImages
from snapshotter.linux import proc
from snapshotter.linux.egress_policy import INSIDE
from snapshotter.pods.booting import PodBoots
from snapshotter.pods.entered_worker import (
    Returned,
    apply_pod_settings,
    keep_if_passed_on,
    stdio_of,
)
from snapshotter.pods.entry.pod_entry import Entry, entered
from snapshotter.pods.entry.processes import NODE_DIRECTORY, EntryProcesses
from snapshotter.pods.environments import PodEnvironments
from snapshotter.pods.pod_process import pidfd_of_peer, require_own_namespaces
from snapshotter.pods.promotions import POD_LABEL
from snapshotter.slots.boot_limiter import FairSemaphore
from snapshotter.slots.launch_plan import Sources
from snapshotter.slots.occupied_slot import StartPhase
from snapshotter.snapshots.components import SnapshotComponents
from snapshotter.snapshots.readahead import ReadAhead
from snapshotter.snapshots.restores import DEVICES
from snapshotter.snapshots.stored import Snapshot
from snapshotter.starts.strategy import restore_deadline_s
from snapshotter.types import (
    GpuDevice,
    GpuGrant,
    LaunchSpec,
    StartKind,
    TenantShare,
)

_log = logging.getLogger(__name__)
PART_OF_CLOCK = 0.25
"""Fraction of the startup timeout for what precedes a restore, to leave time for a boot."""
OUR_PORTS = range(8079, 8096)
"""Ports of a pod that its launcher and instances use (`pilotlight.protocol.POD_CONTROL_PORT`): a
server that listened on one of them cannot be restored there."""
_AT_ONCE_MS = 1.0


def of_any_pod(spec: LaunchSpec) -> LaunchSpec:
    """The launch without its pod: what snapshots are made of."""
    labels = {name: value for name, value in spec.labels.items() if name != POD_LABEL}
    return replace(spec, labels=labels)


class PodRestores:
    """Restores workers into pods. Owner: the event loop.

    Attributes:
        boots: boots workers there that are not restored.
    """

    def __init__(
        self,
        snapshots: SnapshotApi,
        *,
        processes: EntryProcesses,
        runtime: Mapping[str, Path],
        directory: Path,
        devices: Devices | None = None,
        gpus: Sequence[GpuDevice] = (),
        container_images: ContainerImages | None = None,
        node_directory: Path = NODE_DIRECTORY,
    ) -> None:
        """`directory`: private directory on this node for CRIU's work and its bundle. `devices`: of
        functions with GPUs. `gpus`: all of this node. `container_images`: None: no function with an
        image of its own is restored or booted. `node_directory`: where pods see that of their
        tenant."""
        self._environments = PodEnvironments(
            snapshots,
            runtime=runtime,
            directory=directory,
            container_images=container_images,
            node_directory=node_directory,
        )
        self.boots = PodBoots(self._environments, processes)
        self._background_tasks = BackgroundTasks()
        self._snapshots = snapshots
        self._processes = processes
        self._devices = devices or NoDevices()
        self._gate = FairSemaphore(max(2, len(os.sched_getaffinity(0))))
        self._gpus = {gpu.uuid: gpu for gpu in gpus} | {str(gpu.minor): gpu for gpu in gpus}

    def __repr__(self) -> str:
        return f"<PodRestores {self._snapshots!r}>"

    async def aclose(self) -> None:
        """Prepare nothing further."""
        await self._background_tasks.aclose()

    def took(self, spec: LaunchSpec, kind: StartKind, ms: float) -> None:
        """Record the duration of a start; request a snapshot after a pod had to boot cold."""
        if kind in (StartKind.RESTORE, StartKind.COLD):
            self._snapshots.selector.took(spec, kind, ms)
        if kind is StartKind.COLD:
            self._background_tasks.run(self._prepare(spec), f"prepare {spec.revision}")

    async def _prepare(self, spec: LaunchSpec) -> None:
        """Have what the next pod of the revision needs: its image, then a snapshot."""
        try:
            await self._environments.pull(spec)
        except BundleUnavailable as e:
            _log.info("pods.no_image revision=%s reason=%s", spec.revision, e)
            return
        # of which GPUs are free the device plugin decides, not this agent
        if not spec.gpu:
            self._snapshots.want(of_any_pod(spec))

    @contextlib.asynccontextmanager
    async def restored(
        self,
        spec: LaunchSpec,
        peer: socket.socket,
        *,
        code: Path,
        weights: Mapping[str, Path],
        gpus: Sequence[str] = (),
    ) -> AsyncIterator[Returned | None]:
        """Restore a worker into the pod at the other end of `peer`; it is killed at the end of the
        context unless it is kept. None: boot it cold. `gpus`: UUIDs or numbers of the pod's."""
        async with contextlib.AsyncExitStack() as held:
            found: Returned | None = None
            snapshot: Snapshot | None = None
            try:
                async with asyncio.timeout(spec.startup_timeout_s * PART_OF_CLOCK) as limit:
                    grant = self._grant(spec, gpus)
                    stock, snapshot = await self._find(spec, grant)
                    held.enter_context(stock.catalogue.lease(snapshot.id))
                    sources = self._environments.sources(spec, code, weights)
                    async with self._turn(spec) as queued_ms:
                        deadline_s = self._deadline_s(spec, snapshot)
                        limit.reschedule(asyncio.get_running_loop().time() + deadline_s)
                        found = await self._into(
                            held,
                            peer,
                            stock,
                            spec=spec,
                            snapshot=snapshot,
                            sources=sources,
                            grant=grant,
                        )
                    if queued_ms > _AT_ONCE_MS:
                        found.phases_ms = {"queue": queued_ms, **found.phases_ms}
            except (Unsupported, BundleUnavailable, CudaRefused) as e:
                _log.info("pods.not_restored revision=%s reason=%s", spec.revision, e)
            except (CriuError, SnapshotterError, CudaLost, OSError, TimeoutError) as e:
                _log.warning(
                    "pods.restore_failed revision=%s error=%s",
                    spec.revision,
                    str(e) or type(e).__name__,
                )
                if (
                    snapshot is not None
                    and isinstance(e, CriuError | CudaLost | TimeoutError)
                    and not isinstance(e, CriuUnavailable)  # the pod was not entered
                ):
                    await self._snapshots.selector.failed(
                        snapshot.id, "pod", str(e) or "the restore timed out"
                    )
            yield found
            if found is not None and found.kept and snapshot is not None:
                self._snapshots.selector.used(snapshot.id)

    def has_root(self, spec: LaunchSpec) -> bool:
        """Whether the node has a root file system for it: then its worker is booted by the agent
        (`PodBoots.booted`), else by the pod's own launcher. Raises BundleUnavailable, after which
        the image is pulled; Unsupported."""
        try:
            return self._environments.stock().images.layout_of(spec).rootfs is not None
        except BundleUnavailable:
            self._background_tasks.run(self._prepare(spec), f"prepare {spec.revision}")
            raise

    def _grant(self, spec: LaunchSpec, gpus: Sequence[str]) -> GpuGrant | None:
        """The pod's GPUs, by what its device plugin named. Raises Unsupported."""
        if not spec.gpu_count:
            return None
        devices = tuple(self._gpus[name] for name in gpus if name in self._gpus)
        if len(devices) != spec.gpu_count or len(gpus) != spec.gpu_count:
            raise Unsupported(
                f"it has {spec.gpu_count} GPUs, and its pod names {', '.join(gpus) or 'none'} of "
                f"{len(self._gpus) // 2} on this node"
            )
        return GpuGrant(kind=devices[0].kind, devices=devices)

    async def _find(
        self, spec: LaunchSpec, grant: GpuGrant | None
    ) -> tuple[SnapshotComponents, Snapshot]:
        """A snapshot that fits the node, the pod's GPUs and its ports. Raises Unsupported,
        BundleUnavailable, CudaRefused."""
        stock = self._snapshots.stock
        if stock is None:
            raise Unsupported(f"this node has no snapshots: {self._snapshots.selector.why_not}")
        snapshot = await self._snapshots.selector.find(spec, StartPhase(gpus=grant))
        if snapshot is None:
            raise Unsupported("this node has no validated snapshot of it")
        taken = [at for at in snapshot.manifest.point.get("listens", ()) if _port(at) in OUR_PORTS]
        if taken:
            raise Unsupported(f"it listens on {', '.join(taken)}, a port of the platform in pods")
        record = DeviceRecord.from_json(snapshot.manifest.point[DEVICES])
        self._of(spec).check_restore(record, target=grant.uuids if grant is not None else ())
        return stock, snapshot

    @contextlib.asynccontextmanager
    async def _turn(self, spec: LaunchSpec) -> AsyncIterator[float]:
        """One of as many restores as there are processors, tenants in turn: more only slow each
        other down. Yields how long it waited (ms). Raises Unsupported when it takes too long."""
        began = time.perf_counter()
        try:
            async with asyncio.timeout(spec.startup_timeout_s * PART_OF_CLOCK / 2):
                await self._gate.acquire(TenantShare(tenant=spec.tenant))
        except TimeoutError:
            raise Unsupported("other restores have taken all processors for too long") from None
        try:
            yield round((time.perf_counter() - began) * 1000, 3)
        finally:
            self._gate.release()

    def _of(self, spec: LaunchSpec) -> Devices:
        return self._devices if spec.gpu else NoDevices()

    def _deadline_s(self, spec: LaunchSpec, snapshot: Snapshot) -> float:
        """How long the restore may take before the pod boots. Raises Unsupported if that is
        expected to be faster."""
        selector = self._snapshots.selector
        restore_ms, cold_ms = selector.restore_ms(spec, snapshot), selector.cold_ms(spec)
        deadline_s = restore_deadline_s(
            restore_ms=restore_ms, cold_ms=cold_ms, left_s=spec.startup_timeout_s
        )
        if deadline_s is None:
            selector.passed_over(spec, snapshot)
            raise Unsupported(
                f"COLD is expected to take {cold_ms:.0f} ms and RESTORE {restore_ms:.0f} ms"
            )
        return deadline_s

    async def _into(
        self,
        held: contextlib.AsyncExitStack,
        peer: socket.socket,
        stock: SnapshotComponents,
        *,
        spec: LaunchSpec,
        snapshot: Snapshot,
        sources: Sources,
        grant: GpuGrant | None,
    ) -> Returned:
        began = time.perf_counter()
        pidfd = pidfd_of_peer(peer)
        held.callback(os.close, pidfd)
        pod = require_own_namespaces(pidfd)
        plan, work = held.enter_context(self._environments.planned(spec, sources))
        brought = self._environments.brought(
            spec,
            sources,
            plan,
            files=snapshot.files_tar,
            kdat=stock.kdat,
            address=INSIDE if snapshot.manifest.network else "",
        )
        entry = await held.enter_async_context(entered(self._processes, pidfd, brought, stock.kit))
        entered_at = time.perf_counter()
        stdio = held.enter_context(stdio_of(pod)) if snapshot.manifest.stdio else ()
        restored_pid, worker = await _restore(
            entry,
            stock,
            snapshot,
            work,
            uid=spec.uid or 0,
            stdio=stdio,
            within_s=spec.startup_timeout_s,
        )
        held.callback(worker.close)
        if worker.socket is None:
            raise Unsupported("the restored worker has no control channel")
        held.callback(worker.socket.close)
        host_pid = proc.host_pid(worker.pidfd)
        await asyncio.to_thread(apply_pod_settings, host_pid, pod)
        phases = {
            "pod": (entered_at - began) * 1000,
            "restore": (time.perf_counter() - entered_at) * 1000,
        }
        record = DeviceRecord.from_json(snapshot.manifest.point[DEVICES])
        if record.processes:
            target = grant.uuids if grant is not None else ()
            tree = proc.process_tree(host_pid)
            phases |= await self._of(spec).after_restore(tree, record, target=target)
        found = Returned(
            pid=restored_pid,
            control=worker.socket,
            phases_ms={name: round(ms, 3) for name, ms in phases.items()},
        )
        held.push_async_callback(keep_if_passed_on, entry, found)
        return found


async def _restore(
    entry: Entry,
    stock: SnapshotComponents,
    snapshot: Snapshot,
    work: Path,
    *,
    uid: int,
    stdio: Sequence[int],
    within_s: float,
) -> tuple[int, SandboxProcess]:
    entry.stdio = tuple(stdio)
    with contextlib.ExitStack() as opened:
        opened.callback(ReadAhead([snapshot.images]).stop)
        fds = []
        for path in (snapshot.images, work):
            fds.append(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            opened.callback(os.close, fds[-1])
        restored = await operations.restore(
            entry,
            criu=stock.criu,
            images=fds[0],
            work=fds[1],
            uid=uid,
            cgroup={},
            stdio_keys=snapshot.manifest.stdio,
            tcp=snapshot.manifest.in_place,
            deadline_s=within_s,
        )
    return restored.pid, await entry.attach(restored.pid)


def _port(address: str) -> int:
    """The port of `127.0.0.1:8000`, `[::]:8000`; 0 if there is none."""
    port = address.rpartition(":")[2]
    return int(port) if port.isdigit() else 0
