"""Streams of server-sent events to callers (WHATWG HTML §9.2), with heartbeats during silence.

Only whole events are forwarded, so that a stream that is interrupted between two events can still
report the error and its end. Events are not delayed further: an event is sent in the event loop
turn in which its last byte arrives. While a call waits for its slot, a cold start or its first
item, and between items, a comment is sent each `every_s` seconds, so that proxies and callers keep
the connection open. The first heartbeat sends the head; from then on the response is a stream
whatever the outcome of the call."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from activator.http.payloads import GUARD
from activator.http.problems import problem_of
from activator.http.request import Headers, Request
from pilotlight import errors
from pilotlight.protocol import CONTENT_SSE

T = TypeVar("T")

HEARTBEAT: Final = b": waiting\n\n"
"""A comment, which clients ignore. It ends like an event, so it may only be sent between events."""
HOLD_BYTES: Final = 64 * 1024
"""Limit of the buffered part of an incomplete event; a longer event is forwarded as it arrives, and
an interruption in it breaks the connection."""
_END: Final = b"\n\n"
_SSE: Final = CONTENT_SSE.encode()
STREAM_LINES: Final[Headers] = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    *GUARD,
]
"""Headers of every stream: a proxy must not buffer it (nginx: ngx_http_proxy_module,
X-Accel-Buffering)."""


class SseSplitter:
    """Splits a stream at the ends of events. Owner: one stream.

    Attributes:
        is_inside: a part of an event was forwarded, and its end was not.
    """

    __slots__ = ("_held", "is_inside")

    def __init__(self) -> None:
        self._held = b""
        self.is_inside = False

    def __repr__(self) -> str:
        return f"<SseSplitter {len(self._held)} bytes held{', inside' if self.is_inside else ''}>"

    def feed(self, data: bytes, now_ns: int = 0) -> bytes:
        """Return what can be forwarded now: everything up to the end of the last whole event; b""
        for nothing."""
        if self._held:
            data = self._held + data
        end = data.rfind(_END) + 2
        if end == len(data) > 1:
            self._held, self.is_inside = b"", False
            return data
        out, rest = (data[:end], data[end:]) if end > 1 else (b"", data)
        if out:
            self.is_inside = False
        # keep the last byte: it may be the first half of an event's end
        if self.is_inside or len(rest) > HOLD_BYTES:
            self.is_inside, out, rest = True, out + rest[:-1], rest[-1:]
        self._held = rest
        return out

    def end(self, status: int) -> tuple[int, bytes]:
        """Return the unfinished last event of a stream, with its end added; b"" where there is
        none."""
        held, self._held = self._held, b""
        if not held and not self.is_inside:
            return status, b""
        self.is_inside = False
        return status, held.rstrip(b"\n") + _END

    def collected(self, status: int, body: bytes) -> tuple[int, bytes]:
        """Return a whole response as it is."""
        return status, body


class SseResponse:
    """One caller's stream. Owner: the task of its request; its heartbeats are callbacks and short
    tasks of the same event loop.

    async with SseResponse(request, every_s=10, head=…) as stream:
        # sends heartbeats; raises what `step` raises, without an error event to the caller
        exchange = await stream.during(step)
        await stream.begin(headers)  # sends the head, unless a heartbeat did
        await stream.send(events)  # whole events; heartbeats between them
        await stream.close(end_event(…))
    """

    def __init__(self, request: Request, *, every_s: float, head: Callable[[], Headers]) -> None:
        """`head`: returns the headers that are known before there is a response."""
        self._request = request
        self._every_s = every_s
        self._head = head
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._heartbeat: asyncio.Task[None] | None = None
        self._sent_at = self._loop.time()
        self._is_busy = False
        self._is_inside = False

    def __repr__(self) -> str:
        return f"<SseResponse of {self._request.id}{' begun' if self.is_begun else ''}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop_heartbeats()

    @property
    def is_begun(self) -> bool:
        """Whether the head was sent: then the response must end as a stream."""
        return self._request.is_answered

    async def during(self, step: Awaitable[T]) -> T:
        """Return the result of `step`, sending heartbeats while it runs."""
        self._arm(self._every_s)
        try:
            return await step
        finally:
            # do not wait here: the result must reach its owner, which releases its slot
            self._stop_heartbeats()

    async def begin(self, headers: Headers) -> None:
        """Send the head, unless a heartbeat did, and start the heartbeats."""
        if not self.is_begun:
            await self._request.start(200, headers)
        self._sent_at = self._loop.time()
        self._arm(self._every_s)

    async def send(self, data: bytes, *, is_inside: bool = False) -> None:
        """Forward events; waits while the caller does not read. `is_inside`: the last event is
        incomplete."""
        if self._heartbeat is not None:
            await self._heartbeat
        self._is_busy, self._is_inside = True, is_inside
        try:
            await self._request.chunk(data)
        finally:
            self._is_busy = False
        self._sent_at = self._loop.time()

    async def close(self, data: bytes = b"") -> None:
        """Send the last events, and end the response."""
        self._stop_heartbeats()
        if not self.is_begun:
            await self._request.start(200, self._head())
        await self._request.chunk(data, more=False)

    # -- heartbeats --------------------------------------------------------------------------------
    def _arm(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._on_timer)

    def _on_timer(self) -> None:
        left_s = self._sent_at + self._every_s - self._loop.time()
        # something was sent meanwhile: a stream has one timer, not one for each piece
        if left_s > 0:
            self._arm(left_s)
        elif self._is_busy or self._is_inside or self._is_congested:
            # unread bytes keep the caller's connection alive
            self._arm(self._every_s)
        else:
            self._heartbeat = self._loop.create_task(
                self._send_heartbeat(), name=f"heartbeat {self._request.id}"
            )

    @property
    def _is_congested(self) -> bool:
        connection = self._request.scope.get("connection")
        return connection is not None and bool(connection.is_congested)

    async def _send_heartbeat(self) -> None:
        try:
            if not self.is_begun:
                await self._request.start(200, self._head())
            await self._request.chunk(HEARTBEAT)
        finally:
            if self._heartbeat is asyncio.current_task():
                self._heartbeat = None
        self._sent_at = self._loop.time()
        self._arm(self._every_s)

    def _stop_heartbeats(self) -> None:
        """Stop the heartbeats. A pending heartbeat is either not sent or sent whole: servers write
        at once, or wait and then write."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        beat, self._heartbeat = self._heartbeat, None
        if beat is not None:
            beat.cancel()


