"""A weight cache as the node agent's pods need it: models are directories, fetched when the test
says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from weight_cache.errors import LeaseUnknown, WeightCacheError
from weight_cache.types import Lease, LoadProgress, OpenedLease, Tier, WeightsLease

GIB = 1024**3


class FakePodWeights:
    """Models lie below `root`, one file each.

    Attributes:
        arriving: manifests that are on their way; `arrive` ends that.
        failures: what `wait` raises, one after the other, before it works.
        held: lease id → lease.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.arriving: dict[str, asyncio.Event] = {}
        self.progress: list[Callable[[LoadProgress], None]] = []
        self.failures: list[WeightCacheError] = []
        self.held: dict[str, Lease] = {}
        self.waiting = asyncio.Event()

    def model(self, manifest: str) -> Path:
        """Its directory, made as the store makes it."""
        directory = self._root / manifest
        if not directory.exists():
            (directory / "sub").mkdir(parents=True)
            for name in ("model.safetensors", "sub/config.json"):
                (directory / name).write_text(name)
                (directory / name).chmod(0o444)
            (directory / "sub").chmod(0o555)
        return directory

    def arrive(self, manifest: str) -> None:
        """It is here now."""
        self.arriving.pop(manifest).set()

    def tell(self, done_bytes: int, total_bytes: int) -> None:
        """How far fetching is, to everybody who waits."""
        for on_progress in self.progress:
            on_progress(LoadProgress(done_bytes=done_bytes, total_bytes=total_bytes))

    async def open(self, manifest: str, *, holder: str, pid: int | None = None) -> OpenedLease:
        """See WeightCacheClient."""
        lease = Lease(
            id=Lease.id_of(manifest, holder), manifest=manifest, holder=holder, acquired_at=0.0
        )
        self.held[lease.id] = lease
        is_here = manifest not in self.arriving
        path = self.model(manifest) if is_here else None
        return OpenedLease(
            lease_id=lease.id,
            manifest=manifest,
            ready=is_here,
            tier=Tier.NVME if is_here else Tier.ORIGIN,
            path=path,
        )

    async def wait(
        self, lease_id: str, *, on_progress: Callable[[LoadProgress], None] | None = None
    ) -> WeightsLease:
        """See WeightCacheClient."""
        if self.failures:
            raise self.failures.pop(0)
        lease = self.held.get(lease_id)
        if lease is None:
            raise LeaseUnknown(f"no lease {lease_id}")
        if on_progress is not None:
            self.progress.append(on_progress)
        self.waiting.set()
        if (arrival := self.arriving.get(lease.manifest)) is not None:
            await arrival.wait()
        return WeightsLease(
            lease_id=lease_id, manifest=lease.manifest, path=self.model(lease.manifest)
        )

    async def close(self, lease_id: str) -> bool:
        """See WeightCacheClient."""
        return self.held.pop(lease_id, None) is not None

    async def leases(self) -> list[Lease]:
        """See WeightCacheClient."""
        return list(self.held.values())
