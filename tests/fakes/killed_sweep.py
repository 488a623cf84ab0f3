"""A sweep of blobs in a process of its own, killed with SIGKILL at a chosen point. Run as a module:
DATABASE BLOBS POINT NUMBER."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from pilotlight.controller.database.store import Store
from pilotlight.controller.weights.blob_gc import BlobCollector, collect_garbage
from pilotlight.controller.weights.blobs import BlobStore
from pilotlight.core.object_store import DirectoryStore

BEFORE, AFTER, NEVER = "before", "after", "never"


class DeadlyStore(DirectoryStore):
    """Kills the process before or after it removed so many objects."""

    def __init__(self, root: Path, *, point: str, number: int) -> None:
        super().__init__(root)
        self._point = point
        self._left = number

    async def delete(self, key: str) -> None:
        """As ever, or never more."""
        self._left -= 1
        if self._left == 0 and self._point == BEFORE:
            os.kill(os.getpid(), signal.SIGKILL)
        await super().delete(key)
        if self._left == 0 and self._point == AFTER:
            os.kill(os.getpid(), signal.SIGKILL)


async def main(database: str, blobs: str, point: str, number: str) -> None:
    """Sweep once: whatever nothing refers to goes, however new it is."""
    store = Store(database, clock=lambda: 1_900_000_000.0)
    objects = DeadlyStore(Path(blobs), point=point, number=int(number))
    files = BlobStore(objects=objects, incoming=Path(blobs) / "incoming", limit_bytes=1 << 30)
    await collect_garbage(BlobCollector(files, store), store, unused_since=float("inf"))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
