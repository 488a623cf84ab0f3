"""Bytes from a caller's connection to one of the engine's, and back: nothing is parsed, nothing is
kept.

One connection of a caller has one connection to the engine for as long as it lives. What the engine
sends goes out at once. A side that reads slowly pauses the other side's reading, so at most two
socket buffers and some pieces wait per direction. A caller's end of its direction is passed on as
that; a side that is gone takes the other along: the engine sees that its caller left, and frees the
request. Owner: one event loop.

One question is for us and not for the engine: a connection that begins with it never reaches the
engine (`ProxyCaller`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from pilotlight.protocol import WORKER_STATUS

STATUS_QUESTION = b"GET %s HTTP/1.1\r\n" % WORKER_STATUS.encode()
MAX_HEAD_BYTES = 8192
"""Of the question with its headers."""
_ANSWER = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: "
    b"close\r\ncontent-length: %d\r\n\r\n"
)
HIGH_WATER_BYTES = 256 * 1024
"""Of a side's unsent bytes, above which the other side is no longer read."""


class ProxySide(asyncio.Protocol):
    """One side of a pair."""

    def __init__(self, pair: ProxyPair) -> None:
        self._pair = pair
        self._other: Any = None
        self.transport: Any = None
        """asyncio.Transport, or uvloop's, which is no subclass of it; None until it is
        connected."""
        self.has_ended = False

    def __repr__(self) -> str:
        return f"<ProxySide of {self._pair!r}>"

    def join(self, other: ProxySide) -> None:
        """From now on what comes goes to the other side."""
        self._other = other.transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self.transport = transport
        self.transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self._pair.made(self)

    def data_received(self, data: bytes) -> None:
        """On to the other side."""
        pair = self._pair
        pair.last, pair.moved_at = self, time.monotonic()
        if self._other is None:
            pair.keep(data)
        else:
            self._other.write(data)

    def eof_received(self) -> bool:
        """The other side hears of it."""
        self.has_ended = True
        return self._pair.ended(self)

    def pause_writing(self) -> None:
        """This side reads slowly."""
        if self._other is not None and not self._other.is_closing():
            self._other.pause_reading()

    def resume_writing(self) -> None:
        """It has caught up."""
        self._pair.moved_at = time.monotonic()
        if self._other is not None and not self._other.is_closing():
            self._other.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """The other side goes too."""
        self._pair.lost(self, exc)


class ProxyCaller(ProxySide):
    """The caller's side: of its first bytes it is seen whether they ask for the instance itself."""

    def __init__(self, pair: ProxyPair, question: bytes, answer: Callable[[], bytes]) -> None:
        super().__init__(pair)
        self._question = question
        self._answer = answer
        self._head: bytes | None = b""
        """What came so far, while it may be the question; None once it was seen not to be."""

    def data_received(self, data: bytes) -> None:
        """Answer the question, or hand on."""
        if self._head is None:
            super().data_received(data)
            return
        self._head += data
        if not self._head.startswith(self._question[: len(self._head)]):
            self._go_on()
        elif b"\r\n\r\n" in self._head:
            body = self._answer()
            self.transport.write(_ANSWER % len(body) + body)
            self._pair.close()
        elif len(self._head) > MAX_HEAD_BYTES:
            self._pair.close()

    def eof_received(self) -> bool:
        """Less than the question is for the engine to judge."""
        if self._head:
            self._go_on()
        return super().eof_received()

    def _go_on(self) -> None:
        data, self._head = self._head or b"", None
        super().data_received(data)


class ProxyPair:
    """A caller's connection and the engine's. Made when a caller connects; `on_gone` is called
    once, when both are gone.

    Attributes:
        last: the side that the last bytes came from.
        moved_at: monotonic seconds of that.
    """

    def __init__(
        self,
        path: str,
        loop: asyncio.AbstractEventLoop,
        on_gone: Callable[[ProxyPair], None],
        status: Callable[[], bytes] = lambda: b"{}",
    ) -> None:
        """`status`: what is answered at WORKER_STATUS."""
        self._path = path
        self._loop = loop
        self._on_gone = on_gone
        self._connecting: asyncio.Task[None] | None = None
        self._open = 0
        self._early = b""
        self._is_joined = False
        self.caller, self.engine = ProxyCaller(self, STATUS_QUESTION, status), ProxySide(self)
        self.last: ProxySide | None = None
        self.moved_at = time.monotonic()

    def __repr__(self) -> str:
        side = "nobody" if self.last is None else "caller" if self.last is self.caller else "engine"
        return f"<ProxyPair open={self._open} last={side}>"

    def is_asking(self) -> bool:
        """Whether the caller spoke last: the engine owes it an answer."""
        return self.last is self.caller

    def is_behind(self) -> bool:
        """Whether the caller has not taken all that the engine sent: more of it may wait in the
        engine."""
        return (
            self.caller.transport is not None and self.caller.transport.get_write_buffer_size() > 0
        )

    def made(self, half: ProxySide) -> None:
        """A side is there. The caller's comes first, and has the engine's made."""
        self._open += 1
        if half is self.caller:
            self._connecting = self._loop.create_task(self._connect(), name="connect to the engine")

    def keep(self, data: bytes) -> None:
        """What the caller sends before the engine's side is there: one piece, for then its reading
        pauses."""
        self._early += data
        self.caller.transport.pause_reading()

    def ended(self, half: ProxySide) -> bool:
        """A side sends nothing more. Whether its other direction stays open: of an engine that has
        ended nobody needs the other one."""
        if half is self.engine or self.engine.has_ended:
            return False
        if self._is_joined and self.engine.transport.can_write_eof():
            self.engine.transport.write_eof()
        return True

    def lost(self, half: ProxySide, exc: Exception | None) -> None:
        """A side is gone. When the caller's is, so is the engine's at once; what the engine had
        sent before it left still goes out."""
        self._open -= 1
        if half is self.caller and self._connecting is not None:
            self._connecting.cancel()
        other = self._other(half)
        if other.transport is not None and not other.transport.is_closing():
            if half is self.caller:
                other.transport.abort()
            else:
                other.transport.close()
        if self._open == 0:
            self._on_gone(self)

    def close(self) -> None:
        """End both sides; what is on its way to the caller still goes out."""
        for half in (self.engine, self.caller):
            if half.transport is not None:
                half.transport.close()

    async def _connect(self) -> None:
        try:
            await self._loop.create_unix_connection(lambda: self.engine, self._path)
        except OSError:  # it died; whoever watches it ends us
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
