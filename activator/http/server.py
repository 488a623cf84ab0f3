"""uvicorn's HTTP protocol with limits on the resources of unauthenticated clients.

uvicorn implements HTTP/1.1; this module adds limits on connections per address, the size of a
request's head, the time a head may take (slow-loris) and pipelined requests, and notifies the
gateway at once when a caller disconnects, without a task for each request.

A request that the application recognizes as warm (`FastPathApplication`) is answered without ASGI:
uvicorn's scope, cycle and task are not created for it. It falls back to ASGI before it begins, or
midway (`continue_in_task`); all other requests use plain uvicorn.

Callers repeat the heads of their requests byte by byte. What follows from the head of a warm
request is kept (`KnownHead`): the next one with the same head, whose body came in the same read, is
not parsed at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from activator.http.compression import accepts_gzip
from activator.http.connection_limits import ConnectionLimits
from activator.http.peer_credentials import user_behind
from activator.http.trusted_proxies import network_of

MAX_BARE_BYTES = 8 * 1024
"""Limit of the bytes between two pieces of a chunked body: trailers, which are ignored, and chunk
extensions."""
MAX_UNREAD_BYTES = 16 * 1024 * 1024
"""Limit of the rest of a body whose request was answered early: larger than the default body limit,
so that clients can read the response."""

PIECE_BYTES = 1024
"""Bytes of a read that are parsed at once, extended to the end of the head (or chunked body) there:
they contain at most some 40 requests.

