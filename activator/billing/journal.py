"""The activator's journal: records each attempt before it runs and its cost afterwards. It has one
owner.

Hot path: `open_call` and `close_call` are one `write(2)` each, so they survive `kill -9`.
`fdatasync` is grouped and runs in a thread, at most `sync_s` later (the loss in a power failure);
`submit` waits for it. Segments are rotated by size and deleted, oldest first, once they are shipped
and hold nothing open. Open lines in an old segment that is mostly garbage are copied to the current
one, so the journal stays below twice its live content plus a few segments.

A close that the disk does not accept is kept in memory and written as soon as there is room; until
then no call is opened. Owner: the activator's event loop. Methods that are not `async` are atomic,
so no lock is needed."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from activator.billing import journal_format
from activator.billing.errors import JournalFull
from activator.billing.recovery import HeldCall, Scan, lost_records, scan
from activator.billing.segment_log import SegmentLog
from activator.billing.segments import Cursor, lock, read_segment
from activator.billing.usage_pricing import UsageTemplate, encode_optional_fields
from pilotlight.errors import Conflict, NotFound
from pilotlight.protocol import UsageRecord
from pilotlight.spec.record_json import canonical_json

log = logging.getLogger(__name__)

SEGMENT_BYTES = 64 * 1024**2
HEARTBEAT_S = 1.0
GARBAGE_SEGMENTS = 4
"""Open lines are copied out of an old segment only when the journal is this many segments over
twice its live content."""


OpenLine = tuple[int, int, int, UsageTemplate]
"""Position of the open line of an attempt (segment, offset, length), and its template: one for each
running call, so nothing dearer than a tuple."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalStatistics:
    """State of the journal. `deferred`: closes that wait for disk space; `unshipped`: closes that
    the ledger does not have."""

    segments: int
    size_bytes: int
    open_calls: int
    held_calls: int
    deferred: int
    unshipped: int
    oldest_unshipped_ns: int | None
    syncs: int
    sync_errors: int
    damaged_lines: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What the previous process left: attempts closed as lost, calls to run again, results to
    deliver again."""

    lost: tuple[UsageRecord, ...]
    unfinished: tuple[HeldCall, ...]
    undelivered: tuple[HeldCall, ...]


class Journal:
    """The journal in one directory. Create it with `Journal.open`, run `run()` as a task, call
    `close()` last."""

    def __init__(
        self,
        directory: Path,
        *,
        activator: str,
        found: Scan,
        lock_descriptor: int,
        segment_bytes: int,
        sync_s: float,
        wall_ns: Callable[[], int],
    ) -> None:
        self._directory = directory
        self._activator = activator
        self._life = uuid4().hex
        self._lock = lock_descriptor
        self._wall_ns = wall_ns
        self._segment_bytes = segment_bytes
        self._live: Counter[int] = Counter()
        self._held = dict(found.held)
        for held in self._held.values():
            self._live[held.segment] += held.length
        self._open: dict[str, OpenLine] = {}
        self._clocks: dict[str, tuple[int, int]] = {}
        self._templates = 0
        self._damaged = found.damaged
        self.shipped = found.shipped
        self._unshipped, self._oldest_unshipped_ns = found.unshipped, found.oldest_unshipped_ns
        self._unshipped_event = asyncio.Event()
        if self._unshipped:
            self._unshipped_event.set()
        self._log = SegmentLog(
            directory,
            sizes=found.sizes,
            segment_bytes=segment_bytes,
            sync_s=sync_s,
            make_header=self._header,
            tidy=self._tidy,
        )

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        activator: str,
        segment_bytes: int = SEGMENT_BYTES,
        sync_s: float = 0.05,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> tuple[Self, Recovered]:
        """Lock `directory`, recover its contents, and start a new segment. Blocks on the disk.

        Raises JournalInUse when another process owns it, JournalFull when there is no room for a
        segment."""
        descriptor = lock(directory)
        try:
            found = scan(directory)
            journal = cls(
                directory,
                activator=activator,
                found=found,
                lock_descriptor=descriptor,
                segment_bytes=segment_bytes,
                sync_s=sync_s,
                wall_ns=wall_ns,
            )
            lost = tuple(lost_records(found))
            for record in lost:
                journal.append_record(canonical_json(record.to_json()), at_ns=wall_ns())
            journal._log.flush()  # blocks on the disk: there are no calls yet
        except BaseException:
            os.close(descriptor)
            raise
        held = sorted(found.held.values(), key=lambda h: h.id)
        return journal, Recovered(
            lost=lost,
            unfinished=tuple(h for h in held if not h.is_finished),
            undelivered=tuple(h for h in held if h.is_finished),
        )

    def __repr__(self) -> str:
        counts = f"{len(self._open)} open, {len(self._held)} held, {self._unshipped} unshipped"
        return f"<Journal {self._directory} segment {self._log.number}, {counts}>"

    # -- the hot path ------------------------------------------------------------------------------

    def open_call(
        self,
        template: UsageTemplate,
        *,
        call: str,
        attempt: int,
        start_kind: str,
        at_ns: int,
        queued_ms: int,
        start_ms: int,
        virtual_ns: int,
        mark: str = "",
    ) -> None:
        """Record that an attempt is about to be dispatched. Raises JournalFull (it must then not be
        dispatched), Conflict (it is open already)."""
        name = f"{call}/{attempt}"
        if name in self._open:
            raise Conflict(f"attempt {name} is open already: call ids must be unique", call=call)
        log = self._log
        prefix = b"" if template.segment == log.number else self._template_line(template)
        line = journal_format.opened(
            n=template.number,
            call=call,
            attempt=attempt,
            start_kind=start_kind,
            at_ns=at_ns,
            queued_ms=queued_ms,
            start_ms=start_ms,
            virtual_ns=virtual_ns,
            mark=mark,
        )
        offset = log.append(prefix + line if prefix else line) + len(prefix)
        template.segment = segment = log.number
        length = len(line)
        self._open[name] = segment, offset, length, template
        self._live[segment] += length
        self._clocks[template.instance] = at_ns, virtual_ns
        if self._held and (held := self._held.get(call)) is not None:
            held.attempts = max(held.attempts, attempt)

    def close_call(self, id: str, record: bytes, *, at_ns: int, virtual_ns: int) -> None:
        """Write the complete record of an attempt (`id` = call/attempt). Never fails: without disk
        space it is kept in memory until there is some. That of a submitted call is written with its
        result, if `finish` follows at once: a call whose result is lost, and that runs again, has
        not cost anything as answered.

        Raises KeyError when it was not open."""
        segment, _, length, template = self._open.pop(id)
        self._live[segment] -= length
        self._clocks[template.instance] = at_ns, virtual_ns
        line = journal_format.closed(record, at_ns=at_ns, virtual_ns=virtual_ns)
        if self._held and id.rpartition("/")[0] in self._held:
            self._log.append_with_next(line)
        else:
            self._log.append_or_defer(line)
        if self._unshipped:
            self._unshipped += 1
        else:
            self._first_unshipped(at_ns)

    def append_call(self, record: bytes, *, at_ns: int) -> None:
        """Write the complete record of a call in which nothing runs, before it is answered. Raises
        JournalFull (it must then not be answered)."""
        self._log.append(journal_format.closed(record, at_ns=at_ns, virtual_ns=0))
        self._count_unshipped(at_ns)

    def append_record(self, record: bytes, *, at_ns: int) -> None:
        """Write a record without an open line: an idle span, or an attempt closed by recovery.
        Never fails, like `close_call`."""
        self._log.append_or_defer(journal_format.closed(record, at_ns=at_ns, virtual_ns=0))
        self._count_unshipped(at_ns)

    # -- submitted calls ---------------------------------------------------------------------------

    async def submit(self, call: str, payload: Mapping[str, Any]) -> None:
        """Store a submitted call; returns once it is on the disk. Raises JournalFull (it is not
        stored), Conflict (it is stored already).

        If cancelled, it stays stored: the caller may have no answer, but the call may run."""
        if call in self._held:
            raise Conflict(f"call {call} was submitted already", call=call)
        line = journal_format.submitted(call, payload)
        held = HeldCall(
            id=call, segment=self._log.number, offset=self._log.append(line), length=len(line)
        )
        self._held[call] = held
        self._live[held.segment] += held.length
        try:
            await self.wait_synced()
        except JournalFull:
            self.delete_call(call)
            raise

    def finish(self, call: str, result: Mapping[str, Any]) -> None:
        """Store a submitted call's result in place of its payload until `delete_call`. Raises
        NotFound, JournalFull (then the payload stays)."""
        held = self._held_call(call)
        line = journal_format.finished(call, result, attempts=held.attempts)
        self._move_held(held, self._log.append(line), len(line))
        held.is_finished = True

    def delete_call(self, call: str) -> None:
        """Delete a submitted call whose result was delivered or is not needed. Raises NotFound."""
        held = self._held_call(call)
        del self._held[call]
        self._live[held.segment] -= held.length
        self._log.append_or_defer(journal_format.forgotten(call))

    def payload(self, call: str) -> Any:
        """Read the payload of a stored call from the disk, or its result once finished. Raises
        NotFound."""
        held = self._held_call(call)
        return json.loads(self._read(held.segment, held.offset))["p"]

    @property
    def directory(self) -> Path:
        """Directory of the segments."""
        return self._directory

    @property
    def current_segment(self) -> int:
        """Number of the segment that is written now."""
        return self._log.number

    @property
    def end(self) -> Cursor:
        """Position after everything that is written."""
        return Cursor(segment=self._log.number, offset=self._log.end)

    async def wait_unshipped(self) -> None:
        """Wait until there is an unshipped record."""
        await self._unshipped_event.wait()

    def mark_shipped(self, cursor: Cursor, *, count: int, oldest_unshipped_ns: int | None) -> None:
        """Record that the ledger has everything before `cursor`, `count` more records than before,
        and that the checkpoint is durable."""
        self.shipped = cursor
        self._unshipped -= count
        if self._unshipped <= 0:
            self._unshipped, self._oldest_unshipped_ns = 0, None
            self._unshipped_event.clear()
        elif oldest_unshipped_ns is not None:
            self._oldest_unshipped_ns = oldest_unshipped_ns
        self._log.request_sync()  # a segment may be deletable now

    def statistics(self) -> JournalStatistics:
        """Current state of the journal."""
        return JournalStatistics(
            segments=len(self._log.older) + 1,
            size_bytes=self._log.size_bytes,
            open_calls=len(self._open),
            held_calls=len(self._held),
            deferred=self._log.deferred,
            unshipped=self._unshipped,
            oldest_unshipped_ns=self._oldest_unshipped_ns,
            syncs=self._log.syncs,
            sync_errors=self._log.sync_errors,
            damaged_lines=self._damaged,
        )

    async def run(self) -> None:
        """Run group commit and heartbeat until cancelled, as one task next to the server."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._log.run(), name="journal-sync")
            group.create_task(self._run_heartbeat(), name="journal-heartbeat")

    async def wait_synced(self) -> None:
        """Wait until everything written so far is on the disk. Raises JournalFull when the disk
        failed."""
        await self._log.wait_synced()

    async def sync(self) -> bool:
        """Sync once now; `run()` does it periodically. Returns False when the disk failed."""
        return await self._log.sync()

    def heartbeat(self) -> None:
        """Write deferred lines and, while calls are open, a heartbeat."""
        try:
            self._log.write_deferred()
            if self._open:
                self._log.append(journal_format.heartbeat(self._wall_ns()))
        except JournalFull as e:
            log.warning("journal full: %s", e)

    def close(self) -> None:
        """Make everything durable and release the directory. The task of `run()` must have
        ended."""
        self._log.close()
        os.close(self._lock)

    def abandon(self) -> None:
        """Release the directory without writing anything, as the death of the process would."""
        self._log.abandon()
        os.close(self._lock)

    async def _run_heartbeat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self.heartbeat()

    def _header(self, number: int) -> bytes:
        return journal_format.header(
            activator=self._activator, life=self._life, segment=number, at_ns=self._wall_ns()
        )

    def _template_line(self, template: UsageTemplate) -> bytes:
        """The template's own line when this segment does not have it yet, otherwise empty."""
        if template.segment == self._log.number:
            return b""
        self._templates += 1
        template.number = self._templates
        return journal_format.template(template.number, template)

    def _count_unshipped(self, at_ns: int) -> None:
        if self._unshipped:
            self._unshipped += 1
        else:
            self._first_unshipped(at_ns)

    def _first_unshipped(self, at_ns: int) -> None:
        self._oldest_unshipped_ns = at_ns
        self._unshipped_event.set()
        self._unshipped = 1

    def _held_call(self, call: str) -> HeldCall:
        if call not in self._held:
            raise NotFound(f"this activator does not hold a submitted call {call}", call=call)
        return self._held[call]

    def _move_held(self, held: HeldCall, offset: int, length: int) -> None:
        self._live[held.segment] -= held.length
        held.segment, held.offset, held.length = self._log.number, offset, length
        self._live[held.segment] += length

    def _read(self, segment: int, offset: int) -> bytes:
        return next(read_segment(self._directory, segment, offset=offset)).text

    def _tidy(self) -> None:
        """Mark the oldest unneeded segments for deletion. Lines copied out of them become durable
        in the sync that deletes them."""
        for number in self._log.older:
            if self.shipped.segment <= number:
                return
            if self._live[number] and not self._is_mostly_garbage():
                return
            try:
                self._copy_open_lines(number)
            except JournalFull as e:
                log.warning("journal cannot delete old segments: %s", e)
                return
            del self._live[number]
            self._log.delete_after_sync(number)
            self._delete_idle_clocks()

    def _delete_idle_clocks(self) -> None:
        busy = {template.instance for *_, template in self._open.values()}
        self._clocks = {
            instance: clock for instance, clock in self._clocks.items() if instance in busy
        }

    def _is_mostly_garbage(self) -> bool:
        return (
            self._log.size_bytes
            > 2 * sum(self._live.values()) + GARBAGE_SEGMENTS * self._segment_bytes
        )

    def _copy_open_lines(self, number: int) -> None:
        """Copy the open lines of segment `number` to the current one. Duplicate lines are harmless,
        so a crash in between is too."""
        if not self._live[number]:
            return
        for name, opened in [(name, o) for name, o in self._open.items() if o[0] == number]:
            self._open[name] = self._copy_open_line(opened)
        for held in [h for h in self._held.values() if h.segment == number]:
            body = json.loads(self._read(held.segment, held.offset))
            make = journal_format.finished if held.is_finished else journal_format.submitted
            line = make(held.id, body["p"], attempts=held.attempts)
            self._move_held(held, self._log.append(line), len(line))

    def _copy_open_line(self, opened: OpenLine) -> OpenLine:
        old_segment, old_offset, old_length, template = opened
        body = json.loads(self._read(old_segment, old_offset))
        prefix = self._template_line(template)
        line = journal_format.opened(
            n=template.number,
            call=body["c"],
            attempt=body["a"],
            start_kind=body["k"],
            at_ns=body["at"],
            queued_ms=body["q"],
            start_ms=body["s"],
            virtual_ns=body["v"],
            mark=encode_optional_fields(**body.get("m", {})),
        )
        at_ns, virtual_ns = self._clocks[template.instance]
        clock = journal_format.virtual(
            instance=template.instance, at_ns=at_ns, virtual_ns=virtual_ns
        )
        offset = self._log.append(prefix + line + clock) + len(prefix)
        template.segment = self._log.number
        self._live[old_segment] -= old_length
        self._live[self._log.number] += len(line)
        return self._log.number, offset, len(line), template
