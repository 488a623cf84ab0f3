"""The NVMe tier: models as read-only directories at stable paths, for as long as somebody holds a lease on them.

One process owns the directory. Files are content-addressed and verified while they come in; equal files of two models are
one. When room is needed, models that nobody holds go, least recently used first. A lease names its holder and survives our
restart; it ends when the holder releases it, or with the machine. The node agent, which is the holder, compares `leases()`
with what it runs after its own restart, and releases what is left over.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from weight_cache.catalogue import Catalogue, Removal
from weight_cache.errors import ChunkCorrupt, ManifestInvalid
from weight_cache.flights import Flights
from weight_cache.ingest import finish_in_thread, hash_file, ingest_file
from weight_cache.layout import StoreDirectory
from weight_cache.manifest import MAX_MANIFEST_BYTES, Manifest, ManifestFile, parse
from weight_cache.origin import Origin
from weight_cache.types import Lease, LoadProgress, ModelInfo, StoreStatistics

_log = logging.getLogger(__name__)

OnProgress = Callable[[LoadProgress], None]
"""Told while a model comes in; called on the store's event loop, must not block."""


class Store:
    """The models of this node. Owner: one event loop; see Catalogue for why no lock is needed."""

    def __init__(self, directory: StoreDirectory, catalogue: Catalogue, origin: Origin, clock: Callable[[], float]) -> None:
        self._directory = directory
        self._catalogue = catalogue
        self._origin = origin
        self._clock = clock
        self._model_flights: Flights[None] = Flights()
        self._file_flights: Flights[None] = Flights()
        self._listeners: dict[str, list[OnProgress]] = {}
        self._hits = self._misses = self._fetched_bytes = 0
        self._evicted_models = self._evicted_bytes = self._quarantined = 0

    @classmethod
    def open(cls, root: Path, *, origin: Origin, max_bytes: int | None, clock: Callable[[], float]) -> Store:
        """Take the directory, clean up after a dead owner, and take stock. Raises StoreOwned.

        `max_bytes` None means half of what is free on the disk, what the store holds already counted as free. Blocking.
        """
        directory = StoreDirectory(root)
        directory.empty_tmp()
        files = dict(directory.files())
        budget = max_bytes if max_bytes is not None else (shutil.disk_usage(root).free + sum(files.values())) // 2
        catalogue = Catalogue(budget)
        for digest, size in files.items():
            catalogue.file_arrived(digest, size)
        for name, used_at in directory.models():
            manifest = directory.manifest(name)
            if manifest is not None and manifest.blobs().items() <= files.items():
                catalogue.adopt(name, manifest.blobs(), last_used_at=used_at)
                directory.settle(name)
            elif (grave := directory.bury_model(name)) is not None:
                directory.remove(grave)
        directory.forget_manifests({m.manifest for m in catalogue.models()})
        for lease in directory.leases():
            if catalogue.is_here(lease.manifest):
                catalogue.lease(lease)
            else:
                directory.remove_lease(lease.id)
        return cls(directory, catalogue, origin, clock)

    def __repr__(self) -> str:
        return f"<Store {self._directory.root} {self._catalogue!r}>"

    async def lease(self, manifest: str, *, holder: str, on_progress: OnProgress | None = None) -> tuple[Lease, Path]:
        """Hold model `manifest`, fetching it first when it is not here; returns the lease and the model's directory.

        Asking again with the same holder gives the same lease. Cancelling it leaves no lease, and ends the fetching
        when nobody else waits for it. Raises ManifestInvalid, OriginUnavailable, ChunkCorrupt, StoreFull.
        """
        hit = self._catalogue.is_here(manifest)
        await self.prefetch(manifest, on_progress=on_progress)
        now = self._clock()
        lease = Lease(id=_lease_id(manifest, holder), manifest=manifest, holder=holder, acquired_at=now)
        if not self._catalogue.is_held(lease.id):
            self._directory.write_lease(lease)  # before it counts: a lease that was answered is on disk
        self._catalogue.lease(lease)
        self._directory.touch(manifest, now=now)
        self._hits += hit
        self._misses += not hit
        return lease, self._directory.model(manifest)

    async def release(self, lease_id: str) -> bool:
        """Let go of a lease; False when there was none (releasing twice is harmless)."""
        now = self._clock()
        lease = self._catalogue.release(lease_id, now=now)
        if lease is None:
            return False
        self._directory.remove_lease(lease_id)
        self._directory.touch(lease.manifest, now=now)
        return True

    async def prefetch(self, manifest: str, *, on_progress: OnProgress | None = None) -> None:
        """Bring a model here without holding it; when this returns it is here until something is awaited. Errors as `lease`."""
        listeners = self._listeners.setdefault(manifest, [])
        if on_progress is not None:
            listeners.append(on_progress)
        try:
            while not (self._catalogue.is_here(manifest) and await self._looks_sealed(manifest)):
                if not self._catalogue.is_here(manifest):
                    await self._model_flights.join(manifest, lambda: self._ingest(manifest))
        finally:
            if on_progress is not None:
                listeners.remove(on_progress)
            if not listeners:
                self._listeners.pop(manifest, None)

    async def verify(self, manifest: str) -> list[str]:
        """Read every byte of a model that is here again; returns the digests of files that were corrupt (now quarantined)."""
        if not self._catalogue.is_here(manifest):
            return []
        return await self._condemn_corrupt(list(self._catalogue.files_of(manifest)))

    def leases(self) -> list[Lease]:
        """Every lease, oldest first."""
        return self._catalogue.leases()

    def models(self) -> list[ModelInfo]:
        """Every model that is here, least recently used first."""
        return self._catalogue.models()

    def statistics(self) -> StoreStatistics:
        """The store right now."""
        return StoreStatistics(
            max_bytes=self._catalogue.max_bytes,
            used_bytes=self._catalogue.used_bytes,
            models=len(self._catalogue.models()),
            leases=len(self._catalogue.leases()),
            arriving=self._catalogue.arriving,
            hits=self._hits,
            misses=self._misses,
            fetched_bytes=self._fetched_bytes,
            evicted_models=self._evicted_models,
            evicted_bytes=self._evicted_bytes,
            quarantined_files=self._quarantined,
        )

    def close(self) -> None:
        """Let go of the directory; nothing may be under way any more."""
        self._directory.close()

    async def _ingest(self, name: str) -> None:
        raw = await self._read_manifest(name)
        manifest = parse(raw)
        graves = self._bury(self._catalogue.claim(name, manifest.blobs()))
        try:
            await finish_in_thread(self._directory.remove, *graves)  # in one go: a cancellation must leave none behind
            await self._bring(name, manifest)
            await finish_in_thread(self._directory.publish_model, name, raw, manifest)
        except FileNotFoundError as e:  # another model's check condemned a file that both share, between the two lines above
            self._catalogue.abandon(name)
            raise ChunkCorrupt(f"a file of model {name[:12]} was found corrupt while the model was put together; try again: {e}") from e
        except BaseException:
            self._catalogue.abandon(name)
            self._undo(self._directory.bury_model(name))
            raise
        self._catalogue.model_arrived(name, now=self._clock())

    async def _bring(self, name: str, manifest: Manifest) -> None:
        """Fetch what is missing, file by file (a file's chunks come in parallel)."""
        files = {f.digest: f for f in manifest.files}
        done = sum(f.size_bytes for f in files.values() if self._catalogue.has_file(f.digest))
        total = sum(manifest.blobs().values())

        def on_bytes(count: int) -> None:
            nonlocal done
            done += count
            for listener in self._listeners.get(name, ()):
                listener(LoadProgress(done_bytes=done, total_bytes=total))

        on_bytes(0)
        for digest, file in files.items():
            if not self._catalogue.has_file(digest):
                await self._file_flights.join(digest, lambda file=file: self._fetch(file, on_bytes))  # type: ignore[misc]

    async def _fetch(self, file: ManifestFile, on_bytes: Callable[[int], None]) -> None:
        def count(size: int) -> None:
            self._fetched_bytes += size
            on_bytes(size)

        temp = self._directory.temp()
        try:
            await ingest_file(self._origin, file, temp, on_bytes=count)
            await finish_in_thread(self._directory.publish_file, temp, file.digest)
        except BaseException:
            temp.unlink(missing_ok=True)
            self._undo(self._directory.bury_file(file.digest))
            raise
        self._catalogue.file_arrived(file.digest, file.size_bytes)

    def _undo(self, grave: Path | None) -> None:
        """A cancellation can come after the rename; what was not entered in the catalogue must not be on the disk either."""
        if grave is not None:
            self._directory.remove(grave)

    async def _read_manifest(self, name: str) -> bytes:
        size = await self._origin.size(name)
        if size > MAX_MANIFEST_BYTES:
            raise ManifestInvalid(f"blob {name[:12]} of {size} bytes is too long for a manifest ({MAX_MANIFEST_BYTES})")
        raw = await self._origin.read(name, offset_bytes=0, length_bytes=size)
        if hashlib.sha256(raw).hexdigest() != name:
            raise ChunkCorrupt(f"manifest {name[:12]} does not match its hash; the origin's copy is damaged. Deploy again to upload it")
        return raw

    async def _looks_sealed(self, name: str) -> bool:
        """Whether nobody wrote to the model's files; a suspect one is read again, and the model leaves when it is corrupt."""
        files = self._catalogue.files_of(name)
        suspects = [d for d, size in files.items() if not self._directory.is_sealed(self._directory.file(d), size)]
        if not suspects:
            return True
        await self._condemn_corrupt(suspects)
        return False  # look again: time has passed

    async def _condemn_corrupt(self, digests: list[str]) -> list[str]:
        corrupt = [d for d in digests if not await finish_in_thread(self._is_intact, d)]
        if not corrupt:
            return []
        _log.error("corrupt files quarantined count=%d first=%s", len(corrupt), corrupt[0])
        self._quarantined += len(corrupt)
        broken = self._catalogue.condemn(set(corrupt))
        graves = [self._directory.bury_model(name) for name in broken]
        for digest in corrupt:
            self._directory.quarantine(digest)
        await finish_in_thread(self._directory.remove, *(grave for grave in graves if grave is not None))
        return corrupt

    def _is_intact(self, digest: str) -> bool:
        path = self._directory.file(digest)
        try:
            if hash_file(path) != digest:
                return False
            self._directory.reseal(path)
        except OSError as e:
            _log.warning("file unreadable digest=%s error=%s", digest[:12], e)
            return False
        return True

    def _bury(self, removal: Removal) -> list[Path]:
        """Take the names away at once, before anything is awaited: whoever asks for these models next fetches them anew."""
        graves = [self._directory.bury_model(name) for name in removal.models]
        graves += [self._directory.bury_file(digest) for digest in removal.files]
        self._evicted_models += len(removal.models)
        self._evicted_bytes += removal.size_bytes
        if removal.models:
            _log.info("evicted models=%d bytes=%d", len(removal.models), removal.size_bytes)
        return [grave for grave in graves if grave is not None]


def _lease_id(manifest: str, holder: str) -> str:
    return "l-" + hashlib.sha256(f"{manifest}\n{holder}".encode()).hexdigest()[:24]
