"""What a streamed result consists of: events, lines or pickles become items, each one server-sent
event. Nothing is unpickled here."""

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


class ItemSplitter(Protocol):
    """Owner: one reader of one stream."""

    def feed(self, data: bytes) -> list[bytes]:
        """The items that `data` completes, each as the lines of an event, without its id and the
        empty line behind it."""
        ...


class SseItems:
    """Events stay what they are; comments are no items."""

    def __init__(self) -> None:
        self._parts = _Parts(b"\n\n")

    def feed(self, data: bytes) -> list[bytes]:
        """See Cutter."""
        return [
            event
            for event in self._parts.feed(data)
            if event.strip(b"\n") and not _is_comment(event)
        ]


class NdjsonItems:
    """A line is an item; a problem document is an error."""

    def __init__(self) -> None:
        self._parts = _Parts(b"\n")

    def feed(self, data: bytes) -> list[bytes]:
        """See Cutter."""
        return [
            (b"event: error\ndata: " if _is_problem(line) else b"data: ") + line
            for line in self._parts.feed(data)
            if line.strip()
        ]


class PickleItems:
    """A pickle is an item in base64: `event: pickle`, and `event: exception` for what was
    raised."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._exception_follows = False

    def feed(self, data: bytes) -> list[bytes]:
        """See Cutter."""
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
    """Parts of a stream that each end with `delimiter`; each byte is looked at once, however small
    the pieces come."""

    def __init__(self, delimiter: bytes) -> None:
        self._delimiter = delimiter
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The parts that it completes, without their delimiters."""
        buffer, delimiter = self._buffer, self._delimiter
        looked_at = max(0, len(buffer) - len(delimiter) + 1)
        buffer += data
        end = buffer.rfind(delimiter, looked_at)
        if end < 0:
            return []
        found = bytes(buffer[:end]).split(delimiter)
        del buffer[: end + len(delimiter)]
        return found


def cutter_of(content_type: str) -> ItemSplitter | None:
    """What finds the items of a result of this type; None for one that is a single value."""
    kind = content_type.partition(";")[0].strip()
    makers: dict[str, Callable[[], ItemSplitter]] = {
        CONTENT_SSE: SseItems,
        CONTENT_NDJSON: NdjsonItems,
        CONTENT_PICKLE_STREAM: PickleItems,
    }
    made = makers.get(kind)
    return made() if made is not None else None


def _is_comment(event: bytes) -> bool:
    return all(line.startswith(b":") for line in event.split(b"\n") if line)


def _is_problem(line: bytes) -> bool:
    if _PROBLEM not in line:
        return False
    try:
        body = json.loads(line)
    except ValueError:
        return False
    return (
        isinstance(body, dict)
        and str(body.get("type", "")).startswith(PROBLEM_BASE)
        and "status" in body
    )
