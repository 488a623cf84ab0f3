"""Creation of snapshots: quiesce → dump → keep files → publish → prove. One run per revision at a
time; a failure leaves nothing behind.

For a Template, a *pristine fork* is dumped, which the dump consumes: the Template and its instances
are unaffected. A worker that cannot be forked is booted for the purpose, in its own network
namespace if it listens on TCP, and dumped itself with its whole process tree.

A failure that may be temporary is tried again a few times. What will recur, such as an open
connection of the function, is remembered per revision: background requests do not try it again, an
explicit request (a deploy, a command) does."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pilotlight.core.background_tasks import cancel_all
from pilotlight.core.backoff import Backoff, delay_s
from snapshotter.checkpointing.dumps import (
    DumpBlocked,
    Dumps,
    InstanceStartedDuringDump,
    TemplateGone,
    launch_of,
)
from snapshotter.checkpointing.trial_restore import ProofFailed, SnapshotValidator, uncharged
from snapshotter.criu import working_set
from snapshotter.errors import NoCapacity, SnapshotRefused, SnapshotterError
from snapshotter.gpus.grants import GpuGrants
from snapshotter.metrics import Metrics
from snapshotter.slots.occupied_slot import StartPhase
from snapshotter.slots.replies import SlotConnectionLost
from snapshotter.snapshots import readahead
from snapshotter.snapshots.components import SnapshotComponents
from snapshotter.snapshots.manifest import Proof, SnapshotManifest
from snapshotter.snapshots.restores import SnapshotUnfit
from snapshotter.snapshots.selector import SnapshotSelector
from snapshotter.snapshots.stored import DiskBudgetExceeded, Snapshot, SnapshotStaging
from snapshotter.types import ENVIRONMENT_PREFIX, GpuGrant, LaunchSpec, RevisionKey

_log = logging.getLogger(__name__)
_ATTEMPTS = 3
"""The Template may be dropped during the dump, or an instance may start from it; then a worker is
booted for the dump."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_TRIES = 3
"""Attempts of one request while failures may be temporary."""
_RETRY_FIRST_S, _RETRY_MAX_S = 0.2, 1.0
_RETRIED_LATER = ("disk", "template_gone", "timeout")
"""Temporary causes that a second does not remove, or that took long to find out."""
_AGAIN_FIRST_S, _AGAIN_MAX_S = 5.0, 30.0
"""Pause between explicit requests of a revision that is refused again and again: each may boot a
worker, at the platform's cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refused:
    """A refusal that will recur. `times`: requests in a row that ended with one; `at`: monotonic
    seconds of the last."""

    error: SnapshotRefused
    times: int
    at: float

    def pause_s(self, now: float) -> float:
        """Seconds until an explicit request tries again."""
        if self.times < 2:
            return 0.0
        pause_s = delay_s(self.times - 2, first_s=_AGAIN_FIRST_S, max_s=_AGAIN_MAX_S, jitter=0)
        return max(0.0, self.at + pause_s - now)


class Checkpoints:
    """Creates snapshots. Owner: the event loop. A cancelled caller does not cancel the creation:
    the next start needs the result.

    Attributes:
        last_refusal: `{"revision", "at", "reasons"}`, for `doctor`.
    """

    def __init__(
        self,
        *,
        stock: SnapshotComponents,
        selector: SnapshotSelector,
        dumps: Dumps,
        proofs: SnapshotValidator,
        metrics: Metrics,
        gpus: GpuGrants,
        monotonic: Callable[[], float] = time.monotonic,
        retry_first_s: float = _RETRY_FIRST_S,
    ) -> None:
        self._monotonic = monotonic
        self._retry_first_s = retry_first_s
        self._stock = stock
        self._selector = selector
        self._dumps = dumps
        self._proofs = proofs
        self._metrics = metrics
        self._gpus = gpus
        self._flights: dict[RevisionKey, asyncio.Task[Snapshot]] = {}
        self._refused: dict[RevisionKey, _Refused] = {}
        self._late: set[RevisionKey] = set()
        self._asked: set[RevisionKey] = set()
        self._publish_ms: dict[str, float] = {}
        self.last_refusal: Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        return f"<Checkpoints {len(self._flights)} in the making, {len(self._refused)} refused>"

    def refused(self, revision: RevisionKey) -> SnapshotRefused | None:
        """Why the revision cannot be snapshotted and is not retried in the background; None if
        unknown."""
        known = self._refused.get(revision)
        return known.error if known is not None else None

    async def make(self, launch: LaunchSpec, *, unasked: bool = False) -> Snapshot:
        """The proven snapshot of this revision, created if there is none. Raises SnapshotRefused,
        and the errors of a start.

        unasked: a background request; a dropped Template is not booted again for it, and what was
        refused for a reason that will recur is not tried again.
        """
        if not launch.snapshot:
            raise _refusal(
                launch,
                "disabled",
                "its snapshots are disabled (snapshot=False): every start without a Template is "
                "COLD",
            )
        if (known := self._refused.get(launch.revision)) is not None:
            self._require_retry(known, unasked=unasked)
        flight = self._flights.get(launch.revision)
        if flight is None:
            flight = asyncio.create_task(
                self._make(launch, unasked=unasked), name=f"snapshot {launch.revision}"
            )
            self._flights[launch.revision] = flight
            flight.add_done_callback(lambda task: self._landed(launch.revision, task))
        if not unasked:
            self._asked.add(launch.revision)
        return await asyncio.shield(flight)

    def cancel(self, revision: RevisionKey) -> None:
        """Calls no longer reach this revision: stop making its snapshot, unless somebody waits for
        it."""
        if revision in self._flights and revision not in self._asked:
            self._flights[revision].cancel()

    async def wait_idle(self, revision: RevisionKey) -> None:
        """Wait until no snapshot is made that somebody waits for, nor one of this revision."""
        while flights := [
            flight for key, flight in self._flights.items() if key in self._asked or key == revision
        ]:
            await asyncio.wait(flights)

    def _require_retry(self, known: _Refused, *, unasked: bool) -> None:
        """Raise SnapshotRefused if a revision that was refused is not to be tried now."""
        if unasked:
            raise SnapshotRefused(str(known.error), known.error.detail)
        if (pause_s := known.pause_s(self._monotonic())) > 0:
            note = f"refused {known.times} times in a row, tried again after {pause_s:.0f} s"
            first, *others = known.error.detail["reasons"]
            first = {**first, "message": f"{first['message']} ({note})"}
            raise SnapshotRefused(
                f"{known.error} ({note})", {**known.error.detail, "reasons": [first, *others]}
            )

    def launch_of(self, snapshot_id: str) -> LaunchSpec:
        """The launch that the snapshot was made of. Raises SnapshotUnknown."""
        return launch_of(self._stock.catalogue.get(snapshot_id))

    async def prove(
        self, snapshot_id: str, charge: Callable[[int], None], *, gpus: GpuGrant | None = None
    ) -> Snapshot | None:
        """Restore it once more and check its examples; None if that failed and it is quarantined.
        Raises SnapshotUnknown, and SnapshotRefused if it does not fit these GPUs.

        charge: receives the CPU time of each restored copy (`SnapshotValidator.prove`). gpus: of
            these copies.
        """
        snapshot = self._stock.catalogue.get(snapshot_id)
        try:
            return await self._prove(launch_of(snapshot), snapshot, gpus=gpus, charge=charge)
        except SnapshotRefused as e:
            if isinstance(e.__cause__, SnapshotUnfit):
                raise
            return None

    async def aclose(self) -> None:
        """Cancel all creations; partial results are removed."""
        await cancel_all(self._flights.values())

    def _landed(self, revision: RevisionKey, task: asyncio.Task[Snapshot]) -> None:
        del self._flights[revision]
        self._asked.discard(revision)
        if not task.cancelled() and isinstance(
            error := task.exception(), SnapshotterError | SlotConnectionLost
        ):
            _log.info("snapshot.not_made revision=%s error=%s", revision, error)

    async def _make(self, launch: LaunchSpec, *, unasked: bool) -> Snapshot:
        try:
            # one set of GPUs for the dump and the proof, which follow each other
            with self._reserved_gpus(launch) as gpus:
                found = await self._selector.find(launch, StartPhase(gpus=gpus), waits=True)
                if found is not None:
                    return found
                proven = await self._try(launch, unasked=unasked, gpus=gpus)
        except SnapshotRefused as e:
            self._metrics.snapshot_made("refused", {})
            if not launch.revision.startswith(ENVIRONMENT_PREFIX):
                self.last_refusal = {
                    "revision": launch.revision,
                    "at": time.time(),
                    "reasons": e.detail["reasons"],
                }
            if not e.detail.get("passing") or self._is_late_again(launch.revision, e):
                known = self._refused.get(launch.revision)
                times = (known.times if known is not None else 0) + 1
                self._refused[launch.revision] = _Refused(
                    error=e, times=times, at=self._monotonic()
                )
            raise
        self._refused.pop(launch.revision, None)
        self._late.discard(launch.revision)
        self._metrics.snapshot_made("ready", proven.manifest.phases_ms)
        self._selector.ready(proven)
        return proven

    def _is_late_again(self, revision: RevisionKey, refused: SnapshotRefused) -> bool:
        """Whether it exceeded a deadline a second time: its code hangs, and each attempt keeps
        other revisions waiting."""
        if not any(reason["kind"] == "timeout" for reason in refused.detail["reasons"]):
            return False
        is_again = revision in self._late
        self._late.add(revision)
        return is_again

    @contextlib.contextmanager
    def _reserved_gpus(self, launch: LaunchSpec) -> Iterator[GpuGrant | None]:
        """GPUs for a snapshot of `launch`. Raises SnapshotRefused while none are free, and
        Unsupported."""
        with contextlib.ExitStack() as held:
            try:
                gpus = held.enter_context(self._gpus.reserved(launch))
            except NoCapacity as e:
                raise _refusal(launch, "no_gpu", f"it needs GPUs: {e}", passing=True) from e
            yield gpus

    async def _try(self, launch: LaunchSpec, *, unasked: bool, gpus: GpuGrant | None) -> Snapshot:
        """Dump and prove, again while failures may be temporary."""
        backoff = Backoff(first_s=self._retry_first_s, max_s=_RETRY_MAX_S)
        while True:
            try:
                snapshot = await self._dump(launch, unasked=unasked, gpus=gpus)
                return await self._prove(launch, snapshot, unasked=unasked, gpus=gpus)
            except SnapshotRefused as e:
                if backoff.failures + 1 == _TRIES or not _is_retried_now(e):
                    raise
                _log.info("snapshot.retried revision=%s error=%s", launch.revision, e)
                await backoff.pause()

    async def _dump(self, launch: LaunchSpec, *, unasked: bool, gpus: GpuGrant | None) -> Snapshot:
        for attempt in range(_ATTEMPTS):
            try:
                # dump nothing below the disk floor
                await self._stock.catalogue.make_room(0)
                async with self._stock.catalogue.stage() as stage:
                    return await self._publish(
                        await self._dumps.dump(launch, stage, unasked=unasked, gpus=gpus), stage
                    )
            except DumpBlocked as e:
                raise SnapshotRefused(
                    f"revision {launch.revision} cannot be snapshotted: {e}",
                    {"reasons": e.reasons, "passing": e.passing},
                ) from e
            except TemplateGone as e:
                raise _refusal(launch, "template_gone", str(e), passing=True) from e
            except DiskBudgetExceeded as e:
                raise _refusal(launch, "disk", str(e), passing=True) from e
            except OSError as e:
                word = "the disk is full" if e.errno in _NO_SPACE else f"disk error: {e}"
                raise _refusal(launch, "disk", word, passing=True) from e
            except (InstanceStartedDuringDump, SlotConnectionLost) as e:
                if attempt + 1 == _ATTEMPTS:
                    raise _refusal(
                        launch,
                        "slot",
                        f"its slot was lost or used while it was dumped: {e}",
                        passing=True,
                    ) from e
        raise AssertionError("the last attempt returns or raises")

    async def _publish(self, draft: SnapshotManifest, stage: SnapshotStaging) -> Snapshot:
        began = time.perf_counter()
        with self._selector.telling("evicted"):
            snapshot = await self._stock.catalogue.publish(stage, draft, now=time.time())
        self._publish_ms[snapshot.id] = (time.perf_counter() - began) * 1000
        return snapshot

    async def _prove(
        self,
        launch: LaunchSpec,
        snapshot: Snapshot,
        *,
        unasked: bool = False,
        gpus: GpuGrant | None = None,
        charge: Callable[[int], None] = uncharged,
    ) -> Snapshot:
        """Prove the snapshot: afterwards it is READY, or quarantined and refused."""
        began = time.perf_counter()
        try:
            verdict = await self._proofs.prove(
                launch, snapshot, unasked=unasked, gpus=gpus, charge=charge
            )
        except SnapshotUnfit as e:
            raise _refusal(
                launch, "gpu_remap", f"its proof needs other GPUs: {e}", passing=True
            ) from e
        except ProofFailed as e:
            if e.passing and snapshot.manifest.proof is None:
                await self._stock.catalogue.delete(snapshot.id)
                raise _refusal(
                    launch, "timeout", f"its proof did not end: {e}", passing=True
                ) from e
            await self._selector.quarantine(snapshot.id, str(e))
            raise _refusal(
                launch, "proof", f"the snapshot was created, but its proof failed: {e}"
            ) from e
        except BaseException:
            if snapshot.manifest.proof is None:  # one proven before stays valid
                await asyncio.shield(self._stock.catalogue.delete(snapshot.id))
            raise
        phases = {
            "publish": self._publish_ms.pop(snapshot.id, 0.0),
            "prove": (time.perf_counter() - began) * 1000,
        }
        _log.info(
            "snapshot.proven snapshot=%s revision=%s pages=%s measured=%s",
            snapshot.id,
            launch.revision,
            verdict.pages,
            verdict.measured,
        )
        proof = Proof(
            at=time.time(),
            answer_ms={way: measured.answer_ms for way, measured in verdict.measured.items()},
            restore_ms=verdict.chosen.restore_ms,
            working_set=working_set.encode(verdict.recorded.working_set),
            file_parts=readahead.encode(verdict.recorded.file_parts),
        )
        with self._selector.telling("replaced"):
            return await self._stock.catalogue.mark_proven(
                snapshot.id, proof, pages=verdict.pages, phases_ms=phases
            )


def _refusal(
    launch: LaunchSpec, kind: str, message: str, *, passing: bool = False
) -> SnapshotRefused:
    """A SnapshotRefused. `passing`: the cause may be temporary."""
    reason = {"kind": kind, "fd": None, "what": "", "where": None, "message": message}
    text = f"revision {launch.revision} cannot be snapshotted: {message}"
    return SnapshotRefused(text, {"reasons": [reason], "passing": passing})


def _is_retried_now(refused: SnapshotRefused) -> bool:
    """Whether the cause may be temporary and may be gone within a second."""
    kinds = [reason["kind"] for reason in refused.detail["reasons"]]
    return bool(refused.detail.get("passing")) and not any(k in _RETRIED_LATER for k in kinds)
