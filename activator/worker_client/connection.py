"""HTTP/1.1 to a worker over its Unix socket, or to a pod (`address`): pooled connections, one
exchange at a time on each.

A response with a known, small length is collected whole (one future, no queue: the hot path),
except one of server-sent events; others stream with back-pressure: reading from the worker pauses
while the caller does not read. An abandoned exchange closes its connection, which tells the worker
that the caller disconnected.

A worker repeats the heads of its responses byte by byte: a response that came whole, with a head
that was parsed before, is not parsed (`KnownHeads`)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from functools import partial
from typing import Final, Protocol, cast

import httptools

from activator.worker_client.address import connect
from pilotlight.protocol import CONTENT_SSE, HEADER_FINISH, HEADER_OUTCOME, HEADER_SPANS

MAX_STATUS: Final = 599
"""Statuses have five classes (RFC 9110, section 15); servers send no other ones on."""
WHOLE_BODY_BYTES: Final = 256 * 1024
"""Largest response that is collected before it is forwarded, so that its cost can be sent in its
headers."""
MAX_HEAD_BYTES: Final = 64 * 1024
"""Limit of a response head, and of the bytes between two pieces of a streamed response (trailers,
chunk extensions): a worker runs user code, which must not exhaust the activator's memory."""
STREAM_WINDOW_BYTES: Final = 256 * 1024
"""Bytes buffered for a slow caller before reading from the worker pauses."""
JOINED_BYTES: Final = 64 * 1024
"""Pieces that arrived in one read are joined into one write, up to this many bytes, to save writes
with a fast worker."""
MAX_IDLE_S: Final = 30.0
"""Idle connections older than this are not reused: well below the worker's keep-alive of 75 s, so
that a reused connection is not just being closed."""
MAX_KNOWN_HEADS: Final = 256
MAX_KNOWN_HEAD_BYTES: Final = 1024
"""Limits of the heads that are kept for each worker: they differ by the length of the body."""
_END_OF_HEAD: Final = b"\r\n\r\n"
_OUTCOME: Final = HEADER_OUTCOME.encode()
_SSE: Final = CONTENT_SSE.encode()
_NO_SNIFF: Final = b"x-content-type-options"
_TRAILERS: Final = frozenset({HEADER_FINISH.encode(), HEADER_SPANS.encode()})
"""Trailers of a stream that are stored."""


class WorkerConnectionLost(Exception):
    """Raised when the worker's connection ended before its response did.

    `sent`: whether any byte of the request may have reached the worker.
    """

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class ResponseHead:
    """The head of responses that came whole. Owner: the event loop.

    Attributes:
        body_bytes: its content-length.
        forwarded: the header lines that callers get, once they were formatted
            (`calls.response.forwarded_lines`); until then b"".
    """

    __slots__ = ("body_bytes", "forwarded", "headers", "status")

    def __init__(self, status: int, headers: list[tuple[bytes, bytes]], body_bytes: int) -> None:
        self.status = status
        self.headers = headers
        self.body_bytes = body_bytes
        self.forwarded = b""


KnownHeads = dict[bytes, ResponseHead]
"""Heads of one worker's responses, by their bytes."""


