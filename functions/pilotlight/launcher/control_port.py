"""The control port of a warm pod: HTTP/1.1 for its activator (promotion) and its probes, within the
launcher's poll loop.

Strict and small: one request per connection, a request line and headers within limits, a body of
`content-length` bytes. Whatever else arrives is answered with an error and closed. Who connects is
bounded by the pod's network policy; connections, bytes and time are bounded here."""

from __future__ import annotations

import contextlib
import json
import re
import select
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_BODY_BYTES = 256 * 1024
"""Largest body: a launch document has some 100 KiB at most, and all secrets 128 KiB."""
MAX_HEAD_BYTES = 8 * 1024
MAX_CONNECTIONS = 16
"""Open connections; the oldest one makes room for the next."""
REQUEST_S = 5.0
"""Time for one request and its answer."""
_REQUEST_LINE = re.compile(rb"([A-Z]{1,16}) (/[!-~]{0,255}) HTTP/1\.1\Z")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t -~\x80-\xff]*)\Z")
_LENGTH = re.compile(rb"[0-9]{1,9}\Z")
_ONCE = (b"content-length", b"host")
_NEGOTIATING = (b"transfer-encoding", b"expect", b"upgrade")
_TITLES = {
    200: "OK",
    202: "Accepted",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    409: "Conflict",
    413: "Content Too Large",
    431: "Request Header Fields Too Large",
    501: "Not Implemented",
    503: "Service Unavailable",
}


class Refused(Exception):
    """Raised for a request that is not accepted; it is answered with `status` and the message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class ControlRequest:
    """A complete request."""

    method: str
    path: str
    body: bytes

    def document(self) -> dict[str, Any]:
        """The body as a JSON object. Raises Refused."""
        try:
            found = json.loads(self.body)
        except (ValueError, RecursionError) as e:
            raise Refused(400, f"the body is not JSON: {e}") from e
        if not isinstance(found, dict):
            raise Refused(400, "the body must be a JSON object")
        return found


Handle = Callable[[ControlRequest], tuple[int, Mapping[str, Any]]]
"""Answers a request with a status and a JSON object. Raises Refused."""


@dataclass(eq=False)
class _ControlConnection:
    socket: socket.socket
    until: float
    incoming: bytearray = field(default_factory=bytearray)
    outgoing: bytes = b""


class ControlPort:
    """The listener and its connections. Owner: the launcher's loop, which calls `register` before
    it polls, and `turn` afterwards, at the latest at `next_at`."""

    def __init__(self, listener: socket.socket, handle: Handle) -> None:
        """`listener`: bound, not listening. Raises OSError."""
        listener.setblocking(False)
        listener.listen(MAX_CONNECTIONS)
        self._listener = listener
        self._handle = handle
        self._connections: list[_ControlConnection] = []

    def __repr__(self) -> str:
        return f"<ControlPort {len(self._connections)} connections>"

    @property
    def address(self) -> str:
        """Where it listens: `host:port`."""
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    @property
    def next_at(self) -> float:
        """When the next connection times out, monotonic; inf without connections."""
        return min((one.until for one in self._connections), default=float("inf"))

    def register(self, poll: select.poll) -> None:
        """Register all descriptors."""
        poll.register(self._listener, select.POLLIN)
        for one in self._connections:
            poll.register(one.socket, select.POLLOUT if one.outgoing else select.POLLIN)

    def turn(self) -> None:
        """Accept, read, answer and time out, without blocking."""
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                if len(self._connections) >= MAX_CONNECTIONS:
                    self._end(self._connections[0])
                self._connections.append(
                    _ControlConnection(socket=connection, until=time.monotonic() + REQUEST_S)
                )
        for one in list(self._connections):
            try:
                if not one.outgoing:
                    self._receive(one)
                if one.outgoing:
                    self._send(one)
            except OSError:
                self._end(one)
            if one.until < time.monotonic() and one in self._connections:
                self._end(one)

    def close(self) -> None:
        """Close everything."""
        self._listener.close()
        for one in list(self._connections):
            self._end(one)

    def _end(self, one: _ControlConnection) -> None:
        one.socket.close()
        self._connections.remove(one)

    def _receive(self, one: _ControlConnection) -> None:
        with contextlib.suppress(BlockingIOError):
            data = one.socket.recv(65536)
            if not data:
                raise ConnectionError("the peer closed the connection")
            one.incoming += data
        try:
            if (request := parse(one.incoming)) is None:
                return
            status, body = self._handle(request)
        except Refused as e:
            status, body = e.status, {"status": e.status, "detail": str(e)}
        one.outgoing = _answer(status, body)

    def _send(self, one: _ControlConnection) -> None:
        with contextlib.suppress(BlockingIOError):
            one.outgoing = one.outgoing[one.socket.send(one.outgoing, socket.MSG_NOSIGNAL) :]
            if not one.outgoing:
                one.socket.shutdown(socket.SHUT_WR)
                self._end(one)


def parse(data: bytes | bytearray) -> ControlRequest | None:
    """The request in `data`, None while it is incomplete. Raises Refused."""
    head, separator, body = bytes(data).partition(b"\r\n\r\n")
    if len(head) > MAX_HEAD_BYTES:
        raise Refused(431, f"the head exceeds {MAX_HEAD_BYTES} bytes")
    if not separator:
        return None
    first, *lines = head.split(b"\r\n")
    if (line := _REQUEST_LINE.match(first)) is None:
        raise Refused(400, "the request line is invalid, or not of HTTP/1.1")
    length = _length(lines)
    if len(body) > length:
        raise Refused(400, "more bytes than content-length says: one request per connection")
    if len(body) < length:
        return None
    return ControlRequest(method=line[1].decode(), path=line[2].decode(), body=body)


def _length(lines: list[bytes]) -> int:
    """Bytes of the body, by the headers. Raises Refused."""
    fields: dict[bytes, bytes] = {}
    for text in lines:
        if (found := _FIELD.match(text)) is None:
            raise Refused(400, "a header is invalid")
        name = found[1].lower()
        if name in fields and name in _ONCE:
            raise Refused(400, f"the header {name.decode()} is repeated")
        fields[name] = found[2].strip()
    if not fields.keys().isdisjoint(_NEGOTIATING):
        raise Refused(501, "send a body with content-length, and nothing to negotiate")
    length = fields.get(b"content-length", b"0")
    if not _LENGTH.match(length):
        raise Refused(400, "content-length is invalid")
    if int(length) > MAX_BODY_BYTES:
        raise Refused(413, f"the body exceeds {MAX_BODY_BYTES} bytes")
    return int(length)


def _answer(status: int, body: Mapping[str, Any]) -> bytes:
    text = json.dumps(body).encode()
    kind = "application/json" if status < 400 else "application/problem+json"
    head = (
        f"HTTP/1.1 {status} {_TITLES[status]}\r\ncontent-type: {kind}\r\n"
        f"content-length: {len(text)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + text
