"""Restore of one snapshot into a fresh slot. The result is equivalent to a worker booted to its
snapshot point.

    slot (taken, leases, layout) → furnish → criu → tiles → devices → revive
                 └ files and the image are read ahead ┘

The weight cache prefetches the weights while the slot holds them.

After any failure the slot is cleared completely. `selector` decides whether a snapshot may be used
and counts its failures."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pilotlight.core.background_tasks import BackgroundTasks
from snapshotter.criu import operations, page_map, working_set
from snapshotter.criu.errors import CriuError
from snapshotter.criu.lazy import LazyPages, PageRequest
from snapshotter.cuda.devices import Devices, NoDevices
from snapshotter.cuda.errors import CudaLost, CudaRefused
from snapshotter.cuda.gpu_mapping import DeviceRecord
from snapshotter.errors import SnapshotUnknown, StartFailed
from snapshotter.linux import amx, proc
from snapshotter.shim import cpu_priority, seqpacket
from snapshotter.shim.sandbox import mounts
from snapshotter.slots.allocator import SlotAllocator, SlotPreparation
from snapshotter.slots.occupied_slot import OccupiedSlot, StartPhase
from snapshotter.slots.replies import BootFailed, SlotConnectionLost
from snapshotter.slots.slot import SlotListener
from snapshotter.snapshots import readahead
from snapshotter.snapshots.components import SnapshotComponents
from snapshotter.snapshots.mapped_files import BindMounts
from snapshotter.snapshots.readahead import FileParts, ReadAhead
from snapshotter.snapshots.stored import Snapshot
from snapshotter.types import LaunchSpec

_log = logging.getLogger(__name__)
LAUNCH, DEVICES, ENVIRONMENT = "launch", "devices", "import_of"
"""Keys of a manifest's `point` that are private to the agent: the launch, its processes' GPU
resources, and the environment snapshot in which the worker was booted (absent if in none)."""
RESTORE_PHASES = frozenset({"restore", "cuda_restore", "cuda_unlock", "revive"})
"""The sequential phases of a restore; read-ahead runs in parallel."""


class RestoreFailed(Exception):
    """Raised when a snapshot cannot be restored; `reason` is one word for metrics, the message says
    what happened."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class SnapshotUnfit(RestoreFailed):
    """Raised when a snapshot does not fit the GPUs that were granted; it is not broken."""


