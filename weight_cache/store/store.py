"""The NVMe tier: models as read-only directories at stable paths, for as long as somebody holds a
lease on them.

One process owns the directory. Files are content-addressed and verified while they come in; equal
files of two models are one. When room is needed, what is cheapest to bring back goes first
(`victims`), never what is held, pinned or arriving. A lease names its holder and survives our
restart; it ends when the holder releases it, or with the machine. What came half is kept, and the
next try fetches the rest."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pilotlight.core.disk_floor import DiskFloor, no_floor
from pilotlight.core.threads import LowPriorityThreads, finish_in_thread
from weight_cache.errors import ManifestInvalid
from weight_cache.fetch.file_download import FileDownloader, disk_error
from weight_cache.fetch.origin import Origin
from weight_cache.fetch.peer_source import PeerSource
from weight_cache.fetch.read_scheduler import PriorityOf, ReadScheduler
from weight_cache.store.catalog import Catalog, guess_reload_s
from weight_cache.store.counters import FetchRateMeter, Observe, StoreCounters
from weight_cache.store.downloads import ModelDownloads, OnProgress
from weight_cache.store.eviction import ReloadSeconds
from weight_cache.store.integrity import IntegrityChecker
from weight_cache.store.layout import StoreDirectory
from weight_cache.store.scrubber import Scrubber, Sleep
from weight_cache.store.verified_chunks import VerifiedChunks
from weight_cache.types import Lease, ModelInfo, ReadPriority, StoreStatistics

__all__ = ["OnProgress", "Store"]

_NAME = re.compile(r"[0-9a-f]{64}\Z")


class Store:
    """The models of this node. Owner: one event loop; see Catalogue for why no lock is needed."""

    def __init__(
        self,
        directory: StoreDirectory,
        catalogue: Catalog,
        origin: Origin,
        clock: Callable[[], float],
        *,
        lanes: ReadScheduler,
        observe: Observe | None,
        neighbours: PeerSource | None = None,
    ) -> None:
        self._directory = directory
        self._catalogue = catalogue
        self._clock = clock
        self._lanes = lanes
        self._noting = asyncio.Lock()
        self._verifying = asyncio.Lock()
        self._tally = StoreCounters()
        self._threads = LowPriorityThreads()
        self._checks = IntegrityChecker(
            directory=directory, catalogue=catalogue, threads=self._threads, tally=self._tally
        )
        self.shelf = VerifiedChunks(directory, catalogue)
        self._arrivals = ModelDownloads(
            directory=directory,
            catalogue=catalogue,
            ingest=FileDownloader(
                origin=origin, lanes=lanes, threads=self._threads, neighbours=neighbours
            ),
            shelf=self.shelf,
            tally=self._tally,
            meter=FetchRateMeter(time.monotonic, observe),
            clock=clock,
        )

    @classmethod
    def open(
        cls,
        root: Path,
        *,
        origin: Origin,
        max_bytes: int | None,
        clock: Callable[[], float],
        lanes: ReadScheduler | None = None,
        observe: Observe | None = None,
        reload_s: ReloadSeconds = guess_reload_s,
        neighbours: PeerSource | None = None,
        floor: DiskFloor | None = None,
    ) -> Store:
        """Take the directory, clean up after a dead owner, and take stock. Raises StoreOwned.
        Blocking.

        Args:
            max_bytes: None means half of what is free on the disk, what the store holds already
            counted as free. clock: seconds since the epoch; stamps leases and uses. lanes: whose
            turn it is to read from the origin; None: 8 at once, a quarter of them for prefetches.
            observe: told (bytes, seconds) whenever a fetch from the origin ended well. reload_s:
            bytes → predicted seconds to fetch them again: what keeps a model when room is needed.
            neighbours: other nodes, asked before the origin; None: there are none. floor: free disk
            that the store leaves to others; None: none.
        """
        directory = StoreDirectory(root, floor=floor)
        directory.empty_tmp()
        files = dict(directory.files())
        partials = directory.partials.stock(set(files))
        held = sum(files.values()) + sum(partials.values())
        budget = max_bytes if max_bytes is not None else (shutil.disk_usage(root).free + held) // 2
        catalogue = Catalog(budget, reload_s=reload_s, shortage=(floor or no_floor()).missing)
        for digest, size in files.items():
            catalogue.file_arrived(digest, size)
        for digest, size in partials.items():
            catalogue.partial_left(digest, size)
        _scan_disk(directory, catalogue, files)
        return cls(
            directory,
            catalogue,
            origin,
            clock,
            lanes=lanes or ReadScheduler(8, 0.25),
            observe=observe,
            neighbours=neighbours,
        )

    def __repr__(self) -> str:
        return f"<Store {self._directory.root} {self._catalogue!r}>"

    async def lease(
        self,
        manifest: str,
        *,
        holder: str,
        lane: ReadPriority = ReadPriority.START,
        pid: int | None = None,
        pid_started: int | None = None,
        on_progress: OnProgress | None = None,
    ) -> tuple[Lease, Path]:
        """Hold model `manifest`, fetching it first when it is not here; returns the lease and the
        model's directory.

        Asking again with the same holder gives the same lease (of the process named last).
        Cancelling it leaves no lease, and ends the fetching when nobody else waits for it. Raises
        ManifestInvalid, OriginUnavailable, ChunkCorrupt, StoreFull, StoreFailed."""
        hit = self._catalogue.is_here(manifest)
        await self._bring(manifest, lambda: lane, on_progress)
        now = self._clock()
        lease = Lease(
            id=Lease.id_of(manifest, holder),
            manifest=manifest,
            holder=holder,
            acquired_at=now,
            pid=pid,
            pid_started=pid_started,
        )
        held = self._catalogue.held(lease.id)
        if held is not None and pid in (None, held.pid):
            lease = held
        else:
            with self._noted(f"lease {lease.id}"):
                # before it counts: a lease that was answered is on disk
                self._directory.notes.write_lease(lease)
        self._catalogue.lease(lease, now=now)
        self._directory.touch(manifest, now=now)
        self._tally.hits += hit
        self._tally.misses += not hit
        return lease, self._directory.model(manifest)

    async def release(self, lease_id: str) -> bool:
        """Let go of a lease; False when there was none (releasing twice is harmless)."""
        now = self._clock()
        lease = self._catalogue.release(lease_id, now=now)
        if lease is None:
            return False
        with self._noted(f"the end of lease {lease_id}"):
            self._directory.notes.remove_lease(lease_id)
        self._directory.touch(lease.manifest, now=now)
        return True

    async def prefetch(self, manifest: str, *, on_progress: OnProgress | None = None) -> None:
        """Bring a model here without holding it; when this returns it is here until something is
        awaited. Errors as `lease`."""
        await self._bring(manifest, lambda: ReadPriority.PREFETCH, on_progress)

    async def pin(self, manifest: str, *, on_progress: OnProgress | None = None) -> None:
        """Bring a model here, as `prefetch`, and keep it whoever needs room, over restarts too,
        until `unpin`. Idempotent.

        Raises StoreFull, too, when more than one half of the budget would be pinned.
        """
        await self._bring(manifest, lambda: ReadPriority.PREFETCH, on_progress)
        self._catalogue.pin(manifest)  # in the same breath: from here on it stays
        await self._note_pin(manifest)

    async def unpin(self, manifest: str) -> bool:
        """Let a model go like any other when room is needed; False when it was not pinned."""
        was_pinned = self._catalogue.unpin(manifest)
        if was_pinned:
            await self._note_pin(manifest)
        return was_pinned

    async def drop(self, manifest: str) -> bool:
        """Take a model away by hand, and what is half here of it; False when it is held, pinned,
        arriving, or not here."""
        removal = self._catalogue.drop(manifest)
        if removal is None:
            return False
        graves = self._directory.bury(removal)
        self._tally.evicted(removal)
        with self._noted(f"the end of model {manifest[:12]}"):
            await finish_in_thread(self._directory.remove, *graves)
        return True

    async def verify(self, manifest: str) -> list[str]:
        """Read every byte of a model that is here again; returns the digests of files that were
        corrupt (now quarantined).

        One model at a time: a file keeps a thread for as long as it is read, and arrivals need the
        others."""
        async with self._verifying:
            if not self._catalogue.is_here(manifest):
                return []
            with self._noted(f"model {manifest[:12]}"):
                return await self._checks.verify_files(list(self._catalogue.files_of(manifest)))

    def scrubber(
        self,
        bytes_per_s: int,
        *,
        sleep: Sleep = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> Scrubber:
        """What reads everything again, at that pace, for as long as its `run` is awaited; `sleep`
        and `clock` keep the pace."""
        return Scrubber(
            directory=self._directory,
            catalogue=self._catalogue,
            checks=self._checks,
            lanes=self._lanes,
            threads=self._threads,
            tally=self._tally,
            bytes_per_s=bytes_per_s,
            sleep=sleep,
            clock=clock,
        )

    def is_here(self, manifest: str) -> bool:
        """Whether a lease would be given without fetching."""
        return self._catalogue.is_here(manifest)

    def missing_bytes(self, manifest: str) -> int | None:
        """What would have to be fetched (chunks that are here of a half file would not); None:
        nobody asked for this model yet."""
        return self._catalogue.missing(manifest)

    def path(self, manifest: str) -> Path:
        """Where a model's directory lies when it is here."""
        return self._directory.model(manifest)

    def files(self, manifest: str) -> list[Path]:
        """The distinct files of a model that is here; of another nothing."""
        if not self._catalogue.is_here(manifest):
            return []
        return [self._directory.file(digest) for digest in self._catalogue.files_of(manifest)]

    def leases(self) -> list[Lease]:
        """Every lease, oldest first."""
        return self._catalogue.leases()

    def models(self) -> list[ModelInfo]:
        """Every model that is here, least recently used first."""
        return self._catalogue.models()

    def statistics(self) -> StoreStatistics:
        """The store right now."""
        return self._tally.statistics(self._catalogue)

    def close(self) -> None:
        """Let go of the directory; nothing may be under way any more."""
        self._arrivals.close()
        self._threads.close()
        self._directory.close()

    async def _note_pin(self, manifest: str) -> None:
        """Write down what is true now; one at a time, so that the last word stays."""
        async with self._noting:
            notes = self._directory.notes
            with self._noted(f"pin {manifest[:12]}"):
                await finish_in_thread(
                    notes.write_pin if self._catalogue.is_pinned(manifest) else notes.remove_pin,
                    manifest,
                )

    @contextlib.contextmanager
    def _noted(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise disk_error(e, self._directory.root, what) from e

    async def _bring(
        self, manifest: str, priority_of: PriorityOf, on_progress: OnProgress | None
    ) -> None:
        """Return when the model is here and looks as it was published, until something is
        awaited."""
        if not _NAME.match(manifest):
            raise ManifestInvalid(
                f"{manifest[:80]!r} names no manifest: expected the 64 hex digits of its sha256"
            )
        with self._arrivals.told(manifest, on_progress):
            while True:
                if not self._catalogue.is_here(manifest):
                    await self._arrivals.bring(manifest, priority_of=priority_of)
                elif changed_files := self._checks.changed_files(manifest):
                    with self._noted(f"model {manifest[:12]}"):
                        await self._checks.verify_files(changed_files)
                else:
                    return


def _scan_disk(directory: StoreDirectory, catalogue: Catalog, files: dict[str, int]) -> None:
    """Enter the models whose files are all here, bury the others, and remember leases and pins."""
    for name in directory.notes.manifests():
        if (manifest := directory.notes.manifest(name)) is not None:
            catalogue.know(name, manifest.blobs())
    for name, used_at in directory.models():
        manifest = directory.notes.manifest(name)
        if manifest is not None and manifest.blobs().items() <= files.items():
            catalogue.adopt(
                name, manifest.blobs(), folders=manifest.folders(), last_used_at=used_at
            )
            directory.settle(name)
        elif (grave := directory.detach_model(name)) is not None:
            directory.remove(grave)
    catalogue.rank_adopted()
    directory.notes.prune_manifests({m.manifest for m in catalogue.models()})
    for pin in directory.notes.pins():
        catalogue.adopt_pin(pin)
    for lease in directory.notes.leases():
        if catalogue.is_here(lease.manifest):
            catalogue.lease(lease, now=lease.acquired_at)
        else:
            directory.notes.remove_lease(lease.id)
