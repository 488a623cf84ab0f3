"""Proxies bytes between a caller's connection and one to the server, without parsing or buffering.

Each caller's connection has its own connection to the server for its lifetime, which carries any
number of requests to an engine, and one to a web server of user code, whose heads are edited
(`one_request`). The server's bytes are forwarded at once. A side that reads slowly pauses reading
from the other side, so at most two socket buffers and some pieces wait per direction. A caller's
half-close is forwarded; when the caller disconnects, the server's side is closed too, so that the
server frees the request. When the server disconnects, what the caller still sends is read and
discarded until the caller has closed (RFC 9112, section 9.6): a socket that is closed with unread
bytes resets the connection, and the response would be lost. Owner: one event loop.

The worker answers requests about itself: a connection that begins with one never reaches the server
(`ProxyCaller`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from pilotlight.protocol import WORKER_END, WORKER_STATUS
from pilotlight.worker.engine import one_request
from pilotlight.worker.engine.client import Address
from pilotlight.worker.engine.one_request import OneRequest

STATUS_QUESTION = b"GET %s HTTP/1.1\r\n" % WORKER_STATUS.encode()
END_QUESTION = b"POST %s HTTP/1.1\r\n" % WORKER_END.encode()
MAX_HEAD_BYTES = 8192
"""Maximum size of such a request with its headers."""
_ANSWER = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: "
    b"close\r\ncontent-length: %d\r\n\r\n"
)
LINGER_S = 5.0
"""How long a caller may go on to send after the server has disconnected."""
HIGH_WATER_BYTES = 256 * 1024
"""Number of a side's unsent bytes above which reading from the other side pauses."""


class ProxySide(asyncio.Protocol):
    """One side of a pair."""

    def __init__(self, pair: ProxyPair) -> None:
        self._pair = pair
        self._other: Any = None
        self.transport: Any = None
        """asyncio.Transport, or uvloop's, which is not a subclass; None until connected."""
        self.has_ended = False

    def __repr__(self) -> str:
        return f"<ProxySide of {self._pair!r}>"

    def join(self, other: ProxySide) -> None:
        """Forward received bytes to the other side from now on."""
        self._other = other.transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start using the new transport (asyncio.Protocol)."""
        self.transport = transport
        self.transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self._pair.made(self)

    def data_received(self, data: bytes) -> None:
        """Forward to the other side."""
        pair = self._pair
        pair.last, pair.moved_at = self, time.monotonic()
        if self._other is None:
            pair.keep(data)
        else:
            self._other.write(data)

    def eof_received(self) -> bool:
        """Forward the half-close to the other side."""
        self.has_ended = True
        return self._pair.ended(self)

    def pause_writing(self) -> None:
        """Pause reading from the other side: this side reads slowly."""
        if self._other is not None and not self._other.is_closing():
            self._other.pause_reading()

    def resume_writing(self) -> None:
        """Resume reading from the other side."""
        self._pair.moved_at = time.monotonic()
        if self._other is not None and not self._other.is_closing():
            self._other.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the other side, too."""
        self._pair.lost(self, exc)


class ProxyCaller(ProxySide):
    """The caller's side, which checks whether the first bytes are a request to the worker, and
    edits the head of the only request of its connection."""

    def __init__(self, pair: ProxyPair, answers: Mapping[bytes, Callable[[], bytes]]) -> None:
        super().__init__(pair)
        self._answers = answers
        self._head: bytes | None = b""
        """The bytes so far, while they may be such a request; None once they are not."""

    def data_received(self, data: bytes) -> None:
        """Answer a request to the worker, or forward."""
        if self._pair.engine_is_lost:
            return
        if self._head is None:
            super().data_received(data)
            return
        self._head += data
        head = self._head
        possible = [one for one in self._answers if head.startswith(one[: len(head)])]
        if not possible:
            self._resume()
        elif b"\r\n\r\n" in head:
            body = self._answers[possible[0]]()
            self.transport.write(_ANSWER % len(body) + body)
            self._pair.close()
        elif len(head) > MAX_HEAD_BYTES:
            self._pair.close()

    def eof_received(self) -> bool:
        """Forward an incomplete request to the engine."""
        if self._head:
            self._resume()
        return super().eof_received()

    def _resume(self) -> None:
        data, edits = self._head or b"", self._pair.edits
        if edits is not None and not self.has_ended:
            end = data.find(one_request.END_OF_HEAD) + len(one_request.END_OF_HEAD)
            if end < len(one_request.END_OF_HEAD):
                if len(data) > one_request.MAX_REQUEST_HEAD_BYTES:
                    self._refuse(one_request.too_long())
                return  # the head is not complete
            if refusal := one_request.refusal(data[:end]):
                self._refuse(refusal)
                return
            data = edits.request(data[:end]) + data[end:]
        self._head = None
        super().data_received(data)

    def _refuse(self, response: bytes) -> None:
        self.transport.write(response)
        self._pair.close()


