"""Dump of a worker at its snapshot point to images on disk: choose the process, quiesce it, dump
it, keep the slot's files.

What cannot be in a snapshot is found by the worker, in its own process tree
(`pilotlight.worker.snapshot.snapshot_blockers`), and on GPUs by `snapshotter.cuda.gpu_blockers`."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import json
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from snapshotter.criu import operations, page_map, zero_pages
from snapshotter.criu.errors import CriuError, CriuFailed, CriuReason
from snapshotter.cuda.devices import Devices, NoDevices, Suspension
from snapshotter.cuda.errors import CudaFailed, CudaLost, CudaRefused
from snapshotter.cuda.gpu_mapping import DeviceRecord
from snapshotter.linux import proc
from snapshotter.shim import cpu_priority
from snapshotter.shim.sandbox import mounts
from snapshotter.slots import replies
from snapshotter.slots.allocator import SlotAllocator
from snapshotter.slots.occupied_slot import OccupiedSlot, StartPhase
from snapshotter.snapshots import mapped_files, memory_report
from snapshotter.snapshots.components import SnapshotComponents
from snapshotter.snapshots.manifest import SnapshotManifest
from snapshotter.snapshots.restores import DEVICES, ENVIRONMENT, LAUNCH
from snapshotter.snapshots.stored import Snapshot, SnapshotStaging
from snapshotter.starts.teardown import Teardown
from snapshotter.starts.template_boot import TemplateBooter
from snapshotter.starts.templates import Template, Templates
from snapshotter.types import GpuGrant, LaunchSpec

_DEADLINE_S = 120.0
"""A dump writes at disk speed: 30 GB at 250 MB/s."""
_UNSEEN = (CriuReason.UNIX_PEER, CriuReason.TCP_CONNECTION)
"""A connection that the worker's own scan, just before, did not find: not one that `enter()` left
open, which the scan names with its source line."""
_PASSING = (
    CriuReason.NO_MEMORY,
    CriuReason.NO_PROCESS,
    CriuReason.TRACED,
    CriuReason.OTHER,
    *_UNSEEN,
)
"""Temporary reasons, or those of a process that was removed meanwhile; all other reasons will
recur."""
SMAPS_BYTES = 16 * 1024 * 1024
"""Limit for the smaps of one tree, some 23,000 mappings: Python with torch has 3,000. They only
explain an image."""
MAPS_BYTES = 16 * 1024 * 1024
"""Limit for the maps and open files of one tree, which must be complete: some 200,000 mappings."""
_QUIESCE_S = 30.0
"""Time to fork, drop caches, and detect obstacles: 0.1 s, longer on a node under load."""


class DumpBlocked(Exception):
    """Raised when something in the process prevents a dump; `reasons` as in SnapshotRefused.
    `passing`: the cause may be temporary."""

    def __init__(
        self, message: str, reasons: Sequence[Mapping[str, Any]], *, passing: bool = False
    ) -> None:
        super().__init__(message)
        self.reasons = [dict(reason) for reason in reasons]
        self.passing = passing


class InstanceStartedDuringDump(Exception):
    """Raised when an instance started from the dumped Template, and could have changed files that
    the dump was reading."""


class TemplateGone(Exception):
    """Raised when a background snapshot's Template was dropped."""


@dataclass(frozen=True, kw_only=True)
class _Subject:
    """The dumped process: for a Template a pristine fork, otherwise the worker itself."""

    occupied: OccupiedSlot
    in_place: bool
    network: bool


