"""Proof of a snapshot before its use: it is restored, and must answer its declared examples as in
the warm-up.

This is done once for each kind of memory restore (eager, lazy); before the lazy one the working set
is recorded, in a restore in which every access to memory is seen. The kind with the earlier first
answer is recorded, not the one that is ready earlier, because the first call pays for pages loaded
on demand. The recorded time becomes the expectation of RESTORE, so a measurement that waited long
for a processor is repeated, unless a caller waits for the proof: then what it waited is
subtracted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pilotlight.core.background_tasks import cancel_all
from snapshotter.criu import working_set
from snapshotter.criu.lazy import PageRequest
from snapshotter.linux import proc
from snapshotter.shim.sandbox import mounts
from snapshotter.slots.allocator import SlotAllocator
from snapshotter.slots.occupied_slot import OccupiedSlot, StartPhase
from snapshotter.slots.replies import BootFailed, SlotConnectionLost
from snapshotter.snapshots import readahead
from snapshotter.snapshots.readahead import FileParts
from snapshotter.snapshots.restores import RESTORE_PHASES, RestoreFailed, Restores, SnapshotUnfit
from snapshotter.snapshots.stored import Snapshot
from snapshotter.starts.teardown import Teardown
from snapshotter.types import GpuGrant, LaunchSpec

_log = logging.getLogger(__name__)
_STARVED_PART = 0.25
_ATTEMPTS = 3
"""Attempts per kind of pages while CPU-starved, if no caller waits for the proof."""


def _is_below_binds(path: str) -> bool:
    """Whether an in-slot path is one of packages, code or weights."""
    return path.startswith(f"{mounts.ROOT}/")


def uncharged(cpu_ns: int) -> None:
    """Discard the CPU time of a proof that the platform itself requested."""


class ProofFailed(Exception):
    """Raised when a snapshot cannot be restored, or does not answer as the original worker did.
    `passing`: it was not answered at all, for a cause that may be temporary."""

    def __init__(self, message: str, *, passing: bool = False) -> None:
        super().__init__(message)
        self.passing = passing


@dataclass(frozen=True, kw_only=True)
class RestoreTiming:
    """One proof: from the restore request until the worker was ready, and until it had answered its
    first example, in ms.

    waited_ms: how long its process was runnable without a free processor (proc(5),
    /proc/pid/schedstat)."""

    restore_ms: float
    answer_ms: float
    waited_ms: float = 0.0

    @property
    def is_starved(self) -> bool:
        """Whether the result mostly reflects other load on the machine."""
        return self.waited_ms > _STARVED_PART * self.answer_ms

    def without_waiting(self) -> RestoreTiming:
        """What it would have taken on processors of its own."""
        part = 1 - min(0.9, self.waited_ms / self.answer_ms)
        return RestoreTiming(restore_ms=self.restore_ms * part, answer_ms=self.answer_ms * part)


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What a start and its first calls access: memory (`PageRequest.working_set`), and files."""

    working_set: bytes = b""
    file_parts: FileParts = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ValidationResult:
    """The measurements for `eager` and `lazy`, the chosen one, and what `lazy` brings first."""

    pages: str
    measured: dict[str, RestoreTiming]
    recorded: Recorded = field(default_factory=Recorded)

    @property
    def chosen(self) -> RestoreTiming:
        """The measurement of the chosen kind of pages."""
        return self.measured[self.pages]


