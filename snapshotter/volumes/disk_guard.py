"""Keeps the disk of a node above its floor while functions write to volumes.

What a function writes to a volume lies on the node's disk, and is bounded by no plan before it is
committed. Below the floor (`platform.disk_floor_bytes`), directories of volumes go that no slot has
mounted, the one used longest ago first: what was committed is fetched again when it is needed, what
was not is lost. If that does not suffice, the processes that have the largest volume mounted are
ended, and its directory goes next."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from pilotlight.core.disk_floor import DiskFloor
from snapshotter.volumes.node_volumes import NodeVolumes, VolumeKey

_log = logging.getLogger(__name__)
INTERVAL_S = 0.5
"""Between two looks at the disk: one process writes some 500 MB in that time."""
_PAUSE_S = 2.0
"""After processes were ended: until their slots are cleared."""


class VolumeDiskGuard:
    """Watches the disk. Owner: its task."""

    def __init__(
        self, volumes: NodeVolumes, floor: DiskFloor, *, end_users: Callable[[VolumeKey], int]
    ) -> None:
        """`end_users` ends the processes that have a volume mounted, and returns how many."""
        self._volumes = volumes
        self._floor = floor
        self._end_users = end_users

    def __repr__(self) -> str:
        return f"<VolumeDiskGuard {self._floor!r}>"

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            if self._volumes.is_used and any(self._floor.missing()):
                await self.make_room()

    async def make_room(self) -> None:
        """Free what is missing, as far as volumes can."""
        while any(self._floor.missing()) and await self._volumes.evict_one():
            pass
        if not any(self._floor.missing()):
            return
        largest = await self._volumes.largest_mounted()
        if largest is None:
            return
        key, size_bytes = largest
        ended = self._end_users(key)
        _log.warning(
            "volume.disk_full tenant=%s environment=%s volume=%s size_bytes=%d ended=%d: %s",
            *key,
            size_bytes,
            ended,
            self._floor.describe(),
        )
        await asyncio.sleep(_PAUSE_S)