While any of them waits for its turn, the rest of the read is buffered as bytes, which cost a
hundredth of what requests do. """
SEARCHED_BYTES = 3 * 1024
"""How far that end is searched; without one the piece ends there. Searching all of a large body
would take longer than parsing it."""
_END_OF_HEAD = b"\r\n\r\n"
MAX_KNOWN_HEAD_BYTES = 2048
"""Longest head that is kept: those of callers with a key are a quarter of that."""


@dataclass(slots=True)
class KnownHead:
    """The head of a warm request, parsed and routed before.

    Attributes:
        warm: what `FastPathApplication.find_warm` found for it.
        url, headers: as parsed.
        body_bytes: its content-length.
    """

    warm: Any
    url: bytes
    headers: list[tuple[bytes, bytes]]
    body_bytes: int


class DirectHandler(Protocol):
    """Answers requests without ASGI."""

    def begin(self, connection: ClientConnection, warm: Any, body: bytes) -> bool:
        """Begin to answer a request, `warm` being what `FastPathApplication.find_warm` found for
        its head. Returns False, without side effects, when ASGI must handle it."""


@runtime_checkable
class FastPathApplication(Protocol):
    """An ASGI application that answers some requests without ASGI."""

    @property
    def warm(self) -> DirectHandler:
        """Answers them."""

    def find_warm(self, url: bytes, headers: dict[bytes, bytes]) -> Any:
        """Return what `DirectHandler.begin` needs of a warm POST with this head; None when ASGI
        must handle it."""

    def find_known(self, head: bytes) -> KnownHead | None:
        """Return the head that `remember` got for the same bytes, as long as it is valid."""

    def remember(self, head: bytes, known: KnownHead) -> None:
        """Keep the head of a request that began, unless it will not come again."""


class _DefaultHeaders:
    """The headers of all responses as lines. uvicorn rebuilds their list each second (the date);
    the lines are cached per list."""

    def __init__(self) -> None:
        self._known: list[tuple[bytes, bytes]] | None = None
        self._lines = b""

    def lines(self, headers: list[tuple[bytes, bytes]]) -> bytes:
        """Return `headers` as lines."""
        if self._known is not headers:
            self._lines = b"".join([b"%b: %b\r\n" % header for header in headers])
            self._known = headers
        return self._lines


class _NoEvent:
    def set(self) -> None:
        """No task waits for this event."""


class _DirectCycle:
    """Stands in for uvicorn's cycle for requests that run without one. Each connection has one,
    reused by its requests."""

    __slots__ = (
        "disconnected",
        "headers",
        "keep_alive",
        "message_event",
        "response_complete",
        "url",
    )

    def __init__(self) -> None:
        self.disconnected = False
        self.keep_alive = True
        self.response_complete = True
        self.message_event = _NO_EVENT
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []


_NO_EVENT = _NoEvent()


class _FlowControl(FlowControl):
    """uvicorn's flow control, which also pauses reading while requests or unparsed bytes wait on
    the connection.

    Attributes:
        unparsed: the rest of a read; it is parsed once `pipeline` is empty.
    """

    def __init__(self, transport: asyncio.Transport, pipeline: Collection[object]) -> None:
        super().__init__(transport)
        self._pipeline = pipeline
        self.unparsed = b""

    def resume_reading(self) -> None:
        if self.read_paused and not self._pipeline and not self.unparsed:
            super().resume_reading()


class ClientConnection(HttpToolsProtocol):
    """One client connection.

    The gateway sets `on_gone` while it handles a request of this connection; it is called once if
    the peer disconnects."""

    limits: ConnectionLimits[ClientConnection]
    default_headers: _DefaultHeaders
    flow: _FlowControl
    cycle: Any  # uvicorn's, or that of a request that goes no way of ASGI

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.on_gone: Callable[[], None] | None = None
        self.head_since: float | None = None
        self.idle_since: float | None = None
        self._head_bytes = 0
        self._ignores_input = False
        self._read_bytes = 0
        self._bare_bytes: int | None = None
        self._body_left = 0
        self._unread_bytes = 0
        self._address = ""
        self._application: FastPathApplication | None = (
            self.app if isinstance(self.app, FastPathApplication) else None
        )
        self._direct_cycle = _DirectCycle()
        self._warm: Any = None
        self._is_parsed, self._is_declined = True, False
        self._read = b""
        self._parts: list[bytes] = []

    @classmethod
    def bound_to(cls, limits: ConnectionLimits[ClientConnection]) -> type[HttpToolsProtocol]:
        """A protocol class with these limits, for `uvicorn.Config(http=…)`."""
        attributes = {"limits": limits, "default_headers": _DefaultHeaders()}
        return type(f"Bound{cls.__name__}", (cls,), attributes)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _FlowControl(transport, self.pipeline)
        if self.client is None:
            self.client = user_behind(transport)
        self._address = self.counted_as()
        limits = self.limits
        limits.connections.add(self)
        limits.by_address[self._address] += 1
        self.head_since = self.loop.time()
        if limits.by_address[self._address] > limits.max_per_address:
            limits.refused += 1
            self.refuse(b"503 Service Unavailable", b"too many connections from this address\n")
        self.admit()

    def counted_as(self) -> str:
        """Under what its connections are counted: the peer's address or network."""
        return network_of(self.client[0]) if self.client else ""

    def admit(self) -> None:
        """Called once the connection is registered; a subclass may refuse it."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._unregister()
        super().connection_lost(exc)
        self._direct_cycle.disconnected = True
        self._warm = None
        if self.on_gone is not None:
            on_gone, self.on_gone = self.on_gone, None
            on_gone()

    def _unregister(self) -> None:
        limits = self.limits
        if self in limits.connections:
            limits.connections.discard(self)
            limits.by_address[self._address] -= 1
            if not limits.by_address[self._address]:
                del limits.by_address[self._address]

    def refuse(self, status: bytes, text: bytes) -> None:
        """Send a minimal error response and close: for peers without a valid request.

        Earlier requests on the connection are answered first, because responses are matched by
        their order alone."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if not getattr(cycle, "more_body", False):
                cycle.keep_alive = False
                self._ignores_input = True
                return
            # its own body is invalid, and its response has begun or must wait
            if cycle.response_started or self.pipeline:
                self.transport.abort()
        if not self.transport.is_closing():
            head = (
                b"HTTP/1.1 "
                + status
                + b"\r\ncontent-type: text/plain\r\nretry-after: 1\r\nconnection: "
                b"close\r\ncontent-length: "
            )
            self.transport.write(head + str(len(text)).encode() + b"\r\n\r\n" + text)
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for bytes that are not a valid request."""
        self.refuse(b"400 Bad Request", msg.encode() + b"\n")

    def data_received(self, data: bytes) -> None:
        if self._ignores_input:
            return
        if self.flow.unparsed:
            self.flow.unparsed += data  # TLS had buffered more when reading was paused
            return
        application = self._application
        if self._is_parsed and self.idle_since is not None and application is not None:
            end = data.find(_END_OF_HEAD, 0, MAX_KNOWN_HEAD_BYTES) + len(_END_OF_HEAD)
            known = application.find_known(data[:end])
            if known is not None and known.body_bytes == len(data) - end:
                self._begin_known(application, known, data, end)
                return
        self._read = data if self._is_parsed else b""
        if len(data) <= PIECE_BYTES:
            self._feed(data)
        else:
            self._feed_pieces(data)
        self._read = b""
        if self._warm is not None and not self.transport.is_closing():
            # the body is incomplete: a task waits for it, within its timeout
            self._fall_back_to_asgi()

    def _begin_known(
        self, application: FastPathApplication, known: KnownHead, data: bytes, end: int
    ) -> None:
        """Begin a whole request with a known head of `end` bytes, which the parser need not see: it
        is between two requests, and what it would find is known."""
        turn = self._direct_cycle
        turn.response_complete = False
        turn.url, turn.headers = known.url, known.headers
        idle_since, self.idle_since = self.idle_since, None
        if application.warm.begin(self, known.warm, data[end:]):
            self.cycle = turn
        else:
            turn.response_complete = True
            self.idle_since = idle_since
            self._is_declined = True
            self._feed(data)
            self._is_declined = False

    def _feed_pieces(self, data: bytes) -> None:
        """Parse a read until a request has to wait for the answer to another one; keep the rest."""
        at = 0
        while at < len(data) and not self._ignores_input and not self.transport.is_closing():
            if self.pipeline:
                self.flow.unparsed = data[at:]
                self.flow.pause_reading()
                return
            # no request begins in a body
            start = at + max(PIECE_BYTES - len(_END_OF_HEAD), self._body_left)
            end = data.find(_END_OF_HEAD, start, start + SEARCHED_BYTES)
            piece = data[at : end + len(_END_OF_HEAD) if end >= 0 else start + SEARCHED_BYTES]
            at += len(piece)
            self._feed(piece)
            if self.parser.should_upgrade():
                return  # the parser stopped there: the rest belongs to another protocol

    def _feed_rest(self) -> None:
        rest = self.flow.unparsed
        if rest and not self.pipeline:
            self.flow.unparsed = b""
            self.flow.resume_reading()
            self.data_received(rest)

    def _feed(self, data: bytes) -> None:
        if self.head_since is not None:
            self._head_bytes += len(data)
            if self._head_bytes > self.limits.max_head_bytes and self._is_head_only(data):
                self._refuse_head()
                return
        elif self._bare_bytes is not None:
            if self._bare_bytes > MAX_BARE_BYTES:
                self._refuse_bare()
                return
            self._bare_bytes += len(data)  # reset by the next piece of the body
        self._read_bytes = len(data)
        super().data_received(data)

    def _refuse_head(self) -> None:
        self.refuse(b"431 Request Header Fields Too Large", b"request head over the limit\n")

    def _refuse_bare(self) -> None:
        if self.cycle is not None and self.cycle.response_complete:
            self._close_silently()
        else:
            self.refuse(b"431 Request Header Fields Too Large", b"trailers over the limit\n")

    def _close_silently(self) -> None:
        """Close without a response: the request was answered, and more bytes would be taken for the
        response to another one."""
        self._ignores_input = True
        self.transport.close()

    def _is_head_only(self, data: bytes) -> bool:
        """Whether these bytes cannot contain the end of a head within the limit (a body may legally
        follow in the same read)."""
        end = data.find(_END_OF_HEAD)
        return end < 0 or self._head_bytes - len(data) + end > self.limits.max_head_bytes

    def on_message_begin(self) -> None:
        """A request begins. Its scope is created only when it goes to ASGI."""
        self.url = b""
        self.headers = []
        self.expect_100_continue = self._is_parsed = False
        self.idle_since = None
        if self.head_since is None:
            self.head_since = self.loop.time()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header line. Trailers are dropped: none were requested (RFC 9110, section 6.5.1)."""
        if self.head_since is None:
            return
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head is complete: the request takes the fast path or goes to ASGI. Raises ValueError,
        which the parser answers with 400."""
        self.head_since = None
        self._head_bytes = 0
        # this read may contain a whole head that was not measured yet
        if self._read_bytes > self.limits.max_head_bytes:
            self._check_size()
        known = dict(self.headers)
        if b"expect" in known:
            self.expect_100_continue = any(
                name == b"expect" and value.lower() == b"100-continue"
                for name, value in self.headers
            )
        if b"host" not in known and self.parser.get_http_version() == "1.1":
            raise ValueError(
                "HTTP/1.1 request without a Host header"
            )  # RFC 9112, section 3.2; it may be empty
        if _check_framing(self.headers, known):
            self._bare_bytes = 0
        elif (length := known.get(b"content-length")) is not None:
            self._body_left = int(length)
        # older HTTP versions are kept alive only on request
        if self._is_plain_post() and (
            b"connection" not in known or self.parser.get_http_version() == "1.1"
        ):
            self._warm = self._application.find_warm(self.url, known)  # type: ignore[union-attr]
        if self._warm is None:
            self._begin_asgi()

    def _check_size(self) -> None:
        if (
            sum(len(name) + len(value) + 4 for name, value in self.headers) + len(self.url)
            > self.limits.max_head_bytes
        ):
            self._refuse_head()
            raise ValueError("request head over the limit")

    def _is_plain_post(self) -> bool:
        parser, cycle = self.parser, self.cycle
        return (
            self._application is not None
            and not self._is_declined
            and (cycle is None or cycle.response_complete)
            and not self.expect_100_continue
            and parser.get_method() == b"POST"
            and parser.should_keep_alive()
            and not parser.should_upgrade()
        )

    def on_body(self, body: bytes) -> None:
        """A piece of the body arrived."""
        self._body_left -= len(body)
        if self._bare_bytes:
            self._bare_bytes = 0
        if self._warm is not None:
            self._parts.append(body)
            return
        cycle = self.cycle
        if cycle is not None and cycle.response_complete:
            self._unread_bytes += len(body)
            if self._unread_bytes > MAX_UNREAD_BYTES:
                self._close_silently()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        self._bare_bytes = None
        self._body_left = 0
        self._is_parsed = True
        warm, application = self._warm, self._application
        if warm is None or application is None:
            super().on_message_complete()
            return
        parts = self._parts
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        turn = self._direct_cycle
        turn.response_complete = False
        turn.url, turn.headers = self.url, self.headers
        if application.warm.begin(self, warm, body):
            self.cycle = turn
            self._warm = None
            if parts:
                self._parts = []
            self._remember(application, warm, body)
        else:
            turn.response_complete = True
            self._fall_back_to_asgi()
            super().on_message_complete()

    def _remember(self, application: FastPathApplication, warm: Any, body: bytes) -> None:
        """Keep the head of a request that began, if its read held this request alone."""
        read = self._read
        end = read.find(_END_OF_HEAD, 0, MAX_KNOWN_HEAD_BYTES) + len(_END_OF_HEAD)
        if len(read) - end == len(body) and read.startswith(b"POST "):
            application.remember(read[:end], KnownHead(warm, self.url, self.headers, len(body)))

    def _fall_back_to_asgi(self) -> None:
        self._warm = None
        self._begin_asgi()
        parts, self._parts = self._parts, []
        for part in parts:
            super().on_body(part)

    def _begin_asgi(self) -> None:
        """Run uvicorn's callbacks from the beginning of a request to the end of its head."""
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self._unread_bytes = 0
        self.url, self.headers, self.expect_100_continue = url, headers, expects
        self.scope["headers"] = headers
        self.scope["connection"] = self  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()

    def continue_in_task(self, application: Callable[..., Any]) -> None:
        """Let `application` answer, through ASGI, the request that ran without a task. Its body was
        already read; `receive` has none."""
        turn = self._direct_cycle
        scope: MutableMapping[str, Any] = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": self.scheme,
            "path": turn.url.decode("latin-1"),
            "raw_path": turn.url,
            "query_string": b"",
            "root_path": "",
            "headers": turn.headers,
            "server": self.server,
            "client": self.client,
            "state": {},
            "connection": self,
        }
        cycle = RequestResponseCycle(
            scope=scope,  # type: ignore[arg-type]
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=turn.keep_alive,
            on_response=self.on_response_complete,
        )
        cycle.more_body = False
        cycle.disconnected = turn.disconnected
        newest: object = self.cycle
        # otherwise another request arrived meanwhile: uvicorn stores the newest there, and it waits
        # for this one
        if newest is turn:
            self.cycle = cycle
        self._start_asgi_task(cycle, application)

    @property
    def is_congested(self) -> bool:
        """Whether the caller reads too slowly for a response in one write."""
        return self.flow.write_paused

    @property
    def accepts_gzip(self) -> bool:
        """Whether the caller of the request that ran without a task accepts compressed answers."""
        return accepts_gzip(dict(self._direct_cycle.headers).get(b"accept-encoding", b""))

    def answer(self, status: int, head: bytes, body: bytes) -> None:
        """Answer the request that ran without a task, in one write; `head` as in
        `respond_whole`."""
        turn = self._direct_cycle
        turn.response_complete = True
        self._write_whole(status, head, body, keep_alive=turn.keep_alive)
        self.on_response_complete()

    def respond_whole(
        self, cycle: RequestResponseCycle, status: int, head: bytes, body: bytes
    ) -> bool:
        """Answer an ASGI request in one write, `head` being header lines that each end in CRLF,
        content-length among them.

        Returns False when that is not possible (the peer reads slowly, or disconnected): answer
        through ASGI's `send` then. It does what uvicorn's `send` does for a start and a body event,
        without validating each header again: they come from httptools and from this package."""
        if self.flow.write_paused or cycle.disconnected or cycle.response_started:
            return False
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        self._write_whole(status, head, body, keep_alive=cycle.keep_alive)
        cycle.message_event.set()
        cycle.on_response()
        return True

    def _write_whole(self, status: int, head: bytes, body: bytes, *, keep_alive: bool) -> None:
        defaults = self.default_headers.lines(self.server_state.default_headers)
        end = b"\r\n" if keep_alive else b"connection: close\r\n\r\n"
        self.transport.write(b"".join((STATUS_LINE[status], defaults, head, end, body)))
        if not keep_alive:
            self.transport.close()

    def on_response_complete(self) -> None:
        """Like uvicorn's method without the keep-alive timer, which `ConnectionLimits.close_idle`
        replaces, and without a count of requests, which only `limit_max_requests` reads."""
        if self.transport.is_closing():
            return
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        else:
            self.idle_since = self.loop.time()
        if not self.flow.unparsed:
            if self.flow.read_paused:
                self.flow.resume_reading()
        elif not self.pipeline:
            # not directly: the parser may be the caller, and other connections get their turn
            self.loop.call_soon(self._feed_rest)

    def handle_websocket_upgrade(self) -> None:
        """Switch the connection to the WebSocket protocol; it counts among those of its address
        until it ends."""
        self.head_since = None
        super().handle_websocket_upgrade()
        protocol: Any = self.transport.get_protocol()
        if protocol is not self:
            end, receive = protocol.connection_lost, protocol.data_received

            def connection_lost(exc: Exception | None) -> None:
                self._unregister()
                end(exc)

            def data_received(data: bytes) -> None:
                if protocol.handshake_complete:
                    receive(data)
                else:
                    # a client must not send data before the handshake is accepted (RFC 6455,
                    # section 4.1)
                    protocol.transport.abort()

            protocol.connection_lost = connection_lost
            protocol.data_received = data_received


def _check_framing(headers: list[tuple[bytes, bytes]], known: dict[bytes, bytes]) -> bool:
    """Return whether the body is chunked.

    Raises ValueError for requests that a proxy in front may parse differently: two hosts (RFC 9112,
    section 3.2), and transfer codings other than chunked (6.1). The parser itself refuses other
    ambiguous framing (several lengths, a length and a coding)."""
    coding = known.get(b"transfer-encoding")
    if coding is not None and coding.lower() != b"chunked":
        raise ValueError("unsupported transfer coding: only chunked is supported")
    if len(known) != len(headers):
        names = [name for name, _ in headers]
        if names.count(b"host") > 1 or names.count(b"transfer-encoding") > 1:
            raise ValueError("several Host or Transfer-Encoding headers")
    return coding is not None
