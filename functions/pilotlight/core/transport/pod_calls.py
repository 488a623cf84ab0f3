"""The protocol by which a node agent passes the calls that functions in pods make to the activator
that claimed the pod, over mutual TLS. One connection serves one pod after another:

    agent → activator   {"tenant": "t-…", "pod": "<uid>"}
    activator → agent   {"answer": "leased" | "not_leased" | "unconfirmed" | "refused", "why": "…"}
    after `leased`, both ways: the pod's HTTP/1.1 in frames (length in 4 bytes, then the bytes);
    a frame of length 0 is the end. A side that receives one answers with its own

After both ends, and after another answer than `leased`, the next statement may follow. The agent
does not parse the HTTP."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

MAX_LINE_BYTES = 1024
"""Limit of each of the two lines."""
OPENING_TIMEOUT_S = 10.0
"""Limit of the time from a connection's handshake to its statement, and from that to the answer."""
IDLE_S = 30.0
"""How long an agent keeps a connection for the next statement; an activator twice as long."""
ENDING_S = 30.0
"""Limit of the time from a side's end to the other's."""
END = bytes(4)
"""The last frame."""
_MAX_FRAME_BYTES = 256 * 1024
_LENGTH = struct.Struct(">I")
_MAX_WHY = 500
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")
_UID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z")


def is_pod_uid(text: str) -> bool:
    """Whether `text` can be the uid of a pod (RFC 4122)."""
    return _UID.match(text) is not None


@dataclass(frozen=True, slots=True)
class PodStatement:
    """What an agent states about the process that opened a connection.

    Attributes:
        tenant: id of the tenant whose directory of the node has the socket.
        pod: uid of the pod whose control group the process is in."""

    tenant: str
    pod: str

    def to_line(self) -> bytes:
        """The line on the wire."""
        return json.dumps({"tenant": self.tenant, "pod": self.pod}).encode() + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> Self:
        """Parse a line. Raises ValueError."""
        body = json.loads(line)
        if not isinstance(body, dict):
            raise ValueError("a statement must be a JSON object")
        tenant, pod = body.get("tenant"), body.get("pod")
        if not isinstance(tenant, str) or not _TENANT.match(tenant):
            raise ValueError("a statement must name a tenant's id")
        if not isinstance(pod, str) or not is_pod_uid(pod):
            raise ValueError("a statement must name a pod's uid")
        return cls(tenant, pod)


class Answer(StrEnum):
    """An activator's answer. `NOT_LEASED`: another activator may have claimed the pod.
    `UNCONFIRMED`: it does not know the agent as that of the pod's node, or not yet."""

    LEASED = "leased"
    NOT_LEASED = "not_leased"
    UNCONFIRMED = "unconfirmed"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class PodAnswer:
    """An activator's answer to a statement. `why`: of a refusal, for the function's author."""

    answer: Answer
    why: str = ""

    def to_line(self) -> bytes:
        """The line on the wire."""
        return json.dumps({"answer": self.answer, "why": self.why[:_MAX_WHY]}).encode() + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> Self:
        """Parse a line. Raises ValueError."""
        body = json.loads(line)
        if not isinstance(body, dict):
            raise ValueError("an answer must be a JSON object")
        return cls(Answer(str(body.get("answer"))), str(body.get("why", ""))[:_MAX_WHY])


def frame(data: bytes) -> bytes:
    """`data`, which is not empty, as frames."""
    pieces = (data[at : at + _MAX_FRAME_BYTES] for at in range(0, len(data), _MAX_FRAME_BYTES))
    return b"".join([_LENGTH.pack(len(piece)) + piece for piece in pieces])


class FrameReader:
    """An incremental parser of frames until their end. It keeps no payload, and of a length at most
    3 bytes."""

    def __init__(self) -> None:
        self._head = b""
        self._left = 0
        self.is_complete = False

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """Return the payload in `data`, and the bytes after the end. Raises ValueError."""
        payload: list[bytes] = []
        while data and not self.is_complete:
            if self._left:
                piece, data = data[: self._left], data[self._left :]
                self._left -= len(piece)
                payload.append(piece)
                continue
            missing = _LENGTH.size - len(self._head)
            self._head, data = self._head + data[:missing], data[missing:]
            if len(self._head) == _LENGTH.size:
                (self._left,) = _LENGTH.unpack(self._head)
                self._head = b""
                self.is_complete = not self._left
                if self._left > _MAX_FRAME_BYTES:
                    raise ValueError(f"a frame of {self._left} bytes is over the limit")
        return b"".join(payload), data
