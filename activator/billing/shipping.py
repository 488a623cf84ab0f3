"""Ships closed records from the journal to the ledger: in order and at least once, with unique ids
so that duplicates count once.

The shipper reads the journal's files from its checkpoint, so its memory does not grow while the
ledger is unreachable, and a new process resumes at the last confirmed record. The checkpoint is
written after the ledger has accepted a batch; a crash in between sends the batch again. A record
that the ledger rejects permanently is moved to `refused.ndjson`, never dropped."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from activator.billing import journal_format
from activator.billing.errors import LedgerRefused, LedgerUnavailable
from activator.billing.journal import Journal
from activator.billing.segments import Cursor, save_checkpoint, segment_path
from pilotlight.core.backoff import Backoff
from pilotlight.protocol import BudgetState

log = logging.getLogger(__name__)

MAX_RECORDS = 1000
MAX_BYTES = 1024**2
"""Limits of a batch. A megabyte is some 1,500 records, and cheap enough to send again."""
SLICE_BYTES = 64 * 1024
"""Bytes of the journal read at once: some sixty records, a fifth of a millisecond."""
GATHER_S = 0.5
FEW_RECORDS = MAX_RECORDS // 2
"""A batch costs two commits, whatever its size. Records of GATHER_S are sent together, and fewer
than FEW_RECORDS left over wait for the next round."""
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
REFUSED_NAME = "refused.ndjson"


class Ledger(Protocol):
    """Destination of records. Accepting the same id again must change nothing."""

    async def accept(self, records: Sequence[bytes]) -> Mapping[str, BudgetState]:
        """Accept all of `records` (each a UsageRecord as JSON) or none. Returns the state of the
        budgets that apply to them, by id.

        Raises LedgerUnavailable or LedgerRefused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Records to send, the journal position after them, and the time of the next record (None:
    there is none yet)."""

    records: tuple[bytes, ...]
    cursor: Cursor
    next_at_ns: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """How far the ledger is behind: number of records, and age of the oldest in seconds."""

    records: int
    seconds: float


def usage_body(activator: str, records: Sequence[bytes]) -> bytes:
    """The body of `POST /internal/usage`, without parsing the records."""
    return b'{"activator":"%b","records":[%b]}' % (activator.encode(), b",".join(records))


async def gather_batch(journal: Journal) -> Batch:
    """Read a whole batch in slices and yield to the event loop after each, because calls have
    priority over shipping."""
    records: list[bytes] = []
    cursor, size, next_at_ns = journal.shipped, 0, None
    while len(records) < MAX_RECORDS and size < MAX_BYTES:
        part = read_batch(
            journal, cursor, max_records=MAX_RECORDS - len(records), max_bytes=SLICE_BYTES
        )
        cursor = part.cursor
        if not part.records:
            break
        records += part.records
        size += sum(map(len, part.records))
        next_at_ns = part.next_at_ns
        await asyncio.sleep(0)
    return Batch(records=tuple(records), cursor=cursor, next_at_ns=next_at_ns)


async def unshipped_records(journal: Journal, until: Cursor) -> AsyncIterator[bytes]:
    """Yield the records between the checkpoint and `until`, giving the event loop a turn after each
    slice. Nothing may be shipped meanwhile."""
    cursor = journal.shipped
    while cursor < until:
        size = (
            SLICE_BYTES
            if cursor.segment < until.segment
            else min(SLICE_BYTES, until.offset - cursor.offset)
        )
        text = _whole_lines(journal, cursor, size)
        for line in text.split(b"\n"):
            if line.startswith(journal_format.CLOSE_MARK):
                yield journal_format.record_of(line)
        cursor = (
            Cursor(segment=cursor.segment, offset=cursor.offset + len(text))
            if text
            else Cursor(segment=cursor.segment + 1)
        )
        await asyncio.sleep(0)


def read_batch(
    journal: Journal,
    cursor: Cursor | None = None,
    *,
    max_records: int = MAX_RECORDS,
    max_bytes: int = MAX_BYTES,
) -> Batch:
    """Read the next records after `cursor` (None: the checkpoint), oldest first. The new cursor
    also skips lines that are not records.

    Processes a whole slice of a segment at a time, because there are thousands of lines a
    second."""
    cursor = journal.shipped if cursor is None else cursor
    while True:
        text = _whole_lines(journal, cursor, max_bytes)
        if not text:
            if cursor.segment >= journal.current_segment:
                return Batch(records=(), cursor=cursor, next_at_ns=None)
            cursor = Cursor(segment=cursor.segment + 1)
            continue
        closes = [line for line in text.split(b"\n") if line.startswith(journal_format.CLOSE_MARK)]
        if len(closes) > max_records:
            text = text[: text.index(closes[max_records])]
            del closes[max_records:]
        cursor = Cursor(segment=cursor.segment, offset=cursor.offset + len(text))
        if closes:
            # the next record is not older than the last line of this batch
            return Batch(
                records=tuple(map(journal_format.record_of, closes)),
                cursor=cursor,
                next_at_ns=journal_format.at_of(closes[-1]),
            )


def _whole_lines(journal: Journal, cursor: Cursor, size: int) -> bytes:
    """Read about `size` bytes of complete lines from `cursor`, at least one line. Empty at the end
    of the data."""
    try:
        with segment_path(journal.directory, cursor.segment).open("rb") as f:
            f.seek(cursor.offset)
            text = f.read(size)
            while text and b"\n" not in text:
                more = f.read(size)
                if not more:
                    return b""
                text += more
    except FileNotFoundError:
        return b""  # before the first existing segment: all older ones were shipped
    return text[: text.rindex(b"\n") + 1] if text else b""


class Shipper:
    """The task that ships one journal. Run `run()` until cancelled, `flush()` once at shutdown.
    While `lock` is held, no batch is being sent."""

    def __init__(
        self,
        journal: Journal,
        ledger: Ledger,
        *,
        gather_s: float = GATHER_S,
        on_accepted: Callable[[Mapping[str, BudgetState], Sequence[bytes]], Awaitable[None]]
        | None = None,
        before_batch: Callable[[], Awaitable[None]] | None = None,
        first_backoff_s: float = FIRST_BACKOFF_S,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`before_batch` is awaited before each batch is read, `on_accepted` after the ledger
        accepted it and before the checkpoint."""
        self._on_accepted = on_accepted
        self._before_batch = before_batch
        self.lock = asyncio.Lock()
        self._journal = journal
        self._ledger = ledger
        self._gather_s = gather_s
        self._first_backoff_s = first_backoff_s
        self._wall_ns = wall_ns
        self.refused = 0

    def __repr__(self) -> str:
        lag = self.lag()
        return (
            f"<Shipper {lag.records} records, {lag.seconds:.1f} s behind, {self.refused} refused>"
        )

    def lag(self) -> Lag:
        """How far the ledger is behind now."""
        held = self._journal.statistics()
        age_ns = (
            0
            if held.oldest_unshipped_ns is None
            else max(0, self._wall_ns() - held.oldest_unshipped_ns)
        )
        return Lag(records=held.unshipped, seconds=age_ns / 1e9)

    async def run(self) -> None:
        """Ship until cancelled. Retries an unreachable ledger with exponential backoff."""
        backoff = Backoff(first_s=self._first_backoff_s, max_s=MAX_BACKOFF_S)
        while True:
            await self._journal.wait_unshipped()
            await asyncio.sleep(self._gather_s)
            try:
                while await self._ship() and self._journal.statistics().unshipped >= FEW_RECORDS:
                    pass
                backoff.reset()
            except (LedgerUnavailable, OSError) as e:
                wait_s = backoff.next_s()
                log.warning(
                    "usage not shipped: records=%d retry_s=%.1f error=%s",
                    self.lag().records,
                    wait_s,
                    e,
                )
                await asyncio.sleep(wait_s)

    async def flush(self) -> int:
        """Ship all records and return their number. Raises LedgerUnavailable, or OSError of the
        checkpoint's disk."""
        total = 0
        while shipped := await self._ship():
            total += shipped
        return total

    async def _ship(self) -> int:
        async with self.lock:
            return await self._ship_alone()

    async def _ship_alone(self) -> int:
        if self._before_batch is not None:
            await self._before_batch()
        batch = await gather_batch(self._journal)
        if batch.records:
            await self._send(batch.records)
            await asyncio.to_thread(save_checkpoint, self._journal.directory, batch.cursor)
            self._journal.mark_shipped(
                batch.cursor, count=len(batch.records), oldest_unshipped_ns=batch.next_at_ns
            )
        return len(batch.records)

    async def _send(self, records: Sequence[bytes]) -> None:
        """Send a batch. A rejected batch is halved until the invalid record is alone."""
        try:
            states = await self._ledger.accept(records)
            if self._on_accepted is not None:
                await self._on_accepted(states, records)
        except LedgerRefused as e:
            if len(records) == 1:
                await asyncio.to_thread(
                    _move_aside, self._journal.directory / REFUSED_NAME, records[0]
                )
                self.refused += 1
                log.error("ledger refused a usage record, moved to %s: %s", REFUSED_NAME, e)
                return
            middle = len(records) // 2
            await self._send(records[:middle])
            await self._send(records[middle:])


def _move_aside(path: Path, record: bytes) -> None:
    with path.open("ab") as f:
        f.write(record + b"\n")
        f.flush()
        os.fsync(f.fileno())
