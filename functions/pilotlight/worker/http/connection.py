"""uvicorn's HTTP/1.1 protocol, and beside it the shorter way of a call.

A `POST /invoke/…` is handed to `Calls` as a Request when its body is complete, without an ASGI
scope, messages or a task, and answered in one write. Everything else is uvicorn's."""

from __future__ import annotations

import asyncio
import functools
import http
import json
from collections.abc import Callable, Mapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pilotlight.protocol import CONTENT_PROBLEM, HEADER_OUTCOME, WORKER_INVOKE
from pilotlight.worker.user_code import serialization

KEEP_ALIVE_S = 3600
"""The activator pools its connections and closes them itself: if the worker closed them, a request
could meet a closing connection."""
_INVOKE = WORKER_INVOKE.encode()
_OUTCOME = HEADER_OUTCOME.encode()
_PROBLEM = CONTENT_PROBLEM.encode()


class _Ignored:
    """In place of the event of uvicorn's cycles, for which nothing waits here."""

    def set(self) -> None:
        """Do nothing."""


class Request:
    """One `POST /invoke/…` and its response. In place of uvicorn's cycle, some of whose attributes
    it has. Owned by the event loop.

    Attributes:
        url: as received.
        parts: the body, in the pieces that arrived.
        is_whole: whether all of it has.
        is_due: whether those before it on the connection were answered.
    """

    __slots__ = (
        "connection",
        "disconnected",
        "headers",
        "is_due",
        "is_whole",
        "keep_alive",
        "parts",
        "response_complete",
        "url",
    )
    message_event = _Ignored()

    def __init__(self, connection: Connection, headers: Mapping[bytes, bytes], url: bytes) -> None:
        self.connection = connection
        self.headers = headers
        self.url = url
        self.parts: list[bytes] = []
        self.is_whole = False
        self.is_due = True
        self.keep_alive = True
        self.disconnected = False
        self.response_complete = False

    def __repr__(self) -> str:
        return f"<Request {self.url!r} {'answered' if self.response_complete else 'open'}>"

    @property
    def body(self) -> bytes:
        """The whole body."""
        parts = self.parts
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def respond(
        self, status: int, content_type: bytes, outcome: bytes, body: bytes, lines: bytes = b""
    ) -> None:
        """Send the whole response in one write, unless the caller has disconnected. `lines`:
        further header lines, each ending in CRLF."""
        if self.disconnected:
            return
        head = _head(status, content_type, outcome, self.keep_alive)
        self.connection.transport.write(b"%b%d\r\n%b\r\n%b" % (head, len(body), lines, body))
        self._complete()

    def respond_problem(
        self, document: dict[str, Any], *, outcome: bytes, call: str = "", lines: bytes = b""
    ) -> None:
        """Send a problem document, which contains the id `call`."""
        body = json.dumps({**document, "instance": call} if call else document).encode()
        self.respond(document["status"], _PROBLEM, outcome, body, lines)

    def respond_error(self, error: Any, *, outcome: bytes, call: str = "") -> None:
        """Send one of our own errors."""
        self.respond_problem(serialization.problem_of(error), outcome=outcome, call=call)

    def start(self, content_type: bytes, outcome: bytes, body: bytes, lines: bytes = b"") -> None:
        """Send the head and the first piece of a response whose length is not known. `lines`: as
        for `respond`."""
        if not self.disconnected:
            head = _stream_head(content_type, outcome, self.keep_alive)
            self.connection.transport.write(b"%b%b\r\n%b" % (head, lines, _chunk(body)))

    async def send(self, body: bytes) -> None:
        """Send a further piece; waits while the caller does not read."""
        if self.connection.flow.write_paused and not self.disconnected:
            await self.connection.flow.drain()
        if body and not self.disconnected:
            self.connection.transport.write(_chunk(body))

    def end(self, body: bytes, lines: bytes) -> None:
        """Send the last piece, and trailer lines after it (RFC 9112 §7.1.2)."""
        if not self.disconnected:
            self.connection.transport.write(b"%b0\r\n%b\r\n" % (_chunk(body), lines))
            self._complete()

    def _complete(self) -> None:
        self.response_complete = True
        if not self.keep_alive:
            self.connection.transport.close()
        self.connection.on_response_complete()


