"""Encodes commands of Redis and decodes their replies (RESP2), with bounds: what answers may be
anything.

Source: https://redis.io/docs/latest/develop/reference/protocol-spec/"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

MAX_VALUE_BYTES: Final = 1024**2
MAX_REPLY_BYTES: Final = 8 * 1024**2
MAX_LINE_BYTES: Final = 4096
MAX_VALUES: Final = 64


class ProtocolError(Exception):
    """Raised when a peer does not speak RESP2, or exceeds the bounds."""


class ReplyError(Exception):
    """An error as a reply, such as `NOAUTH …`: the connection remains in step."""


Value = bytes | None
Reply = bytes | list[Value] | ReplyError


class _Incomplete(Exception):
    """Raised when the rest of a reply has not arrived."""


def command(*parts: str) -> bytes:
    """Return an encoded command."""
    encoded = [part.encode() for part in parts]
    return b"*%d\r\n" % len(encoded) + b"".join(
        b"$%d\r\n%b\r\n" % (len(part), part) for part in encoded
    )


class ReplyReader:
    """Splits a stream of bytes into replies."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._at = 0

    def feed(self, data: bytes) -> Iterator[Reply]:
        """Add data; yield the replies that are complete. Raises ProtocolError."""
        self._buffer += data
        while self._buffer:
            self._at = 0
            try:
                reply = self._reply()
            except _Incomplete:
                break
            del self._buffer[: self._at]
            yield reply
        if len(self._buffer) > MAX_REPLY_BYTES:
            raise ProtocolError(f"a reply has more than {MAX_REPLY_BYTES} bytes")

    def _reply(self) -> Reply:
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return ReplyError(rest.decode(errors="replace"))
        if kind == b"*":
            count = _number(rest)
            if not 0 <= count <= MAX_VALUES:
                raise ProtocolError(f"a reply of {count} values")
            return [self._value(self._line()) for _ in range(count)]
        raise ProtocolError(f"a reply that begins with {kind!r}")

    def _value(self, line: bytes) -> Value:
        if line[:1] != b"$":
            raise ProtocolError(f"a value that begins with {line[:1]!r}")
        size = _number(line[1:])
        if size == -1:
            return None
        if not 0 <= size <= MAX_VALUE_BYTES:
            raise ProtocolError(f"a value of {size} bytes")
        end = self._at + size
        if len(self._buffer) < end + 2:
            raise _Incomplete
        if self._buffer[end : end + 2] != b"\r\n":
            raise ProtocolError("a value is longer than it says")
        value = bytes(self._buffer[self._at : end])
        self._at = end + 2
        return value

    def _line(self) -> bytes:
        end = self._buffer.find(b"\r\n", self._at, self._at + MAX_LINE_BYTES)
        if end < 0:
            if len(self._buffer) - self._at >= MAX_LINE_BYTES:
                raise ProtocolError(f"a line has more than {MAX_LINE_BYTES} bytes")
            raise _Incomplete
        line = bytes(self._buffer[self._at : end])
        self._at = end + 2
        return line


def _number(text: bytes) -> int:
    if not text.removeprefix(b"-").isdigit() or len(text) > 12:
        raise ProtocolError(f"{text[:20]!r} is no number")
    return int(text)


def require_values(reply: Reply, count: int) -> Sequence[Value]:
    """Return the values of a reply to MGET of `count` keys. Raises ReplyError, ProtocolError."""
    if isinstance(reply, ReplyError):
        raise reply
    if not isinstance(reply, list) or len(reply) != count:
        raise ProtocolError(f"the reply to {count} keys does not have as many values")
    return reply
