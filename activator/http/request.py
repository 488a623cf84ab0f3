"""One HTTP request at the edge: its headers, its body within bounds, and the ways to answer it."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol

from activator.http.content_types import GUARD, GUARD_LINES
from pilotlight import errors
from pilotlight.protocol import CONTENT_PROBLEM, new_call_id, problem

if TYPE_CHECKING:
    from activator.calls.runner import Call
    from activator.http.bodies import Room
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
"""Where a scope has the caller's address, if that is not the peer's."""
_PROBLEM = CONTENT_PROBLEM.encode()
MAX_WAIT_S = 7 * 86_400
"""Of a caller: the longest execution clock that there may be (`spec.Clocks`)."""


MAX_ACCEPT_BYTES = 1024
"""Of a call's `Accept`, which is kept with the call for as long as that waits, in memory and in the
journal: browsers send 150."""
LEAST_READ_BYTES = 16 * 1024
"""What a caller has to read of an answer in each period of `Request.wait_read`: who reads a byte
now and then holds it for ever."""
UNREAD_S = 2.0
"""How long a caller may leave the rest of an answer unread that was cut off."""


class RateLimitHeaderSource(Protocol):
    """What knows the quotas that a request falls under."""

    def head(self) -> bytes:
        """Header lines that say what is left of them, each ending in CRLF."""
        ...


class Request:
    """A request as the gateway sees it. `id` is always ours: records are unique by it, so a caller
    must not choose it.

    Attributes:
        gate: the quotas that it falls under, once they are known; None = none. call: what it became
        once it was admitted; None = not yet, or no call. tenant: whose request it is, once that is
        known; "" before. target: what it calls, once that is known and until its end was observed.
        began_ns, routed_ns: monotonic time when it was made, and when it was routed. choice: which
        revision answers it, and why; None = one revision answers all, or nobody has chosen yet.
        room: where its body counts; None = nowhere. shape: content type and body of the errors that
        it is answered with.
    """

    __slots__ = (
        "_receive",
        "_send",
        "began_ns",
        "call",
        "choice",
        "gate",
        "headers",
        "id",
        "is_answered",
        "path",
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
        self.gate: RateLimitHeaderSource | None = None
        self.call: Call | None = None
        self.tenant = ""
        self.choice: RoutingDecision | None = None
        self.target: CallTarget | None = None
        self.room: Room | None = None
        self.shape: Shape = problem_shape
        self.began_ns = self.routed_ns = time.monotonic_ns()

    def __repr__(self) -> str:
        return f"<Request {self.id} {self.verb} {self.path}>"

    @property
    def cycle(self) -> Any:
        """uvicorn's side of this very request, of which a connection may have several (pipelining);
        None in front of another server."""
        return getattr(self._send, "__self__", None)

    @property
    def arm(self) -> str:
        """The arm of the experiment that it is in; "" for none."""
        return self.choice.arm if self.choice is not None else ""

    @property
    def verb(self) -> str:
        """GET, POST, …"""
        return str(self.scope.get("method", ""))

    @property
    def address(self) -> str:
        """The caller's address: the peer's, or what a trusted proxy says
        (`activator.http.trusted_proxies`); "" when unknown."""
        return self.scope.get(CALLER) or self.peer

    @property
    def peer(self) -> str:
        """The address at the other end of the connection; "" when unknown."""
        client = self.scope.get("client")
        return client[0] if client else ""

    async def body(self, *, limit_bytes: int, timeout_s: float) -> bytes:
        """The whole body.

        Raises TooLarge before reading on, TooManyRequests where it has no room, InvalidInput when
        it comes too slowly, ClientClosedRequest."""
        declared = self.headers.get(b"content-length")
        room = self.room
        if declared is not None and declared.isdigit():
            if int(declared) > limit_bytes:
                raise too_large(limit_bytes)
            if room is not None:
                room.take(int(declared))
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
                    room.take(len(message["body"]))
                self._listen()
                return bytes(message["body"])
        try:
            async with asyncio.timeout(timeout_s):
                body = await self._rest(message, limit_bytes, room)
        except TimeoutError as e:
            raise errors.InvalidInput(f"the body did not arrive within {timeout_s:g} s") from e
        self._listen()
        return body

    def _listen(self) -> None:
        """Read on, so that it is seen when the caller leaves: uvicorn stops within a large body,
        until more of it is asked for."""
        connection = self.scope.get("connection")
        if connection is not None:
            connection.flow.resume_reading()

    async def _rest(
        self, message: MutableMapping[str, Any] | None, limit_bytes: int, room: Room | None
    ) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            if message is None:
                message = await self._receive()
            if message["type"] == "http.disconnect":
                raise errors.ClientClosedRequest("the caller left while sending its body")
            part = message["body"]
            size += len(part)
            if size > limit_bytes:
                raise too_large(limit_bytes)
            if room is not None:
                room.take(len(part))
            parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)
            message = None

    def deadline_s(self) -> float | None:
        """Seconds that its caller is ready to wait in all; None = it does not say. Raises
        InvalidInput."""
        given = self.headers.get(b"pilotlight-timeout")
        if given is None:
            return None
        try:
            seconds = float(given)
        except ValueError:
            seconds = -1.0
        if not 0 < seconds <= MAX_WAIT_S:
            raise errors.InvalidInput(
                f"header pilotlight-timeout: write the seconds you will wait, more than 0, at "
                f"most {MAX_WAIT_S}"
            )
        return seconds

    async def receive(self) -> MutableMapping[str, Any]:
        """The next ASGI message, for bodies that stream."""
        return await self._receive()

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """Answer at once."""
        await self.start(status, headers)
        await self._send({"type": "http.response.body", "body": body})

    async def respond_whole(self, status: int, head: bytes, body: bytes) -> None:
        """Answer at once with header lines that are bytes already (each ends in CRLF,
        content-length left out): the hot path."""
        head += b"content-length: %d\r\n" % len(body)
        connection = self.scope.get("connection")
        if connection is not None and connection.respond_whole(self.cycle, status, head, body):
            self.is_answered = True
            return
        await self.respond(status, header_list(head), body)

    async def start(self, status: int, headers: Headers) -> None:
        """Begin a streaming answer."""
        self.is_answered = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def chunk(self, data: bytes, *, more: bool = True) -> None:
        """Send on; waits while the caller does not read."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def wait_read(self, pause_s: float) -> None:
        """Return once the caller has read what it was sent, but for what a buffer takes.

        One that reads less than LEAST_READ_BYTES in `pause_s` is cut off: raises
        ClientClosedRequest."""
        connection = self.scope.get("connection")
        while connection is not None and connection.is_congested:
            unread = connection.transport.get_write_buffer_size()
            try:
                async with asyncio.timeout(pause_s):
                    await connection.flow.drain()
            except TimeoutError:
                if unread - connection.transport.get_write_buffer_size() < LEAST_READ_BYTES:
                    self.is_answered = True  # nobody reads an error either
                    connection.transport.abort()
                    raise errors.ClientClosedRequest(
                        f"the caller did not read its answer for {pause_s:g} s"
                    ) from None

    def quota_headers(self) -> Headers:
        """`RateLimit` and `RateLimit-Policy` of whatever is answered; none where no quota
        applies."""
        return header_list(self.gate.head()) if self.gate is not None else []

    def give_up(self) -> None:
        """Its answer was cut off. A caller who does not read what there is of it soon is, too: what
        it holds it would hold for ever."""
        connection = self.scope.get("connection")
        if connection is not None and connection.on_gone is not None:
            asyncio.get_running_loop().call_later(
                UNREAD_S, _abort_unread, connection, connection.on_gone
            )

    async def respond_json(
        self, status: int, body: Mapping[str, Any], headers: Headers | None = None
    ) -> None:
        """Answer with JSON."""
        data = json.dumps(body).encode()
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
        """Answer with a problem document, and `Retry-After` where a retry makes sense (RFC 9457,
        RFC 9110 §10.2.3)."""
        head, data = error_answer(error, self.id, self.shape)
        await self.respond(
            error.status, header_list(head) + self.quota_headers() + (headers or []), data
        )


