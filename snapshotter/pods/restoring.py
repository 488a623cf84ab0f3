"""Restores a worker into a waiting pod, instead of booting one there; or boots one there in an
environment of the node, which the pod's own image does not have.

    find a validated snapshot → enter the pod (`entry`) → CRIU → GPUs → control channel → pass both
    to the launcher, and leave

After any failure the pod boots cold, and nothing of it remains in the pod. Snapshots are made from
the node's own slots, and a restored worker finds there what it had in its slot, by mounts that the
pod's other processes do not see: the node's interpreter, packages, programs and libraries (CRIU
compares the build ids of what is mapped). The pod's image only needs the directories over which
they are mounted. A function with a container image of its own finds the root file system of that,
which the node has pulled (`container_images`), restored or booted. The GPUs are those that the
device plugin gave the pod.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import shutil
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pilotlight.core.background_tasks import BackgroundTasks
from pilotlight.core.transport.calls_socket import CALLS_VARIABLE, POD_CALLS_SOCKET
from snapshotter.checkpointing.api import SnapshotApi
from snapshotter.criu import operations
from snapshotter.criu.errors import CriuError, CriuUnavailable
from snapshotter.criu.self_test_sandbox import SandboxProcess
from snapshotter.cuda.devices import Devices, NoDevices
from snapshotter.cuda.errors import CudaLost, CudaRefused
from snapshotter.cuda.gpu_mapping import DeviceRecord
from snapshotter.errors import BundleUnavailable, SnapshotterError, Unsupported
from snapshotter.images.oci.container_images import ContainerImages
from snapshotter.linux import amx, proc
from snapshotter.linux.egress_policy import INSIDE
from snapshotter.pods.entry import Brought, Entry, entered
from snapshotter.pods.entry_processes import NODE_DIRECTORY, EntryProcesses
from snapshotter.pods.pod_process import pidfd_of_peer, require_own_namespaces
from snapshotter.pods.promotions import POD_LABEL
from snapshotter.slots import launch_plan
from snapshotter.slots.boot_limiter import FairSemaphore
from snapshotter.slots.launch_plan import Plan, Sources
from snapshotter.slots.occupied_slot import StartPhase
from snapshotter.snapshots.components import SnapshotComponents
from snapshotter.snapshots.readahead import ReadAhead
from snapshotter.snapshots.restores import DEVICES
from snapshotter.snapshots.stored import Snapshot
from snapshotter.starts.strategy import restore_deadline_s
from snapshotter.types import (
    VISIBLE_DEVICES,
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
SCRATCH_DIRECTORY = Path("/scratch")
"""The pod's own disk (`pilotlight.kubernetes.manifests.pod`)."""
_WORK = "p-"


def of_any_pod(spec: LaunchSpec) -> LaunchSpec:
    """The launch without its pod: what snapshots are made of."""
    labels = {name: value for name, value in spec.labels.items() if name != POD_LABEL}
    return replace(spec, labels=labels)


@dataclass(kw_only=True)
class Returned:
    """A worker restored into its pod, or booted there. After `control` was passed to the launcher,
    `kept` is set.

    Attributes:
        pid: its pid in the pod.
    """

    pid: int
    control: socket.socket
    phases_ms: Mapping[str, float]
    kept: bool = False


