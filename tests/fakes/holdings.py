"""A store for leases: models are directories of small files, fetched when the test says so;
remembers who was let in and out."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path

from weight_cache.errors import WeightCacheError
from weight_cache.leases.manager import OnProgress
from weight_cache.types import Lease, LoadProgress, ReadPriority


class FakeHoldings:
    """Models by manifest name; a model in `coming` arrives when its event is set, one in `broken`
    fails with that error."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.here: set[str] = set()
        self.coming: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.broken: dict[str, WeightCacheError] = {}
        self.sizes: dict[str, int] = {}
        self.held: dict[str, Lease] = {}
        self.diary: list[str] = []

    def put(self, manifest: str, content: bytes = b"w" * 1000) -> str:
        """A model that is here."""
        folder = self._root / manifest
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "weights").write_bytes(content)
        self.here.add(manifest)
        return manifest

    async def lease(
        self,
        manifest: str,
        *,
        holder: str,
        lane: ReadPriority,
        pid: int | None,
        pid_started: int | None,
        on_progress: OnProgress | None,
    ) -> tuple[Lease, Path]:
        self.diary.append(f"lease {manifest} {lane}")
        try:
            if manifest in self.broken:
                raise self.broken[manifest]
            if manifest not in self.here:
                await self._arrive(manifest, on_progress)
        except asyncio.CancelledError:
            self.diary.append(f"abandoned {manifest}")
            raise
        lease_id = Lease.id_of(manifest, holder)
        lease = Lease(
            id=lease_id,
            manifest=manifest,
            holder=holder,
            acquired_at=1.0,
            pid=pid,
            pid_started=pid_started,
        )
        self.held[lease_id] = lease
        return lease, self.path(manifest)

    async def _arrive(self, manifest: str, on_progress: OnProgress | None) -> None:
        if on_progress is not None:
            on_progress(LoadProgress(done_bytes=0, total_bytes=1000))
        await self.coming[manifest].wait()
        if on_progress is not None:
            on_progress(LoadProgress(done_bytes=1000, total_bytes=1000))
        self.put(manifest)

    async def release(self, lease_id: str) -> bool:
        self.diary.append("release")
        return self.held.pop(lease_id, None) is not None

    def is_here(self, manifest: str) -> bool:
        return manifest in self.here

    def missing_bytes(self, manifest: str) -> int | None:
        return 0 if manifest in self.here else self.sizes.get(manifest)

    def files(self, manifest: str) -> list[Path]:
        return sorted(self.path(manifest).iterdir())

    def path(self, manifest: str) -> Path:
        return self._root / manifest

    def leases(self) -> list[Lease]:
        return list(self.held.values())