def _abort_unread(connection: Any, on_gone: Callable[[], object]) -> None:
    if connection.on_gone == on_gone and connection.is_congested:  # still the same request
        connection.transport.abort()


def problem_shape(error: errors.PilotlightError, request_id: str) -> tuple[bytes, bytes]:
    """Content type and body of an error as a problem document."""
    return _PROBLEM, json.dumps(problem_of(error, request_id)).encode()


Shape = Callable[[errors.PilotlightError, str], tuple[bytes, bytes]]
"""How an error is told: content type and body, of the error and the request's id."""


def error_answer(
    error: errors.PilotlightError, request_id: str, shape: Shape = problem_shape
) -> tuple[bytes, bytes]:
    """Header lines, each ending in CRLF, and body of an answer that is an error."""
    content_type, data = shape(error, request_id)
    head = b"content-type: %b\r\n%bcontent-length: %d\r\nx-request-id: %b\r\n" % (
        content_type,
        GUARD_LINES,
        len(data),
        request_id.encode(),
    )
    retry_after_s = error.retry_after_s
    if retry_after_s is None and error.status in (429, 503):
        retry_after_s = 1.0
    if retry_after_s is not None:
        head += b"retry-after: %d\r\n" % max(1, math.ceil(retry_after_s))
    if error.status == 401:
        head += b'www-authenticate: Bearer realm="pilotlight"\r\n'
    return head, data


def problem_of(error: errors.PilotlightError, request_id: str) -> dict[str, Any]:
    """Its problem document."""
    title = (
        HTTPStatus(error.status).phrase
        if error.status in HTTPStatus._value2member_map_
        else "Client Closed Request"
    )
    return problem(
        type=error.type,
        title=title,
        status=error.status,
        detail=str(error),
        instance=request_id,
        extra=dict(error.detail),
    )


def header_list(head: bytes) -> Headers:
    """Header lines, each ending in CRLF, as ASGI's list of pairs."""
    return [
        (name, value)
        for name, _, value in (line.partition(b": ") for line in head.split(b"\r\n")[:-1])
    ]


def accept_of(headers: Mapping[bytes, bytes]) -> bytes:
    """What a call's caller wants its answer to be; b"" where it does not say. Raises InvalidInput
    for one over its bound."""
    given = headers.get(b"accept", b"")
    if len(given) > MAX_ACCEPT_BYTES:
        raise errors.InvalidInput(
            f"header accept: {len(given)} bytes, more than {MAX_ACCEPT_BYTES}: shorten it",
            parameter="accept",
        )
    return given


def too_large(limit_bytes: int) -> errors.TooLarge:
    """The error of a body over its bound."""
    return errors.TooLarge(
        f"the body is larger than {limit_bytes} bytes (activator.max_body_bytes, or a quota "
        f"body_bytes): send a reference to it instead",
        limit_bytes=limit_bytes,
    )
