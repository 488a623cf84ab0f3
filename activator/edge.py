"""The outermost line: uvicorn's HTTP protocol with bounds of ours on what strangers may cost.

uvicorn parses and speaks HTTP/1.1; this adds what it leaves open: connections per address, the size of a request's head, the time
a head may take (slow-loris), and a way for the gateway to learn at once that a caller left, without a task for each request.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

SWEEP_S = 1.0
"""How often heads that take too long are looked for: a bound of 10 s needs no finer clock."""


class EdgeLimits:
    """Connection bookkeeping of one listening process. Owner: the event loop; all methods are synchronous."""

    def __init__(self, *, max_per_address: int, max_head_bytes: int, head_timeout_s: float) -> None:
        self.max_per_address = max_per_address
        self.max_head_bytes = max_head_bytes
        self.head_timeout_s = head_timeout_s
        self.by_address: Counter[str] = Counter()
        self.connections: set[EdgeProtocol] = set()
        self.refused = 0

    def __repr__(self) -> str:
        return f"<EdgeLimits {len(self.connections)} connections, {len(self.by_address)} addresses, {self.refused} refused>"

    def protocol(self) -> type[HttpToolsProtocol]:
        """A protocol class bound to these limits, for `uvicorn.Config(http=…)`."""
        return type("BoundEdgeProtocol", (EdgeProtocol,), {"limits": self})

    def close_slow(self, now: float) -> int:
        """Close connections whose request head has been incomplete for too long; returns how many."""
        slow = [c for c in self.connections if c.head_since is not None and now - c.head_since > self.head_timeout_s]
        for connection in slow:
            connection.refuse(b"408 Request Timeout", b"the request's head took too long\n")
        return len(slow)

    async def sweep(self) -> None:
        """Run `close_slow` each SWEEP_S, forever."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_S)
            self.close_slow(loop.time())


class EdgeProtocol(HttpToolsProtocol):
    """One client connection.

    `on_gone` is set by the gateway while it works for this connection, and called once if the peer leaves.
    """

    limits: EdgeLimits

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.on_gone: Callable[[], None] | None = None
        self.head_since: float | None = None
        self._head_bytes = 0
        self._address = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        limits = self.limits
        limits.connections.add(self)
        limits.by_address[self._address] += 1
        self.head_since = self.loop.time()
        if limits.by_address[self._address] > limits.max_per_address:
            limits.refused += 1
            self.refuse(b"503 Service Unavailable", b"too many connections from this address\n")

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)
        if self.on_gone is not None:
            on_gone, self.on_gone = self.on_gone, None
            on_gone()

    def _forget(self) -> None:
        limits = self.limits
        if self in limits.connections:
            limits.connections.discard(self)
            limits.by_address[self._address] -= 1
            if not limits.by_address[self._address]:
                del limits.by_address[self._address]

    def refuse(self, status: bytes, text: bytes) -> None:
        """Answer with a bare status and close: for peers that do not get as far as a request."""
        if not self.transport.is_closing():
            head = b"HTTP/1.1 " + status + b"\r\ncontent-type: text/plain\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: "
            self.transport.write(head + str(len(text)).encode() + b"\r\n\r\n" + text)
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        if self.head_since is not None:
            self._head_bytes += len(data)
            if self._head_bytes > self.limits.max_head_bytes and self._is_head_only(data):
                self.refuse(b"431 Request Header Fields Too Large", b"request head over the limit\n")
                return
        super().data_received(data)

    def _is_head_only(self, data: bytes) -> bool:
        """Whether these bytes cannot contain the end of a head within the limit (a body may legally follow in the same read)."""
        end = data.find(b"\r\n\r\n")
        return end < 0 or self._head_bytes - len(data) + end > self.limits.max_head_bytes

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["connection"] = self  # type: ignore[typeddict-unknown-key]
        if self.head_since is None:
            self.head_since = self.loop.time()

    def on_headers_complete(self) -> None:
        self.head_since = None
        self._head_bytes = 0
        super().on_headers_complete()

    def respond_whole(self, status: int, head: bytes, body: bytes) -> bool:
        """Answer the current request in one write, `head` being header lines that each end in CRLF, content-length among them.

        False when that is not possible just now (the peer reads slowly, or left): answer through ASGI's `send` then. It is what uvicorn's
        `send` does
        for a start and a body event, without looking at each header again: ours come from httptools and from ourselves.
        """
        cycle = self.cycle
        if self.flow.write_paused or cycle.disconnected or cycle.response_started:
            return False
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        defaults = b"".join([b"%s: %s\r\n" % header for header in self.server_state.default_headers])
        end = b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n"
        self.transport.write(b"".join((STATUS_LINE[status], defaults, head, end, body)))
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()
        return True

    def is_body_here(self) -> bool:
        """Whether the request's body has arrived whole, so that reading it cannot wait."""
        return not self.cycle.more_body

    def handle_websocket_upgrade(self) -> None:
        self.head_since = None
        self._forget()
        super().handle_websocket_upgrade()
