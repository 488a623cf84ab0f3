"""What the activator sends to its writer process for each logged call: three lengths (4 bytes each,
big-endian), then the facts as JSON, the body of the request and that of the response."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

MAX_BODY_BYTES: Final = 256 * 1024
"""A larger body is logged by its size only: a part of it could be neither scrubbed nor parsed."""
_HEAD: Final = struct.Struct(">III")


class LoggedCall(NamedTuple):
    """A logged call.

    Attributes:
        facts: fields of its row (`parquet.COLUMNS`), and what the writer needs to make the others:
            `log` (the terms), `parameters` (their names by position), `input_type`, `output_type`.
        input, output: bodies of the request and of the response; empty where they are not logged.
    """

    facts: dict[str, Any]
    input: bytes
    output: bytes

    def encode(self) -> bytes:
        """Return the frame."""
        facts = json.dumps(self.facts).encode()
        head = _HEAD.pack(len(facts), len(self.input), len(self.output))
        return b"".join((head, facts, self.input, self.output))


class FrameReader:
    """Splits a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[LoggedCall]:
        """Add data; yield the frames that are complete."""
        buffer = self._buffer
        buffer += data
        at = 0
        while len(buffer) - at >= _HEAD.size:
            facts, request, response = _HEAD.unpack_from(buffer, at)
            begin = at + _HEAD.size
            end = begin + facts + request + response
            if len(buffer) < end:
                break
            middle = begin + facts
            yield LoggedCall(
                json.loads(buffer[begin:middle]),
                bytes(buffer[middle : middle + request]),
                bytes(buffer[middle + request : end]),
            )
            at = end
        del buffer[:at]