class ProxyServer(ProxySide):
    """The server's side, which edits the head of the only response of its connection."""

    def data_received(self, data: bytes) -> None:
        """Forward to the caller."""
        edits = self._pair.edits
        if edits is not None:
            data = edits.response(data)
        if data:
            super().data_received(data)


class ProxyPair:
    """A caller's connection and the engine's. Created when a caller connects; `on_gone` is called
    once, when both are closed.

    Attributes:
        last: the side that sent the most recent bytes.
        moved_at: monotonic seconds at which it did.
    """

    def __init__(
        self,
        address: Address,
        loop: asyncio.AbstractEventLoop,
        on_gone: Callable[[ProxyPair], None],
        answers: Mapping[bytes, Callable[[], bytes]] = {},
        *,
        edits: OneRequest | None = None,
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        """`answers`: by the first line of a request to the worker, what returns the response's
        body. `edits`: None: the connection carries any number of requests. `on_refused`: called
        when nothing listens at the address."""
        self._address = address
        self._loop = loop
        self._on_gone = on_gone
        self._on_refused = on_refused
        self.edits = edits
        self._connecting: asyncio.Task[None] | None = None
        self._open = 0
        self._early = b""
        self._is_joined = False
        self.engine_is_lost = False
        self.caller, self.engine = ProxyCaller(self, answers), ProxyServer(self)
        self.last: ProxySide | None = None
        self.moved_at = time.monotonic()

    def __repr__(self) -> str:
        side = "none" if self.last is None else "caller" if self.last is self.caller else "engine"
        return f"<ProxyPair open={self._open} last={side}>"

    def is_asking(self) -> bool:
        """Whether the caller sent the most recent bytes, so that a response is due."""
        return self.last is self.caller

    def is_behind(self) -> bool:
        """Whether the caller has not read all that the engine sent; more may wait in the engine."""
        return (
            self.caller.transport is not None and self.caller.transport.get_write_buffer_size() > 0
        )

    def made(self, half: ProxySide) -> None:
        """Handle a new side. The caller's comes first and triggers the connection to the engine."""
        self._open += 1
        if half is self.caller:
            self._connecting = self._loop.create_task(self._connect(), name="connect to the engine")

    def keep(self, data: bytes) -> None:
        """Keep what the caller sends before the engine is connected: one piece, then reading
        pauses."""
        self._early += data
        self.caller.transport.pause_reading()

    def ended(self, half: ProxySide) -> bool:
        """Handle a half-close; returns whether the other direction stays open, which it does not
        after the engine's half-close."""
        if half is self.engine or self.engine.has_ended or self.engine_is_lost:
            return False
        if self._is_joined and self.engine.transport.can_write_eof():
            self.engine.transport.write_eof()
        return True

    def lost(self, half: ProxySide, exc: Exception | None) -> None:
        """Handle a lost side. A lost caller aborts the engine's side at once; after a lost engine,
        the bytes that it had sent still go out, and the caller has LINGER_S to close."""
        self._open -= 1
        if half is self.caller and self._connecting is not None:
            self._connecting.cancel()
        other = self._other(half)
        if other.transport is not None and not other.transport.is_closing():
            if half is self.caller:
                other.transport.abort()
            else:
                if exc is None and self.edits is not None:
                    other.transport.write(self.edits.end())
                self._linger()
        if self._open == 0:
            self._on_gone(self)

    def close(self) -> None:
        """Close both sides; pending bytes to the caller still go out."""
        for half in (self.engine, self.caller):
            if half.transport is not None:
                half.transport.close()

    def _linger(self) -> None:
        """Tell the caller that nothing follows, and discard what it sends."""
        self.engine_is_lost = True
        transport = self.caller.transport
        if self.caller.has_ended or not transport.can_write_eof():
            transport.close()
            return
        transport.write_eof()
        transport.resume_reading()
        self._loop.call_later(LINGER_S, transport.close)

    async def _connect(self) -> None:
        try:
            if isinstance(self._address, str):
                await self._loop.create_unix_connection(lambda: self.engine, self._address)
            else:
                await self._loop.create_connection(lambda: self.engine, *self._address)
        except OSError as e:
            if isinstance(e, ConnectionRefusedError):
                self._on_refused()
            self.close()
            return
        self.caller.join(self.engine)
        self.engine.join(self.caller)
        self._is_joined = True
        if self._early:
            self.engine.transport.write(self._early)
            self._early = b""
            self.caller.transport.resume_reading()
        if self.caller.has_ended and self.engine.transport.can_write_eof():
            self.engine.transport.write_eof()

    def _other(self, half: ProxySide) -> ProxySide:
        return self.engine if half is self.caller else self.caller