class PodRestores:
    """Restores workers into pods. Owner: the event loop."""

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
        self._container_images = container_images
        self._background_tasks = BackgroundTasks()
        self._node_directory = node_directory
        self._snapshots = snapshots
        self._processes = processes
        self._runtime = runtime
        self._directory = directory
        self._devices = devices or NoDevices()
        self._gate = FairSemaphore(max(2, len(os.sched_getaffinity(0))))
        self._gpus = {gpu.uuid: gpu for gpu in gpus} | {str(gpu.minor): gpu for gpu in gpus}
        for left in directory.glob(f"{_WORK}*"):  # leftovers of an agent that was killed
            shutil.rmtree(left, ignore_errors=True)

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
            await self._pull(spec)
        except BundleUnavailable as e:
            _log.info("pods.no_image revision=%s reason=%s", spec.revision, e)
            return
        # of which GPUs are free the device plugin decides, not this agent
        if not spec.gpu:
            self._snapshots.want(of_any_pod(spec))

    async def _pull(self, spec: LaunchSpec) -> None:
        """Raises BundleUnavailable."""
        if self._container_images is not None and spec.image and spec.container_image:
            await self._container_images.ensure(spec.container_image, tenant=spec.tenant)

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
                    sources = self._sources(spec, code, weights)
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

    @contextlib.asynccontextmanager
    async def booted(
        self,
        spec: LaunchSpec,
        peer: socket.socket,
        *,
        code: Path,
        weights: Mapping[str, Path],
        gpus: Sequence[str] = (),
    ) -> AsyncIterator[Returned]:
        """Boot a worker in the root file system of its function's container image, which nothing in
        the pod could enter; it is killed at the end of the context unless it is kept. Raises
        BundleUnavailable, Unsupported, OSError."""
        sources = self._sources(spec, code, weights)
        if sources.layout.rootfs is None:
            raise Unsupported(f"the environment of {spec.revision} has no root file system")
        began = time.perf_counter()
        try:
            async with contextlib.AsyncExitStack() as held:
                pidfd = pidfd_of_peer(peer)
                held.callback(os.close, pidfd)
                pod = require_own_namespaces(pidfd)
                plan, _ = held.enter_context(self._planned(spec, sources))
                stdio = held.enter_context(_stdio_of(pod))
                brought = Brought(
                    binds=plan.order["binds"],
                    uid=spec.uid or 0,
                    writable_bytes=plan.order["writable_bytes"],
                    python=plan.order["python"],
                    files=Path(os.devnull),
                    kdat=None,
                    stdio=stdio,
                    **self._root_of(spec, sources),
                )
                kit = self._stock().kit
                entry = await held.enter_async_context(
                    entered(self._processes, pidfd, brought, kit)
                )
                names = ("argv", "work", "uid", "limits")
                command = {name: plan.order[name] for name in names}
                env = self._booted_env(spec, plan.order["env"], gpus)
                worker = await entry.boot({**command, "env": env})
                held.callback(worker.close)
                assert worker.socket is not None
                held.callback(worker.socket.close)
                host_pid = proc.host_pid(worker.pidfd)
                await asyncio.to_thread(_apply_pod_settings, host_pid, pod)
                found = Returned(
                    pid=worker.pid,
                    control=worker.socket,
                    phases_ms={"pod": round((time.perf_counter() - began) * 1000, 3)},
                )
                held.push_async_callback(_keep, entry, found)
                yield found
        except CriuError as e:
            raise Unsupported(f"the pod cannot be entered: {e}") from e

    def _booted_env(
        self, spec: LaunchSpec, planned: Mapping[str, str], gpus: Sequence[str]
    ) -> dict[str, str]:
        """Variables of a worker that is booted in a pod: as in a slot, with the pod's GPUs and the
        pod's way to other functions."""
        env = {name: value for name, value in planned.items() if name != VISIBLE_DEVICES}
        if gpus:
            env[VISIBLE_DEVICES] = ",".join(gpus)
        if not spec.offline:
            env[CALLS_VARIABLE] = str(self._node_directory / POD_CALLS_SOCKET)
        return env

    def has_root(self, spec: LaunchSpec) -> bool:
        """Whether the node has a root file system for it: then its worker is `booted`, else the
        pod's own launcher boots it. Raises BundleUnavailable, after which the image is pulled;
        Unsupported."""
        try:
            return self._stock().images.layout_of(spec).rootfs is not None
        except BundleUnavailable:
            self._background_tasks.run(self._prepare(spec), f"prepare {spec.revision}")
            raise

    def _stock(self) -> SnapshotComponents:
        """Raises Unsupported."""
        stock = self._snapshots.stock
        if stock is None:
            raise Unsupported(
                f"this node shows pods no environments: {self._snapshots.selector.why_not}"
            )
        return stock

    def _sources(self, spec: LaunchSpec, code: Path, weights: Mapping[str, Path]) -> Sources:
        """Raises BundleUnavailable, Unsupported."""
        layout = self._stock().images.layout_of(spec)
        return Sources(layout=layout, code=code, weights=weights, runtime=self._runtime)

    def _root_of(self, spec: LaunchSpec, sources: Sources) -> dict[str, Any]:
        """What `Brought` says of the root file system."""
        if sources.layout.rootfs is None:
            return {}
        kept = [str(self._node_directory), str(SCRATCH_DIRECTORY)]
        return {"rootfs": sources.layout.rootfs, "kept": kept, "driver": bool(spec.gpu)}

    async def furnish(
        self, spec: LaunchSpec, peer: socket.socket, *, code: Path, weights: Mapping[str, Path]
    ) -> Mapping[str, Any]:
        """Build in the pod the tree of a slot for an environment of this node, which the pod's own
        image does not have; returns what the launcher executes there: `argv`, `env`, `work`,
        and the number of the control channel. Raises BundleUnavailable, Unsupported, OSError."""
        stock, sources = self._stock(), self._sources(spec, code, weights)
        if sources.layout.rootfs is not None:
            raise Unsupported(f"{spec.revision} has a root file system of its own: it is `booted`")
        pidfd = pidfd_of_peer(peer)
        try:
            require_own_namespaces(pidfd)
            with self._planned(spec, sources) as (plan, _):
                brought = Brought(
                    binds=plan.order["binds"],
                    uid=spec.uid or 0,
                    writable_bytes=plan.order["writable_bytes"],
                    python=plan.order["python"],
                    files=Path(os.devnull),
                    kdat=None,
                    restores=False,
                )
                async with entered(self._processes, pidfd, brought, stock.kit):
                    shown = {name: plan.order[name] for name in ("argv", "env", "work")}
                    return {**shown, "control_fd": plan.launch_file["control_fd"]}
        except CriuError as e:
            raise Unsupported(f"the pod cannot be entered: {e}") from e
        finally:
            os.close(pidfd)

    @contextlib.contextmanager
    def _planned(self, spec: LaunchSpec, sources: Sources) -> Iterator[tuple[Plan, Path]]:
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
        uid = spec.uid or 0
        plan, work = held.enter_context(self._planned(spec, sources))
        brought = Brought(
            binds=plan.order["binds"],
            uid=uid,
            writable_bytes=plan.order["writable_bytes"],
            python=plan.order["python"],
            files=snapshot.files_tar,
            kdat=stock.kdat,
            address=INSIDE if snapshot.manifest.network else "",
            **self._root_of(spec, sources),
        )
        entry = await held.enter_async_context(entered(self._processes, pidfd, brought, stock.kit))
        entered_at = time.perf_counter()
        stdio = held.enter_context(_stdio_of(pod)) if snapshot.manifest.stdio else ()
        restored_pid, worker = await _restore(
            entry, stock, snapshot, work, uid=uid, stdio=stdio, within_s=spec.startup_timeout_s
        )
        held.callback(worker.close)
        if worker.socket is None:
            raise Unsupported("the restored worker has no control channel")
        held.callback(worker.socket.close)
        host_pid = proc.host_pid(worker.pidfd)
        await asyncio.to_thread(_apply_pod_settings, host_pid, pod)
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
        held.push_async_callback(_keep, entry, found)
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