class SnapshotValidator:
    """Proves snapshots by trial restores. Owner: the event loop.

    Attributes:
        ways: the kinds of pages to try, `eager` and `lazy`; the first must work.
        deadline_s: minimum timeout for each; a slow boot gets its own startup timeout.
    """

    def __init__(
        self,
        *,
        restores: Restores,
        slot_allocator: SlotAllocator,
        ends: Teardown,
        ways: Sequence[str],
        deadline_s: float,
    ) -> None:
        self._restores = restores
        self._slot_allocator = slot_allocator
        self._ends = ends
        self._ways = ways
        self._deadline_s = deadline_s

    async def prove(
        self,
        spec: LaunchSpec,
        snapshot: Snapshot,
        *,
        unasked: bool = False,
        gpus: GpuGrant | None = None,
        charge: Callable[[int], None] = uncharged,
    ) -> ValidationResult:
        """Restore it and check its examples. Raises ProofFailed if the first kind of pages does not
        work (a later failure only excludes that kind), SnapshotUnfit if it does not fit the GPUs.

        unasked: a background request, which yields to everything else. gpus: of the restored
        copies, one after the other; without them, the working set is recorded beside the first
        measurement if a caller waits. charge: receives the CPU
        time (ns) of each restored copy, after success or failure."""
        measured: dict[str, RestoreTiming] = {}
        found = Recorded()

        def phase() -> StartPhase:
            return StartPhase(is_background=unasked, gpus=gpus)

        def record() -> asyncio.Task[Recorded]:
            recording = self._record(spec, snapshot, phase=phase, charge=charge)
            return asyncio.create_task(recording, name=f"working set of {snapshot.id}")

        beside = "lazy" in self._ways[1:] and not (unasked or gpus)
        recorded = [record()] if beside else []
        try:
            for way in self._ways:
                try:
                    request = None
                    if way == "lazy":
                        recorded = recorded or [record()]
                        found = await recorded[0]
                        request = PageRequest(working_set=found.working_set)
                    measured[way] = await self._measure(
                        spec, snapshot, request=request, phase=phase, charge=charge, repeats=unasked
                    )
                except ProofFailed as e:
                    if not measured:
                        raise
                    _log.info("proof.way_unfit snapshot=%s way=%s error=%s", snapshot.id, way, e)
        finally:
            await cancel_all(recorded)
        pages = min(measured, key=lambda way: measured[way].answer_ms)
        return ValidationResult(pages=pages, measured=measured, recorded=found)

    async def _record(
        self,
        spec: LaunchSpec,
        snapshot: Snapshot,
        *,
        phase: Callable[[], StartPhase],
        charge: Callable[[int], None],
    ) -> Recorded:
        """What the examples access, answered and then served."""
        found: list[Recorded] = []
        request = PageRequest(record=True)

        def look(occupied: OccupiedSlot) -> None:
            parts = readahead.mapped_parts(
                occupied.slot.worker_pid,
                lambda path: path in snapshot.manifest.mapped or _is_below_binds(path),
            )
            ranges = working_set.recorded(occupied.slot.directory / "criu")
            found.append(Recorded(working_set=ranges, file_parts=parts))

        await self._try(
            spec,
            snapshot,
            request=request,
            phase=phase,
            charge=charge,
            look=look,
        )
        return found[0]

    async def _measure(
        self,
        spec: LaunchSpec,
        snapshot: Snapshot,
        *,
        request: PageRequest | None,
        phase: Callable[[], StartPhase],
        charge: Callable[[int], None],
        repeats: bool,
    ) -> RestoreTiming:
        """The fastest of several attempts; one attempt is enough if it was not CPU-starved."""
        best = await self._try(spec, snapshot, request=request, phase=phase, charge=charge)
        if not repeats:
            return best.without_waiting() if best.is_starved else best
        for _ in range(_ATTEMPTS - 1):
            if not best.is_starved:
                break
            again = await self._try(spec, snapshot, request=request, phase=phase, charge=charge)
            best = min(best, again, key=lambda measured: measured.answer_ms)
        return best

    async def _try(
        self,
        spec: LaunchSpec,
        snapshot: Snapshot,
        *,
        request: PageRequest | None,
        phase: Callable[[], StartPhase],
        charge: Callable[[int], None],
        look: Callable[[OccupiedSlot], None] | None = None,
    ) -> RestoreTiming:
        """`look`: called in a thread with the slot after the answers, which are also served; the
        worker is still there."""
        deadline_s = max(self._deadline_s, spec.startup_timeout_s)
        try:
            async with asyncio.timeout(deadline_s):
                occupied = await self._restores.restore(
                    spec,
                    snapshot,
                    phase(),
                    self._ends,
                    deadline_s=deadline_s,
                    lazy=request is not None,
                    request=request,
                    transient=True,
                )
                try:
                    began = time.perf_counter()
                    proved = await occupied.slot.check_examples(
                        deadline_s, records=look is not None
                    )
                    first_ms = proved.phases_ms.get(
                        "first_answer", (time.perf_counter() - began) * 1000
                    )
                    waited_ms = proc.waited_ns(occupied.slot.worker_pid) / 1e6
                    if look is not None:
                        await asyncio.to_thread(look, occupied)
                finally:
                    charge(occupied.cpu_ns())
                    await asyncio.shield(
                        asyncio.create_task(
                            self._slot_allocator.clear(occupied), name=f"clear {occupied.slot.id}"
                        )
                    )
        except TimeoutError as e:
            raise ProofFailed(f"it did not answer within {deadline_s:g} s", passing=True) from e
        except SlotConnectionLost as e:
            raise ProofFailed(str(e), passing=True) from e
        except SnapshotUnfit:
            raise
        except (RestoreFailed, BootFailed) as e:
            raise ProofFailed(str(e)) from e
        if not proved.ok:
            error = proved.error or {}
            raise ProofFailed(
                f"its example was answered differently: {error.get('type')}: {error.get('message')}"
            )
        restore_ms = sum(ms for phase, ms in occupied.boot_ms.items() if phase in RESTORE_PHASES)
        return RestoreTiming(
            restore_ms=restore_ms, answer_ms=restore_ms + first_ms, waited_ms=waited_ms
        )
