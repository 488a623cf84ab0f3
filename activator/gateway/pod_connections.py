"""The listener at which node agents pass on the calls that functions in pods make, with mutual TLS.

A connection serves one pod after another (`pilotlight.core.transport.pod_calls`). If this activator
has claimed the pod that a statement names, and the agent may speak for it, what follows is served
like a connection at the socket of an instance on this machine (`instance_sockets`)."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol, cast

from activator.gateway.instance_sockets import InstanceSockets
from activator.http.server import ClientConnection
from pilotlight.core.transport.endpoint import HANDSHAKE_TIMEOUT_S, TlsCredentials
from pilotlight.core.transport.listeners import BACKLOG
from pilotlight.core.transport.pod_calls import (
    END,
    ENDING_S,
    IDLE_S,
    MAX_LINE_BYTES,
    OPENING_TIMEOUT_S,
    Answer,
    FrameReader,
    PodAnswer,
    PodStatement,
    frame,
)

log = logging.getLogger(__name__)


class Statements(Protocol):
    """`activator.knative.pod_statements.PodStatements`."""

    def instance_of(self, statement: PodStatement, address: str) -> str | PodAnswer:
        """Return the id of an instance in the pod, or the answer to the agent."""

    def instances_in(self, pod: str) -> Iterable[str]:
        """Ids of the instances in the pod with this uid."""


class PodConnections:
    """Accepts connections of node agents. Owner: the event loop."""

    def __init__(
        self,
        sockets: InstanceSockets,
        statements: Statements,
        *,
        listener: socket.socket,
        credentials: TlsCredentials,
    ) -> None:
        self._sockets = sockets
        self._statements = statements
        self._listener = listener
        self._credentials = credentials
        self._open: set[_AgentConnection] = set()

    def __repr__(self) -> str:
        return f"<PodConnections {len(self._open)} open>"

    @property
    def port(self) -> int:
        """The TCP port."""
        return int(self._listener.getsockname()[1])

    async def run(self) -> None:
        """Serve until cancelled, then end all connections: the last call of a function was
        answered."""
        server = await asyncio.get_running_loop().create_server(
            lambda: _AgentConnection(self, self._open),
            sock=self._listener,
            ssl=self._credentials.server_context(),
            ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
            backlog=BACKLOG,
        )
        try:
            await asyncio.Event().wait()
        finally:
            server.close()
            for connection in list(self._open):
                connection.transport.abort()

    def decide(self, line: bytes, address: str) -> tuple[PodAnswer, ClientConnection | None]:
        """Return the answer to a statement of the agent at `address`, and where it is `leased` the
        protocol that serves the pod. Raises ValueError for what is no statement."""
        statement = PodStatement.parse(line)
        found = self._statements.instance_of(statement, address)
        if isinstance(found, PodAnswer):
            return found, None
        own = self._sockets.in_pod(found)
        if own is None:  # it takes no more calls
            return PodAnswer(Answer.NOT_LEASED), None
        if own.target.launch.offline:
            why = "a function with network='none' calls no other functions"
            return PodAnswer(Answer.REFUSED, why), None
        mates = partial(self._statements.instances_in, statement.pod)
        return PodAnswer(Answer.LEASED), self._sockets.connection(own, mates)


class _AgentConnection(asyncio.Protocol):
    """One connection of a node agent. Owner: the event loop.

    It waits for a statement, or has a stream: the connection of a pod."""

    transport: asyncio.Transport

    def __init__(self, connections: PodConnections, all_open: set[_AgentConnection]) -> None:
        self._connections = connections
        self._open = all_open
        self._line = b""
        self._stream: _PodStream | None = None
        self._bound: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._open.add(self)
        self._abort_after(OPENING_TIMEOUT_S)

    def data_received(self, data: bytes) -> None:
        try:
            while data:
                data = self._read_line(data) if self._stream is None else self._stream.read(data)
        except ValueError as e:
            log.warning("connection of a node agent ended peer=%s error=%s", self._peer, e)
            self.transport.abort()

    def _read_line(self, data: bytes) -> bytes:
        self._line += data
        line, end, rest = self._line.partition(b"\n")
        if len(line) > MAX_LINE_BYTES:
            raise ValueError("its statement is too long")
        if not end:
            return b""
        self._line = b""
        answer, served = self._connections.decide(line, self._peer)
        if answer.why:  # the agent logs it, at a bounded rate
            log.debug("calls of a pod refused agent=%s why=%s", self._peer, answer.why)
        self.transport.write(answer.to_line())
        if served is None:
            self._abort_after(2 * IDLE_S)
        else:
            self._abort_after(None)
            self._stream = _PodStream(self, served)
            served.connection_made(self._stream)
        return rest

    @property
    def _peer(self) -> str:
        return str((self.transport.get_extra_info("peername") or ("",))[0])

    def on_closed(self) -> None:
        """The stream was closed here; the agent must end it, too."""
        self._abort_after(ENDING_S)

    def on_ended(self) -> None:
        """Both sides have ended the stream."""
        self._stream = None
        self.transport.resume_reading()
        self._abort_after(2 * IDLE_S)

    def _abort_after(self, seconds: float | None) -> None:
        if self._bound is not None:
            self._bound.cancel()
        self._bound = (
            None
            if seconds is None
            else asyncio.get_running_loop().call_later(seconds, self.transport.abort)
        )

    def pause_writing(self) -> None:
        if self._stream is not None:
            self._stream.pause_writing()

    def resume_writing(self) -> None:
        if self._stream is not None:
            self._stream.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._abort_after(None)
        self._open.discard(self)
        if self._stream is not None:
            self._stream.lose(exc)


class _PodStream(asyncio.Transport):
    """The connection of a pod within that of its node's agent, as the transport of the protocol
    that serves it."""

    def __init__(self, connection: _AgentConnection, served: ClientConnection) -> None:
        super().__init__()
        self._connection = connection
        self._transport = connection.transport
        self._served: ClientConnection | None = served
        self._frames = FrameReader()
        self._is_closing = False

    def __repr__(self) -> str:
        return f"<_PodStream {'closing' if self._is_closing else 'open'}>"

    def read(self, data: bytes) -> bytes:
        """Pass frames on; return what follows their end. Raises ValueError."""
        payload, rest = self._frames.feed(data)
        if payload and self._served is not None and not self._is_closing:
            self._served.data_received(payload)
        if self._frames.is_complete:
            if not self._is_closing:  # the pod hung up
                self._end()
            self.lose(None)
            self._connection.on_ended()
        return rest

    def lose(self, exc: Exception | None) -> None:
        """Tell the protocol, once, that its connection is over."""
        self._is_closing = True
        served, self._served = self._served, None
        if served is not None:
            served.connection_lost(exc)

    def _end(self) -> None:
        self._is_closing = True
        if not self._transport.is_closing():
            self._transport.write(END)

    # -- asyncio.Transport -------------------------------------------------------------------------
    def write(self, data: bytes | bytearray | memoryview) -> None:
        if data and not self._is_closing:
            self._transport.write(frame(bytes(data)))

    def close(self) -> None:
        if self._is_closing:
            return
        self._end()
        asyncio.get_running_loop().call_soon(self.lose, None)
        # the agent's end must be read whether or not the protocol has paused
        self._transport.resume_reading()
        self._connection.on_closed()

    def abort(self) -> None:
        self._is_closing = True
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._is_closing or self._transport.is_closing()

    def pause_reading(self) -> None:
        if not self._is_closing:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._is_closing:
            self._transport.resume_reading()

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def pause_writing(self) -> None:
        """The connection has enough bytes to send."""
        if self._served is not None:
            self._served.pause_writing()

    def resume_writing(self) -> None:
        """The connection takes bytes again."""
        if self._served is not None:
            self._served.resume_writing()
