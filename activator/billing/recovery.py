"""Reads what a dead activator left in its journal: open attempts, submitted calls, and unshipped
records.

An attempt that was opened and never closed becomes a `lost` record, closed at the last proof of
life of its process: the latest time on any line of its segments. Its charge is exact processor
sharing: the instance's virtual clock is known at its last open or close, and since then only the
lost attempts have shared it.

Reading changes nothing, so an interrupted recovery can be repeated; the ids make the result the
same."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from activator.billing import journal_format
from activator.billing.segments import (
    Cursor,
    Line,
    load_checkpoint,
    read_segment,
    segment_numbers,
    segment_path,
)
from pilotlight.protocol import UsageRecord
from pilotlight.spec.pricing import charged_ns, price_duration

LOST = "lost"


@dataclass(slots=True, kw_only=True)
class HeldCall:
    """A submitted call in the journal: position of its latest line, number of opened attempts, and
    whether it has a result."""

    id: str
    segment: int
    offset: int
    length: int
    attempts: int = 0
    is_finished: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAttempt:
    """An opened attempt: the fixed fields of its record, its own line, and the id of the process
    run that opened it."""

    fixed: dict[str, Any]
    request_price: str
    minimum_ms: int
    rounding_ms: int
    line: dict[str, Any]
    life: str


@dataclass(slots=True, kw_only=True)
class Scan:
    """The contents of all segments.

    Attributes:
        open: record id → attempt without a close.
        held: call id → submitted call that is not over.
        proof_ns: process run → latest time on its lines.
        clocks: instance → (time, virtual clock) at its last event.
        sizes: segment → bytes of complete lines.
        shipped, unshipped: the checkpoint, and the number of closes after it.
        oldest_unshipped_ns: time of the first of these closes.
        damaged: number of unreadable lines (without torn last ones)."""

    open: dict[str, OpenAttempt] = field(default_factory=dict)
    held: dict[str, HeldCall] = field(default_factory=dict)
    proof_ns: dict[str, int] = field(default_factory=dict)
    clocks: dict[str, tuple[int, int]] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    shipped: Cursor = field(default_factory=Cursor)
    unshipped: int = 0
    oldest_unshipped_ns: int | None = None
    damaged: int = 0


def scan(directory: Path) -> Scan:
    """Read all segments, oldest first."""
    found = Scan(shipped=load_checkpoint(directory))
    attempts: Counter[str] = Counter()
    closed: set[str] = set()
    for number in segment_numbers(directory):
        reader = _SegmentReader(found, attempts, closed)
        found.sizes[number] = segment_path(directory, number).stat().st_size
        for line in read_segment(directory, number):
            reader.read(line)
    for record_id in closed & found.open.keys():
        del found.open[record_id]
    for call in found.held.values():
        call.attempts = max(call.attempts, attempts[call.id])
    return found


class _SegmentReader:
    """Reads the lines of one segment into a scan. Template numbers are valid only within their
    segment."""

    def __init__(self, found: Scan, attempts: Counter[str], closed: set[str]) -> None:
        self._found = found
        self._attempts = attempts
        self._closed = closed
        self._templates: dict[int, dict[str, Any]] = {}
        self._life = ""

    def read(self, line: Line) -> None:
        """Add one line to the scan. A damaged line is counted and skipped; the lines around it stay
        valid."""
        body = journal_format.parse(line.text)
        try:
            if body is None:
                raise ValueError("not a journal line")
            self._apply(body, line)
        except (KeyError, TypeError, ValueError):
            self._found.damaged += 1

    def _apply(self, body: dict[str, Any], line: Line) -> None:
        match body["t"]:
            case "J":
                self._life = body["life"]
            case "T":
                self._templates[body["n"]] = body
            case "O":
                self._on_open_line(body)
            case "V":
                self._found.clocks[body["i"]] = (body["at"], body["v"])
            case "C":
                self._closed_line(body, line)
            case "S" | "R":
                self._found.held[body["c"]] = HeldCall(
                    id=body["c"],
                    segment=line.segment,
                    offset=line.offset,
                    length=len(line.text) + 1,
                    attempts=body["n"],
                    is_finished=body["t"] == "R",
                )
            case "F":
                self._found.held.pop(body["c"], None)
        if "at" in body:
            self._found.proof_ns[self._life] = max(
                self._found.proof_ns.get(self._life, 0), body["at"]
            )

    def _on_open_line(self, body: dict[str, Any]) -> None:
        known = self._templates[body["n"]]
        call, attempt = body["c"], body["a"]
        self._attempts[call] = max(self._attempts[call], attempt)
        self._found.open[f"{call}/{attempt}"] = OpenAttempt(
            fixed=known["u"],
            request_price=known["request"],
            minimum_ms=known.get("minimum", 0),
            rounding_ms=known.get("step", 0),
            line=body,
            life=self._life,
        )
        self._found.clocks[known["u"]["instance"]] = (body["at"], body["v"])

    def _closed_line(self, body: dict[str, Any], line: Line) -> None:
        record = body["u"]
        self._closed.add(record["id"])
        if record["outcome"] != LOST and record["kind"] == "CALL":
            self._found.clocks[record["instance"]] = (body["at"], body["v"])
        if line.end > self._found.shipped:
            self._found.unshipped += 1
            if self._found.oldest_unshipped_ns is None:
                self._found.oldest_unshipped_ns = body["at"]


def lost_records(found: Scan) -> list[UsageRecord]:
    """The records that close attempts that were left open, each at its process's last proof of
    life."""
    sharers = Counter(a.fixed["instance"] for a in found.open.values())
    return [
        _lost(name, attempt, found, sharers[attempt.fixed["instance"]])
        for name, attempt in found.open.items()
    ]


def _lost(id: str, attempt: OpenAttempt, found: Scan, sharers: int) -> UsageRecord:
    line = attempt.line
    proof_ns = found.proof_ns[attempt.life]
    event_ns, virtual_ns = found.clocks[attempt.fixed["instance"]]
    billed_ns = max(0, virtual_ns - line["v"]) + max(0, proof_ns - event_ns) // sharers
    billable = charged_ns(billed_ns, minimum_ms=attempt.minimum_ms, rounding_ms=attempt.rounding_ms)
    return UsageRecord(
        **attempt.fixed,
        id=id,
        call=line["c"],
        attempt=line["a"],
        start_kind=line["k"],
        started_at=line["at"] / 1e9,
        queued_ms=line["q"],
        start_ms=line["s"],
        exec_ms=max(0, proof_ns - line["at"]) // 1_000_000,
        billed_ns=billed_ns,
        outcome=LOST,
        **line.get("m", {}),
        cost=f"{price_duration(billable, Decimal(attempt.fixed['rate_per_s']), Decimal(attempt.request_price)):f}",
    )
