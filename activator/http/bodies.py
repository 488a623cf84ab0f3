"""Memory limits for request bodies, per tenant and for all tenants together.

A call that waits for a slot has its body in memory until it is answered (a submitted call has it in
the journal, with separate limits). Memory for a body is reserved before it is read where its length
is known, else as it arrives, and released once the request was answered. A response that is
translated before it is sent counts towards the same limits. Callers without a key share the limit
of the function's tenant, or a separate one while no function is known."""

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
    """Reserved bytes by tenant. Owner: the event loop; every method is synchronous."""

    def __init__(self, *, limit_bytes: int, tenant_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._tenant_bytes = tenant_bytes
        self.bytes_of: Counter[str] = Counter()
        self._total = 0

    def __repr__(self) -> str:
        return f"<Bodies {self._total}/{self._limit_bytes} bytes of {len(self.bytes_of)} tenants>"

    def room(self, request: Request) -> Room:
        """Return a context in which the request's body is counted as it is read."""
        return Room(self, request)

    def acquire(self, tenant: str, size: int) -> None:
        """Reserve `size` bytes. Raises TooManyRequests; a single body is always admitted, whatever
        its size."""
        for whose, used, name, limit in (
            ("this tenant's", self.bytes_of[tenant], "tenant_waiting_bytes", self._tenant_bytes),
            ("all tenants'", self._total, "waiting_bytes", self._limit_bytes),
        ):
            if used and used + size > limit:
                problem = (
                    f"bodies of {whose} calls use {used} of {limit} bytes, the limit "
                    f"(activator.{name}): retry once some calls have been answered"
                )
                raise errors.TooManyRequests(problem, retry_after_s=RETRY_S)
        self.bytes_of[tenant] += size
        self._total += size

    @contextmanager
    def reserved(self, tenant: str, size: int) -> Iterator[None]:
        """Reserve `size` bytes while the context lasts. Raises TooManyRequests."""
        self.acquire(tenant, size)
        try:
            yield
        finally:
            self.release(tenant, size)

    def release(self, tenant: str, size: int) -> None:
        """Release `size` bytes."""
        self._total -= size
        self.bytes_of[tenant] -= size
        if not self.bytes_of[tenant]:
            del self.bytes_of[tenant]


class Room:
    """The memory reserved for one request's body, until the context ends."""

    __slots__ = ("_bodies", "_request", "_size", "_tenant")

    def __init__(self, bodies: Bodies, request: Request) -> None:
        self._bodies = bodies
        self._request = request
        self._tenant = ""
        self._size = 0

    def __repr__(self) -> str:
        return f"<Room {self._size} bytes of {self._tenant or '-'}>"

    def acquire(self, size: int) -> None:
        """Reserve `size` more bytes for the tenant known at the first reservation. Raises
        TooManyRequests."""
        if not self._size:
            self._tenant = self._request.tenant
        self._bodies.acquire(self._tenant, size)
        self._size += size

    def release(self, size: int) -> None:
        """Release `size` of the reserved bytes before the request ends."""
        self._bodies.release(self._tenant, size)
        self._size -= size

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
            self._bodies.release(self._tenant, self._size)
            self._size = 0
