"""Minimal HTTP/1.1 (RFC 9112) between nodes: GET without request bodies, Content-Length only,
persistent connections.

Everything else is refused: neither side is a general web server.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

MAX_HEAD_BYTES = 8 * 1024
_NUMBER = re.compile(r"[0-9]{1,15}\Z")


class ProtocolViolation(Exception):
    """Raised when the peer sends invalid or incomplete data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request without a body; header names are in lower case."""

    method: str
    target: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead:
    """The head of a response, whose body has `length_bytes` bytes."""

    status: int
    headers: Mapping[str, str]
    length_bytes: int


async def read_request(reader: asyncio.StreamReader) -> Request | None:
    """Read the next request; None if the peer closed the connection between requests. Raises
    ProtocolViolation, OSError."""
    lines = await _head(reader)
    if lines is None:
        return None
    parts = lines[0].split(" ")
    if len(parts) != 3 or parts[2] not in ("HTTP/1.1", "HTTP/1.0"):
        raise ProtocolViolation("not an HTTP request")
    headers = _headers(lines[1:])
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        raise ProtocolViolation("a request with a body")
    return Request(method=parts[0], target=parts[1], headers=headers)


async def read_head(reader: asyncio.StreamReader) -> ResponseHead:
    """Read the head of a response. Raises ProtocolViolation, OSError."""
    lines = await _head(reader)
    parts = lines[0].split(" ", 2) if lines else []
    if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not _NUMBER.match(parts[1]):
        raise ProtocolViolation(
            "the connection was closed before a response" if not lines else "not an HTTP response"
        )
    headers = _headers(lines[1:]) if lines else {}
    length = headers.get("content-length", "")
    if not _NUMBER.match(length) or "transfer-encoding" in headers:
        raise ProtocolViolation("a response without Content-Length")
    return ResponseHead(status=int(parts[1]), headers=headers, length_bytes=int(length))


async def read_body(reader: asyncio.StreamReader, length_bytes: int) -> bytes:
    """Read exactly that many bytes. Raises ProtocolViolation, OSError."""
    try:
        return await reader.readexactly(length_bytes)
    except asyncio.IncompleteReadError as e:
        raise ProtocolViolation(f"received {len(e.partial)} of {length_bytes} bytes") from e


def request_head(target: str, headers: Mapping[str, str]) -> bytes:
    """Format a GET request."""
    return f"GET {target} HTTP/1.1\r\n{_lines(headers)}\r\n".encode()


def response_head(
    status: int, length_bytes: int, headers: Mapping[str, str] | None = None
) -> bytes:
    """Format the head of a response."""
    lines = _lines({**(headers or {}), "Content-Length": str(length_bytes)})
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{lines}\r\n".encode()


def _lines(headers: Mapping[str, str]) -> str:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())


async def _head(reader: asyncio.StreamReader) -> list[str] | None:
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as e:
        if e.partial:
            raise ProtocolViolation("the connection was closed within a head") from e
        return None
    except asyncio.LimitOverrunError as e:
        raise ProtocolViolation(f"a head longer than {MAX_HEAD_BYTES} bytes") from e
    if len(raw) > MAX_HEAD_BYTES:
        raise ProtocolViolation(f"a head longer than {MAX_HEAD_BYTES} bytes")
    return raw.decode("latin-1").split("\r\n")[:-2]


def _headers(lines: list[str]) -> dict[str, str]:
    found = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise ProtocolViolation("an invalid header")
        found[name.lower()] = value.strip()
    return found
