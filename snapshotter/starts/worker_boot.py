"""Boots workers: IMPORT where an environment snapshot fits, else from nothing (COLD)."""

from __future__ import annotations

import errno
from collections.abc import Callable

from snapshotter.environments.starts import EnvironmentStarts
from snapshotter.errors import StartFailed
from snapshotter.slots.allocator import SlotAllocator
from snapshotter.slots.occupied_slot import OccupiedSlot, StartPhase
from snapshotter.starts.teardown import Teardown
from snapshotter.types import LaunchSpec


class WorkerBooter:
    """Boots workers. Owner: the event loop.

    Attributes:
        slots: where they run.
        on_booted: receives each worker of a function at its snapshot point.
    """

    def __init__(
        self, *, slots: SlotAllocator, ends: Teardown, environments: EnvironmentStarts | None
    ) -> None:
        """`environments`: None: there is no IMPORT."""
        self.slots = slots
        self._ends = ends
        self._environments = environments
        self.on_booted: Callable[[OccupiedSlot], None] = _nobody

    async def boot(
        self, launch: LaunchSpec, phase: StartPhase, *, imports: bool = True
    ) -> OccupiedSlot:
        """Boot a worker to its snapshot point, in a separate slot. Raises StartFailed,
        BundleUnavailable, Unsupported.

        Uses a separate network if the TCP port of the worker is in use, most likely by another
        worker of the revision. `imports`: whether IMPORT may be tried.
        """
        network = self.slots.is_listening(launch.revision)
        occupied = None
        if imports and self._environments is not None:
            occupied = await self._environments.boot(launch, phase, self._ends, network=network)
        if occupied is None:
            occupied = await self._from_nothing(launch, phase, network=network)
        self.on_booted(occupied)
        return occupied

    def exclude(self, launch: LaunchSpec, snapshot_id: str) -> bool:
        """Do not try IMPORT from this snapshot for the function again; False if it is not one of an
        environment."""
        environments = self._environments
        return environments is not None and environments.exclude(launch, snapshot_id)

    async def _from_nothing(
        self, launch: LaunchSpec, phase: StartPhase, *, network: bool
    ) -> OccupiedSlot:
        try:
            return await self.slots.boot(launch, phase, self._ends, network=network)
        except StartFailed as e:
            if not _is_address_taken(e):
                raise
            return await self.slots.boot(launch, phase, self._ends, network=True)


def _nobody(_: OccupiedSlot) -> None:
    """Nothing learns from it."""


def _is_address_taken(failure: StartFailed) -> bool:
    """Whether user code failed to bind because its address is in use."""
    error = failure.detail.get("error") or {}
    return f"[Errno {errno.EADDRINUSE}]" in str(error.get("message"))
