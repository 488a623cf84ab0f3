"""Splits a streamed result into items: each event, line or pickle becomes one server-sent event.
Pickles are not loaded here."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable
from typing import Final, Protocol

from pilotlight.protocol import CONTENT_NDJSON, CONTENT_PICKLE_STREAM, CONTENT_SSE, PROBLEM_BASE

_LENGTH: Final = struct.Struct(">I")
_EXCEPTION_FOLLOWS: Final = 0xFFFFFFFF
_PROBLEM: Final = PROBLEM_BASE.encode()
_OUR_EVENTS: Final = frozenset({b"pickle", b"exception", b"result", b"state", b"end"})


class ItemSplitter(Protocol):
    """Splits a stream into items. Owner: one reader of one stream."""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the items that `data` completes, each as the lines of an event without its id and
        its empty last line."""


class SseItems:
    """Splits server-sent events, leaving out comments, ids, and names of the platform's events."""

    def __init__(self) -> None:
        self._parts = _Parts(b"\n\n")

    def feed(self, data: bytes) -> list[bytes]:
        """Return the items that `data` completes."""
        events = map(_without_ours, self._parts.feed(data))
        return [event for event in events if event.strip(b"\n") and not _is_comment(event)]


class NdjsonItems:
    """Splits lines; a problem document becomes an error event."""

    def __init__(self) -> None:
        self._parts = _Parts(b"\n")

    def feed(self, data: bytes) -> list[bytes]:
        """Return the items that `data` completes."""
        return [
            (b"event: error\ndata: " if _is_problem(line) else b"data: ") + line
            for line in self._parts.feed(data)
            if line.strip()
        ]


class PickleItems:
    """Splits pickles, sent in base64 as `event: pickle`, and as `event: exception` for a raised
    exception."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._exception_follows = False

    def feed(self, data: bytes) -> list[bytes]:
        """Return the items that `data` completes."""
        self._buffer += data
        found, at = [], 0
        while len(self._buffer) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, at)
            if length == _EXCEPTION_FOLLOWS and not self._exception_follows:
                self._exception_follows = True
                at += _LENGTH.size
                continue
            end = at + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            name = b"exception" if self._exception_follows else b"pickle"
            found.append(
                b"event: %b\ndata: %b"
                % (name, base64.b64encode(self._buffer[at + _LENGTH.size : end]))
            )
            self._exception_follows, at = False, end
        del self._buffer[:at]
        return found


class _Parts:
    """Splits a stream at `delimiter`; each byte is searched once, however small the pieces are."""

    def __init__(self, delimiter: bytes) -> None:
        self._delimiter = delimiter
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the parts that `data` completes, without their delimiters."""
        buffer, delimiter = self._buffer, self._delimiter
        searched = max(0, len(buffer) - len(delimiter) + 1)
        buffer += data
        end = buffer.rfind(delimiter, searched)
        if end < 0:
            return []
        found = bytes(buffer[:end]).split(delimiter)
        del buffer[: end + len(delimiter)]
        return found


def cutter_of(content_type: str) -> ItemSplitter | None:
    """Return a splitter for results of this type; None for a single value."""
    kind = content_type.partition(";")[0].strip()
    makers: dict[str, Callable[[], ItemSplitter]] = {
        CONTENT_SSE: SseItems,
        CONTENT_NDJSON: NdjsonItems,
        CONTENT_PICKLE_STREAM: PickleItems,
    }
    made = makers.get(kind)
    return made() if made is not None else None


def _without_ours(event: bytes) -> bytes:
    """Return an event of a function without what only the platform says in this stream: clients
    unpickle what it calls a pickle, and resume from its ids."""
    return b"\n".join(line for line in event.replace(b"\r", b"").split(b"\n") if not _is_ours(line))


def _is_ours(line: bytes) -> bool:
    field, _, value = line.partition(b":")
    return field == b"id" or (field == b"event" and value.removeprefix(b" ") in _OUR_EVENTS)


def _is_comment(event: bytes) -> bool:
    return all(line.startswith(b":") for line in event.split(b"\n") if line)


def _is_problem(line: bytes) -> bool:
    if _PROBLEM not in line:
        return False
    try:
        body = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return (
        isinstance(body, dict)
        and str(body.get("type", "")).startswith(PROBLEM_BASE)
        and "status" in body
    )
