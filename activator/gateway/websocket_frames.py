"""Both sides of a WebSocket parse what was read in pieces: one read may hold 40,000 frames, which
take the event loop a second.

What is not parsed yet stays bytes, and nothing more is read meanwhile.
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
"""Parsed before the clock is looked at: 170 frames of a caller at most, some 3 ms."""
TURN_S = 0.002
"""Of the event loop, for the frames of one WebSocket; a read of one large frame takes a quarter of
it."""
MAX_FRAGMENTS = 16_384
"""Of one message: empty ones count nowhere else."""


class Pieces:
    """What was read and is not parsed yet. Owner: the event loop; every method is synchronous."""

    def __init__(
        self,
        transport: asyncio.Transport,
        *,
        parse: Callable[[bytes], None],
        is_full: Callable[[], bool],
        call_soon: Callable[[Callable[[], None]], object],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`is_full`: messages wait to be taken; who takes them calls `go_on`."""
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
        """This was read."""
        if self._unparsed:
            self._unparsed += data  # TLS had some more of it when reading was paused
            self.go_on()
        elif len(data) <= PIECE_BYTES:
            self._parse(data)
        else:
            self._unparsed = data
            self._take_turn()

    def go_on(self) -> None:
        """Parse what is left when it is our turn again; read on where nothing is."""
        transport = self._transport
        if transport.is_closing():
            self._unparsed = b""
        elif self._unparsed:
            transport.pause_reading()
            if not self._is_due and not self._is_full():
                self._is_due = True
                self._call_soon(self._take_turn)
        elif not self._is_full():
            transport.resume_reading()

    def _take_turn(self) -> None:
        self._is_due = False
        data, at, ends_at = self._unparsed, 0, self._clock() + TURN_S
        while at < len(data) and not self._is_full() and not self._transport.is_closing():
            self._parse(data[at : at + PIECE_BYTES])
            at += PIECE_BYTES
            if self._clock() > ends_at:
                break
        self._unparsed = data[at:]
        self.go_on()


class CallerSocket(WebSocketsSansIOProtocol):
    """A caller's side (`uvicorn.Config(ws=…)`)."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
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
        """The next ASGI message."""
        message = await self.queue.get()
        if self.read_paused and self.queue.empty():
            self.read_paused = False
            self._pieces.go_on()
        return message

    async def send(self, message: ASGISendEvent) -> None:
        """Send an ASGI message; after a close the other side's is read."""
        await super().send(message)
        if message["type"] == "websocket.close":
            self._pieces.go_on()


class WorkerSocket(ClientConnection):
    """A worker's side (`websockets.connect(create_connection=…)`)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pieces: Pieces

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        super().connection_made(transport)
        messages = self.recv_messages
        self._pieces = Pieces(
            self.transport,
            parse=super().data_received,
            is_full=lambda: messages.paused,
            call_soon=self.loop.call_soon,
        )
        messages.resume = self._pieces.go_on

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._pieces.add(data)
