"""The scrubber: reads what is on the disk again, in a circle, when nobody else has anything to
read, and compares.

Disks rot silently. What is corrupt is set aside, and the models that have it are fetched anew when
they are next asked for. The pace is a bound: `bytes_per_s` of the disk at most, less while others
read. It is kept with a monotonic clock, so that a step of the wall clock neither stalls nor hurries
it. The file that was checked last is remembered over restarts."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
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
"""Read in one turn: whoever is more urgent waits for one of these at most."""
ROUND_S = 3600.0
"""A round takes no less: a small store is not read all day long. Also the time between two looks at
one that holds nothing."""


class Scrubber:
    """Checks one file after the other. Owner: the task that awaits `run`."""

    def __init__(
        self,
        *,
        directory: StoreDirectory,
        catalogue: Catalog,
        checks: IntegrityChecker,
        lanes: ReadScheduler,
        threads: LowPriorityThreads,
        tally: StoreCounters,
        bytes_per_s: int,
        sleep: Sleep,
        clock: Callable[[], float],
    ) -> None:
        self._directory = directory
        self._catalogue = catalogue
        self._checks = checks
        self._lanes = lanes
        self._threads = threads
        self._tally = tally
        self._bytes_per_s = bytes_per_s
        self._sleep = sleep
        self._clock = clock
        self._free_at = 0.0

    def __repr__(self) -> str:
        return (
            f"<Scrubber after={self._directory.notes.scrubbed()[:12] or 'nothing'} "
            f"{self._bytes_per_s} bytes/s>"
        )

    async def run(self) -> None:
        """Go round until cancelled; return at once when the pace is 0."""
        began = self._clock()
        while self._bytes_per_s:
            digest = self._next()
            if digest is None:  # round
                await self._sleep(began + ROUND_S - self._clock())
                began = self._clock()
                await self._remember("")
            else:
                await self.check(digest)
                await self._remember(digest)

    async def check(self, digest: str) -> bool:
        """Read one file at the pace; False (and set aside) when it is not what its name says. One
        that left meanwhile is right."""
        path = self._directory.file(digest)
        try:
            reader = _Reader(path)
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

    async def _piece(self, reader: _Reader) -> int:
        async with self._lanes.turn(lambda: ReadPriority.SCRUB):
            size = await self._threads.run(reader.read)
        self._tally.scrubbed_bytes += size
        now = self._clock()
        # what was missed is not made up for
        self._free_at = max(now, self._free_at) + size / self._bytes_per_s
        await self._sleep(self._free_at - now)
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
        except OSError as e:  # a full disk: checking goes on, a restart begins earlier
            _log.warning("scrubber's position not kept digest=%s error=%s", digest[:12], e)

    def _next(self) -> str | None:
        """The file after the last one; None at the end of a round."""
        last = self._directory.notes.scrubbed()
        return min(
            (digest for digest in self._catalogue.file_names() if digest > last), default=None
        )


class _Reader:
    """A file in pieces, from the disk itself where it can be (open(2), O_DIRECT): what memory holds
    is not what is checked."""

    def __init__(self, path: Path) -> None:
        self.hash = FileHash()
        self._piece = mmap.mmap(-1, PIECE_BYTES)  # page-aligned, as O_DIRECT asks for
        try:
            self._descriptor = _open(path)
        except OSError:
            self._piece.close()
            raise
        self._size = os.fstat(self._descriptor).st_size
        self._offset = 0

    def read(self) -> int:
        """Read and hash the next piece; its length, 0 at the end. Raises OSError."""
        if self._offset >= self._size:
            return 0
        # the last read was short in the middle: O_DIRECT does not go on from there
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
