"""A durable append-only log in segments. Lines are written at once, synced in groups, and deleted
oldest first.

`append` is one `write(2)`: a line survives the death of the process once the call returns, and that
of the machine after the next `fdatasync`. A partial write is truncated, so a torn line can only be
the last one. `sync` rotates the segment when due, calls `fdatasync` in a thread,
wakes the tasks that wait for it, and deletes the segments that were marked for deletion before it,
so that the data that replaces them is durable first. Lines that the disk does not accept and that
must not be lost are deferred: they are kept in memory and written, in order, as soon as there is
room. So are, for the rest of a turn of the event loop, lines that mean more together with the next
one. Owner: the activator's event loop. Methods that are not `async` are atomic, so no lock is
needed."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from activator.billing.errors import JournalFull
from activator.billing.segments import segment_path
from pilotlight.core.durability import sync_directory

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Pause after a failed sync."""


class SegmentFile:
    """The segment that is currently written. Owned by the log."""

    def __init__(self, directory: Path, number: int, *, header: bytes) -> None:
        """Create the file with its first line, durably. Raises JournalFull, and then leaves no file
        behind."""
        self.number = number
        self.size = 0
        self.path = segment_path(directory, number)
        try:
            self.fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as e:
            raise JournalFull(
                f"cannot create {self.path}: {e.strerror}; free some disk space", retry_after_s=5
            ) from e
        try:
            self.append(header)
            os.fdatasync(self.fd)
            sync_directory(directory)
        except (JournalFull, OSError):
            os.close(self.fd)
            self.path.unlink()
            raise

    def append(self, line: bytes) -> int:
        """Write a line and return its offset. Raises JournalFull when the disk does not accept the
        whole line; then none of it remains."""
        try:
            written = os.write(self.fd, line)
        except OSError as e:
            raise JournalFull(
                f"cannot write to the journal {self.path}: {e.strerror}; free some disk space",
                retry_after_s=5,
            ) from e
        if written != len(line):
            os.ftruncate(self.fd, self.size)
            raise JournalFull(
                f"only {written} of {len(line)} bytes were written to the journal {self.path}; "
                f"free some disk space",
                retry_after_s=5,
            )
        offset = self.size
        self.size = offset + written
        return offset


