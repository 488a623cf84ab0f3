"""One HTTP request: its headers, its body within limits, and the methods that answer it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Protocol

from activator.http.compression import (
    MIN_COMPRESSED_BYTES,
    accepts_gzip,
    coding_of,
    compress,
    decode,
    is_compressible,
)
from activator.http.payloads import GUARD
from activator.http.problems import Shape, error_answer, problem_shape
from pilotlight import errors
from pilotlight.protocol import TENANT_PATH, new_call_id

if TYPE_CHECKING:
    from activator.routing.call_origin import CallOrigin
    from activator.routing.call_target import CallTarget
    from activator.routing.traffic_split import RoutingDecision

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"transfer-encoding",
        b"te",
        b"trailer",
        b"upgrade",
        b"proxy-connection",
        b"host",
    }
)
"""Headers that end at each hop (RFC 9110 §7.6.1)."""


CALLER = "pilotlight.caller"
"""Key in a scope of the caller's address, where that is not the peer's."""
_GZIP_LINES = b"content-encoding: gzip\r\nvary: accept-encoding\r\n"
CALLING = "pilotlight.calling"
"""Key in a scope of the function that makes the request (`routing.call_origin.CallingFunction`),
which the platform identified by its socket."""
FORWARDED = "pilotlight.forwarded"
"""Key in a scope of a request that another activator forwards, which has counted it."""
MAX_WAIT_S = 7 * 86_400
"""Longest wait that a caller may request: the longest possible execution clock
(`spec.function.Clocks`)."""


MAX_ACCEPT_BYTES = 1024
"""Limit of a call's `Accept` header, which is stored with a waiting call in memory and in the
journal; browsers send about 150 bytes."""
LEAST_READ_BYTES = 16 * 1024
"""Bytes of a response that a caller must read in each period of `Request.wait_read`: otherwise a
caller that reads a byte now and then would hold its connection for ever."""
UNREAD_S = 2.0
"""How long a caller may leave the rest of an interrupted response unread."""


Handle = Callable[["Request"], Coroutine[Any, Any, None]]
"""Answers a request, or raises the error that answers it."""


class BodyRoom(Protocol):
    """The memory reserved for a request's body (`activator.http.bodies.Room`)."""

    def acquire(self, size: int) -> None:
        """Reserve `size` more bytes. Raises TooManyRequests."""

    def release(self, size: int) -> None:
        """Release `size` of the reserved bytes before the request ends."""


class RateLimitHeaderSource(Protocol):
    """Provides the rate limit headers of a request."""

    def head(self) -> bytes:
        """Return header lines with the remaining quotas, each ending in CRLF."""


