"""Restores a worker into a waiting pod, instead of booting one there. Experimental, disabled by
default.

    find a validated snapshot → enter the pod (`entry`) → CRIU → control channel → pass both to the
    launcher, and leave

After any failure the pod boots cold: only mounts that nothing uses remain in it. Snapshots are made
from the node's own slots, so the pod's image must contain exactly the files that the worker maps
(CRIU compares their build ids); this is the case for functions without an image of their own, if
agent and functions run the same one.
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
from dataclasses import dataclass
from pathlib import Path

from snapshotter.checkpointing.api import SnapshotApi
from snapshotter.criu import operations
from snapshotter.criu.errors import CriuError
from snapshotter.criu.self_test_sandbox import SandboxProcess
from snapshotter.errors import SnapshotterError, Unsupported
from snapshotter.linux import amx, proc
from snapshotter.pods.entry import Brought, Entry, entered
from snapshotter.pods.pod_process import demand_own_namespaces, pidfd_of_peer
from snapshotter.slots import launch_plan
from snapshotter.slots.launch_plan import Sources
from snapshotter.slots.manager import StartPhase
from snapshotter.snapshots.components import SnapshotComponents
from snapshotter.snapshots.stored import Snapshot
from snapshotter.types import LaunchSpec

_log = logging.getLogger(__name__)
PART_OF_CLOCK = 0.25
"""Fraction of the startup timeout after which a restore is cancelled, to leave time for a boot."""
_WRITABLE_FLOOR_BYTES = 64 * 1024**2
_WORK = "p-"


@dataclass(kw_only=True)
class Returned:
    """A worker restored into its pod. After `control` was passed to the launcher, `kept` is set.

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
        self, snapshots: SnapshotApi, *, runtime: Mapping[str, Path], directory: Path
    ) -> None:
        """`directory`: private directory on this node for CRIU's work and its bundle."""
        self._snapshots = snapshots
        self._runtime = runtime
        self._directory = directory
        for left in directory.glob(f"{_WORK}*"):  # leftovers of an agent that was killed
            shutil.rmtree(left, ignore_errors=True)

    def __repr__(self) -> str:
        return f"<PodRestores {self._snapshots!r}>"

    def want(self, spec: LaunchSpec) -> None:
        """Request a snapshot after a pod had to boot cold."""
        if not spec.gpu:
            self._snapshots.want(spec)

    @contextlib.asynccontextmanager
    async def restored(
        self, spec: LaunchSpec, peer: socket.socket, *, code: Path, weights: Mapping[str, Path]
    ) -> AsyncIterator[Returned | None]:
        """Restore a worker into the pod at the other end of `peer`; it is killed at the end of the
        context unless it is kept. None: boot it cold."""
        async with contextlib.AsyncExitStack() as held:
            found: Returned | None = None
            snapshot: Snapshot | None = None
            try:
                async with asyncio.timeout(spec.startup_timeout_s * PART_OF_CLOCK):
                    stock, snapshot = await self._find(spec)
                    held.enter_context(stock.catalogue.lease(snapshot.id))
                    layout = stock.images.layout(spec.image, spec.engine, uid=spec.uid)
                    sources = Sources(
                        layout=layout, code=code, weights=weights, runtime=self._runtime
                    )
                    found = await self._into(
                        held, peer, stock, spec=spec, snapshot=snapshot, sources=sources
                    )
            except Unsupported as e:
                _log.info("pods.not_restored revision=%s reason=%s", spec.revision, e)
            except (CriuError, SnapshotterError, OSError, TimeoutError) as e:
                _log.warning(
                    "pods.restore_failed revision=%s error=%s",
                    spec.revision,
                    str(e) or type(e).__name__,
                )
                if snapshot is not None and isinstance(e, CriuError | TimeoutError):
                    await self._snapshots.selector.failed(
                        snapshot.id, "pod", str(e) or "the restore timed out"
                    )
            yield found
            if found is not None and found.kept and snapshot is not None:
                self._snapshots.selector.used(snapshot.id)

    async def _find(self, spec: LaunchSpec) -> tuple[SnapshotComponents, Snapshot]:
        stock = self._snapshots.stock
        if stock is None:
            raise Unsupported(f"this node has no snapshots: {self._snapshots.selector.why_not}")
        if spec.gpu:
            raise Unsupported(
                "a function with a GPU cannot be restored into a pod: its devices are "
                "assigned to the pod by its plugin, not to the node agent"
            )
        snapshot = await self._snapshots.selector.find(spec, StartPhase())
        if snapshot is None:
            raise Unsupported("this node has no validated snapshot of it")
        if snapshot.manifest.network:
            raise Unsupported(
                "its snapshot is of a server that requires the addresses of its original network, "
                "which a pod does not have"
            )
        return stock, snapshot

    async def _into(
        self,
        held: contextlib.AsyncExitStack,
        peer: socket.socket,
        stock: SnapshotComponents,
        *,
        spec: LaunchSpec,
        snapshot: Snapshot,
        sources: Sources,
    ) -> Returned:
        began = time.perf_counter()
        pidfd = pidfd_of_peer(peer)
        held.callback(os.close, pidfd)
        pod = demand_own_namespaces(pidfd)
        uid = spec.uid or 0
        self._directory.mkdir(mode=0o700, exist_ok=True)
        work = held.enter_context(_work_directory(self._directory))
        limits = launch_plan.limits(spec, uid=spec.uid, limits_memory=True, limits_pids=True)
        plan = launch_plan.plan(
            spec, sources, directory=work, uid=spec.uid, namespaced=True, limits=limits
        )
        (work / "launch.json").write_text(json.dumps(plan.launch_file))
        (work / "launch.json").chmod(0o444)
        writable_bytes = max(_WRITABLE_FLOOR_BYTES, spec.memory_bytes)
        brought = Brought(
            binds=plan.order["binds"],
            uid=uid,
            writable_bytes=writable_bytes,
            files=snapshot.files_tar,
            kdat=stock.kdat,
        )
        entry = await held.enter_async_context(entered(pidfd, brought, stock.kit))
        entered_at = time.perf_counter()
        stdio = held.enter_context(_stdio_of(pod)) if snapshot.manifest.stdio else ()
        restored_pid, worker = await _restore(
            entry, stock, snapshot, work, uid=uid, stdio=stdio, within_s=spec.startup_timeout_s
        )
        held.callback(worker.close)
        if worker.socket is None:
            raise Unsupported("the restored worker has no control channel")
        held.callback(worker.socket.close)
        await asyncio.to_thread(_apply_pod_settings, proc.host_pid(worker.pidfd), pod)
        phases = {
            "pod": (entered_at - began) * 1000,
            "restore": (time.perf_counter() - entered_at) * 1000,
        }
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
            deadline_s=within_s * PART_OF_CLOCK,
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
