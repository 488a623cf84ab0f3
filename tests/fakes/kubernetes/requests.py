"""What clients asked for: the log that tests count in."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

KEPT = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request.

    Attributes:
        at: Unix time. verb: get, list, watch, create, update, patch, apply, delete,
        deletecollection, or the HTTP method where there is no resource. resource: `pods`,
        `deployments.apps`; "" without. subresource: `status`, `scale`, …; "" without. status: of
        the answer; 0 = none was sent. wrote: whether it changed an object. user_agent: of the
        client.
    """

    at: float
    verb: str
    resource: str
    subresource: str
    namespace: str
    name: str
    path: str
    status: int
    wrote: bool
    user_agent: str


class RequestLog:
    """The newest requests. Owner: the server's event loop; others read copies."""

    def __init__(self) -> None:
        self._asked: deque[Asked] = deque(maxlen=KEPT)

    def __repr__(self) -> str:
        return f"<RequestLog {len(self._asked)} requests, {self.writes()} writes>"

    def __iter__(self) -> Iterator[Asked]:
        return iter(list(self._asked))

    def __len__(self) -> int:
        return len(self._asked)

    def add(self, asked: Asked) -> None:
        """Note one."""
        self._asked.append(asked)

    def clear(self) -> None:
        """Count anew."""
        self._asked.clear()

    def count(
        self, verb: str | None = None, resource: str | None = None, subresource: str | None = None
    ) -> int:
        """How many requests were of this kind; None = any."""
        return sum(
            (verb is None or one.verb == verb)
            and (resource is None or one.resource == resource)
            and (subresource is None or one.subresource == subresource)
            for one in self
        )

    def writes(self) -> int:
        """How many changed an object."""
        return sum(one.wrote for one in self)
