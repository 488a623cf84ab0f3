"""The two ends of a pod's call: the pod's connection, and one to an activator.

Bytes are neither parsed nor kept: an end that does not read stops the other. A connection to an
activator carries one pod's connection after another."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from typing import Protocol, cast

from pilotlight.core.transport.pod_calls import (
    END,
    ENDING_S,
    IDLE_S,
    MAX_LINE_BYTES,
    OPENING_TIMEOUT_S,
    FrameReader,
    PodAnswer,
    PodStatement,
    frame,
)

_log = logging.getLogger(__name__)

BUFFER_BYTES = 64 * 1024
"""Bytes that wait for one end before the other is not read any further."""
MAX_IDLE = 64
"""Connections to one activator that are kept for the next pod: a handshake takes ten times the CPU
time of what follows it."""
LAST_BYTES_S = 10.0
"""How long a pod may take to read the rest of an answer whose connection has ended."""


class PodEndOwner(Protocol):
    """What a pod's connection tells of itself."""

    def begin(self, end: PodEnd) -> None:
        """It is open."""

    def end(self, end: PodEnd) -> None:
        """It is closed."""


class PodEnd(asyncio.Protocol):
    """A pod's connection. It is read once an activator takes it. Owner: the event loop."""

    transport: asyncio.Transport

    def __init__(self, owner: PodEndOwner, tenant: str) -> None:
        self._owner = owner
        self._activator: ActivatorEnd | None = None
        self.tenant = tenant
        self.pod: str | None = None
        self.is_closed = False
        self._bound: asyncio.TimerHandle | None = None

    @property
    def socket(self) -> socket.socket:
        """The connected socket."""
        found: socket.socket = self.transport.get_extra_info("socket")
        return found

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(BUFFER_BYTES)
        # The loop adds its reader right after this callback, paused or not in CPython 3.11.2
        # (Debian 12): paused in the next iteration, before what its selector finds is read
        asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        if not self.is_closed:
            self.transport.pause_reading()
            self._owner.begin(self)

    def data_received(self, data: bytes) -> None:
        if self._activator is not None:
            self._activator.send(data)

    def pause_writing(self) -> None:
        if self._activator is not None:
            self._activator.pause_reading()

    def resume_writing(self) -> None:
        if self._activator is not None:
            self._activator.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        if self._bound is not None:
            self._bound.cancel()
        self._owner.end(self)
        if self._activator is not None:
            self._activator.hang_up()

    def join(self, activator: ActivatorEnd) -> None:
        """Pass bytes on in both directions from now on."""
        if activator.transport.is_closing():
            self.abort()
            return
        self._activator = activator
        activator.begin(self)
        if self.is_closed:
            activator.hang_up()
        else:
            self.transport.resume_reading()

    def finish(self) -> None:
        """The activator has ended the connection: send what the pod has not read yet, for a limited
        time."""
        self._activator = None
        if not self.is_closed:
            self.transport.close()
            self._bound = asyncio.get_running_loop().call_later(LAST_BYTES_S, self.abort)

    def abort(self) -> None:
        """End the connection at once."""
        if not self.is_closed:
            self.transport.abort()

    def refuse(self, status: int, message: str) -> None:
        """Answer the request, which is not read, with a problem document (RFC 9457)."""
        title = {403: "Forbidden", 503: "Service Unavailable"}[status]
        body = json.dumps({"type": "about:blank", "status": status, "detail": message}).encode()
        again = "retry-after: 1\r\n" if status == 503 else ""
        head = (
            f"HTTP/1.1 {status} {title}\r\ncontent-type: application/problem+json\r\n{again}"
            f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.finish()


class ActivatorEnd(asyncio.Protocol):
    """A connection to an activator: it waits for an answer, carries a pod's connection, or is kept
    for the next one. Owner: the event loop."""

    transport: asyncio.Transport

    def __init__(self, ends: set[ActivatorEnd], idle: list[ActivatorEnd]) -> None:
        """`ends`: all of the agent; `idle`: where it is kept."""
        self._ends = ends
        self._idle = idle
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line = b""
        self._answered: asyncio.Future[PodAnswer] | None = None
        self._pod: PodEnd | None = None
        self._frames: FrameReader | None = None
        self._has_ended = False
        self._bound: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._ends.add(self)
        self.transport.set_write_buffer_limits(BUFFER_BYTES)

    async def ask(self, statement: PodStatement) -> PodAnswer:
        """Send a statement, and return the answer. Where there is none the connection is aborted.
        Raises OSError, ValueError."""
        self._abort_after(None)
        self._answered = asyncio.get_running_loop().create_future()
        try:
            if self.transport.is_closing():
                raise ConnectionResetError("it closed the connection")
            self.transport.write(statement.to_line())
            async with asyncio.timeout(OPENING_TIMEOUT_S):
                return await self._answered
        except BaseException:
            self.transport.abort()
            raise
        finally:
            self._answered = None

    def begin(self, pod: PodEnd) -> None:
        """Carry the connection of a pod."""
        self._pod, self._frames, self._has_ended = pod, FrameReader(), False

    def send(self, data: bytes) -> None:
        """Send bytes of the pod."""
        if not self._has_ended:
            self.transport.write(frame(data))

    def hang_up(self) -> None:
        """The pod has ended its connection: wait for the activator's end, and keep this one."""
        self._pod = None
        if not self._has_ended and not self.transport.is_closing():
            self._has_ended = True
            self.transport.write(END)
            self.resume_reading()
            self._abort_after(ENDING_S)

    def keep(self) -> None:
        """Keep it for the next statement, for a while."""
        if self.transport.is_closing():
            return
        if len(self._idle) >= MAX_IDLE:
            self.transport.abort()
            return
        self._idle.append(self)
        self._abort_after(IDLE_S)

    def abort(self) -> None:
        """End the connection at once."""
        self.transport.abort()

    def pause_reading(self) -> None:
        """The pod does not read."""
        if not self._has_ended:
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """The pod reads again, or is gone."""
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        try:
            if self._frames is None:
                self._read_line(data)
            else:
                self._read_frames(self._frames, data)
        except ValueError as e:
            _log.warning("pods.activator_not_understood error=%s", e)
            if self._answered is not None and not self._answered.done():
                self._answered.set_exception(e)
            self.transport.abort()

    def _read_line(self, data: bytes) -> None:
        self._line += data
        line, end, rest = self._line.partition(b"\n")
        if len(line) > MAX_LINE_BYTES:
            raise ValueError("its answer is too long")
        if not end:
            return
        if rest or self._answered is None or self._answered.done():
            raise ValueError("it sent what was not asked for")
        self._line = b""
        self._answered.set_result(PodAnswer.parse(line))

    def _read_frames(self, frames: FrameReader, data: bytes) -> None:
        payload, rest = frames.feed(data)
        pod = self._pod
        if payload and pod is not None:
            pod.transport.write(payload)
        if not frames.is_complete:
            return
        if rest:
            raise ValueError("it sent what was not asked for")
        self._pod = self._frames = None
        if not self._has_ended:
            self.transport.write(END)
        if pod is not None:
            pod.finish()
        self.resume_reading()
        self.keep()

    def pause_writing(self) -> None:
        if self._pod is not None:
            self._pod.transport.pause_reading()

    def resume_writing(self) -> None:
        if self._pod is not None:
            self._pod.transport.resume_reading()

    def _abort_after(self, seconds: float | None) -> None:
        if self._bound is not None:
            self._bound.cancel()
        self._bound = (
            None
            if seconds is None
            else asyncio.get_running_loop().call_later(seconds, self.transport.abort)
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self._abort_after(None)
        self.closed.set_result(None)
        self._ends.discard(self)
        if self in self._idle:
            self._idle.remove(self)
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(exc or ConnectionResetError("it closed the connection"))
        if self._pod is not None:
            self._pod.finish()