class Dumps:
    """Dumps workers; stateless. Owner: the event loop.

    Attributes:
        on_booted: receives each worker that is booted for a dump, at its snapshot point.
    """

    def __init__(
        self,
        *,
        stock: SnapshotComponents,
        template_booter: TemplateBooter,
        templates: Templates,
        slot_allocator: SlotAllocator,
        ends: Teardown,
        devices: Devices,
        has_templates: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`has_templates`: False on a node of a cluster, whose functions run in pods: there a
        worker is booted for each snapshot, also unasked, and no Template stays behind."""
        self._has_templates = has_templates
        self._stock = stock
        self._template_booter = template_booter
        self._templates = templates
        self._slot_allocator = slot_allocator
        self._ends = ends
        self._devices = devices
        self._clock = clock
        self.on_booted: Callable[[OccupiedSlot], None] = _ignore

    async def dump(
        self,
        launch: LaunchSpec,
        stage: SnapshotStaging,
        *,
        unasked: bool,
        gpus: GpuGrant | None = None,
    ) -> SnapshotManifest:
        """Fill `stage`; returns the manifest without its files. `gpus`: of the worker that is
        booted for it.

        Raises DumpBlocked, InstanceStartedDuringDump, TemplateGone, SlotConnectionLost,
        OSError, and the errors of a boot."""
        async with self._subject(launch, unasked=unasked, gpus=gpus) as subject:
            point = subject.occupied.slot.point.result()
            if point.obstacles:
                is_full = all(obstacle["kind"] == "disk" for obstacle in point.obstacles)
                raise _obstructed(point.obstacles, passing=is_full)
            try:
                manifest = await self._dump(subject, stage)
            except replies.CheckpointFailed as e:
                raise _obstructed(e.obstacles, str(e)) from e
            except TimeoutError as e:
                raise _obstructed(
                    [],
                    f"it did not quiesce within {_QUIESCE_S:g} s",
                    kind="timeout",
                    passing=True,
                ) from e
            except CudaRefused as e:
                raise _obstructed(e.detail["reasons"], str(e)) from e
            except (CudaFailed, CudaLost) as e:
                raise _obstructed([], str(e), kind=e.code, passing=True) from e
            except CriuFailed as e:
                if e.reason is CriuReason.NO_SPACE:
                    raise OSError(errno.ENOSPC, "no space left for the images") from e
                message = (
                    f"a connection was open during the dump that was not open before it: "
                    f"{e.cause or e.message}"
                    if e.reason in _UNSEEN
                    else e.message
                )
                raise _obstructed(
                    [], message, kind=e.reason.value, passing=e.reason in _PASSING
                ) from e
            except CriuError as e:
                raise _obstructed([], str(e), kind="criu", passing=True) from e
            if not subject.occupied.is_pristine:
                raise InstanceStartedDuringDump(
                    f"an instance of {launch.revision} started while its Template was dumped"
                )
            return manifest

    @contextlib.asynccontextmanager
    async def _subject(
        self, launch: LaunchSpec, *, unasked: bool, gpus: GpuGrant | None
    ) -> AsyncIterator[_Subject]:
        """The resident Template if no instance has run from it yet, otherwise a worker booted for
        this purpose. A booted worker that cannot be forked is consumed by the dump, and a process
        that was restored at its snapshot point is never snapshotted again."""
        fresh = None
        if (
            self._has_templates
            and launch.forkable
            and not gpus
            and not self._templates.is_single(launch.revision)
        ):
            template = self._templates.get(launch.revision)
            if template is None and unasked:
                raise TemplateGone(f"the Template of {launch.revision} was dropped")
            if template is None:
                await self._template_booter.ensure(launch)
                template = fresh = self._templates.get(launch.revision)
            if (
                template is not None
                and _is_as_booted(template.occupied)
                and not _whole(template.occupied)
            ):
                with self._template_booter.pinned(template):
                    yield _Subject(occupied=template.occupied, in_place=False, network=False)
                return
        async with self._whole_tree(launch, fresh, unasked=unasked, gpus=gpus) as subject:
            yield subject

    @contextlib.asynccontextmanager
    async def _whole_tree(
        self, launch: LaunchSpec, fresh: Template | None, *, unasked: bool, gpus: GpuGrant | None
    ) -> AsyncIterator[_Subject]:
        """A worker for this purpose, booted again in its own network namespace if it turns out to
        listen on TCP.

        fresh: a Template that was just booted for it and turned out not to be forkable."""
        occupied = self._take_template(fresh, unasked=unasked)
        if occupied is None and (
            launch.offline or not self._slot_allocator.is_listening(launch.revision)
        ):
            occupied = await self._slot_allocator.boot(
                launch,
                StartPhase(is_background=unasked, gpus=gpus),
                self._ends,
                transient=True,
            )
        network = not launch.offline and (
            occupied is None or bool(occupied.slot.point.result().listens)
        )
        if occupied is None or network:
            if occupied is not None:
                await self._slot_allocator.clear(occupied)
            occupied = await self._slot_allocator.boot(
                launch,
                StartPhase(is_background=unasked, gpus=gpus),
                self._ends,
                network=True,
                transient=True,
            )
        self.on_booted(occupied)
        try:
            yield _Subject(occupied=occupied, in_place=_whole(occupied), network=network)
        finally:
            await asyncio.shield(
                asyncio.create_task(
                    self._slot_allocator.clear(occupied), name=f"clear {occupied.slot.id}"
                )
            )

    def _take_template(self, template: Template | None, *, unasked: bool) -> OccupiedSlot | None:
        """The Template's slot, removed from the Templates; None if it was dropped or has served."""
        if (
            template is None
            or not _is_as_booted(template.occupied)
            or not self._templates.remove(template)
        ):
            return None
        template.occupied.transient = template.occupied.is_booting = True
        template.occupied.lower_cpu_priority(
            cpu_priority.BACKGROUND if unasked else cpu_priority.BOOT
        )
        self._ends.on_template_exit(template, "snapshotted", {})
        return template.occupied

    async def _dump(self, subject: _Subject, stage: SnapshotStaging) -> SnapshotManifest:
        occupied, slot, name = subject.occupied, subject.occupied.slot, f"c-{secrets.token_hex(8)}"
        began, owed_ns = time.perf_counter(), occupied.charge_idle_ns()
        async with asyncio.timeout(_QUIESCE_S):
            with _kdat_of(self._stock) as kdat:
                quiesced = await slot.checkpoint(
                    name, occupied.group.entry_files(), in_place=subject.in_place, kdat=kdat
                )
        try:
            if quiesced.obstacles:
                raise _obstructed(quiesced.obstacles)
            quiesced_at = time.perf_counter()
            draft = await self._draft(subject, quiesced)
            async with self._suspended(subject, quiesced) as suspension:
                await self._write(subject, quiesced, stage)
            zeros_bytes = await asyncio.to_thread(zero_pages.drop_zero_pages, stage.images)
            await asyncio.to_thread(page_map.write_page_maps, stage.images)
            draft = replace(
                draft, heap_bytes=memory_report.without_zero_pages(draft.heap_bytes, zeros_bytes)
            )
            await self._save_files(subject, name, stage)
        finally:
            slot.end_checkpoint(name)
            # CRIU and the dumped fork are in its cgroup, but the cost of snapshots is the
            # platform's
            occupied.charge_idle_ns()
            if occupied.charged_ns is not None:
                occupied.charged_ns -= owed_ns
        phases = {
            "quiesce": _ms(began, quiesced_at),
            **suspension.phases_ms,
            "dump": _ms(quiesced_at, time.perf_counter()),
        }
        return replace(
            draft,
            phases_ms=phases,
            point=_plain({**draft.point, DEVICES: suspension.record.to_json()}),
        )

    @contextlib.asynccontextmanager
    async def _suspended(
        self, subject: _Subject, quiesced: replies.QuiesceResult
    ) -> AsyncIterator[Suspension]:
        """Suspend the tree's devices; roll back if the dump fails."""
        devices = self._devices if subject.occupied.launch.gpu else NoDevices()
        granted = subject.occupied.gpus
        suspension = await devices.before_dump(
            proc.process_tree(quiesced.host_pid), granted=granted.uuids if granted else ()
        )
        try:
            yield suspension
        except BaseException as e:
            await asyncio.shield(devices.rollback(suspension, str(e)))
            raise

    async def _draft(self, subject: _Subject, quiesced: replies.QuiesceResult) -> SnapshotManifest:
        """The manifest's data from before the dump, which the processes do not survive."""
        occupied, launch, point = (
            subject.occupied,
            subject.occupied.launch,
            subject.occupied.slot.point.result(),
        )
        identity, binds = self._stock.describe(launch, occupied.gpus)
        imported = {ENVIRONMENT: occupied.environment} if occupied.environment else {}
        heap_bytes, weights_bytes, paths = await asyncio.to_thread(examine, quiesced.host_pid)
        return SnapshotManifest(
            identity=identity,
            created_at=self._clock(),
            mapped=await mapped_files.record(paths, binds, self._stock.catalogue.memory),
            in_place=subject.in_place,
            stdio=quiesced.stdio,
            point=_plain({**point.to_json(), LAUNCH: launch.to_json(), **imported}),
            network=subject.network,
            heap_bytes=heap_bytes,
            weights_bytes=weights_bytes,
            cold_ms=0.0 if occupied.environment else occupied.took_ms,
            labels=launch.labels,
        )

    async def _write(
        self, subject: _Subject, quiesced: replies.QuiesceResult, stage: SnapshotStaging
    ) -> None:
        occupied, slot = subject.occupied, subject.occupied.slot
        with _open_directories(stage.images, slot.directory / "criu") as (images, work):
            await operations.dump(
                slot,
                criu=self._stock.criu,
                pid=quiesced.pid,
                images=images,
                work=work,
                uid=occupied.launch.uid or 0,
                cgroup=occupied.group.entry_files(),
                tcp=subject.in_place,
                deadline_s=_DEADLINE_S,
            )

    async def _save_files(self, subject: _Subject, name: str, stage: SnapshotStaging) -> None:
        fd = os.open(stage.files_tar, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            await subject.occupied.slot.save_files(name, fd)
        finally:
            os.close(fd)


def _is_as_booted(occupied: OccupiedSlot) -> bool:
    """Whether its forks are equivalent to a boot: it was not restored from a snapshot of its
    revision (one of an environment is compared with a boot), and no instance could have changed the
    slot's files that the image would contain or map."""
    return occupied.snapshot is None and occupied.is_pristine


def _ignore(_: OccupiedSlot) -> None:
    """Nothing learns from it."""


def _plain(body: Mapping[str, Any]) -> dict[str, Any]:
    """The values as they will be read back: lists, no tuples."""
    plain: dict[str, Any] = json.loads(json.dumps(body))
    return plain


def _whole(occupied: OccupiedSlot) -> bool:
    """Whether it must be dumped itself with its whole tree: it cannot be forked, or its forks would
    share its listening sockets."""
    point = occupied.slot.point.result()
    return not occupied.launch.forkable or bool(point.threads) or bool(point.listens)


@contextlib.contextmanager
def _open_directories(*directories: Path) -> Iterator[list[int]]:
    """Descriptors of directories, created if missing."""
    with contextlib.ExitStack() as stack:
        fds = []
        for directory in directories:
            directory.mkdir(mode=0o700, exist_ok=True)
            fds.append(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            stack.callback(os.close, fds[-1])
        yield fds


@contextlib.contextmanager
def _kdat_of(stock: SnapshotComponents) -> Iterator[int | None]:
    """CRIU's cached kernel features: detecting them again takes 0.1 s, and privileges that it does
    not have in every slot."""
    if stock.kdat is None:
        yield None
        return
    with stock.kdat.open("rb") as kdat:
        yield kdat.fileno()


def examine(
    pid: int, *, smaps_bytes: int = SMAPS_BYTES, maps_bytes: int = MAPS_BYTES
) -> tuple[dict[str, int], int, tuple[str, ...]]:
    """Memory by cause, bytes of mapped weights, and mapped or open paths of a process and its
    descendants.

    Blocking: some 25 µs of CPU per mapping. Processes that have exited are skipped. Raises
    DumpBlocked."""
    smaps, paths, most = "", set[str](), maps_bytes
    for one in proc.process_tree(pid):
        with contextlib.suppress(OSError):
            here = Path(f"/proc/{one}")
            text = _read(here / "smaps", smaps_bytes)
            smaps_bytes -= len(text)
            smaps += text if smaps_bytes >= 0 else (here / "smaps_rollup").read_text()
            maps = _read(here / "maps", maps_bytes)
            links = [
                os.readlink(fd)
                for fd in itertools.islice((here / "fd").iterdir(), max(0, maps_bytes))
            ]
            maps_bytes -= len(maps) + sum(map(len, links))
            if maps_bytes < 0:
                message = (
                    f"its processes have too many mappings and open files (more than {most} bytes "
                    f"of /proc/<pid>/maps): map fewer"
                )
                raise _obstructed([], message, kind="memory")
            paths.update(mapped_files.paths_of(maps, links))
    return (
        memory_report.causes(smaps),
        memory_report.mapped_bytes(smaps, f"{mounts.ROOT}/weights/"),
        tuple(sorted(paths)),
    )


def _read(path: Path, most: int) -> str:
    """The first `most` + 1 characters of a file of /proc, so that a longer file is detectable.
    Raises OSError."""
    with path.open(errors="surrogateescape") as file:
        return file.read(max(0, most) + 1)


def launch_of(snapshot: Snapshot) -> LaunchSpec:
    """The launch that the snapshot was made of; of its kinds of GPUs only the model that the
    snapshot was made on."""
    launch = LaunchSpec.from_json(snapshot.manifest.point[LAUNCH])
    if not launch.gpu:
        return launch
    model = DeviceRecord.from_json(snapshot.manifest.point[DEVICES]).model
    return replace(launch, gpu=(model,)) if model else launch


def _obstructed(
    obstacles: Sequence[Mapping[str, Any]],
    message: str = "",
    *,
    kind: str = "process",
    passing: bool = False,
) -> DumpBlocked:
    """A DumpBlocked with the worker's obstacles, or with one message."""
    reasons = list(obstacles) or [
        {"kind": kind, "fd": None, "what": "", "where": None, "message": message}
    ]
    return DumpBlocked(
        "; ".join(str(reason.get("message")) for reason in reasons), reasons, passing=passing
    )


def _ms(began: float, ended: float) -> float:
    return (ended - began) * 1000
