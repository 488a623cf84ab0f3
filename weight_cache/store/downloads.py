"""Downloads of models into the store: concurrent requests share one download per model and per
file; a complete model is published.

claim room → detach evicted files → fetch missing files → link the model's directory → published. A
download that fails, or that no caller waits for, releases its claim and keeps its partial files
for the next attempt."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

from pilotlight.core.object_store import blob_key
from pilotlight.core.threads import BoundedThreads, finish_in_thread, run_concurrently
from weight_cache.errors import ChunkCorrupt, ManifestInvalid
from weight_cache.fetch.file_download import FileDownloader, disk_error
from weight_cache.fetch.partial_files import PartialFile
from weight_cache.fetch.peer_source import ChunkRequest
from weight_cache.fetch.read_scheduler import PriorityOf
from weight_cache.fetch.single_flight import SingleFlight
from weight_cache.manifest import MAX_MANIFEST_BYTES, Manifest, ManifestFile, parse
from weight_cache.store.catalog import Catalog
from weight_cache.store.counters import FetchRateMeter, StoreCounters
from weight_cache.store.layout import StoreDirectory
from weight_cache.store.verified_chunks import VerifiedChunks
from weight_cache.types import LoadProgress

_log = logging.getLogger(__name__)

_FILES_AT_ONCE = 8
"""Concurrent files of one model: each small file waits for a disk flush, and the disk performs
several at once."""
_FEW_FOLDERS = 128
_FEW_FILES = 2048
"""A larger model is linked in a separate thread pool: flushing 10,000 directories can take
minutes."""

OnProgress = Callable[[LoadProgress], None]
"""Called with the progress of a download, on the store's event loop; must not block."""
_OnFile = Callable[[int], None]
"""Called with the bytes of a file that are on disk."""
T = TypeVar("T")