async def _keep(entry: Entry, found: Returned) -> None:
    """Keep the worker before the sandbox is closed, if it was passed on; otherwise it is killed,
    which its launcher detects."""
    if found.kept:
        try:
            await entry.keep()
        except CriuError as e:
            _log.warning("pods.not_kept pid=%d error=%s", found.pid, e)


def _port(address: str) -> int:
    """The port of `127.0.0.1:8000`, `[::]:8000`; 0 if there is none."""
    port = address.rpartition(":")[2]
    return int(port) if port.isdigit() else 0


def _apply_pod_settings(worker: int, pod: int) -> None:
    """Apply the pod's OOM score, which CRIU does not restore, and the permission for the
    processor's tiles."""
    if amx.has_tiles():
        amx.request_tile_permission(proc.process_tree(worker))
    score = Path(f"/proc/{pod}/oom_score_adj").read_text()
    for one in proc.process_tree(worker):
        with contextlib.suppress(OSError):
            Path(f"/proc/{one}/oom_score_adj").write_text(score)


@contextlib.contextmanager
def _work_directory(directory: Path) -> Iterator[Path]:
    work = directory / f"{_WORK}{secrets.token_hex(8)}"
    work.mkdir(mode=0o755)
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def _stdio_of(pod: int) -> Iterator[tuple[int, ...]]:
    """The launcher's stdout and stderr, for a worker that had its own when it was dumped."""
    fds: list[int] = []
    try:
        for number in (1, 2):
            try:
                fds.append(
                    os.open(f"/proc/{pod}/fd/{number}", os.O_WRONLY | os.O_CLOEXEC | os.O_APPEND)
                )
            except OSError:  # a socket: output before the worker serves is lost
                fds.append(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC))
        yield tuple(fds)
    finally:
        for fd in fds:
            os.close(fd)
