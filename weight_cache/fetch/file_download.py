"""Download of one file from the origin to the disk: chunks in parallel, each verified before
use."""

from __future__ import annotations

import errno
import functools
import shutil
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path

from pilotlight.core.object_store import blob_key
from pilotlight.core.threads import LowPriorityThreads, run_concurrently
from weight_cache.errors import ChunkCorrupt, OriginUnavailable, StoreFailed, StoreFull
from weight_cache.fetch.origin import Origin
from weight_cache.fetch.partial_files import PartialFile
from weight_cache.fetch.peer_source import ChunkRequest, PeerSource
from weight_cache.fetch.read_scheduler import PriorityOf, ReadScheduler
from weight_cache.manifest import CHUNK_BYTES, FileHash, ManifestFile
from weight_cache.types import Chunk

_ATTEMPTS = 2
"""A corrupt chunk is read once more, in case the transfer failed. Twice corrupt means corrupt at
the origin."""

OnBytes = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDownloader:
    """Downloads files from peers, if any, and the origin: schedules reads, hashes and writes."""

    origin: Origin
    lanes: ReadScheduler
    threads: LowPriorityThreads
    peer_source: PeerSource | None = None

    async def complete(
        self,
        file: ManifestFile,
        partial: PartialFile,
        *,
        priority_of: PriorityOf,
        on_fetched: OnBytes,
        on_given: OnBytes,
        on_resumed: OnBytes,
    ) -> None:
        """Fetch the missing chunks of `file` into `partial`, verify each, make the file durable and
        read-only.

        Called with each chunk's bytes: `on_fetched` for the origin, `on_given` for peers,
        `on_resumed` for chunks already on disk. Verified chunks imply a verified file. Raises
        ChunkCorrupt, OriginUnavailable, StoreFull, OSError; verified chunks stay in `partial`."""
        check_room(partial.path.parent, partial.missing_bytes)

        def jobs() -> Iterator[Callable[[], Coroutine[None, None, None]]]:
            chunks = list(file.chunks())
            for index in (
                range(len(chunks)) if self.peer_source is None else self.peer_source.in_turn(file)
            ):
                chunk = chunks[index]
                if index in partial.verified:
                    on_resumed(chunk.length_bytes)
                else:
                    yield functools.partial(bring, index, chunk)

        async def bring(index: int, chunk: Chunk) -> None:
            if index in partial.claimed and await self.threads.run(partial.check, index, chunk):
                on_resumed(chunk.length_bytes)
                return
            async with self.lanes.turn(priority_of):
                was_given = await self._obtain(file, index, chunk, partial)
            (on_given if was_given else on_fetched)(chunk.length_bytes)

        await run_concurrently(jobs(), at_once=self.lanes.reads_at_once)
        await self.threads.run(partial.seal)

    async def _obtain(
        self, file: ManifestFile, index: int, chunk: Chunk, partial: PartialFile
    ) -> bool:
        """Fetch one chunk; True if it came from a peer."""
        if self.peer_source is None:
            await self._fetch(file, index, chunk, partial)
            return False
        wanted = ChunkRequest(
            digest=file.digest, index=index, length_bytes=chunk.length_bytes, sha256=chunk.sha256
        )
        async with self.peer_source.asked(wanted) as given:
            if given is not None:
                if await self.threads.run(partial.write, index, chunk, given.block):
                    self.peer_source.used(given)
                    return True
                self.peer_source.report_corrupt(given)
            await self._fetch(file, index, chunk, partial)
        return False

    async def _fetch(
        self, file: ManifestFile, index: int, chunk: Chunk, partial: PartialFile
    ) -> None:
        for _ in range(_ATTEMPTS):
            block = await self.origin.read(
                file.digest, offset_bytes=chunk.offset_bytes, length_bytes=chunk.length_bytes
            )
            if await self.threads.run(partial.write, index, chunk, block):
                return
            if len(block) < chunk.length_bytes:
                raise OriginUnavailable(
                    f"{file.path}: the origin's {file.digest[:12]} ends before byte "
                    f"{chunk.offset_bytes + chunk.length_bytes}"
                )
        raise ChunkCorrupt(
            f"{file.path}: bytes from {chunk.offset_bytes} of {file.digest[:12]} do not match "
            f"their hash: the origin's copy is corrupt. "
            f"Remove {blob_key(file.digest)} from the origin, then deploy or push again"
        )


def check_room(folder: Path, size_bytes: int) -> None:
    """Check for free disk space before fetching. Raises StoreFull with both sizes."""
    free = shutil.disk_usage(folder).free
    if free < size_bytes:
        raise StoreFull(
            f"the disk below {folder} has no room for {size_bytes} bytes: {free} are free"
        )


def disk_error(error: OSError, folder: Path, what: str) -> StoreFull | StoreFailed:
    """Convert an OSError of the store's disk."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(f"the disk below {folder} has no room for {what}: {error.strerror}")
    return StoreFailed(
        f"the disk below {folder} failed for {what}: {error.strerror or error}. Check its "
        f"permissions and its health"
    )


def hash_file(path: Path) -> str:
    """The digest of a file (`manifest.file_digest`). Raises OSError."""
    whole = FileHash()
    with path.open("rb", buffering=0) as stream:
        while block := stream.read(CHUNK_BYTES):
            whole.update(block)
    return whole.hexdigest()
