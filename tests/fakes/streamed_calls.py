"""The stream of a finished submitted call, as the platform tells it."""

from __future__ import annotations

import base64
import json
from typing import Any

from activator.async_calls.public_record import public_record
from activator.async_calls.stream_items import cutter_of
from activator.http.sse import data_lines
from pilotlight.protocol import CallRecord


def stream_of(record: CallRecord, after: str = "") -> bytes:
    """Its events, those behind the item with the id `after`."""
    result = base64.b64decode(record.result)
    cutter = cutter_of(record.content_type)
    out = [_event("state", {"id": record.id, "state": "RUNNING", "attempt": record.attempt})]
    if cutter is None:
        out.append(b"event: result\n" + data_lines(public_record(record.to_json())))
    else:
        seen = int(after.partition("-")[2] or 0)
        items = list(enumerate(cutter.feed(result), 1))
        out += [b"id: %d-%d\n%b\n\n" % (record.attempt, n, item) for n, item in items if n > seen]
    out.append(_event("end", {"finish_reason": "stop" if record.state == "SUCCEEDED" else "error"}))
    return b"".join(out)


def _event(name: str, body: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps(body)}\n\n".encode()
