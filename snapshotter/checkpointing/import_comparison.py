"""Compares a function that was booted in an environment snapshot with one that was booted from
nothing: both must begin with the imports of the list, and answer the examples alike.

*Rehearse*: before a start uses an environment snapshot that was made for a function, the function
is booted in it in the background. *Check*: a function that a start has booted in one is booted from
nothing in the background."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from snapshotter.environments.import_order import ImportOrder
from snapshotter.environments.starts import EnvironmentStarts, kept_imports, modules_of
from snapshotter.errors import SnapshotterError, StartFailed
from snapshotter.slots.allocator import SlotAllocator
from snapshotter.slots.occupied_slot import OccupiedSlot, StartPhase
from snapshotter.slots.replies import BootFailed, SlotConnectionLost
from snapshotter.snapshots.restores import RestoreFailed
from snapshotter.snapshots.stored import Snapshot
from snapshotter.starts.teardown import Teardown
from snapshotter.types import LaunchSpec


class NotCompared(Exception):
    """Raised when one of the two workers did not come to its snapshot point, or did not answer."""


class OrderDiffers(Exception):
    """Raised when the function kept to the first `kept` imports of the list only."""

    def __init__(self, kept: int, message: str) -> None:
        super().__init__(message)
        self.kept = kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot:
    """What is known of one boot of a function."""

    launch: LaunchSpec
    order: ImportOrder
    ended: str
    answers: Mapping[str, Any]
    environment: str | None

    @classmethod
    def of(cls, occupied: OccupiedSlot) -> Boot:
        """Of a worker at its snapshot point."""
        point = occupied.slot.point.result()
        return cls(
            launch=occupied.launch,
            order=ImportOrder.of(point.imports),
            ended=str(point.imports.get("ended", "")),
            answers=point.answers,
            environment=occupied.environment,
        )


class ImportComparison:
    """Boots the other worker, and compares. Owner: the event loop; it has no state."""

    def __init__(
        self, *, environments: EnvironmentStarts, slots: SlotAllocator, ends: Teardown
    ) -> None:
        self._environments = environments
        self._slots = slots
        self._ends = ends

    async def rehearse(self, boot: Boot, snapshot: Snapshot) -> str:
        """How a function that was booted from nothing answers differently in `snapshot`; "" if it
        does not. Raises OrderDiffers, NotCompared."""
        launch = boot.launch
        try:
            async with asyncio.timeout(2 * launch.startup_timeout_s):
                occupied = await self._environments.rehearse(
                    launch,
                    snapshot,
                    self._ends,
                    network=self._slots.is_listening(launch.revision),
                )
        except StartFailed as e:
            if (kept := kept_imports(e)) is not None:
                raise OrderDiffers(kept, str(e)) from e
            raise NotCompared(str(e)) from e
        except (RestoreFailed, SnapshotterError, SlotConnectionLost, TimeoutError) as e:
            raise NotCompared(str(e)) from e
        async with self._cleared(occupied):
            return await self._difference(boot.answers, occupied)

    async def check(self, boot: Boot, environment: str) -> tuple[Boot, str]:
        """The boot from nothing of a function that was booted in `environment`, and how it differs;
        "" if it does not. Raises NotCompared."""
        launch = boot.launch
        try:
            async with asyncio.timeout(launch.startup_timeout_s):
                occupied = await self._slots.boot(
                    launch,
                    StartPhase(is_background=True),
                    self._ends,
                    network=self._slots.is_listening(launch.revision),
                    transient=True,
                )
        except (SnapshotterError, SlotConnectionLost, TimeoutError) as e:
            raise NotCompared(str(e)) from e
        async with self._cleared(occupied):
            reference = Boot.of(occupied)
            if not self.begins_alike(reference, environment):
                why = f"booted from nothing, it does not begin with the imports of {environment}"
                return reference, why
            return reference, await self._difference(boot.answers, occupied)

    def begins_alike(self, reference: Boot, environment: str) -> bool:
        """Whether a function that was booted from nothing begins with the imports of the
        environment snapshot."""
        lists = [modules_of(s) for s in self._environments.all() if s.id == environment]
        return all(map(reference.order.begins_with, lists))

    async def _difference(self, answers: Mapping[str, Any], occupied: OccupiedSlot) -> str:
        """How the worker answers differently; "" if it does not. Raises NotCompared."""
        point = occupied.slot.point.result()
        if not answers or point.answers == answers or point.threads:
            return ""
        try:
            proved = await occupied.slot.check_examples(
                occupied.launch.startup_timeout_s, answers=answers
            )
        except (BootFailed, SlotConnectionLost, TimeoutError) as e:
            raise NotCompared(str(e)) from e
        return "" if proved.ok else str((proved.error or {}).get("message"))

    @contextlib.asynccontextmanager
    async def _cleared(self, occupied: OccupiedSlot) -> AsyncIterator[None]:
        """Clear the slot afterwards."""
        try:
            yield
        finally:
            await asyncio.shield(
                asyncio.create_task(self._slots.clear(occupied), name=f"clear {occupied.slot.id}")
            )
