"""Bodies of requests that are answered here: what they may take of the memory, all together and of
one tenant.

A call that waits for a slot has its body in memory until it is answered (a submitted one has it in
the journal, and budgets of its own). The room for a body is taken before it is read where its
length is known, else as it comes, and given back once the request was answered. An answer that is
translated before it goes out takes of the same room. Callers without a key share the room of the
function's tenant, or one of their own where no function is known yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from activator.http.request import Request
from pilotlight import errors

RETRY_S = 1.0


class Bodies:
    """Bytes by tenant. Owner: the event loop; every method is synchronous."""

    def __init__(self, *, limit_bytes: int, tenant_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._tenant_bytes = tenant_bytes
        self.bytes_of: Counter[str] = Counter()
        self._total = 0

    def __repr__(self) -> str:
        return f"<Bodies {self._total}/{self._limit_bytes} bytes of {len(self.bytes_of)} tenants>"

    def room(self, request: Request) -> Room:
        """A context in which the request's body counts when it is read."""
        return Room(self, request)

    def take(self, tenant: str, size: int) -> None:
        """Count so many bytes more. Raises TooManyRequests; one body alone has room, however large
        it may be."""
        for whose, used, name, limit in (
            ("this tenant's", self.bytes_of[tenant], "tenant_waiting_bytes", self._tenant_bytes),
            ("all tenants'", self._total, "waiting_bytes", self._limit_bytes),
        ):
            if used and used + size > limit:
                problem = (
                    f"bodies of {whose} calls take {used} of {limit} bytes, the bound "
                    f"(activator.{name}): wait until some are answered"
                )
                raise errors.TooManyRequests(problem, retry_after_s=RETRY_S)
        self.bytes_of[tenant] += size
        self._total += size

    @contextmanager
    def held(self, tenant: str, size: int) -> Iterator[None]:
        """Count so many bytes while the context lasts. Raises TooManyRequests."""
        self.take(tenant, size)
        try:
            yield
        finally:
            self.give_back(tenant, size)

    def give_back(self, tenant: str, size: int) -> None:
        """Count them no more."""
        self._total -= size
        self.bytes_of[tenant] -= size
        if not self.bytes_of[tenant]:
            del self.bytes_of[tenant]


class Room:
    """What one request's body takes, until the context ends."""

    __slots__ = ("_bodies", "_request", "_size", "_tenant")

    def __init__(self, bodies: Bodies, request: Request) -> None:
        self._bodies = bodies
        self._request = request
        self._tenant = ""
        self._size = 0

    def __repr__(self) -> str:
        return f"<Room {self._size} bytes of {self._tenant or 'nobody'}>"

    def take(self, size: int) -> None:
        """Count so many bytes more, of the tenant that is known with the first of them. Raises
        TooManyRequests."""
        if not self._size:
            self._tenant = self._request.tenant
        self._bodies.take(self._tenant, size)
        self._size += size

    def __enter__(self) -> Self:
        self._request.room = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._request.room = None
        if self._size:
            self._bodies.give_back(self._tenant, self._size)
            self._size = 0
