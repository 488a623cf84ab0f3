"""Limits on the connections of unauthenticated clients, which the connections of one listening
process share (`server.ClientConnection`)."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Generic, Protocol, TypeVar

SWEEP_S = 1.0
"""Interval of the check for slow heads and idle connections: limits of 10 s and more need no finer
clock, nor a timer for each request."""


class LimitedConnection(Protocol):
    """A connection that is limited.

    Attributes:
        head_since: since when the head of its request is incomplete; None: it is complete.
        idle_since: since when it waits for another request; None: it has one.
        timeout_keep_alive: how long it may wait, in seconds."""

    head_since: float | None
    idle_since: float | None
    timeout_keep_alive: int

    def refuse(self, status: bytes, text: bytes) -> None:
        """Send an error and close."""

    def timeout_keep_alive_handler(self) -> None:
        """Close, unless it is closing."""


C = TypeVar("C", bound=LimitedConnection)


class ConnectionLimits(Generic[C]):
    """Connection bookkeeping of one listening process. Owner: the event loop; all methods are
    synchronous."""

    def __init__(self, *, max_per_address: int, max_head_bytes: int, head_timeout_s: float) -> None:
        self.max_per_address = max_per_address
        self.max_head_bytes = max_head_bytes
        self.head_timeout_s = head_timeout_s
        self.by_address: Counter[str] = Counter()
        self.connections: set[C] = set()
        self.refused = 0

    def __repr__(self) -> str:
        return (
            f"<ConnectionLimits {len(self.connections)} connections, {len(self.by_address)} "
            f"addresses, {self.refused} refused>"
        )

    def close_slow(self, now: float) -> int:
        """Close connections whose request head has been incomplete for too long; returns how
        many."""
        slow = [
            c
            for c in self.connections
            if c.head_since is not None and now - c.head_since > self.head_timeout_s
        ]
        for connection in slow:
            connection.refuse(b"408 Request Timeout", b"the request's head took too long\n")
        return len(slow)

    def close_idle(self, now: float) -> int:
        """Close connections that have waited for another request longer than the keep-alive time;
        returns how many."""
        idle = [
            c
            for c in self.connections
            if c.idle_since is not None and now - c.idle_since > c.timeout_keep_alive
        ]
        for connection in idle:
            connection.timeout_keep_alive_handler()
        return len(idle)

    async def sweep(self) -> None:
        """Run `close_slow` and `close_idle` each SWEEP_S, forever."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_S)
            self.close_slow(loop.time())
            self.close_idle(loop.time())
