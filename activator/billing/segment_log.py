"""A durable, append-only log in segments: lines go in at once, reach the disk in groups, and leave
oldest first.

`append` is one `write(2)`. `sync` rotates when due, calls `fdatasync` in a thread, wakes who waits
for it, and deletes the segments that were doomed before it, so that whatever replaced their content
is durable first. Lines that the disk refuses and that must not be lost are deferred: kept in memory
and written, in order, as soon as there is room. Owner: the activator's event loop; every method
that is not `async` is one step, so no lock is needed."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from activator.billing.errors import JournalFull
from activator.billing.segments import SegmentFile, segment_path, sync_directory

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Pause after a failed sync."""


class SegmentLog:
    """See the module. `make_header` gives the first line of a segment; `tidy` runs after each
    successful sync."""

    def __init__(
        self,
        directory: Path,
        *,
        sizes: Mapping[int, int],
        segment_bytes: int,
        sync_s: float,
        make_header: Callable[[int], bytes],
        tidy: Callable[[], None],
    ) -> None:
        """`sizes`: bytes of the segments that are there already. Raises JournalFull when there is
        no room for a new one."""
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._sync_s = sync_s
        self._make_header = make_header
        self._tidy = tidy
        self._sizes = dict(sizes)
        self._doomed: list[int] = []
        self._deferred: list[bytes] = []
        self._dirty, self._urgent = asyncio.Event(), asyncio.Event()
        self._waiters: list[asyncio.Future[None]] = []
        self.syncs = self.sync_errors = 0
        self._file = self._new_segment(max(self._sizes, default=0) + 1)

    def __repr__(self) -> str:
        return (
            f"<SegmentLog {self._directory} segment {self._file.number}, {len(self._sizes)} older>"
        )

    @property
    def number(self) -> int:
        """The segment that grows."""
        return self._file.number

    @property
    def end(self) -> int:
        """Bytes in it."""
        return self._file.size

    @property
    def older(self) -> list[int]:
        """The other segments, oldest first, without those that are about to be deleted."""
        return sorted(self._sizes.keys() - set(self._doomed))

    @property
    def size_bytes(self) -> int:
        """Of all segments that stay."""
        return sum(self._sizes[number] for number in self.older) + self._file.size

    @property
    def deferred(self) -> int:
        """Lines that wait for room."""
        return len(self._deferred)

    def append(self, line: bytes) -> int:
        """Write a line behind what was deferred; returns its offset in segment `number`. Raises
        JournalFull."""
        if self._deferred:
            self.write_deferred()
        offset = self._file.append(line)
        if not self._dirty.is_set():
            self._dirty.set()
        return offset

    def append_or_defer(self, line: bytes) -> None:
        """Write a line now, or as soon as there is room."""
        try:
            self.append(line)
        except JournalFull as e:
            self._deferred.append(line)
            log.error(
                "journal full, keeping lines in memory: lines=%d error=%s", len(self._deferred), e
            )

    def write_deferred(self) -> None:
        """Write what had no room. Raises JournalFull when there still is none."""
        while self._deferred:
            self._file.append(self._deferred[0])
            del self._deferred[0]
        self._dirty.set()

    def doom(self, number: int) -> None:
        """Delete an older segment after the next sync."""
        self._doomed.append(number)
        self._dirty.set()

    def touch(self) -> None:
        """Have a sync (and `tidy`) soon although nothing was written."""
        self._dirty.set()

    async def wait_synced(self) -> None:
        """Wait until what was written so far is on the disk. Raises JournalFull when the disk
        failed."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._urgent.set()
        self._dirty.set()
        await waiter

    async def run(self) -> None:
        """Group commit until cancelled: at once when somebody waits for it, else every `sync_s`
        while something was written."""
        while True:
            await self._dirty.wait()
            try:
                async with asyncio.timeout(self._sync_s):
                    await self._urgent.wait()
            except TimeoutError:
                pass  # nobody waits for the disk: the interval groups what came meanwhile
            if not await self.sync():
                await asyncio.sleep(RETRY_S)

    async def sync(self) -> bool:
        """One group commit. False when the disk failed: then who waited was told so."""
        self._dirty.clear()
        self._urgent.clear()
        waiters, self._waiters = self._waiters, []
        doomed, self._doomed = self._doomed, []
        written = self._file
        try:
            await self._rotate_if_due()
            await asyncio.to_thread(os.fdatasync, written.fd)
        except OSError as e:
            self.sync_errors += 1
            self._doomed = doomed + self._doomed
            self._dirty.set()
            log.error("journal sync failed: segment=%s error=%s", written.path, e)
            _resolve(
                waiters,
                JournalFull(
                    f"{written.path} could not be made durable: {e.strerror}", retry_after_s=5
                ),
            )
            return False
        except asyncio.CancelledError:
            # at shutdown: who waits has its answer, and the segment may be closed
            os.fdatasync(written.fd)
            self._doomed = doomed + self._doomed
            _resolve(waiters, None)
            raise
        finally:
            if written is not self._file:
                os.close(written.fd)
        self.syncs += 1
        _resolve(waiters, None)
        if doomed:
            await self._delete(doomed)
        self._tidy()
        return True

    def flush(self) -> None:
        """Make what was written durable now, blocking. Raises OSError."""
        os.fdatasync(self._file.fd)

    def close(self) -> None:
        """Make everything durable and close the file. Blocks on the disk; `run()` must have
        ended."""
        try:
            self.write_deferred()
            os.fdatasync(self._file.fd)
        except (JournalFull, OSError) as e:
            log.error(
                "journal closed without its last lines on disk: deferred=%d error=%s",
                len(self._deferred),
                e,
            )
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the file as it is, as the death of the process would."""
        os.close(self._file.fd)
        _resolve(self._waiters, JournalFull("the journal was closed"))

    def _new_segment(self, number: int) -> SegmentFile:
        return SegmentFile(self._directory, number, header=self._make_header(number))

    async def _rotate_if_due(self) -> None:
        """Go on in a new segment when this one is full. A thread makes it: that waits for the disk;
        until then, lines go to the old one."""
        if self._file.size < self._segment_bytes:
            return
        try:
            fresh = await asyncio.to_thread(self._new_segment, self._file.number + 1)
        except JournalFull as e:
            log.warning("journal cannot rotate, goes on in the old segment: %s", e)
            return
        self._sizes[self._file.number] = self._file.size
        self._file = fresh

    async def _delete(self, doomed: list[int]) -> None:
        try:
            await asyncio.to_thread(self._unlink, doomed)
        except OSError as e:
            self._doomed = doomed + self._doomed
            log.error("journal segments not deleted: segments=%s error=%s", doomed, e)
            return
        for number in doomed:
            del self._sizes[number]

    def _unlink(self, doomed: list[int]) -> None:
        for number in doomed:
            segment_path(self._directory, number).unlink(missing_ok=True)
        sync_directory(self._directory)


def _resolve(waiters: list[asyncio.Future[None]], error: JournalFull | None) -> None:
    for waiter in waiters:
        if waiter.done():
            continue
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)