class ModelDownloads:
    """Downloads models into the store. Owner: the store's event loop; see Catalog for why no lock
    is needed."""

    def __init__(
        self,
        *,
        directory: StoreDirectory,
        catalogue: Catalog,
        ingest: FileDownloader,
        verified_chunks: VerifiedChunks,
        tally: StoreCounters,
        meter: FetchRateMeter,
        clock: Callable[[], float],
    ) -> None:
        self._directory = directory
        self._catalogue = catalogue
        self._ingest = ingest
        self._verified_chunks = verified_chunks
        self._tally = tally
        self._meter = meter
        self._clock = clock
        self._models: SingleFlight[None] = SingleFlight(ingest.lanes.review)
        self._files: SingleFlight[None] = SingleFlight(ingest.lanes.review)
        self._progress: dict[str, LoadProgress] = {}
        self._listeners: dict[str, list[OnProgress]] = {}
        self._file_listeners: dict[str, list[_OnFile]] = {}
        self._links = BoundedThreads(4, "link")
        self._long_links = BoundedThreads(2, "link large")

    def close(self) -> None:
        """Stop the threads. No download may be in progress."""
        self._links.close()
        self._long_links.close()

    async def bring(self, name: str, *, priority_of: PriorityOf) -> None:
        """Return when the model is in the store. Raises ManifestInvalid, OriginUnavailable,
        ChunkCorrupt, StoreFull, StoreFailed."""
        await self._models.join(
            name, lambda lane: self._download(name, lane), priority_of=priority_of
        )

    @contextlib.contextmanager
    def report_progress(self, name: str, on_progress: OnProgress | None) -> Iterator[None]:
        """Report the progress of a model to `on_progress` for the duration of the context; once
        immediately if its download is in progress."""
        if on_progress is None:
            yield
            return
        if (progress := self._progress.get(name)) is not None:
            on_progress(progress)
        with _registered_listener(self._listeners, name, on_progress):
            yield

    async def _download(self, name: str, priority_of: PriorityOf) -> None:
        try:
            manifest = await self._manifest(name)
            await self._download_files(name, manifest, priority_of)
        except OSError as e:
            raise disk_error(e, self._directory.root, f"model {name[:12]}") from e
        finally:
            self._progress.pop(name, None)

    async def _download_files(self, name: str, manifest: Manifest, priority_of: PriorityOf) -> None:
        folders = manifest.folders()
        removal = self._catalogue.claim(name, manifest.blobs(), folders=folders)
        graves = self._directory.bury(removal)  # before anything is awaited
        self._tally.evicted(removal)
        if removal.models:
            _log.info("evicted models=%d bytes=%d", len(removal.models), removal.size_bytes)
        try:
            # not interruptible: a cancellation must leave none behind
            await finish_in_thread(self._directory.remove, *graves)
            await self._fetch_files(name, manifest, priority_of)
            is_large = folders > _FEW_FOLDERS or len(manifest.files) > _FEW_FILES
            await (self._long_links if is_large else self._links).run_until_cancelled(
                lambda stopped: self._directory.publish_model(name, manifest, stopped)
            )
            self._check_none_condemned(name, manifest)
        except FileNotFoundError as e:
            self._catalogue.abandon(name)
            raise _quarantined_error(name) from e
        except BaseException:
            self._catalogue.abandon(name)
            # the cancellation may come after the rename
            if (grave := self._directory.detach_model(name)) is not None:
                await finish_in_thread(self._directory.remove, grave)
            raise
        now = self._clock()
        self._catalogue.model_arrived(name, now=now)
        self._directory.touch(name, now=now)

    def _check_none_condemned(self, name: str, manifest: Manifest) -> None:
        """Check that no file was quarantined by another model's check after it was linked. Before
        linking, linking itself fails on the missing file."""
        if not all(self._catalogue.has_file(digest) for digest in manifest.blobs()):
            raise _quarantined_error(name)

    async def _fetch_files(self, name: str, manifest: Manifest, priority_of: PriorityOf) -> None:
        """Fetch missing files: several files, and several chunks of each, concurrently."""
        files = {f.digest: f for f in manifest.files}
        total = sum(manifest.blobs().values())
        here = {d: file.size_bytes for d, file in files.items() if self._catalogue.has_file(d)}
        done = sum(here.values())

        def tell() -> None:
            self._progress[name] = LoadProgress(done_bytes=done, total_bytes=total)
            for listener in self._listeners.get(name, ()):
                listener(self._progress[name])

        def on_file(digest: str, size: int) -> None:
            nonlocal done
            done, here[digest] = done - here.get(digest, 0) + size, size
            tell()

        async def bring(digest: str, file: ManifestFile) -> None:
            with _registered_listener(
                self._file_listeners, digest, lambda size: on_file(digest, size)
            ):
                await self._files.join(
                    digest, lambda lane: self._fetch(file, lane), priority_of=priority_of
                )
            if here.get(digest) != file.size_bytes:
                on_file(digest, file.size_bytes)

        missing = [(digest, file) for digest, file in files.items() if digest not in here]
        tell()
        with self._metered():
            await run_concurrently(
                (functools.partial(bring, digest, file) for digest, file in missing),
                at_once=_FILES_AT_ONCE,
            )

    @contextlib.contextmanager
    def _metered(self) -> Iterator[None]:
        self._meter.began()
        well = False
        try:
            yield
            well = True
        finally:
            self._meter.ended(well=well)

    async def _fetch(self, file: ManifestFile, priority_of: PriorityOf) -> None:
        """Fetch one file, resuming the last attempt. Other nodes may read its verified chunks
        meanwhile."""
        if self._catalogue.has_file(file.digest):
            return  # completed by another flight meanwhile
        partial = self._directory.partials.open(file)
        with self._verified_chunks.showing(file, partial):
            await self._complete(file, partial, priority_of)

    async def _complete(
        self, file: ManifestFile, partial: PartialFile, priority_of: PriorityOf
    ) -> None:
        digest, done = file.digest, 0

        def on_bytes(size: int) -> None:
            nonlocal done
            done += size
            for listener in self._file_listeners.get(digest, ()):
                listener(done)

        def on_fetched(size: int) -> None:
            self._tally.fetched_bytes += size
            self._meter.count(size)
            on_bytes(size)

        def on_given(size: int) -> None:
            self._tally.given_bytes += size
            self._meter.count(size)
            on_bytes(size)

        def on_resumed(size: int) -> None:
            self._tally.resumed_bytes += size
            on_bytes(size)

        partials = self._directory.partials
        try:
            await self._ingest.complete(
                file,
                partial,
                priority_of=priority_of,
                on_fetched=on_fetched,
                on_given=on_given,
                on_resumed=on_resumed,
            )
            await finish_in_thread(self._directory.publish_file, partial.path, digest)
        finally:  # a cancellation may come after the rename: check the disk
            try:
                await finish_in_thread(partials.leave, partial)
            finally:
                self._catalogue.partial_left(digest, partials.kept_bytes(digest))
                if self._directory.file(digest).exists():
                    self._catalogue.file_arrived(digest, file.size_bytes)

    async def _manifest(self, name: str) -> Manifest:
        """Return the manifest from the disk, else fetch it and store it on the disk."""
        if (known := await finish_in_thread(self._directory.notes.manifest, name)) is not None:
            return known
        if self._ingest.peer_source is None:
            return await self._parse_manifest(name, await self._read_manifest(name))
        wanted = ChunkRequest(digest=name, index=None, length_bytes=MAX_MANIFEST_BYTES, sha256=name)
        async with self._ingest.peer_source.asked(wanted) as given:
            if given is not None and hashlib.sha256(given.block).hexdigest() == name:
                self._ingest.peer_source.used(given)
                return await self._parse_manifest(name, given.block)
            if given is not None:
                self._ingest.peer_source.report_corrupt(given)
            return await self._parse_manifest(name, await self._read_manifest(name))

    async def _read_manifest(self, name: str) -> bytes:
        """Read the manifest from the origin and check its hash."""
        size = await self._ingest.origin.size(name)
        if size > MAX_MANIFEST_BYTES:
            raise ManifestInvalid(
                f"blob {name[:12]} of {size} bytes is too long for a manifest "
                f"({MAX_MANIFEST_BYTES})"
            )
        raw = bytes(await self._ingest.origin.read(name, offset_bytes=0, length_bytes=size))
        if hashlib.sha256(raw).hexdigest() != name:
            raise ChunkCorrupt(
                f"manifest {name[:12]} does not match its hash: the origin's copy is corrupt. "
                f"Remove {blob_key(name)} from the origin and deploy again"
            )
        return raw

    async def _parse_manifest(self, name: str, raw: bytes) -> Manifest:
        # takes seconds for the longest manifests: keep the event loop free
        manifest = await finish_in_thread(parse, raw)
        await finish_in_thread(self._directory.notes.write_manifest, name, raw)
        await finish_in_thread(self._directory.notes.prune_manifests, self._catalogue.names())
        return manifest


def _quarantined_error(name: str) -> ChunkCorrupt:
    return ChunkCorrupt(
        f"a file of model {name[:12]} was found corrupt while the model was assembled: try again "
        f"to fetch the file again"
    )


@contextlib.contextmanager
def _registered_listener(listeners: dict[str, list[T]], key: str, listener: T) -> Iterator[None]:
    heard = listeners.setdefault(key, [])
    heard.append(listener)
    try:
        yield
    finally:
        heard.remove(listener)
        if not heard:
            listeners.pop(key, None)