class SegmentLog:
    """The log in one directory. `make_header` returns the first line of a segment; `tidy` runs
    after each successful sync.

    Attributes:
        number: number of the segment that is written now."""

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
        """`sizes`: bytes of each existing segment. Raises JournalFull when there is no room for a
        new segment."""
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._sync_s = sync_s
        self._make_header = make_header
        self._tidy = tidy
        self._sizes = dict(sizes)
        self._doomed: list[int] = []
        self._deferred: list[bytes] = []
        self._is_full = False
        self._dirty, self._urgent = asyncio.Event(), asyncio.Event()
        self._is_dirty = False
        self._waiters: list[asyncio.Future[None]] = []
        self.syncs = self.sync_errors = 0
        self._file = self._new_segment(max(self._sizes, default=0) + 1)
        self.number = self._file.number

    def __repr__(self) -> str:
        return (
            f"<SegmentLog {self._directory} segment {self._file.number}, {len(self._sizes)} older>"
        )

    @property
    def end(self) -> int:
        """Size of that segment in bytes."""
        return self._file.size

    @property
    def older(self) -> list[int]:
        """The other segments, oldest first, without those marked for deletion."""
        return sorted(self._sizes.keys() - set(self._doomed))

    @property
    def size_bytes(self) -> int:
        """Total size of all segments that are not marked for deletion."""
        return sum(self._sizes[number] for number in self.older) + self._file.size

    @property
    def deferred(self) -> int:
        """Number of lines in memory that wait for disk space."""
        return len(self._deferred) if self._is_full else 0

    def append(self, line: bytes) -> int:
        """Write a line after the deferred ones and return its offset in segment `number`. Raises
        JournalFull."""
        if self._deferred:
            return self._append_after_deferred(line)
        offset = self._file.append(line)
        if not self._is_dirty:
            self.request_sync()
        return offset

    def append_or_defer(self, line: bytes) -> None:
        """Write a line now, or defer it until there is room."""
        try:
            if self._deferred:
                self._append_after_deferred(line)
                return
            self._file.append(line)
            if not self._is_dirty:
                self.request_sync()
        except JournalFull as e:
            self._deferred.append(line)
            self._report_full(e)

    def append_with_next(self, line: bytes) -> None:
        """Write a line together with the next one, in one `write(2)`, or alone in the event loop's
        next turn: the death of the process loses both or none."""
        self._deferred.append(line)
        asyncio.get_running_loop().call_soon(self._write_unless_full)

    def write_deferred(self) -> None:
        """Write the deferred lines. Raises JournalFull when there is still no room."""
        while self._deferred:
            self._file.append(self._deferred[0])
            del self._deferred[0]
        self._is_full = False
        self.request_sync()

    def _append_after_deferred(self, line: bytes) -> int:
        deferred = b"".join(self._deferred)
        try:
            offset = self._file.append(deferred + line) + len(deferred)
        except JournalFull:
            self._is_full = True
            self.write_deferred()  # there may be room for these
            offset = self._file.append(line)
        self._deferred.clear()
        self._is_full = False
        self.request_sync()
        return offset

    def _write_unless_full(self) -> None:
        if not self._deferred or self._is_full:
            return
        try:
            self.write_deferred()
        except JournalFull as e:
            self._report_full(e)

    def _report_full(self, error: JournalFull) -> None:
        self._is_full = True
        log.error(
            "journal full, keeping lines in memory: lines=%d error=%s", len(self._deferred), error
        )

    def delete_after_sync(self, number: int) -> None:
        """Delete an older segment after the next sync."""
        self._doomed.append(number)
        self.request_sync()

    def request_sync(self) -> None:
        """Schedule a sync (and `tidy`), whether or not something was written."""
        self._is_dirty = True
        self._dirty.set()

    async def wait_synced(self) -> None:
        """Wait until everything written so far is on the disk. Raises JournalFull when the disk
        failed."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._urgent.set()
        self.request_sync()
        await waiter

    async def run(self) -> None:
        """Sync until cancelled: at once when a task waits for it, otherwise every `sync_s` after a
        write."""
        while True:
            await self._dirty.wait()
            try:
                async with asyncio.timeout(self._sync_s):
                    await self._urgent.wait()
            except TimeoutError:
                pass  # no task waits for the disk: sync the writes of this interval as a group
            if not await self.sync():
                await asyncio.sleep(RETRY_S)

    async def sync(self) -> bool:
        """Sync once. Returns False when the disk failed; waiting tasks then get the error."""
        self._is_dirty = False
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
            self.request_sync()
            log.error("journal sync failed: segment=%s error=%s", written.path, e)
            _resolve(
                waiters,
                JournalFull(
                    f"{written.path} could not be made durable: {e.strerror}", retry_after_s=5
                ),
            )
            return False
        except asyncio.CancelledError:
            # at shutdown: waiting tasks get their result, and the segment may be closed
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
        """Make all writes durable now. Blocks; raises OSError."""
        os.fdatasync(self._file.fd)

    def close(self) -> None:
        """Make everything durable and close the file. Blocks on the disk. `run()` must have
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
        """Close the file without a sync, as the death of the process would."""
        self._deferred.clear()  # the next turn must not write to a descriptor that others may have
        os.close(self._file.fd)
        _resolve(self._waiters, JournalFull("the journal was closed"))

    def _new_segment(self, number: int) -> SegmentFile:
        return SegmentFile(self._directory, number, header=self._make_header(number))

    async def _rotate_if_due(self) -> None:
        """Switch to a new segment when this one is full. A thread creates it, because that waits
        for the disk; lines go to the old segment meanwhile."""
        if self._file.size < self._segment_bytes:
            return
        try:
            fresh = await asyncio.to_thread(self._new_segment, self._file.number + 1)
        except JournalFull as e:
            log.warning("journal cannot rotate, continuing in the old segment: %s", e)
            return
        self._sizes[self._file.number] = self._file.size
        self._file, self.number = fresh, fresh.number

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