def end_event(*, finish_reason: str, cost: str, exec_ms: float, start: str, **more: Any) -> bytes:
    """Return the last event of every stream. `more`: optional fields such as `tokens_in`; None is
    left out."""
    fields = {
        "finish_reason": finish_reason,
        "cost": cost,
        "exec_ms": round(exec_ms, 2),
        "start": start,
        **more,
    }
    return event("end", {key: value for key, value in fields.items() if value is not None})


def error_event(error: errors.PilotlightError, request_id: str) -> bytes:
    """Return the event of an error that occurs after the head was sent; the end event follows."""
    return event("error", problem_of(error, request_id))


def event(name: str, body: Any) -> bytes:
    """Return one event with a JSON value."""
    return f"event: {name}\ndata: {json.dumps(body)}\n\n".encode()


def data_lines(body: bytes) -> bytes:
    """Return an event without a name, for a text that may have several lines."""
    return b"".join(b"data: %b\n" % line for line in body.splitlines() or [b""]) + b"\n"


def stream_headers(headers: Headers) -> Headers:
    """Return the headers with those that keep proxies from buffering a stream."""
    known = {name for name, _ in headers}
    return headers + [line for line in STREAM_LINES if line[0] not in known]


def early_head(request: Request) -> Headers:
    """Return the head of a stream that begins before its answering instance is known."""
    return [
        (b"content-type", _SSE),
        *STREAM_LINES,
        (b"x-request-id", request.id.encode()),
        *request.quota_headers(),
    ]
