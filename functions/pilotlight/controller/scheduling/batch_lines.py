"""Calls of a batch's lines: their results wait here until they are in the batch's files.

They are not among `calls`: a plan's `result_bytes` and the expiry of results must not lose the
answer of a line."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Write
from pilotlight.protocol import BATCH_LABEL, CONTENT_PROBLEM, CallRecord, problem
from pilotlight.spec.record_json import canonical_json, to_json

MAX_RESULT_BYTES = 4 * 1024**2
"""Of the answer of one line: results wait in the database until they are written to a file."""
_MAX_PROBLEM_CHARS = 65_536


def finish(write: Write, record: CallRecord) -> None:
    """Store the end of a line's call. Its first end counts; one of a line that has ended, or of a
    batch that has, changes nothing. A spent budget stops the batch."""
    if len(record.result) > MAX_RESULT_BYTES * 4 // 3:
        record = failed(
            record,
            type="too-large",
            status=413,
            message=f"the answer of a line has at most {MAX_RESULT_BYTES} bytes",
        )
    table, batches = tables.batch_lines, tables.batches
    batch = write.sql.execute(
        sa.update(table)
        .where(table.c.call == record.id, ~table.c.is_done)
        .values(**done(record))
        .returning(table.c.batch)
    ).scalar()
    if batch is not None and record.status == 402 and record.outcome == "error":
        reason = canonical_json({"code": "over-budget", "message": message_of(record)}).decode()
        write.sql.execute(
            sa.update(batches)
            .where(batches.c.id == batch, batches.c.stop.is_(None))
            .values(stop=reason)
        )


def failed(record: CallRecord, *, type: str, status: int, message: str) -> CallRecord:
    """Return the record of a line that was not answered, for this reason."""
    body = problem(type=type, title=type, status=status, detail=message, instance=record.id)
    return replace(
        record,
        state="FAILED",
        status=status,
        outcome="error",
        content_type=CONTENT_PROBLEM,
        result=base64.b64encode(json.dumps(body).encode()).decode(),
    )


def done(record: CallRecord) -> dict[str, Any]:
    """Return the columns of a line that has ended so."""
    return {
        "record": canonical_json(to_json(replace(record, result=""))).decode(),
        "result": record.result,
        "is_done": True,
        "is_failed": record.state != "SUCCEEDED",
    }


def message_of(record: CallRecord) -> str:
    """Return the text of a platform error; "" where it is none."""
    if len(record.result) > _MAX_PROBLEM_CHARS:
        return ""
    try:
        body = json.loads(base64.b64decode(record.result))
    except (ValueError, RecursionError):
        return ""
    return str(body.get("detail", ""))[:1000] if isinstance(body, Mapping) else ""


def is_open(sql: sa.Connection, call: str) -> bool:
    """Whether the call is that of a line that has not ended."""
    table = tables.batch_lines
    query = sa.select(table.c.line).where(table.c.call == call, ~table.c.is_done)
    return sql.execute(query).first() is not None


def labels_of(batch: str) -> dict[str, str]:
    """Return the labels of calls of this batch's lines."""
    return {BATCH_LABEL: batch}
