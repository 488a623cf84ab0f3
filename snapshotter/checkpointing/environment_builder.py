"""Environment snapshots, and checks of what was booted in them: in the background, one at a time.

*Make*: after a boot, the imports of the function tell which modules of the image an environment
snapshot should have. It is made and proven like any other (`checkpoints`), unless one exists that
saves nearly as much, and the function is booted in it once: where its imports come in another order
then, a shorter list is tried.

*Check*: the first boot of each revision in an environment snapshot is repeated from nothing, after
snapshots that somebody waits for. It must answer the examples alike. Otherwise IMPORT is switched
off for the image, and what came from that environment snapshot is quarantined."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Coroutine
from typing import Any, Protocol

from pilotlight.core.background_tasks import cancel_all
from snapshotter.checkpointing.import_comparison import (
    Boot,
    ImportComparison,
    NotCompared,
    OrderDiffers,
)
from snapshotter.environments.import_order import LEAST_MS, OPENED
from snapshotter.environments.launches import why_not
from snapshotter.environments.records import OWN_IMAGE, ImportRecords, function_of
from snapshotter.environments.starts import EnvironmentStarts
from snapshotter.errors import SnapshotterError, StartFailed
from snapshotter.events import Events
from snapshotter.slots.occupied_slot import OccupiedSlot
from snapshotter.slots.replies import SlotConnectionLost
from snapshotter.snapshots.restores import ENVIRONMENT
from snapshotter.snapshots.selector import SnapshotSelector
from snapshotter.snapshots.stored import Snapshot
from snapshotter.starts.teardown import Teardown
from snapshotter.types import AgentEvent, LaunchSpec, RevisionKey

_log = logging.getLogger(__name__)
_ENOUGH = 0.7
"""Share of the import time that an existing snapshot must save, so that no other is made."""
_TRIES = 6
"""Lists that are tried for one boot: one is made shorter where a module cannot be imported ahead,
or changes what an earlier one does."""
_PER_SCOPE = 3
"""Environment snapshots of one scope: functions with different imports."""
_UNUSED_S = 7 * 86_400.0
_CANNOT = re.compile(r"(\d{1,6}): (.*)", re.DOTALL)
"""Message of `pilotlight.worker.imports.environment_worker.CannotImportAhead`."""


class SnapshotMaker(Protocol):
    """Creates snapshots (`checkpoints.Checkpoints`)."""

    async def make(self, launch: LaunchSpec, *, unasked: bool = False) -> Snapshot: ...

    async def wait_idle(self, revision: RevisionKey) -> None: ...


class BuildBudget(Protocol):
    """Allows builds (`import_budget.ImportBudget`)."""

    @property
    def snapshots(self) -> int: ...

    @property
    def delay_s(self) -> float: ...

    def spend(self) -> bool: ...


class EnvironmentBuilder:
    """Makes and checks in the background. Owner: the event loop; `_one` lets one thing run at a
    time.

    Attributes:
        left_out: the modules that were left out last, with the reason, for `doctor`.
    """

    def __init__(
        self,
        *,
        environments: EnvironmentStarts,
        checkpoints: SnapshotMaker,
        selector: SnapshotSelector,
        comparison: ImportComparison,
        ends: Teardown,
        budget: BuildBudget,
        events: Events,
    ) -> None:
        self._environments = environments
        self._checkpoints = checkpoints
        self._selector = selector
        self._comparison = comparison
        self._ends = ends
        self._budget = budget
        self._events = events
        self._delay_s = budget.delay_s
        self.left_out: dict[str, str] = {}
        self._pending: dict[str, asyncio.Task[None]] = {}
        self._checks: dict[RevisionKey, tuple[Boot, asyncio.Task[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._one = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<EnvironmentBuilder {len(self._pending)} pending>"

    @property
    def _records(self) -> ImportRecords:
        return self._environments.records

    def on_booted(self, occupied: OccupiedSlot) -> None:
        """Learn from a worker at its snapshot point; begin in the background what follows."""
        if "imports" in occupied.launch.entry:
            return
        boot = Boot.of(occupied)
        launch = boot.launch
        if why_not(launch):
            return
        self._records.learn(launch, boot.order)
        if boot.ended:
            _log.info("imports.ended revision=%s reason=%s", launch.revision, boot.ended)
            self._name_left_out(boot.ended)
        if self._records.why_off(launch):
            return
        if boot.environment is None:
            self._verify(boot)
            if self._is_worth(boot):
                self._begin(launch.revision, self._make(boot))
        elif not self._records.is_verified(launch.revision, boot.environment):
            task = self._begin(launch.revision, self._check(boot, boot.environment))
            self._checks[launch.revision] = (boot, task)

    def cancel(self, revision: RevisionKey) -> None:
        """Calls no longer reach this revision: do not check it."""
        if (known := self._checks.pop(revision, None)) is not None:
            known[1].cancel()

    def _verify(self, reference: Boot) -> None:
        """A worker was booted from nothing, for whatever reason: if it answers as the one whose
        check is pending, that needs no boot of its own."""
        boot, _ = self._checks.get(reference.launch.revision, (None, None))
        if (
            boot is not None
            and boot.environment is not None
            and boot.answers == reference.answers
            and self._comparison.begins_alike(reference, boot.environment)
        ):
            self._set_verified(boot, boot.environment)

    def _set_verified(self, boot: Boot, environment: str) -> None:
        self._records.set_verified(boot.launch.revision, environment)
        _log.info("import.checked revision=%s snapshot=%s", boot.launch.revision, environment)

    async def aclose(self) -> None:
        """Stop what is pending or running."""
        await cancel_all(list(self._tasks))

    async def expire(self, now: float) -> None:
        """Delete environment snapshots that no start has used for long."""
        for snapshot in list(self._environments.all()):
            if snapshot.last_used_at < now - _UNUSED_S:
                await self._selector.delete(snapshot.id, "evicted")

    def describe(self) -> dict[str, Any]:
        """The section for `capabilities`."""
        return {
            "snapshots": len(list(self._environments.all())),
            "pending": len(self._tasks),
            "off": [f"{one.image}: {one.reason}" for one in self._records.off],
            "left_out": dict(self.left_out),
        }

    def _begin(self, revision: RevisionKey, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin it after the delay, in place of what has not begun for an earlier boot of the
        function."""
        function = function_of(revision)
        if (earlier := self._pending.pop(function, None)) is not None:
            earlier.cancel()
        task = asyncio.create_task(self._later(revision, work), name=f"imports of {revision}")
        self._pending[function] = task
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._on_done(function, work, done))
        return task

    def _on_done(
        self, function: str, work: Coroutine[Any, Any, None], task: asyncio.Task[None]
    ) -> None:
        work.close()
        self._tasks.discard(task)
        if self._pending.get(function) is task:
            del self._pending[function]
        self._checks = {key: known for key, known in self._checks.items() if known[1] is not task}
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("imports.failed function=%s", function, exc_info=error)

    async def _later(self, revision: RevisionKey, work: Coroutine[Any, Any, None]) -> None:
        await asyncio.sleep(self._delay_s)
        await self._checkpoints.wait_idle(revision)
        async with self._one:
            if self._pending.get(function_of(revision)) is asyncio.current_task():
                del self._pending[function_of(revision)]
            await work

    # -- make

    def _is_worth(self, boot: Boot) -> bool:
        revision, order = boot.launch.revision, boot.order
        whole_ms = order.ms_of(self._records.longest(revision, order)) or 0.0
        if whole_ms < LEAST_MS or not self._budget.snapshots:
            return False
        saved = [
            order.ms_of(modules) or 0.0
            for snapshot, modules in self._environments.ready_for(boot.launch)
            if not self._records.is_excluded(revision, snapshot.id)
        ]
        return max(saved, default=0.0) < _ENOUGH * whole_ms

    async def _make(self, boot: Boot) -> None:
        if not self._is_worth(boot) or not self._budget.spend():
            return
        launch, order = boot.launch, boot.order
        modules = self._records.longest(launch.revision, order)
        for _ in range(_TRIES):
            if (order.ms_of(modules) or 0.0) < LEAST_MS:
                return
            await self._checkpoints.wait_idle(launch.revision)
            try:
                snapshot = await self._checkpoints.make(
                    self._environments.launch_for(launch, modules), unasked=True
                )
                if await self._is_fit(boot, snapshot):
                    self._records.set_longest(launch.revision, modules)
                    text = "environment.ready snapshot=%s modules=%d saves_ms=%.0f"
                    _log.info(text, snapshot.id, len(modules), order.ms_of(modules))
                    await self._keep_within_limit(snapshot)
                return
            except OrderDiffers as e:
                text = "environment.unfaithful snapshot=%s revision=%s error=%s"
                _log.info(text, snapshot.id, launch.revision, e)
                await self._selector.delete(snapshot.id, "evicted")
                modules = order.shorter(modules, e.kept)
                self._records.set_longest(launch.revision, modules)
            except StartFailed as e:
                modules = self._cut(boot, modules, e)
            except (SnapshotterError, SlotConnectionLost) as e:
                _log.info("environment.not_made revision=%s error=%s", launch.revision, e)
                return

    async def _is_fit(self, boot: Boot, snapshot: Snapshot) -> bool:
        """Whether the function may use it: it answers there as it did when it was booted from
        nothing. Raises OrderDiffers."""
        revision = boot.launch.revision
        try:
            why = await self._comparison.rehearse(boot, snapshot)
        except NotCompared as e:
            _log.info("import.unfit revision=%s snapshot=%s error=%s", revision, snapshot.id, e)
            self._records.exclude(revision, snapshot.id)
            return False
        if why:
            await self._on_mismatch(boot.launch, snapshot.id, why)
            return False
        self._set_verified(boot, snapshot.id)
        return True

    def _cut(self, boot: Boot, modules: list[str], error: StartFailed) -> list[str]:
        """The modules before the one that cannot be imported ahead; none if it is not known."""
        failure = error.detail.get("error") or {}
        found = _CANNOT.match(str(failure.get("message", "")))
        if found is None:
            _log.info("environment.not_made revision=%s error=%s", boot.launch.revision, error)
            return []
        self._name_left_out(found[2])
        kept = modules[: int(found[1])]
        return kept[:-1] if kept and kept[-1].endswith(OPENED) else kept

    def _name_left_out(self, why: str) -> None:
        """Remember which module was left out, and why: `importing <module> starts a thread`."""
        words = why.split()
        if words[:1] == ["importing"] and len(words) > 2:
            self.left_out.pop(words[1], None)
            self.left_out[words[1]] = why
            while len(self.left_out) > 20:
                del self.left_out[next(iter(self.left_out))]

    async def _keep_within_limit(self, newest: Snapshot) -> None:
        """Delete the least recently used environment snapshots beyond the limits, of the scope and
        of the node."""
        scope = newest.manifest.revision.partition("@")[0]
        mine = [s for s in self._environments.all() if s.manifest.revision.startswith(scope)]
        every = list(self._environments.all())
        for among, limit in ((mine, _PER_SCOPE), (every, self._budget.snapshots)):
            among.sort(key=lambda snapshot: snapshot.last_used_at)
            for snapshot in [s for s in among if s.id != newest.id][: max(0, len(among) - limit)]:
                await self._selector.delete(snapshot.id, "evicted")

    # -- check

    async def _check(self, boot: Boot, environment: str) -> None:
        """Boot the revision from nothing, and compare. Its imports tell whether another environment
        snapshot would save more."""
        revision = boot.launch.revision
        if self._records.is_verified(revision, environment):
            return
        try:
            reference, why = await self._comparison.check(boot, environment)
        except NotCompared as e:
            _log.info("import.not_checked revision=%s error=%s", revision, e)
            self._records.exclude(revision, environment)
            return
        if why:
            await self._on_mismatch(boot.launch, environment, why)
            return
        self._set_verified(boot, environment)
        await self._make(reference)

    async def _on_mismatch(self, launch: LaunchSpec, environment: str, why: str) -> None:
        """Switch IMPORT off for the image, say so, and use nothing that came from it again."""
        image = launch.image or OWN_IMAGE
        reason = f"{launch.revision} booted from nothing answers differently than by IMPORT: {why}"
        _log.warning("import.off image=%s reason=%s", image, reason)
        with contextlib.suppress(OSError):  # it stays off until the agent restarts
            await asyncio.to_thread(self._records.switch_off, launch, reason)
        for snapshot in [
            s
            for s in self._selector.all()
            if s.id == environment or s.manifest.point.get(ENVIRONMENT) == environment
        ]:
            await self._selector.quarantine(snapshot.id, reason)
        self._ends.drop_imported(environment)
        detail = {"image": image, "function": function_of(launch.revision)}
        self._events.publish(
            AgentEvent(
                kind="import_off",
                subject=launch.revision,
                reason="mismatch",
                message=f"IMPORT is off for {image}: {reason}",
                detail=detail,
            )
        )
