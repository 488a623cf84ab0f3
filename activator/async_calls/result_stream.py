"""`GET /v1/calls/{id}/stream`: the progress of a submitted call as server-sent events, for any
number of readers, each from its own position.

Events: `state` at each change; then each item of a streamed result, with an `id` of attempt and
number (`2-17`), or the whole `result` of another; `error` where it failed; `end` last. A reader
that reconnects with `Last-Event-ID` gets the following items. While an attempt runs, its whole
output is buffered here, up to the size limit of a result (`activator.max_body_bytes`; a call that
produces more fails with 413), so that slow readers do not delay the call. After its end the stored
result is read, so the stream lives as long as the result. A repeated attempt counts its items from
the beginning, because it may produce different ones.

Owner: the event loop.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any, Final

from activator.async_calls.pending_call import PendingCall, StreamBuffer
from activator.async_calls.public_record import public_record
from activator.async_calls.stream_items import ItemSplitter, cutter_of
from activator.http.problems import problem_of
from activator.http.request import Request
from activator.http.sse import SseResponse, data_lines, end_event, event, stream_headers
from pilotlight import errors
from pilotlight.protocol import CONTENT_PICKLE, CONTENT_PROBLEM, CONTENT_SSE

FINAL = frozenset({"SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED"})
"""Final states; only a dead letter that is sent again leaves them."""
LAST_ID: Final = b"last-event-id"
_ID: Final = re.compile(r"([0-9]{1,9})-([0-9]{1,12})")
PIECE_BYTES: Final = 16 * 1024
"""Bytes of a result that are split at once: up to 8,192 items, some 5 ms of the event loop, before
other tasks get their turn."""
Position = tuple[int, int]
"""Attempt and number of the last item that a reader has; (0, 0) = none."""


class StreamSubscriber:
    """One reader of one call's stream. Owner: its request's task."""

    def __init__(self, stream: SseResponse, position: Position) -> None:
        self._stream = stream
        self._after = position

    async def follow(self, held: PendingCall) -> None:
        """Send all events of a call that is pending here, to its end."""
        sent_state: tuple[str, int] | None = None
        log: StreamBuffer | None = None
        items: _Items | None = None
        while True:
            changed, record = held.changed, held.record
            # a record counts the ended attempts
            attempt = record.attempt + (record.state == "RUNNING")
            state = (record.state, max(attempt, held.log.attempt if held.log is not None else 0))
            if state != sent_state and record.state not in FINAL:
                sent_state = state
                await self._stream.send(
                    event("state", {"id": record.id, "state": state[0], "attempt": state[1]})
                )
            if held.log is not None and held.log is not log:
                log = held.log
                items = _Items(cutter_of(log.content_type), log.attempt, self._after)
            if (
                log is not None
                and items is not None
                and (out := items.next_events(log.data)) is not None
            ):
                await self._send_items(out, items)
                continue  # sending may have taken long
            if record.state in FINAL:
                await self.finish(record.to_json())
                return
            await changed.wait()

    async def finish(self, record: Mapping[str, Any]) -> None:
        """Send the remaining events of an ended call, from its record, and the end."""
        result = base64.b64decode(record["result"])
        cutter = cutter_of(record["content_type"])
        if cutter is not None:
            items = _Items(cutter, int(record["attempt"]), self._after)
            while (out := items.next_events(result)) is not None:
                await self._send_items(out, items)
        elif record["state"] == "SUCCEEDED":
            await self._stream.send(b"event: result\n" + data_lines(public_record(record)))
        if cutter is None and record["state"] in ("FAILED", "EXPIRED"):
            await self._stream.send(_failure(record, result))
        await self._stream.close(
            end_event(
                finish_reason=_finish_of(record),
                cost=record["cost"],
                exec_ms=record["exec_ms"],
                start=record["start_kind"],
                id=record["id"],
                state=record["state"],
                attempt=record["attempt"],
            )
        )

    async def _send_items(self, out: bytes, items: _Items) -> None:
        self._after = items.position
        if out:
            await self._stream.send(out)
        await asyncio.sleep(0)  # sending does not yield to other tasks while the caller reads fast


class _Items:
    """Splits the output of an attempt into events with ids, starting after a position."""

    def __init__(self, cutter: ItemSplitter | None, attempt: int, after: Position) -> None:
        self._cutter = cutter
        self._attempt = attempt
        self._skip = after[1] if after[0] == attempt else 0
        self._number = 0
        self._read = 0

    @property
    def position(self) -> Position:
        """Position of the last item."""
        return self._attempt, max(self._number, self._skip)

    def next_events(self, data: bytes | bytearray) -> bytes | None:
        """Return the events, maybe none, in the next unread piece of `data`; None when all of it
        was read."""
        if self._cutter is None or self._read >= len(data):
            return None
        piece = bytes(data[self._read : self._read + PIECE_BYTES])
        self._read += len(piece)
        out = bytearray()
        for item in self._cutter.feed(piece):
            self._number += 1
            if self._number > self._skip:
                out += b"id: %d-%d\n%b\n\n" % (self._attempt, self._number, item)
        return bytes(out)


def position_of(request: Request) -> Position:
    """Return the position in a reader's Last-Event-ID. Raises InvalidInput."""
    given = request.headers.get(LAST_ID, b"").decode("latin-1").strip()
    if not given:
        return (0, 0)
    found = _ID.fullmatch(given)
    if found is None:
        raise errors.InvalidInput(
            f"header Last-Event-ID: {given!r} is not an event id of this stream, such as 1-17; "
            f"omit the header to read from the beginning",
            parameter="last-event-id",
        )
    return int(found[1]), int(found[2])


def call_stream_headers(request: Request) -> list[tuple[bytes, bytes]]:
    """Return the head of a call's stream."""
    return stream_headers(
        [(b"content-type", CONTENT_SSE.encode()), (b"x-request-id", request.id.encode())]
    )


def _failure(record: Mapping[str, Any], result: bytes) -> bytes:
    """Return the error event of a failed call whose result is not a stream."""
    if record["content_type"] == CONTENT_PROBLEM:
        # the worker's word for it: user code may have taken its place
        with contextlib.suppress(ValueError, RecursionError):
            return event("error", json.loads(result))
    if result and record["content_type"] == CONTENT_PICKLE:
        return b"event: exception\ndata: %b\n\n" % base64.b64encode(result)
    if record["state"] == "FAILED":
        failed = errors.FunctionRaised(
            f"call {record['id']} failed with status {record['status']}, and its response is not a "
            f"problem document"
        )
        return event("error", problem_of(failed, record["id"]))
    gone = errors.DeadlineExceeded(
        f"call {record['id']} expired: it exceeded its deadline, or its result is no longer stored"
    )
    return event("error", problem_of(gone, record["id"]))


def _finish_of(record: Mapping[str, Any]) -> str:
    """Return why it ended, one of `engines.FINISH_REASONS`."""
    state = record["state"]
    if state == "FAILED" and record["status"] == 413:
        return "length"
    return {"SUCCEEDED": "stop", "CANCELLED": "cancelled"}.get(state, "error")
