"""How a node agent passes the calls that a pod's function makes to the activator that claimed the
pod: the first line of each connection, which identifies the pod, and the answer.

    agent → activator   {"tenant": "t-…", "pod": "<uid>"}
    activator → agent   {"answer": "leased" | "not_leased" | "refused", "why": "…"}

After `leased` the connection is the pod's: HTTP/1.1, which the agent passes on without parsing
it. After another answer it ends."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

MAX_LINE_BYTES = 1024
"""Limit of each of the two lines."""
OPENING_TIMEOUT_S = 10.0
"""Limit of the time from a connection's handshake to its statement, and from that to the answer."""
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
    """An activator's answer. `NOT_LEASED`: another activator may have claimed the pod."""

    LEASED = "leased"
    NOT_LEASED = "not_leased"
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
        return cls(Answer(body.get("answer")), str(body.get("why", ""))[:_MAX_WHY])
