"""The scrubber: reads the files on the disk again, in a cycle, when there are no other reads, and
verifies them.

It detects silent disk corruption: a corrupt file is quarantined, and the models that contain it are
fetched again when next requested. `bytes_per_s` is an upper bound; the scrubber is slower while
others read. It uses a monotonic clock, so steps of the wall clock have no effect. The position is
kept over restarts."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import mmap
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from pilotlight.core.threads import LowPriorityThreads, finish_in_thread
from weight_cache.fetch.read_scheduler import ReadScheduler
from weight_cache.manifest import FileHash
from weight_cache.store.catalog import Catalog
from weight_cache.store.counters import StoreCounters
from weight_cache.store.integrity import IntegrityChecker, is_resource_exhaustion
from weight_cache.store.layout import StoreDirectory
from weight_cache.types import ReadPriority

_log = logging.getLogger(__name__)

Sleep = Callable[[float], Awaitable[None]]

PIECE_BYTES = 4 * 1024 * 1024
"""Bytes per turn: a read of higher priority waits for at most one of these."""
ROUND_S = 3600.0
"""Minimum duration of a round, so that a small store is not read continuously. Also the interval
between checks of an empty store."""


class ScrubRate:
    """The bound of the scrubber's reads; `bytes_per_s` 0: it does not run."""

    def __init__(
        self,
        bytes_per_s: int,
        *,
        sleep: Sleep = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.bytes_per_s = bytes_per_s
        self.sleep = sleep
        self.clock = clock
        self._free_at = 0.0

    async def pause(self, size_bytes: int) -> None:
        """Wait until the next piece may be read after one of this size; time without reads is not
        caught up on."""
        now = self.clock()
        self._free_at = max(now, self._free_at) + size_bytes / self.bytes_per_s
        await self.sleep(self._free_at - now)


class Scrubber:
    """Checks one file after another. Owner: the task that awaits `run`."""

    def __init__(
        self,
        *,
        directory: StoreDirectory,
        catalogue: Catalog,
        checks: IntegrityChecker,
        lanes: ReadScheduler,
        threads: LowPriorityThreads,
        tally: StoreCounters,
        rate: ScrubRate,
    ) -> None:
        self._directory = directory
        self._catalogue = catalogue
        self._checks = checks
        self._lanes = lanes
        self._threads = threads
        self._tally = tally
        self._rate = rate

    def __repr__(self) -> str:
        return (
            f"<Scrubber after={self._directory.notes.scrubbed()[:12] or 'nothing'} "
            f"{self._rate.bytes_per_s} bytes/s>"
        )

    async def run(self) -> None:
        """Scrub until cancelled; return immediately if the rate is 0."""
        rate = self._rate
        began = rate.clock()
        while rate.bytes_per_s:
            digest = self._next()
            if digest is None:  # end of the round
                await rate.sleep(began + ROUND_S - rate.clock())
                began = rate.clock()
                await self._remember("")
            else:
                await self.check(digest)
                await self._remember(digest)

    async def check(self, digest: str) -> bool:
        """Read one file at the configured rate; quarantine it and return False if it is corrupt. A
        file evicted meanwhile counts as intact."""
        path = self._directory.file(digest)
        try:
            reader = _ScrubReader(path)
        except FileNotFoundError:
            return True
        except OSError as e:
            return await self._condemn(digest, e)
        try:
            while await self._piece(reader):
                pass
        except OSError as e:
            return await self._condemn(digest, e)
        finally:
            reader.close()
        return reader.hash.hexdigest() == digest or await self._condemn(digest, None)

    async def _piece(self, reader: _ScrubReader) -> int:
        async with self._lanes.turn(lambda: ReadPriority.SCRUB):
            size = await self._threads.run(reader.read)
        self._tally.scrubbed_bytes += size
        await self._rate.pause(size)
        return size

    async def _condemn(self, digest: str, error: OSError | None) -> bool:
        if error is not None and is_resource_exhaustion(error):
            _log.warning("scrubber could not read digest=%s error=%s", digest[:12], error)
            return True
        _log.error("scrubber found a bad file digest=%s error=%s", digest[:12], error)
        await self._checks.quarantine([digest])
        return False

    async def _remember(self, digest: str) -> None:
        try:
            await finish_in_thread(self._directory.notes.write_scrub_position, digest)
        except OSError as e:  # full disk: continue; a restart begins at an earlier file
            _log.warning("scrubber's position not kept digest=%s error=%s", digest[:12], e)

    def _next(self) -> str | None:
        """The next file; None at the end of a round."""
        last = self._directory.notes.scrubbed()
        return min(
            (digest for digest in self._catalogue.file_names() if digest > last), default=None
        )


class _ScrubReader:
    """Reads a file in pieces, with O_DIRECT (open(2)) where supported, to check the disk and not
    the page cache."""

    def __init__(self, path: Path) -> None:
        self.hash = FileHash()
        self._piece = mmap.mmap(-1, PIECE_BYTES)  # page-aligned, as O_DIRECT requires
        try:
            self._descriptor = _open(path)
        except OSError:
            self._piece.close()
            raise
        self._size = os.fstat(self._descriptor).st_size
        self._offset = 0

    def read(self) -> int:
        """Read and hash the next piece; return its length, 0 at the end. Raises OSError."""
        if self._offset >= self._size:
            return 0
        # the last read was short and left an unaligned offset, from which O_DIRECT cannot read
        if self._offset % mmap.PAGESIZE:
            fcntl.fcntl(
                self._descriptor,
                fcntl.F_SETFL,
                fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & ~os.O_DIRECT,
            )
        size = os.preadv(self._descriptor, [self._piece], self._offset)
        with memoryview(self._piece) as view:
            self.hash.update(view[:size])
        self._offset += size
        return size

    def close(self) -> None:
        os.close(self._descriptor)
        self._piece.close()


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as e:
        if isinstance(e, FileNotFoundError):
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