class Connection(HttpToolsProtocol):
    """One connection. It notifies the running call when its caller disconnects, without a waiting
    task.

    Attributes:
        leave: called when the caller disconnects; set while a call runs."""

    cycle: Any  # uvicorn's, or a Request
    pipeline: Any

    def __init__(
        self,
        *args: Any,
        begin: Callable[[Request], None] | None,
        on_closed: Callable[[], None],
        **kwargs: Any,
    ) -> None:
        """`begin`: called with each Request; None = all requests are ASGI's."""
        super().__init__(*args, **kwargs)
        self._begin: Any = begin  # set where there is a Request
        self._on_closed = on_closed
        self._request: Request | None = None
        self.leave: Callable[[], None] | None = None
        self._is_used = False
        self._idle_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """A peer has connected."""
        super().connection_made(transport)
        self._watch_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify the running call: the peer has disconnected."""
        super().connection_lost(exc)
        for waiting, _ in self.pipeline:
            waiting.disconnected = True
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        if self.leave is not None:
            self.leave()
        self._on_closed()

    # -- the parser's callbacks --------------------------------------------------------------------
    def on_message_begin(self) -> None:
        """A request begins. Its scope is created only when it goes to ASGI."""
        self.url = b""
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header line."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head is complete: the request becomes a Request, or uvicorn's."""
        headers = dict(self.headers)
        if (
            self._begin is None
            or not self.url.startswith(_INVOKE)
            or b"upgrade" in headers
            or self.parser.get_method() != b"POST"
        ):
            self._begin_asgi()
            return
        self._request = request = Request(self, headers, self.url)
        if not self.parser.should_keep_alive() or (
            b"connection" in headers and self.parser.get_http_version() == "1.0"
        ):
            request.keep_alive = False
        if b"expect" in headers:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        before = self.cycle
        if before is not None and not before.response_complete:
            request.is_due = False
            self.pipeline.appendleft((request, self.app))
        self.cycle = request

    def on_body(self, body: bytes) -> None:
        """A piece of the body arrived."""
        if self._request is None:
            super().on_body(body)
        else:
            self._request.parts.append(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        request, self._request = self._request, None
        if request is None:
            super().on_message_complete()
            return
        request.is_whole = True
        if request.is_due:
            self._begin(request)

    def _begin_asgi(self) -> None:
        """Run uvicorn's callbacks from the beginning of a request to the end of its head."""
        url, headers = self.url, self.headers
        super().on_message_begin()
        self.url = url
        for name, value in headers:
            super().on_header(name, value)
        super().on_headers_complete()

    # -- the end of a response ---------------------------------------------------------------------
    def on_response_complete(self) -> None:
        """Like uvicorn's method, without a timer for each response."""
        self._is_used = True
        if self.transport.is_closing():
            return
        if self.pipeline:
            # not directly: the call that is answered has not ended yet
            self.loop.call_soon(self._begin_next)
        if self.flow.read_paused:
            self.flow.resume_reading()

    def _begin_next(self) -> None:
        if self.transport.is_closing():
            return
        cycle, app = self.pipeline.pop()
        if type(cycle) is not Request:
            self._start_asgi_task(cycle, app)
            return
        cycle.is_due = True
        if cycle.is_whole:
            self._begin(cycle)

    def _watch_idle(self) -> None:
        self._is_used = False
        self._idle_timer = self.loop.call_later(KEEP_ALIVE_S, self._close_idle)

    def _close_idle(self) -> None:
        """Close the connection if it was idle since the last look."""
        cycle = self.cycle
        is_idle = not self._is_used and (cycle is None or cycle.response_complete)
        if is_idle and self.transport.get_protocol() is self:  # not a WebSocket's by now
            self.transport.close()
        else:
            self._watch_idle()


def _chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body) if body else b""


@functools.lru_cache(maxsize=64)  # a handful of combinations
def _head(status: int, content_type: bytes, outcome: bytes, keep_alive: bool) -> bytes:
    return b"%bcontent-length: " % _head_lines(status, content_type, outcome, keep_alive)


@functools.lru_cache(maxsize=64)
def _stream_head(content_type: bytes, outcome: bytes, keep_alive: bool) -> bytes:
    return b"%btransfer-encoding: chunked\r\n" % _head_lines(200, content_type, outcome, keep_alive)


def _head_lines(status: int, content_type: bytes, outcome: bytes, keep_alive: bool) -> bytes:
    phrase = http.HTTPStatus(status).phrase.encode()
    close = b"" if keep_alive else b"connection: close\r\n"
    return b"HTTP/1.1 %d %b\r\n%bcontent-type: %b\r\n%b: %b\r\n" % (
        status,
        phrase,
        close,
        content_type,
        _OUTCOME,
        outcome,
    )
