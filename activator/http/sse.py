"""A stream of server-sent events on its way to one caller (WHATWG HTML §9.2), and what keeps it
alive while nothing comes.

Whole events only are passed on: a stream that breaks off between two events can still say why, and
how it ended. Nothing else is held back: an event goes out in the turn of the event loop in which
its last byte came. While a call waits for its slot, a cold start or its first item, and between
items, a comment goes out each `every_s` seconds, so that proxies and callers do not take silence
for death; the first one takes the head with it, and from then on the answer is a stream whatever
becomes of the call."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from activator.http.content_types import GUARD
from activator.http.request import Headers, Request, problem_of
from activator.worker_client.connection import WorkerResponse
from pilotlight import errors
from pilotlight.protocol import CONTENT_SSE

T = TypeVar("T")

HEARTBEAT: Final = b": waiting\n\n"
"""A comment: clients drop it. It is an event's length of its own, so it may only stand between
events."""
HOLD_BYTES: Final = 64 * 1024
"""Of an event that is not whole yet; a longer one is passed on as it comes, and a break in it is a
broken connection."""
_END: Final = b"\n\n"
_SSE: Final = CONTENT_SSE.encode()
STREAM_LINES: Final[Headers] = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    *GUARD,
]
"""Of every stream: a proxy that keeps bytes back would undo it (nginx: ngx_http_proxy_module,
X-Accel-Buffering)."""


class SseSplitter:
    """Finds where events end. Owner: one stream.

    Attributes:
        is_inside: a part of an event was passed on, and its end was not.
    """

    __slots__ = ("_held", "is_inside")

    def __init__(self) -> None:
        self._held = b""
        self.is_inside = False

    def __repr__(self) -> str:
        return f"<SseSplitter {len(self._held)} bytes held{', inside' if self.is_inside else ''}>"

    def feed(self, data: bytes) -> bytes:
        """What can be passed on now: all up to the end of the last whole event; b"" for nothing."""
        if self._held:
            data = self._held + data
        end = data.rfind(_END) + 2
        if end == len(data) > 1:
            self._held, self.is_inside = b"", False
            return data
        out, rest = (data[:end], data[end:]) if end > 1 else (b"", data)
        if out:
            self.is_inside = False
        # the last byte waits: it may be the first half of an end
        if self.is_inside or len(rest) > HOLD_BYTES:
            self.is_inside, out, rest = True, out + rest[:-1], rest[-1:]
        self._held = rest
        return out

    def rest(self) -> bytes:
        """What is left at the end of a stream whose last event was not ended, with that end."""
        held, self._held = self._held, b""
        if not held and not self.is_inside:
            return b""
        self.is_inside = False
        return held.rstrip(b"\n") + _END


class SseResponse:
    """One caller's stream. Owner: the task of its request; its heartbeats are callbacks and short
    tasks of the same event loop.

    async with EventStream(request, every_s=10, head=…) as stream:
        exchange = await stream.during(step)        # heartbeats; raises what `step` raises, and tells the caller nothing of it
        await stream.begin(headers)                 # the head, unless a heartbeat had to send one
        await stream.send(events)                   # whole ones; heartbeats between them
        await stream.close(end_event(…))
    """

    def __init__(self, request: Request, *, every_s: float, head: Callable[[], Headers]) -> None:
        """`head`: the headers that are known before there is an answer."""
        self._request = request
        self._every_s = every_s
        self._head = head
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._beat: asyncio.Task[None] | None = None
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
        self._rest()

    @property
    def is_begun(self) -> bool:
        """Whether its head is out: then it ends as a stream."""
        return self._request.is_answered

    async def during(self, step: Awaitable[T]) -> T:
        """The outcome of `step`, with heartbeats while it takes its time."""
        self._arm(self._every_s)
        try:
            return await step
        finally:
            # nothing is waited for here: what came must reach its owner, who gives its slot back
            self._rest()

    async def begin(self, headers: Headers) -> None:
        """Send the head, if no heartbeat did; from now on there are heartbeats."""
        if not self.is_begun:
            await self._request.start(200, headers)
        self._sent_at = self._loop.time()
        self._arm(self._every_s)

    async def send(self, data: bytes, *, is_inside: bool = False) -> None:
        """Pass events on; waits while the caller does not read. `is_inside`: the last of them is
        not whole."""
        if self._beat is not None:
            await self._beat
        self._is_busy, self._is_inside = True, is_inside
        try:
            await self._request.chunk(data)
        finally:
            self._is_busy = False
        self._sent_at = self._loop.time()

    async def pass_on(self, answer: WorkerResponse, cutter: SseSplitter) -> AsyncIterator[bytes]:
        """Send a worker's events on as they come; yields what was sent. Raises WorkerConnectionLost
        when the worker dies."""
        async for chunk in answer.chunks():
            if out := cutter.feed(chunk):
                await self.send(out, is_inside=cutter.is_inside)
                yield out
        if out := cutter.rest():
            await self.send(out)
            yield out

    async def close(self, data: bytes = b"") -> None:
        """Send the last events, and end the answer."""
        self._rest()
        if not self.is_begun:
            await self._request.start(200, self._head())
        await self._request.chunk(data, more=False)

    # -- heartbeats --------------------------------------------------------------------------------
    def _arm(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._ring)

    def _ring(self) -> None:
        left_s = self._sent_at + self._every_s - self._loop.time()
        # something was sent meanwhile: one timer for a stream, not one for each piece
        if left_s > 0:
            self._arm(left_s)
        elif self._is_busy or self._is_inside or self._is_congested:
            # what the caller has not read yet keeps its connection alive
            self._arm(self._every_s)
        else:
            self._beat = self._loop.create_task(
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
            if self._beat is asyncio.current_task():
                self._beat = None
        self._sent_at = self._loop.time()
        self._arm(self._every_s)

    def _rest(self) -> None:
        """No more heartbeats. One that was about to be sent is not, or was sent whole: servers
        write at once, or wait and write then."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        beat, self._beat = self._beat, None
        if beat is not None:
            beat.cancel()


def end_event(*, finish_reason: str, cost: str, exec_ms: float, start: str, **more: Any) -> bytes:
    """The last event of every stream. `more`: what only some have, such as `tokens_in`; None is
    left out."""
    told = {
        "finish_reason": finish_reason,
        "cost": cost,
        "exec_ms": round(exec_ms, 2),
        "start": start,
        **more,
    }
    return event("end", {key: value for key, value in told.items() if value is not None})


def error_event(error: errors.PilotlightError, request_id: str) -> bytes:
    """What an error is where the head is out already; the end event follows."""
    return event("error", problem_of(error, request_id))


def event(name: str, body: Any) -> bytes:
    """One event with a JSON value."""
    return f"event: {name}\ndata: {json.dumps(body)}\n\n".encode()


def data_lines(body: bytes) -> bytes:
    """An event without a name, of a text that may have several lines."""
    return b"".join(b"data: %b\n" % line for line in body.splitlines() or [b""]) + b"\n"


def stream_headers(headers: Headers) -> Headers:
    """The same, with what keeps proxies from holding a stream back."""
    known = {name for name, _ in headers}
    return headers + [line for line in STREAM_LINES if line[0] not in known]


def early_head(request: Request) -> Headers:
    """The head of a stream that begins before it is known who answers."""
    return [
        (b"content-type", _SSE),
        *STREAM_LINES,
        (b"x-request-id", request.id.encode()),
        *request.quota_headers(),
    ]
