"""Lines of a running batch: rows of `batch_lines`, and their calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import sqlalchemy as sa

from pilotlight.controller.batches.batches import Batch
from pilotlight.controller.batches.targets import LineTarget
from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.scheduling import batch_lines, dispatch_queue
from pilotlight.errors import PilotlightError
from pilotlight.protocol import CallRecord
from pilotlight.spec.identifiers import Priority

FLUSH_CHARS: Final = 4 * 1024**2
"""Of answers that are written to files at once; a single one may be larger."""
FLUSH_LINES: Final = 500
_T = tables.batch_lines
_C = _T.c


@dataclass(frozen=True, slots=True, kw_only=True)
class LineCounts:
    """Lines of a batch whose calls run, lines that wait to be written to a file, and the length of
    the answers of these."""

    running: int
    ended: int
    ended_chars: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedLine:
    """A line that has ended."""

    line: int
    custom_id: str
    record: CallRecord

    @property
    def is_failed(self) -> bool:
        """Whether it belongs in the error file."""
        return self.record.state != "SUCCEEDED"

    def to_json(self) -> dict[str, Any]:
        """Return what `line_process.composed` takes."""
        record = self.record
        return {
            "custom_id": self.custom_id,
            "call": record.id,
            "batch_line": f"batch_{record.id}",
            "status": record.status,
            "outcome": record.outcome,
            "content_type": record.content_type,
            "result": record.result,
        }


def count(sql: sa.Connection, batch_id: str) -> LineCounts:
    """Count the lines of a batch."""
    ended = sa.case((_C.is_done, 1), else_=0)
    query = sa.select(
        sa.func.count(), sa.func.sum(ended), sa.func.sum(sa.func.length(_C.result) * ended)
    ).where(_C.batch == batch_id)
    every, done, chars = sql.execute(query).one()
    return LineCounts(
        running=int(every) - int(done or 0), ended=int(done or 0), ended_chars=int(chars or 0)
    )


def add(
    write: Write,
    batch: Batch,
    lines: Sequence[Mapping[str, Any]],
    targets: Mapping[str, LineTarget | PilotlightError],
) -> None:
    """Add the parsed lines (`line_process.parsed_lines`) that follow `batch.line`, and queue their
    calls. Lines that cannot be called have ended."""
    for one in lines:
        line = batch.line + one["n"] + 1
        target = targets.get(one.get("model", ""))
        if "code" in one:
            _add(write, batch, line, one["id"], _failed(batch, line, one["code"], one["message"]))
        elif isinstance(target, LineTarget):
            record = _record(batch, line, target, now=write.now)
            _add(write, batch, line, one["id"], record)
            document = dispatch_queue.payload(
                record, body=one["body"].encode(), key=batch.key, customer=batch.customer
            )
            terms = {"priority": Priority.BATCH.value, "retry_until": batch.expires_at}
            dispatch_queue.enqueue_call(write, {**document, **terms}, due_at=write.now)
        else:
            code = target.type if target is not None else "not-found"
            _add(write, batch, line, one["id"], _failed(batch, line, code, str(target)))


def add_stopped(
    write: Write, batch: Batch, lines: Sequence[Mapping[str, Any]], stop: Mapping[str, str]
) -> None:
    """Add the parsed lines that follow as lines that have ended for this reason."""
    for one in lines:
        line = batch.line + one["n"] + 1
        record = _failed(batch, line, stop["code"], stop["message"])
        _add(write, batch, line, one["id"], record)


def _record(batch: Batch, line: int, target: LineTarget, *, now: float) -> CallRecord:
    return CallRecord(
        id=batch.call_of(line),
        tenant=batch.tenant,
        environment=batch.environment,
        app=target.app,
        function=target.function,
        method=target.method,
        state="QUEUED",
        sequence=1,
        submitted_at=now,
        revision=target.revision,
        expires_at=batch.expires_at,
        labels=batch_lines.labels_of(batch.id),
    )


def _failed(batch: Batch, line: int, code: str, message: str) -> CallRecord:
    nothing = _record(batch, line, LineTarget(app="", function=""), now=0.0)
    return batch_lines.failed(nothing, type=code, status=400, message=message)


def _add(write: Write, batch: Batch, line: int, name: str, record: CallRecord) -> None:
    values = batch_lines.done(record)
    if record.state == "QUEUED":
        values |= {"is_done": False, "is_failed": False}
    write.sql.execute(
        sa.insert(_T).values(batch=batch.id, line=line, call=record.id, custom_id=name, **values)
    )


def cancel(write: Write, batch: Batch, stop: Mapping[str, str], *, is_all: bool) -> None:
    """Cancel the calls that run. Those that no activator has, or with `is_all` all of them, end at
    once."""
    query = sa.select(_C.call).where(_C.batch == batch.id, ~_C.is_done)
    calls = write.sql.execute(query).scalars().all()
    free = dispatch_queue.cancel(write, calls)
    for call in calls if is_all else free:
        _end(write, batch, call, stop)


def _end(write: Write, batch: Batch, call: str, stop: Mapping[str, str]) -> None:
    row = write.sql.execute(sa.select(_C.line, _C.record).where(_C.call == call)).one()
    known = CallRecord.from_json(json.loads(row.record))
    record = batch_lines.failed(known, type=stop["code"], status=499, message=stop["message"])
    write.sql.execute(
        sa.update(_T)
        .where(_C.batch == batch.id, _C.line == row.line, ~_C.is_done)
        .values(**batch_lines.done(record))
    )


def ended(sql: sa.Connection, batch: Batch) -> list[EndedLine]:
    """Return some lines that have ended, in their order."""
    length = sa.func.length(_C.result)
    mine = (_C.batch == batch.id, _C.is_done)
    query = sa.select(_C.line, length).where(*mine).order_by(_C.line).limit(FLUSH_LINES)
    chosen: list[int] = []
    chars = 0
    for line, more in sql.execute(query).all():
        chars += int(more)
        if chosen and chars > FLUSH_CHARS:
            break
        chosen.append(line)
    rows = sql.execute(sa.select(_T).where(*mine, _C.line.in_(chosen)).order_by(_C.line))
    return [_ended(batch, row) for row in rows]


def _ended(batch: Batch, row: sa.Row[Any]) -> EndedLine:
    record = replace(CallRecord.from_json(json.loads(row.record)), result=row.result)
    if record.state != "SUCCEEDED" and not record.result:  # cancelled, or expired
        stop = batch.stop or {"code": "cancelled", "message": "the call of this line was cancelled"}
        record = batch_lines.failed(
            record, type=stop["code"], status=record.status or 499, message=stop["message"]
        )
    return EndedLine(line=row.line, custom_id=row.custom_id, record=record)


def refused(line: EndedLine, error: PilotlightError) -> EndedLine:
    """Return a line whose answer cannot be stored."""
    record = batch_lines.failed(
        line.record, type=error.type, status=error.status, message=str(error)
    )
    return replace(line, record=record)


def forget(write: Write, batch: Batch, lines: Sequence[EndedLine]) -> None:
    """Delete lines that are in a file."""
    numbers = [one.line for one in lines]
    write.sql.execute(sa.delete(_T).where(_C.batch == batch.id, _C.line.in_(numbers)))
    dispatch_queue.forget(write, [one.record.id for one in lines])