class WorkerResponse:
    """A worker's response: status, headers (lower-case names), and either `body` or a stream of
    chunks.

    Without a connection (None) it was not received from a worker, and has a body.

    Attributes:
        head: what it shares with others that have the same head; None = nothing.
    """

    __slots__ = ("_connection", "body", "head", "headers", "status")

    def __init__(
        self,
        connection: WorkerConnection | None,
        status: int,
        headers: list[tuple[bytes, bytes]],
        body: bytes | None,
        head: ResponseHead | None = None,
    ) -> None:
        self._connection = connection
        self.status = status
        self.headers = headers
        self.body = body
        self.head = head

    def header(self, name: bytes) -> bytes:
        """Return the first value of a header, or b""."""
        for key, value in self.headers:
            if key == name:
                return value
        return b""

    @property
    def is_busy(self) -> bool:
        """Whether the worker did not begin, because it still runs another call. Its own header is
        the last: an application may have set one before it."""
        if self.status != 503:
            return False
        return [value for name, value in self.headers if name == _OUTCOME][-1:] == [b"busy"]

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body of a streamed response. Raises WorkerConnectionLost when the worker dies
        before its end."""
        connection = self._connection
        while connection is not None:
            chunk = await connection.next_chunk()
            if not chunk:
                return
            yield chunk


class ResponseSink(Protocol):
    """Receiver of a response: a future or a similar object. Called once, unless it is already
    `done`."""

    def done(self) -> bool:
        """Return whether the response is no longer needed."""

    def set_result(self, result: WorkerResponse, /) -> None:
        """Called with the response, or its head if it streams. The exchange may have ended, so the
        connection may be reused."""

    def set_exception(self, exception: WorkerConnectionLost, /) -> None:
        """Called when there will be no response."""


class WorkerConnection(asyncio.Protocol):
    """One connection. Owner: the event loop; used by one exchange at a time."""

    __slots__ = (
        "_body",
        "_buffered",
        "_chunks",
        "_ended",
        "_headers",
        "_is_head",
        "_known",
        "_parser",
        "_paused",
        "_ready",
        "_sent",
        "_streaming",
        "_transport",
        "_unanswered",
        "_waiter",
        "_wakeup",
        "_writable",
        "idle_since",
        "is_usable",
    )

    def __init__(self, known: KnownHeads | None = None) -> None:
        """`known`: shared by the connections to one worker; None = its own."""
        self._parser = httptools.HttpResponseParser(self)
        self._known: KnownHeads = {} if known is None else known
        self._transport: asyncio.Transport | None = None
        self._waiter: ResponseSink | None = None
        self._ready: WorkerResponse | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []
        self._chunks: deque[bytes] = deque()
        self._buffered = 0
        self._streaming = False
        self._ended = True
        self._paused = False
        self._sent = False
        self._unanswered = 0
        self._wakeup: asyncio.Event | None = None
        self._writable: asyncio.Event | None = None
        self.idle_since = 0.0
        self.is_usable = True

    def __repr__(self) -> str:
        state = "streaming" if self._streaming else "idle" if self._ended else "waiting"
        return f"<WorkerConnection {state if self.is_usable else 'closed'}>"

    # -- the exchange ------------------------------------------------------------------------------
    def request(
        self, data: bytes, *, loop: asyncio.AbstractEventLoop, is_head: bool = False
    ) -> asyncio.Future[WorkerResponse]:
        """Send a whole request (or its head). The future is done when the response, or its head if
        it streams, has arrived.

        `is_head`: it is a HEAD request, whose response always ends with its head (RFC 9112
        §6.3)."""
        future: asyncio.Future[WorkerResponse] = loop.create_future()
        if self._transport is None or not self.is_usable:
            future.set_exception(
                WorkerConnectionLost("the worker closed the connection", sent=False)
            )
        else:
            self.send(data, future)
            self._is_head = is_head
        return future

    def send(self, data: bytes, waiter: ResponseSink) -> None:
        """Send a request on a usable connection for a given `waiter`, which is called from the
        event loop's read callback."""
        self._waiter = waiter
        self._is_head = False
        self._body = []
        self._ended = False
        self._streaming = False
        self._sent = True
        self._unanswered = 0
        assert self._transport is not None
        self._transport.write(data)

    async def write(self, data: bytes) -> None:
        """Send more of a request's body; waits while the worker does not read. Raises
        WorkerConnectionLost."""
        if self._transport is None or not self.is_usable:
            raise WorkerConnectionLost("the worker closed the connection", sent=True)
        self._transport.write(data)
        if self._writable is not None:
            await self._writable.wait()

    async def next_chunk(self) -> bytes:
        """Return the next piece of a streamed body, b"" at its end. Raises WorkerConnectionLost."""
        while not self._chunks:
            if self._ended:
                return b""
            if not self.is_usable:
                raise WorkerConnectionLost(
                    "the worker died before the end of its response", sent=True
                )
            self._wakeup = asyncio.Event()
            await self._wakeup.wait()
        chunk = self._pop_chunks()
        self._buffered -= len(chunk)
        if self._paused and self._buffered < STREAM_WINDOW_BYTES and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return chunk

    def _pop_chunks(self) -> bytes:
        """Return the buffered chunks as one piece, without waiting."""
        chunks = self._chunks
        chunk = chunks.popleft()
        if not chunks:
            return chunk
        parts, size = [chunk], len(chunk)
        while chunks and size + len(chunks[0]) <= JOINED_BYTES:
            part = chunks.popleft()
            parts.append(part)
            size += len(part)
        return b"".join(parts)

    @property
    def is_ahead(self) -> bool:
        """Whether the worker has sent more of its response than was read, or all of it."""
        return bool(self._chunks) or self._ended

    @property
    def is_idle(self) -> bool:
        """Whether the last exchange ended cleanly, so that the connection can be reused."""
        return self._ended and self.is_usable and not self._chunks

    def close(self) -> None:
        """Close the connection now, which cancels an unfinished exchange at the worker."""
        self.is_usable = False
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol --------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._ended:  # no request was sent
            self.close()
            return
        end = 0
        if not self._unanswered and not self._is_head:
            end = data.find(_END_OF_HEAD, 0, MAX_KNOWN_HEAD_BYTES) + len(_END_OF_HEAD)
            known = self._known.get(data[:end])
            if known is not None and known.body_bytes == len(data) - end:
                self._ended = True
                waiter, self._waiter = self._waiter, None
                if waiter is not None and not waiter.done():
                    waiter.set_result(
                        WorkerResponse(self, known.status, known.headers, data[end:], known)
                    )
                return
        self._unanswered += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as e:
            self._fail(
                WorkerConnectionLost(f"the worker's response is not valid HTTP: {e}", sent=True)
            )
            self.close()
        ready = self._ready
        # set the result only now: the parser has finished, so the connection can be reused at once
        if ready is not None:
            self._ready = None
            if ready.body is not None and len(data) - end == len(ready.body):
                self._remember(data[:end], ready)
            waiter, self._waiter = self._waiter, None
            if waiter is not None and not waiter.done():
                lost = _lost_in_pod(ready) if ready.status == 502 else None
                if lost is None:
                    waiter.set_result(ready)
                else:
                    waiter.set_exception(lost)
        elif self._unanswered > MAX_HEAD_BYTES and (
            self._streaming or self._unanswered > WHOLE_BODY_BYTES + MAX_HEAD_BYTES
        ):
            self._fail(_too_long())
            self.close()

    def _remember(self, head: bytes, response: WorkerResponse) -> None:
        """Keep the head of a response that came in one read."""
        if response.status == 200 and self.is_usable and head.startswith(b"HTTP/1.1 200 "):
            if len(self._known) >= MAX_KNOWN_HEADS:
                self._known.clear()
            response.head = ResponseHead(
                response.status, response.headers, len(response.body or b"")
            )
            self._known[head] = response.head

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_usable = False
        self._fail(
            WorkerConnectionLost(
                "the worker closed the connection before it responded", sent=self._sent
            )
        )
        if self._writable is not None:
            self._writable.set()

    def pause_writing(self) -> None:
        self._writable = asyncio.Event()

    def resume_writing(self) -> None:
        if self._writable is not None:
            self._writable.set()
            self._writable = None

    def _fail(self, error: WorkerConnectionLost) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)
        if self._wakeup is not None:
            self._wakeup.set()

    # -- httptools ---------------------------------------------------------------------------------
    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if not self._streaming or name in _TRAILERS:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200 and status != 101:
            self._headers = []
            return
        if status > MAX_STATUS:
            raise ValueError(f"status {status} is none of HTTP")
        if self._unanswered > MAX_HEAD_BYTES:
            self._require_small_head()
        # the parser still expects a body, so this connection is not reused
        if self._is_head:
            self._ended, self.is_usable = True, False
            self._answer(b"")
            return
        if self._is_collected():
            return
        self._streaming = True
        self._unanswered = 0
        self._answer(None)

    def _is_collected(self) -> bool:
        """Whether the body is collected: it has a known, small length, and is no stream of events,
        which some servers send at once."""
        length = WHOLE_BODY_BYTES + 1
        for name, value in self._headers:
            if name == b"content-length":
                length = int(value)
            elif name == b"content-type" and value[: len(_SSE)].lower() == _SSE:
                return False
        return length <= WHOLE_BODY_BYTES

    def _require_small_head(self) -> None:
        if sum(len(name) + len(value) + 4 for name, value in self._headers) > MAX_HEAD_BYTES:
            self._fail(_too_long())
            raise ValueError("response head over the limit")

    def on_body(self, body: bytes) -> None:
        if not self._streaming:
            self._body.append(body)
            return
        self._unanswered = 0
        self._chunks.append(body)
        self._buffered += len(body)
        if self._wakeup is not None:
            self._wakeup.set()
        if (
            self._buffered > STREAM_WINDOW_BYTES
            and not self._paused
            and self._transport is not None
        ):
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:
            return
        self._ended = True
        if not self._parser.should_keep_alive():
            self.is_usable = False
        if self._streaming:
            if self._wakeup is not None:
                self._wakeup.set()
        else:
            body = self._body
            self._ready = WorkerResponse(
                self,
                self._parser.get_status_code(),
                self._headers,
                body[0] if len(body) == 1 else b"".join(body),
            )
        self._headers = []

    def _answer(self, body: bytes | None) -> None:
        self._ready = WorkerResponse(self, self._parser.get_status_code(), self._headers, body)