class Restores:
    """Restores snapshots. Owner: the event loop; its only state are the watched page servers
    (`_watch`)."""

    def __init__(
        self,
        *,
        stock: SnapshotComponents,
        slot_allocator: SlotAllocator,
        devices: Devices,
        background_tasks: BackgroundTasks,
        pages: str = "auto",
    ) -> None:
        """`pages`: `auto`: as each snapshot's proof found faster; or `eager` or `lazy` for all."""
        self._stock = stock
        self._slot_allocator = slot_allocator
        self._devices = devices
        self._background_tasks = background_tasks
        self._pages = pages

    async def restore(
        self,
        spec: LaunchSpec,
        snapshot: Snapshot,
        phase: StartPhase,
        owner: SlotListener,
        *,
        deadline_s: float,
        lazy: bool | None = None,
        request: PageRequest | None = None,
        transient: bool = False,
    ) -> OccupiedSlot:
        """A worker at its snapshot point. `lazy` overrides the kind of pages that the proof found
        faster, `request` the working set that it recorded.

        Raises RestoreFailed, SnapshotUnfit, and the errors of provisioning a slot (BundleUnavailable, Unsupported,
        errors of the weight cache)."""
        network = snapshot.manifest.network
        pages = snapshot.manifest.pages if self._pages == "auto" else self._pages
        lazily = pages == "lazy" if lazy is None else lazy
        if lazily and request is None:
            proof = snapshot.manifest.proof
            request = PageRequest(
                working_set=working_set.decode(proof.working_set if proof else "")
            )
        with self._stock.catalogue.lease(snapshot.id):
            try:
                async with self._slot_allocator.provision(
                    spec, phase, owner, network=network, transient=transient
                ) as preparation:
                    phase.name = "restore"
                    await self._move(preparation, snapshot, request if lazily else None, deadline_s)
                    return preparation.occupied
            except (
                CriuError,
                CudaRefused,
                CudaLost,
                StartFailed,
                SlotConnectionLost,
                OSError,
                seqpacket.MessageTooLong,
            ) as e:
                raise RestoreFailed(
                    _word(e), f"snapshot {snapshot.id} of {spec.revision}: {e}"
                ) from e

    async def boot(
        self,
        spec: LaunchSpec,
        snapshot: Snapshot,
        phase: StartPhase,
        owner: SlotListener,
        *,
        deadline_s: float,
        network: bool = False,
        transient: bool = False,
    ) -> OccupiedSlot:
        """A worker of `spec` at its snapshot point, booted in a process that is restored from an
        environment snapshot. `deadline_s`: of the restore; the boot has none of its own.

        Raises RestoreFailed if the process did not come back, StartFailed if user code failed in
        it, and the errors of provisioning a slot."""
        with self._stock.catalogue.lease(snapshot.id):
            async with self._slot_allocator.provision(
                spec, phase, owner, network=network, transient=transient
            ) as preparation:
                occupied, phase.name = preparation.occupied, "queue"
                occupied.environment = snapshot.id
                self._slot_allocator.store_record(occupied)
                async with self._slot_allocator.boot_turn(phase):
                    phase.name = "restore"
                    await self._restore_environment(preparation, snapshot, deadline_s)
                    occupied.lower_cpu_priority(
                        cpu_priority.BACKGROUND if phase.is_background else cpu_priority.BOOT
                    )
                    phase.name = "import"
                    point = await occupied.slot.point
                occupied.boot_ms = {**occupied.boot_ms, **point.phases_ms}
            return occupied

    async def _restore_environment(
        self, preparation: SlotPreparation, snapshot: Snapshot, deadline_s: float
    ) -> None:
        """Raises RestoreFailed."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._move(preparation, snapshot, None, deadline_s, boots=True)
        except (
            CriuError,
            CudaRefused,
            CudaLost,
            BootFailed,
            SlotConnectionLost,
            OSError,
            seqpacket.MessageTooLong,
        ) as e:  # TimeoutError is an OSError
            word = "timeout" if isinstance(e, TimeoutError) else _word(e)
            what = f"environment snapshot {snapshot.id} for {preparation.occupied.launch.revision}"
            raise RestoreFailed(word, f"{what}: {e or 'it was not restored in time'}") from e

    async def _move(
        self,
        preparation: SlotPreparation,
        snapshot: Snapshot,
        lazy: PageRequest | None,
        deadline_s: float,
        *,
        boots: bool = False,
    ) -> None:
        """Restore the process and adopt it. `boots`: it then boots the slot's function, and its
        snapshot point follows."""
        occupied, manifest = preparation.occupied, snapshot.manifest
        slot = occupied.slot
        record = DeviceRecord.from_json(manifest.point[DEVICES])
        devices = self._devices if occupied.launch.gpu else NoDevices()
        target = occupied.gpus.uuids if occupied.gpus is not None else ()
        if not page_map.are_complete([name.rpartition("/")[2] for name in manifest.files]):
            lazy = None
        with _refused_devices(snapshot, occupied):
            devices.check_restore(record, target=target)
        ahead = _read_ahead(snapshot, preparation, lazy)
        try:
            with self._opened(snapshot, slot.directory) as (images, work, files, kdat):
                order = {**preparation.plan.order, "op": "furnish"}
                began = time.perf_counter()
                restored = await operations.restore(
                    slot,
                    criu=self._stock.criu,
                    images=images,
                    work=work,
                    uid=preparation.uid or 0,
                    cgroup=occupied.group.entry_files(),
                    stdio_keys=manifest.stdio,
                    lazy=lazy,
                    tcp=manifest.in_place,
                    deadline_s=deadline_s,
                    prepare=functools.partial(slot.prepare_restore, order, kdat, files),
                )
                restored_at = time.perf_counter()
                occupied.pages = restored.lazy
                if restored.lazy is not None:
                    self._background_tasks.run(
                        self._watch(restored.lazy, occupied, snapshot), f"pages of {slot.id}"
                    )
            if amx.has_tiles():
                await asyncio.to_thread(_grant_tiles, slot.shim_pid, restored.pid)
            gpu: Mapping[str, float] = {}
            if record.processes:
                pids = proc.process_tree(proc.inside(slot.shim_pid, restored.pid))
                gpu = await devices.after_restore(pids, record, target=target)
            whole_at = time.perf_counter()
            if boots:
                await slot.boot_restored(restored.pid, deadline_s)
            else:
                await slot.resume(restored.pid, _point(manifest.point), deadline_s)
        except BaseException:
            ahead.stop()
            raise
        revive_ms = _ms(whole_at, time.perf_counter())
        phases = {
            "prefetch": ahead.ms(),
            "restore": _ms(began, restored_at),
            **gpu,
            "revive": revive_ms,
        }
        occupied.boot_ms = {**occupied.boot_ms, **phases}
        if not boots:
            occupied.snapshot, occupied.whole = snapshot.id, manifest.in_place

    async def _watch(self, lazy: LazyPages, occupied: OccupiedSlot, snapshot: Snapshot) -> None:
        """Wait until all memory is transferred. If the page server dies, missing memory reads as
        zeros, so the process is killed."""
        with contextlib.ExitStack() as held:
            with contextlib.suppress(SnapshotUnknown):
                held.enter_context(self._stock.catalogue.lease(snapshot.id))
            status = await asyncio.shield(lazy.exited)
            await lazy.kill()
        slot = occupied.slot
        if not status or slot.is_lost or slot.is_ending:
            return
        _log.warning("pages.lost slot=%s snapshot=%s status=%s", slot.id, snapshot.id, status)
        for name in list(slot.running):
            slot.kill(name)
        slot.kill_worker()

    @contextlib.contextmanager
    def _opened(
        self, snapshot: Snapshot, slot_directory: Path
    ) -> Iterator[tuple[int, int, int, int]]:
        """Descriptors of the images, CRIU's working directory, the slot's files at the snapshot
        point, and kdat."""
        work = slot_directory / "criu"
        work.mkdir(mode=0o700, exist_ok=True)
        with contextlib.ExitStack() as stack:
            fds = []
            for path in (
                snapshot.images,
                work,
                snapshot.files_tar,
                self._stock.kdat or Path(os.devnull),
            ):
                fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
                stack.callback(os.close, fds[-1])
            yield fds[0], fds[1], fds[2], fds[3]


def _read_ahead(
    snapshot: Snapshot, preparation: SlotPreparation, lazy: PageRequest | None
) -> ReadAhead:
    """Read the parts of files that the process is known to use, then the image. Of the pages in the
    image the page server reads the working set itself, and CRIU needs those that are not lazy."""
    proof, order = snapshot.manifest.proof, preparation.plan.order
    has_working_set = lazy is not None and bool(lazy.working_set)

    def parts() -> FileParts:
        binds = BindMounts.of(order["binds"], built_image=False, rootfs=order.get("rootfs", ""))
        recorded = readahead.decode(proof.file_parts if proof else "")
        # weights last: the first call reads them, after CRIU has opened everything else
        order_of_use = sorted(recorded, key=lambda path: path.startswith(f"{mounts.ROOT}/weights/"))
        found = {host: recorded[path] for path in order_of_use if (host := binds.host_path(path))}
        return {**page_map.eager_parts(snapshot.images), **found} if has_working_set else found

    return ReadAhead([] if has_working_set else [snapshot.images], parts)


def _grant_tiles(shim_pid: int, pid: int) -> None:
    amx.request_tile_permission(proc.process_tree(proc.inside(shim_pid, pid)))


def _point(point: Mapping[str, Any]) -> dict[str, Any]:
    """The snapshot point without the agent's private keys."""
    return {key: value for key, value in point.items() if key not in (LAUNCH, DEVICES, ENVIRONMENT)}


@contextlib.contextmanager
def _refused_devices(snapshot: Snapshot, occupied: OccupiedSlot) -> Iterator[None]:
    """Raise what the devices refuse as SnapshotUnfit."""
    try:
        yield
    except CudaRefused as e:
        raise SnapshotUnfit(
            "devices", f"snapshot {snapshot.id} of {occupied.launch.revision}: {e}"
        ) from e


def _ms(began: float, ended: float) -> float:
    return (ended - began) * 1000


def _word(error: Exception) -> str:
    """The failure's reason in one word, for metrics."""
    words = {
        CriuError: "criu",
        CudaRefused: "devices",
        CudaLost: "devices",
        StartFailed: "revive",
        BootFailed: "revive",
        SlotConnectionLost: "slot_lost",
    }
    return next((word for kind, word in words.items() if isinstance(error, kind)), "node")
