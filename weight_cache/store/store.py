"""The store (NVMe tier): models as read-only directories at stable paths while they are leased.

One process owns the directory. Files are content-addressed and verified on arrival; equal files of
two models are stored once. To make room, the models that are cheapest to fetch again are evicted
(`disk_eviction`), never leased, pinned or arriving ones. A lease names its holder and survives a
restart of this process; it ends when the holder releases it, or with the machine. Partial files are
kept, and the next attempt fetches the rest."""

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
from weight_cache.store.disk_eviction import ReloadSeconds
from weight_cache.store.downloads import ModelDownloads, OnProgress
from weight_cache.store.integrity import IntegrityChecker
from weight_cache.store.layout import StoreDirectory
from weight_cache.store.scrubber import Scrubber, ScrubRate
from weight_cache.store.verified_chunks import VerifiedChunks
from weight_cache.types import Lease, ModelInfo, ReadPriority, StoreStatistics

__all__ = ["OnProgress", "Store"]

_NAME = re.compile(r"[0-9a-f]{64}\Z")


class Store:
    """The models of this node. Owner: one event loop; see Catalog for why no lock is needed."""

    def __init__(
        self,
        directory: StoreDirectory,
        catalogue: Catalog,
        origin: Origin,
        clock: Callable[[], float],
        *,
        lanes: ReadScheduler,
        observe: Observe | None,
        peer_source: PeerSource | None = None,
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
        self.verified_chunks = VerifiedChunks(directory, catalogue)
        self._arrivals = ModelDownloads(
            directory=directory,
            catalogue=catalogue,
            ingest=FileDownloader(
                origin=origin, lanes=lanes, threads=self._threads, peer_source=peer_source
            ),
            verified_chunks=self.verified_chunks,
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
        peer_source: PeerSource | None = None,
        floor: DiskFloor | None = None,
    ) -> Store:
        """Lock the directory, clean up after a dead owner, and load the catalog. Raises StoreOwned.
        Blocking.

        Args:
            max_bytes: None means half of the free disk, counting what the store already holds as
                free.
            clock: seconds since the epoch, for leases and uses.
            lanes: schedules reads from the origin; None: 8 at once, a quarter for prefetches.
            observe: called with (bytes, seconds) after each successful fetch from the origin.
            reload_s: bytes → predicted seconds to fetch them again, used by the eviction policy.
            peer_source: peers, tried before the origin; None: no peers.
            floor: free disk that the store leaves to others; None: none.
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
            peer_source=peer_source,
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
        """Lease model `manifest`, fetching it first if necessary; return the lease and the model's
        directory.

        The same holder gets the same lease again (with the process named last). Cancelling it
        leaves no lease, and stops the fetch when no other caller waits for it. Raises
        ManifestInvalid, OriginUnavailable, ChunkCorrupt, StoreFull, StoreFailed."""
        hit = self._catalogue.is_here(manifest)
        await self._fetch(manifest, lambda: lane, on_progress)
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
            with self._log_storage_errors(f"lease {lease.id}"):
                # persist the lease before it is returned
                self._directory.notes.write_lease(lease)
        self._catalogue.lease(lease, now=now)
        self._directory.touch(manifest, now=now)
        self._tally.hits += hit
        self._tally.misses += not hit
        return lease, self._directory.model(manifest)

    async def release(self, lease_id: str) -> bool:
        """Release a lease; False if there was none. Releasing twice is harmless."""
        now = self._clock()
        lease = self._catalogue.release(lease_id, now=now)
        if lease is None:
            return False
        with self._log_storage_errors(f"the end of lease {lease_id}"):
            self._directory.notes.remove_lease(lease_id)
        self._directory.touch(lease.manifest, now=now)
        return True

    async def prefetch(self, manifest: str, *, on_progress: OnProgress | None = None) -> None:
        """Fetch a model without holding it; after the return it is in the store until the next
        await. Errors as `lease`."""
        await self._fetch(manifest, lambda: ReadPriority.PREFETCH, on_progress)

    async def pin(self, manifest: str, *, on_progress: OnProgress | None = None) -> None:
        """Fetch a model, as `prefetch`, and exempt it from eviction until `unpin`, also over
        restarts. Idempotent.

        Also raises StoreFull if more than half of the budget would be pinned.
        """
        await self._fetch(manifest, lambda: ReadPriority.PREFETCH, on_progress)
        self._catalogue.pin(manifest)  # no await in between: it cannot be evicted before
        await self._store_pin(manifest)

    async def unpin(self, manifest: str) -> bool:
        """Make a model evictable again; False if it was not pinned."""
        was_pinned = self._catalogue.unpin(manifest)
        if was_pinned:
            await self._store_pin(manifest)
        return was_pinned

    async def drop(self, manifest: str) -> bool:
        """Remove a model and its partial files; False if it is leased, pinned, arriving, or not in
        the store."""
        removal = self._catalogue.drop(manifest)
        if removal is None:
            return False
        graves = self._directory.bury(removal)
        self._tally.evicted(removal)
        with self._log_storage_errors(f"the end of model {manifest[:12]}"):
            await finish_in_thread(self._directory.remove, *graves)
        return True

    async def verify(self, manifest: str) -> list[str]:
        """Read every byte of a complete model; return the digests of corrupt files, which are
        quarantined.

        One model at a time: each file occupies a thread while it is read, and downloads need the
        other threads."""
        async with self._verifying:
            if not self._catalogue.is_here(manifest):
                return []
            with self._log_storage_errors(f"model {manifest[:12]}"):
                return await self._checks.verify_files(list(self._catalogue.files_of(manifest)))

    def scrubber(self, rate: ScrubRate) -> Scrubber:
        """Create the scrubber, which verifies the store at that rate while its `run` is awaited."""
        return Scrubber(
            directory=self._directory,
            catalogue=self._catalogue,
            checks=self._checks,
            lanes=self._lanes,
            threads=self._threads,
            tally=self._tally,
            rate=rate,
        )

    def is_here(self, manifest: str) -> bool:
        """Whether a lease would be granted without fetching."""
        return self._catalogue.is_here(manifest)

    def missing_bytes(self, manifest: str) -> int | None:
        """Bytes that would have to be fetched, without the chunks of partial files; None if the
        model was never requested on this node."""
        return self._catalogue.missing(manifest)

    def path(self, manifest: str) -> Path:
        """Path of the model's directory."""
        return self._directory.model(manifest)

    def files(self, manifest: str) -> list[Path]:
        """The distinct files of a complete model; otherwise empty."""
        if not self._catalogue.is_here(manifest):
            return []
        return [self._directory.file(digest) for digest in self._catalogue.files_of(manifest)]

    def leases(self) -> list[Lease]:
        """All leases, oldest first."""
        return self._catalogue.leases()

    def models(self) -> list[ModelInfo]:
        """All complete models, least recently used first."""
        return self._catalogue.models()

    def statistics(self) -> StoreStatistics:
        """The current statistics."""
        return self._tally.statistics(self._catalogue)

    def close(self) -> None:
        """Release the directory. No operation may be in progress."""
        self._arrivals.close()
        self._threads.close()
        self._directory.close()

    async def _store_pin(self, manifest: str) -> None:
        """Persist the current state of a pin; serialized, so that the last state wins."""
        async with self._noting:
            notes = self._directory.notes
            with self._log_storage_errors(f"pin {manifest[:12]}"):
                await finish_in_thread(
                    notes.write_pin if self._catalogue.is_pinned(manifest) else notes.remove_pin,
                    manifest,
                )

    @contextlib.contextmanager
    def _log_storage_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise disk_error(e, self._directory.root, what) from e

    async def _fetch(
        self, manifest: str, priority_of: PriorityOf, on_progress: OnProgress | None
    ) -> None:
        """Return when the model is complete and its files are as published; valid until the next
        await."""
        if not _NAME.match(manifest):
            raise ManifestInvalid(
                f"invalid manifest name {manifest[:80]!r}: expected the 64 hex digits of a sha256"
            )
        with self._arrivals.report_progress(manifest, on_progress):
            while True:
                if not self._catalogue.is_here(manifest):
                    await self._arrivals.bring(manifest, priority_of=priority_of)
                elif changed_files := self._checks.changed_files(manifest):
                    with self._log_storage_errors(f"model {manifest[:12]}"):
                        await self._checks.verify_files(changed_files)
                else:
                    return


def _scan_disk(directory: StoreDirectory, catalogue: Catalog, files: dict[str, int]) -> None:
    """Load complete models into the catalog, remove the others, and load leases and pins."""
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
