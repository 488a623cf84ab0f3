"""Piecewise parsing of WebSocket frames on both sides: one read may contain 40,000 frames, which
would block the event loop for a second.

Unparsed data stays buffered as bytes, and reading is paused meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.asyncio.client import ClientConnection
from websockets.frames import CloseCode

from activator.http.peer_credentials import user_behind

if TYPE_CHECKING:
    from uvicorn._types import ASGIReceiveEvent, ASGISendEvent

PIECE_BYTES = 1024
"""Bytes parsed between checks of the clock: at most 170 frames of a caller, some 3 ms."""
TURN_S = 0.002
"""Time slice of the event loop for the frames of one WebSocket; a read of one large frame takes a
quarter of it."""
MAX_FRAGMENTS = 16_384
"""Limit of fragments in one message: no other limit counts empty ones."""


class Pieces:
    """Buffer of data that was read but not parsed yet. Owner: the event loop; every method is
    synchronous."""

    def __init__(
        self,
        transport: asyncio.Transport,
        *,
        parse: Callable[[bytes], None],
        is_full: Callable[[], bool],
        call_soon: Callable[[Callable[[], None]], object],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`is_full`: parsed messages wait to be consumed; the consumer calls `resume`."""
        self._transport = transport
        self._parse = parse
        self._is_full = is_full
        self._call_soon = call_soon
        self._clock = clock
        self._unparsed = b""
        self._is_due = False

    def __repr__(self) -> str:
        return f"<Pieces {len(self._unparsed)} bytes not parsed>"

    def add(self, data: bytes) -> None:
        """Add data that was read."""
        if self._unparsed:
            self._unparsed += data  # TLS had buffered more when reading was paused
            self.resume()
        elif len(data) <= PIECE_BYTES:
            self._parse(data)
        else:
            self._unparsed = data
            self._parse_slice()

    def resume(self) -> None:
        """Parse the rest in the next event loop turn; resume reading when nothing is left."""
        transport = self._transport
        if transport.is_closing():
            self._unparsed = b""
        elif self._unparsed:
            transport.pause_reading()
            if not self._is_due and not self._is_full():
                self._is_due = True
                self._call_soon(self._parse_slice)
        elif not self._is_full():
            transport.resume_reading()

    def _parse_slice(self) -> None:
        self._is_due = False
        data, at, ends_at = self._unparsed, 0, self._clock() + TURN_S
        while at < len(data) and not self._is_full() and not self._transport.is_closing():
            self._parse(data[at : at + PIECE_BYTES])
            at += PIECE_BYTES
            if self._clock() > ends_at:
                break
        self._unparsed = data[at:]
        self.resume()


class CallerSocket(WebSocketsSansIOProtocol):
    """The caller's side of a WebSocket (`uvicorn.Config(ws=…)`)."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set up piecewise parsing."""
        super().connection_made(transport)
        self.client = self.client or user_behind(transport)
        self._pieces = Pieces(
            self.transport,
            parse=self._parse,
            is_full=lambda: self.read_paused,
            call_soon=self.loop.call_soon,
        )

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._pieces.add(data)

    def _parse(self, data: bytes) -> None:
        super().data_received(data)
        if len(self.frames) > MAX_FRAGMENTS and not self.close_sent:
            self.conn.fail(
                CloseCode.MESSAGE_TOO_BIG, f"a message of more than {MAX_FRAGMENTS} fragments"
            )
            self.handle_parser_exception()

    async def receive(self) -> ASGIReceiveEvent:
        """Return the next ASGI message."""
        message = await self.queue.get()
        if self.read_paused and self.queue.empty():
            self.read_paused = False
            self._pieces.resume()
        return message

    async def send(self, message: ASGISendEvent) -> None:
        """Send an ASGI message; after a close, read the peer's close frame."""
        await super().send(message)
        if message["type"] == "websocket.close":
            self._pieces.resume()


class WorkerSocket(ClientConnection):
    """The worker's side of a WebSocket (`websockets.connect(create_connection=…)`)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pieces: Pieces

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set up piecewise parsing."""
        super().connection_made(transport)
        messages = self.recv_messages
        self._pieces = Pieces(
            self.transport,
            parse=super().data_received,
            is_full=lambda: messages.paused,
            call_soon=self.loop.call_soon,
        )
        messages.resume = self._pieces.resume

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._pieces.add(data)
