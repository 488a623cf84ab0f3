"""The heads of the one request that a connection to a web server of user code carries.

A connection serves one request: the request says `connection: close`, and so does the response,
whatever the server made of it. So no request meets a connection that the server is closing, the
server's own keep-alive has no effect, and what follows a head is forwarded as it is. The path loses
WORKER_ASGI. A response whose end is the end of the connection (RFC 9112, section 6.3) is sent
chunked, so that its receiver can tell its end from a lost connection."""

from __future__ import annotations

import json

from pilotlight.errors import NotFound, PilotlightError, TooLarge
from pilotlight.protocol import CONTENT_PROBLEM, HEADER_OUTCOME, WORKER_ASGI
from pilotlight.worker.user_code import serialization

MAX_HEAD_BYTES = 64 * 1024
"""A longer head of a response is forwarded as it is: the activator refuses it."""
MAX_REQUEST_HEAD_BYTES = 1024 * 1024
"""A longer head of a request is refused. One that was forwarded as it is would keep its connection
open, whose later requests, of other callers, would not be edited."""
END_OF_HEAD = b"\r\n\r\n"
_UNDER = WORKER_ASGI.encode()
_OF_CONNECTION = frozenset({b"connection", b"keep-alive", b"proxy-connection"})
_CLOSE = b"connection: close"
_CHUNKED = b"transfer-encoding: chunked"
_WITHOUT_BODY = frozenset({204, 304})
_SWITCHING = 101


class OneRequest:
    """Edits one request and its response. Owner: the event loop."""

    def __init__(self) -> None:
        self._is_head = False
        self._held: bytes | None = b""
        """Bytes of an incomplete head; None once the final one was forwarded."""
        self._is_chunked = False

    def __repr__(self) -> str:
        return f"<OneRequest {'waits for a head' if self._held is not None else 'forwards'}>"

    def request(self, head: bytes) -> bytes:
        """The request's head as the server gets it. `head`: with its empty line."""
        first, lines = _split(head)
        verb, _, _ = first.partition(b" ")
        version = first.rpartition(b" ")[2]
        target = _target(first).removeprefix(_UNDER)
        if not target.startswith(b"/"):
            target = b"/" + target
        self._is_head = verb == b"HEAD"
        if not any(name == b"upgrade" for name, _ in lines):
            lines = [(name, line) for name, line in lines if name not in _OF_CONNECTION]
            lines.append((b"connection", _CLOSE))
        return _joined(b" ".join((verb, target, version)), lines)

    def response(self, data: bytes) -> bytes:
        """What the caller gets of the next bytes of the server."""
        if self._held is None:
            return self._framed(data)
        self._held += data
        done = b""
        while (end := self._held.find(END_OF_HEAD)) >= 0:
            head, self._held = self._held[: end + 4], self._held[end + 4 :]
            status = head[9:12]
            if status.isdigit() and 100 <= int(status) < 200 and int(status) != _SWITCHING:
                done += head  # an interim response: another head follows
                continue
            done += self._final(head, int(status) if status.isdigit() else 0)
            rest, self._held = self._held, None
            return done + self._framed(rest)
        if len(self._held) > MAX_HEAD_BYTES:
            held, self._held = self._held, None
            return done + held
        return done

    def end(self) -> bytes:
        """What the caller gets when the server has closed its end."""
        held, self._held = self._held or b"", None
        return b"0\r\n\r\n" if self._is_chunked else held

    def _final(self, head: bytes, status: int) -> bytes:
        if not 200 <= status < 600:  # WebSockets, and what is not HTTP
            return head
        first, lines = _split(head)
        names = {name for name, _ in lines}
        has_end = bool(names & {b"content-length", b"transfer-encoding"})
        lines = [(name, line) for name, line in lines if name not in _OF_CONNECTION]
        if not has_end and not self._is_head and status not in _WITHOUT_BODY:
            self._is_chunked = True
            first = b"HTTP/1.1" + first[8:]
            lines.append((b"transfer-encoding", _CHUNKED))
        return _joined(first, [*lines, (b"connection", _CLOSE)])

    def _framed(self, data: bytes) -> bytes:
        if not self._is_chunked or not data:
            return data
        return b"%x\r\n%s\r\n" % (len(data), data)


def refusal(head: bytes) -> bytes:
    """The response to a request that is not for the server, such as one that calls a method; b""
    for others."""
    target = _target(head.partition(b"\r\n")[0])
    if target == _UNDER or target.startswith((_UNDER + b"/", _UNDER + b"?")):
        return b""
    return _problem(NotFound("this function is a web server: it has no method that can be called"))


def too_long() -> bytes:
    """The response to a request whose head is over the limit."""
    message = f"the request's head has more than {MAX_REQUEST_HEAD_BYTES} bytes"
    return _problem(TooLarge(message, limit_bytes=MAX_REQUEST_HEAD_BYTES))


def _problem(error: PilotlightError) -> bytes:
    document = serialization.problem_of(error)
    body = json.dumps(document).encode()
    lines = (
        f"HTTP/1.1 {document['status']} {document['title']}",
        f"content-type: {CONTENT_PROBLEM}",
        f"content-length: {len(body)}",
        f"{HEADER_OUTCOME}: invalid",
        _CLOSE.decode(),
    )
    return "\r\n".join(lines).encode() + END_OF_HEAD + body


def _target(line: bytes) -> bytes:
    """The target of a request line."""
    return line.partition(b" ")[2].rpartition(b" ")[0]


def _split(head: bytes) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """The first line, and the others with their lower-case names."""
    first, *lines = head[: -len(END_OF_HEAD)].split(b"\r\n")
    return first, [(line.partition(b":")[0].strip().lower(), line) for line in lines]


def _joined(first: bytes, lines: list[tuple[bytes, bytes]]) -> bytes:
    return b"\r\n".join([first, *(line for _, line in lines)]) + END_OF_HEAD