class Request:
    """A request as the gateway sees it. The activator always generates `id`: records are unique by
    it, so a caller must not choose it.

    Attributes:
        rate_limits: the quotas that apply to it, once they are known; None = none.
        on_bytes: called with the size of each piece of its answer; None = nothing counts them.
        on_failed: called with type and status of the error that ends its call without a response;
            None before it is admitted, and without a call.
        tenant: its tenant, once known; "" before.
        target: the call target, from routing until its end was observed.
        began_ns, routed_ns: monotonic time when it was created, and when it was routed.
        choice: which revision answers it, and why; None = one revision answers all, or not chosen
            yet.
        room: where its body is counted; None = nowhere.
        shape: formats content type and body of its error responses.
    """

    __slots__ = (
        "_receive",
        "_send",
        "began_ns",
        "choice",
        "headers",
        "id",
        "is_answered",
        "on_bytes",
        "on_failed",
        "path",
        "rate_limits",
        "room",
        "routed_ns",
        "scope",
        "shape",
        "target",
        "tenant",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self._receive = receive
        self._send = send
        self.id = new_call_id()
        self.is_answered = False
        self.rate_limits: RateLimitHeaderSource | None = None
        self.on_bytes: Callable[[int], object] | None = None
        self.on_failed: Callable[[str, int], object] | None = None
        self.tenant = ""
        self.choice: RoutingDecision | None = None
        self.target: CallTarget | None = None
        self.room: BodyRoom | None = None
        self.shape: Shape = problem_shape
        self.began_ns = self.routed_ns = time.monotonic_ns()

    def __repr__(self) -> str:
        return f"<Request {self.id} {self.verb} {self.path}>"

    @property
    def cycle(self) -> Any:
        """uvicorn's cycle of this request, of which a connection may have several (pipelining);
        None under another server."""
        return getattr(self._send, "__self__", None)

    @property
    def origin(self) -> CallOrigin | None:
        """The call of a function that makes the request; None for other callers."""
        calling = self.scope.get(CALLING)
        return None if calling is None else calling.origin

    @property
    def arm(self) -> str:
        """The experiment arm of the request; "" for none."""
        return self.choice.arm if self.choice is not None else ""

    @property
    def verb(self) -> str:
        """GET, POST, …"""
        return str(self.scope.get("method", ""))

    @property
    def address(self) -> str:
        """The caller's address: the peer's, or the one that a trusted proxy reports
        (`activator.http.trusted_proxies`); "" when unknown."""
        return self.scope.get(CALLER) or self.peer

    @property
    def peer(self) -> str:
        """The address at the other end of the connection; "" when unknown."""
        client = self.scope.get("client")
        return client[0] if client else ""

    async def body(self, *, limit_bytes: int, timeout_s: float) -> bytes:
        """Read the whole body, and decode it (`Content-Encoding`); the limit holds before and
        after.

        Raises UnsupportedMediaType for an unknown coding, and what `raw_body` raises."""
        coding = coding_of(self.headers) if b"content-encoding" in self.headers else b""
        body = await self.raw_body(limit_bytes=limit_bytes, timeout_s=timeout_s)
        if not coding or not body:
            return body
        acquire = self.room.acquire if self.room is not None else None
        return await decode(body, coding, limit_bytes=limit_bytes, acquire=acquire)

    async def raw_body(self, *, limit_bytes: int, timeout_s: float) -> bytes:
        """Read the whole body as it was sent.

        Raises TooLarge as soon as it exceeds its limit, TooManyRequests where memory limits are
        reached, InvalidInput when it arrives too slowly, ClientClosedRequest."""
        declared = self.headers.get(b"content-length")
        room = self.room
        if declared is not None and declared.isdigit():
            if int(declared) > limit_bytes:
                raise too_large(limit_bytes)
            if room is not None:
                room.acquire(int(declared))
                room = None
        message: MutableMapping[str, Any] | None = None
        if not getattr(self.cycle, "more_body", False):
            message = await self._receive()
            if (
                message["type"] == "http.request"
                and not message.get("more_body", False)
                and len(message["body"]) <= limit_bytes
            ):
                if room is not None:
                    room.acquire(len(message["body"]))
                self._resume_reading()
                return bytes(message["body"])
        try:
            async with asyncio.timeout(timeout_s):
                body = await self._rest(message, limit_bytes, room)
        except TimeoutError as e:
            raise errors.InvalidInput(f"the body did not arrive within {timeout_s:g} s") from e
        self._resume_reading()
        return body

    def _resume_reading(self) -> None:
        """Resume reading, so that a disconnect of the caller is detected: uvicorn pauses within a
        large body until more of it is requested."""
        connection = self.scope.get("connection")
        if connection is not None:
            connection.flow.resume_reading()

    async def _rest(
        self, message: MutableMapping[str, Any] | None, limit_bytes: int, room: BodyRoom | None
    ) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            if message is None:
                message = await self._receive()
            if message["type"] == "http.disconnect":
                raise errors.ClientClosedRequest("the caller disconnected while sending its body")
            part = message["body"]
            size += len(part)
            if size > limit_bytes:
                raise too_large(limit_bytes)
            if room is not None:
                room.acquire(len(part))
            parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)
            message = None

    def require_method(self, *allowed: str) -> None:
        """Raise MethodNotAllowed for another HTTP method than these."""
        if self.verb not in allowed:
            raise errors.MethodNotAllowed(
                f"{self.verb} is not served at {self.path[:200]}: use {' or '.join(allowed)}",
                allowed=allowed,
            )

    def deadline_s(self) -> float | None:
        """Return the caller's deadline in seconds; None = it gave none. Raises InvalidInput."""
        given = self.headers.get(b"pilotlight-timeout")
        if given is None:
            return None
        try:
            seconds = float(given)
        except ValueError:
            seconds = -1.0
        if not 0 < seconds <= MAX_WAIT_S:
            raise errors.InvalidInput(
                f"header pilotlight-timeout: must be a number of seconds greater than 0 and at "
                f"most {MAX_WAIT_S}"
            )
        return seconds

    async def receive(self) -> MutableMapping[str, Any]:
        """Return the next ASGI message, for streamed bodies."""
        return await self._receive()

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a complete response."""
        if self.on_bytes is not None:
            self.on_bytes(len(body))
        await self.start(status, headers)
        await self._send({"type": "http.response.body", "body": body})

    async def respond_whole(self, status: int, head: bytes, body: bytes) -> None:
        """Send a complete response with header lines that are already bytes (each ends in CRLF,
        without content-length), compressed if it is JSON and its caller accepts that. Used on the
        hot path."""
        if len(body) >= MIN_COMPRESSED_BYTES and self._is_compressed(content_type_of(head), body):
            body, head = await compress(body), head + _GZIP_LINES
        head += b"content-length: %d\r\n" % len(body)
        connection = self.scope.get("connection")
        if connection is not None and connection.respond_whole(self.cycle, status, head, body):
            self.is_answered = True
            return
        await self.respond(status, header_list(head), body)

    def _is_compressed(self, content_type: bytes, body: bytes) -> bool:
        return is_compressible(content_type, len(body)) and accepts_gzip(
            self.headers.get(b"accept-encoding", b"")
        )

    async def start(self, status: int, headers: Headers) -> None:
        """Start a streaming response."""
        self.is_answered = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def chunk(self, data: bytes, *, more: bool = True) -> None:
        """Send a piece of the body; waits while the caller does not read."""
        if self.on_bytes is not None:
            self.on_bytes(len(data))
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def wait_read(self, pause_s: float) -> None:
        """Return once the caller has read what was sent, except what fits into the write buffer.

        A caller that reads less than LEAST_READ_BYTES in `pause_s` is disconnected: raises
        ClientClosedRequest."""
        connection = self.scope.get("connection")
        while connection is not None and connection.is_congested:
            unread = connection.transport.get_write_buffer_size()
            try:
                async with asyncio.timeout(pause_s):
                    await connection.flow.drain()
            except TimeoutError:
                if unread - connection.transport.get_write_buffer_size() < LEAST_READ_BYTES:
                    self.is_answered = True  # the caller would not read an error either
                    connection.transport.abort()
                    raise errors.ClientClosedRequest(
                        f"the caller did not read its response for {pause_s:g} s"
                    ) from None

    def quota_headers(self) -> Headers:
        """Return `RateLimit` and `RateLimit-Policy` of the response; none where no quota
        applies."""
        return header_list(self.rate_limits.head()) if self.rate_limits is not None else []

    def abort_if_unread(self) -> None:
        """The response was interrupted: disconnect the caller if it does not read the rest within
        UNREAD_S, because it would hold the connection for ever."""
        connection = self.scope.get("connection")
        if connection is not None and connection.on_gone is not None:
            asyncio.get_running_loop().call_later(
                UNREAD_S, _abort_unread, connection, connection.on_gone
            )

    async def respond_json(
        self, status: int, body: Mapping[str, Any], headers: Headers | None = None
    ) -> None:
        """Send a JSON response."""
        await self.respond_json_text(status, json.dumps(body).encode(), headers)

    async def respond_json_text(
        self, status: int, data: bytes, headers: Headers | None = None
    ) -> None:
        """Send JSON that is serialized already, compressed if its caller accepts that."""
        if self._is_compressed(b"application/json", data):
            data = await compress(data)
            headers = [*(headers or []), *header_list(_GZIP_LINES)]
        own = [
            (b"content-type", b"application/json"),
            *GUARD,
            (b"content-length", b"%d" % len(data)),
            (b"x-request-id", self.id.encode()),
        ]
        await self.respond(status, own + self.quota_headers() + (headers or []), data)

    async def respond_error(
        self, error: errors.PilotlightError, headers: Headers | None = None
    ) -> None:
        """Send a problem document, with `Retry-After` where a retry can succeed (RFC 9457, RFC 9110
        §10.2.3)."""
        head, data = error_answer(error, self.id, self.shape)
        await self.respond(
            error.status, header_list(head) + self.quota_headers() + (headers or []), data
        )


def content_type_of(head: bytes) -> bytes:
    """Return the content type in header lines; b"" where there is none."""
    return head.partition(b"content-type: ")[2].partition(b"\r\n")[0]


def _abort_unread(connection: Any, on_gone: Callable[[], object]) -> None:
    if connection.on_gone == on_gone and connection.is_congested:  # still the same request
        connection.transport.abort()


def header_list(head: bytes) -> Headers:
    """Convert header lines, each ending in CRLF, to ASGI's list of pairs."""
    return [
        (name, value)
        for name, _, value in (line.partition(b": ") for line in head.split(b"\r\n")[:-1])
    ]


