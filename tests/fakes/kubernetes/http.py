"""HTTP/1.1 on an asyncio protocol, because tests need what servers hide: answers that never come,
connections that are reset."""

from __future__ import annotations

import asyncio
import ctypes
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from typing import Protocol, cast

import httptools

_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # classic BPF: return 0, nothing is let in
_ATTACH_FILTER, _DETACH_FILTER = 26, 27


class Socket(Protocol):
    """A socket, or what asyncio shows of one."""

    def setsockopt(self, level: int, name: int, value: int | bytes) -> None:
        """Set an option."""


def drop_packets(of: Socket, *, drops: bool) -> None:
    """Whether the kernel drops, without a word to the sender, whatever arrives at a socket: as when
    the network between two machines is gone."""
    if not drops:
        of.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
        return
    code = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
    of.setsockopt(
        socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HxxxxxxP", 1, ctypes.addressof(code))
    )


@dataclass(kw_only=True)
class Request:
    """One request, its body complete."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(kw_only=True)
class Answer:
    """An answer: `body`, or `stream` (chunked), whose end is a cut connection where `cut()` says
    so."""

    status: int = 200
    body: bytes = b""
    headers: list[tuple[str, str]] = field(default_factory=list)
    content_type: str = "application/json"
    stream: AsyncIterator[bytes] | None = None
    cut: Callable[[], bool] = lambda: False
    on_close: Callable[[], None] = lambda: None


class Reset(Exception):
    """Raised by a handler when the connection is to be reset."""


Handler = Callable[[Request], "Answer | Awaitable[Answer]"]


class Connection(asyncio.Protocol):
    """One client's connection; answers its requests one after the other. `skew_s()`: what is added
    to the header Date."""

    def __init__(
        self, handler: Handler, open_ones: set[Connection], skew_s: Callable[[], float]
    ) -> None:
        self._handler = handler
        self._open = open_ones
        self._skew_s = skew_s
        self._parser = httptools.HttpRequestParser(self)
        self._task: asyncio.Task[None] | None = None
        self._waiting: list[Request] = []
        self._transport: asyncio.Transport
        self._drained = asyncio.Event()
        self._drained.set()
        self._target = b""
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []

    # -- asyncio -----------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client is there."""
        self._transport = cast(asyncio.Transport, transport)
        self._open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone: whatever was answered to it ends."""
        self._open.discard(self)
        self._drained.set()
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        """Bytes of requests."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    def pause_writing(self) -> None:
        """The client reads slowly."""
        self._drained.clear()

    def resume_writing(self) -> None:
        """It caught up."""
        self._drained.set()

    # -- httptools ---------------------------------------------------------------------------------
    def on_message_begin(self) -> None:
        """A request begins."""
        self._target, self._headers, self._body = b"", {}, []

    def on_url(self, url: bytes) -> None:
        """Its target."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """It is complete."""
        request = Request(
            method=self._parser.get_method().decode(),
            target=self._target.decode(),
            headers=self._headers,
            body=b"".join(self._body),
        )
        self._waiting.append(request)
        if self._task is None:
            self._next()

    def _next(self) -> None:
        while self._waiting and self._task is None and not self._transport.is_closing():
            request = self._waiting.pop(0)
            try:
                answer = self._handler(request)
            except Reset:
                self.abort()
                return
            if isinstance(answer, Answer) and answer.stream is None:
                self._write(answer)
            else:
                self._task = asyncio.get_running_loop().create_task(self._answer(answer))

    async def _answer(self, coming: Answer | Awaitable[Answer]) -> None:
        try:
            answer = coming if isinstance(coming, Answer) else await coming
            if answer.stream is None:
                self._write(answer)
            else:
                await self._stream(answer, answer.stream)
        except Reset:
            self.abort()
        finally:
            self._task = None
        self._next()

    async def _stream(self, answer: Answer, stream: AsyncIterator[bytes]) -> None:
        try:
            self._transport.write(self._head(answer, "Transfer-Encoding: chunked"))
            async for piece in stream:
                if self._transport.is_closing():
                    return
                self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await self._drained.wait()
            if answer.cut():
                self._transport.abort()
            else:
                self._transport.write(b"0\r\n\r\n")
        finally:
            answer.on_close()

    def _write(self, answer: Answer) -> None:
        if not self._transport.is_closing():
            self._transport.write(
                self._head(answer, f"Content-Length: {len(answer.body)}") + answer.body
            )

    def _head(self, answer: Answer, length: str) -> bytes:
        phrase = HTTPStatus(answer.status).phrase
        lines = [
            f"HTTP/1.1 {answer.status} {phrase}",
            f"Content-Type: {answer.content_type}",
            length,
        ]
        lines.append(f"Date: {formatdate(time.time() + self._skew_s(), usegmt=True)}")
        lines += [f"{name}: {value}" for name, value in answer.headers]
        return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace")

    @property
    def socket(self) -> Socket:
        """Of the client's connection."""
        return cast(Socket, self._transport.get_extra_info("socket"))

    def abort(self) -> None:
        """Reset the connection: the client sees ECONNRESET, not an end."""
        connection = self._transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()
