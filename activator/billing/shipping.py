"""Brings closed records from the journal to the ledger: at least once, in order, with unique ids so
that twice counts once.

The shipper reads the journal's files behind its checkpoint, so its memory does not grow while the
ledger is away, and a new process goes on where the last one was confirmed. The checkpoint is
written after the ledger has accepted; dying in between sends a batch again. A record that the
ledger refuses for good is put aside in `refused.ndjson`, never dropped."""

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
from pilotlight.protocol import BudgetState

log = logging.getLogger(__name__)

MAX_RECORDS = 1000
MAX_BYTES = 1024**2
"""Bounds of a batch: a megabyte is some 1,500 records, and small enough to be sent again without
regret."""
SLICE_BYTES = 64 * 1024
"""What is read of the journal in one go: some sixty records, a fifth of a millisecond."""
GATHER_S = 0.5
FEW_RECORDS = MAX_RECORDS // 2
"""A batch costs two commits, whatever is in it: the records of this long go together, and so few
wait for the next turn."""
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
REFUSED_NAME = "refused.ndjson"


class Ledger(Protocol):
    """Where records go. Accepting the same id again must change nothing."""

    async def accept(self, records: Sequence[bytes]) -> Mapping[str, BudgetState]:
        """Take all of `records` (each a UsageRecord as JSON) or none; where the budgets stand that
        they fall under, by id.

        Raises LedgerUnavailable or LedgerRefused.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Records to send, where the journal goes on behind them, and the time of the first record
    behind (None: none yet)."""

    records: tuple[bytes, ...]
    cursor: Cursor
    next_at_ns: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """How far the ledger is behind: records, and the age of the oldest of them in seconds."""

    records: int
    seconds: float


def usage_body(activator: str, records: Sequence[bytes]) -> bytes:
    """The body of `POST /internal/usage`, without parsing the records."""
    return b'{"activator":"%b","records":[%b]}' % (activator.encode(), b",".join(records))


async def gather_batch(journal: Journal) -> Batch:
    """A whole batch, read in slices with a turn of the event loop after each: under load calls have
    the first right to the processor."""
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
    """The records between the checkpoint and `until`, with a turn of the event loop now and then.
    Nothing may be shipped meanwhile."""
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
    """The next records behind `cursor` (None: the checkpoint), oldest first; the new cursor also
    passes over all that is no record.

    Works on a whole piece of a segment at a time, because there are thousands of lines a second.
    """
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
            # what comes next is not older than the last line of this batch
            return Batch(
                records=tuple(map(journal_format.record_of, closes)),
                cursor=cursor,
                next_at_ns=journal_format.at_of(closes[-1]),
            )


def _whole_lines(journal: Journal, cursor: Cursor, size: int) -> bytes:
    """About `size` bytes of complete lines from `cursor` on, at least one line; empty at the end of
    what is written."""
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
        return b""  # before the first segment that is there: all older ones were shipped
    return text[: text.rindex(b"\n") + 1] if text else b""


class Shipper:
    """The task that ships one journal. `run()` until cancelled; `flush()` once at shutdown. Who
    holds `lock` has no batch on its way."""

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
        max_backoff_s: float = MAX_BACKOFF_S,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`before_batch` is awaited before each batch is gathered, `on_accepted` after the ledger
        took it and before the checkpoint."""
        self._on_accepted = on_accepted
        self._before_batch = before_batch
        self.lock = asyncio.Lock()
        self._journal = journal
        self._ledger = ledger
        self._gather_s = gather_s
        self._first_backoff_s = first_backoff_s
        self._max_backoff_s = max_backoff_s
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
        """Ship for ever; an unreachable ledger is tried again with a growing pause."""
        backoff_s = self._first_backoff_s
        while True:
            await self._journal.wait_unshipped()
            await asyncio.sleep(self._gather_s)
            try:
                while await self._ship() and self._journal.statistics().unshipped >= FEW_RECORDS:
                    pass
                backoff_s = self._first_backoff_s
            except (LedgerUnavailable, OSError) as e:
                log.warning(
                    "usage not shipped: records=%d retry_s=%.1f error=%s",
                    self.lag().records,
                    backoff_s,
                    e,
                )
                await asyncio.sleep(backoff_s)
                backoff_s = min(self._max_backoff_s, 2 * backoff_s)

    async def flush(self) -> int:
        """Ship what there is; returns how many records. Raises LedgerUnavailable, or OSError of the
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
        """Send a batch; a refused one is halved until the wrong record stands alone."""
        try:
            states = await self._ledger.accept(records)
            if self._on_accepted is not None:
                await self._on_accepted(states, records)
        except LedgerRefused as e:
            if len(records) == 1:
                await asyncio.to_thread(
                    _put_aside, self._journal.directory / REFUSED_NAME, records[0]
                )
                self.refused += 1
                log.error(
                    "the ledger refused a usage record, it is kept in %s: %s", REFUSED_NAME, e
                )
                return
            middle = len(records) // 2
            await self._send(records[:middle])
            await self._send(records[middle:])


def _put_aside(path: Path, record: bytes) -> None:
    with path.open("ab") as f:
        f.write(record + b"\n")
        f.flush()
        os.fsync(f.fileno())