def accept_of(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the `Accept` header of a call; b"" where there is none. Raises InvalidInput for one
    over MAX_ACCEPT_BYTES."""
    given = headers.get(b"accept", b"")
    if len(given) > MAX_ACCEPT_BYTES:
        raise errors.InvalidInput(
            f"header accept: {len(given)} bytes, more than {MAX_ACCEPT_BYTES}: shorten it",
            parameter="accept",
        )
    return given


def too_large(limit_bytes: int) -> errors.TooLarge:
    """Return the error for a body over its limit."""
    return errors.TooLarge(
        f"the body is larger than {limit_bytes} bytes (activator.max_body_bytes, or quota "
        f"body_bytes): send a reference to the data instead",
        limit_bytes=limit_bytes,
    )


def tenant_prefix(scope: Scope) -> str:
    """Return `/t/{tenant}` where the path names a tenant, else ""."""
    path = str(scope["path"])
    return (
        f"{TENANT_PATH}{path[len(TENANT_PATH) :].partition('/')[0]}"
        if path.startswith(TENANT_PATH)
        else ""
    )


def subpath(scope: Scope) -> bytes:
    """Return the part of the request target after `/fn/{app}/{function}`, as the caller wrote
    it."""
    before = 6 if tenant_prefix(scope) else 4
    raw = scope["raw_path"].partition(b"?")[0].split(b"/", before)
    query = scope["query_string"]
    return b"%b%b" % (
        b"/" + raw[before] if len(raw) > before else b"/",
        b"?" + query if query else b"",
    )