def _lost_in_pod(answer: WorkerResponse) -> WorkerConnectionLost | None:
    """The error of a response that Knative's queue-proxy makes itself (Go's `Error` of net/http),
    because it does not reach the pod's worker, or lost it. A worker's responses have its
    outcome."""
    if answer.body is None or answer.header(_OUTCOME) or answer.header(_NO_SNIFF) != b"nosniff":
        return None
    said = answer.body[:200].decode(errors="replace").strip()
    return WorkerConnectionLost(
        f"the worker in the pod is lost: {said}", sent=not said.startswith("dial ")
    )


def _too_long() -> WorkerConnectionLost:
    return WorkerConnectionLost(
        f"the head or the trailers of the worker's response have more than {MAX_HEAD_BYTES} bytes",
        sent=True,
    )


class ConnectionPool:
    """Connections to one worker. The most recently used is reused first, so that surplus ones
    expire."""

    __slots__ = ("_idle", "_make", "_path")

    def __init__(self, path: str) -> None:
        self._path = path
        self._idle: list[WorkerConnection] = []
        known: KnownHeads = {}
        self._make = partial(WorkerConnection, known)

    def __repr__(self) -> str:
        return f"<ConnectionPool {self._path} {len(self._idle)} idle>"

    def acquire_nowait(self, now: float) -> WorkerConnection | None:
        """Return an idle connection, or None when one must be opened."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable and now - connection.idle_since < MAX_IDLE_S:
                return connection
            connection.close()
        return None

    async def open(self, loop: asyncio.AbstractEventLoop) -> WorkerConnection:
        """Open a new connection. Raises WorkerConnectionLost (nothing sent) when it fails."""
        try:
            return await connect(loop, self._make, self._path)
        except OSError as e:
            raise WorkerConnectionLost(
                f"cannot connect to the worker: {e.strerror or e!r}", sent=False
            ) from e

    def release(self, connection: WorkerConnection, now: float) -> None:
        """Return a connection to the pool when its exchange ended cleanly; otherwise close it."""
        if connection._ended and connection.is_usable and not connection._chunks:  # `is_idle`
            connection.idle_since = now
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close all idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
