"""The listener at which node agents pass on the calls that functions in pods make, with mutual TLS.

The first line of a connection states the pod (`pilotlight.core.transport.pod_calls`). If this
activator has claimed it, and the agent may speak for it, the rest of the connection is served like
one at the socket of an instance on this machine (`instance_sockets`)."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Protocol

from activator.gateway.instance_sockets import InstanceSockets
from pilotlight.core.transport.endpoint import HANDSHAKE_TIMEOUT_S, TlsCredentials
from pilotlight.core.transport.listeners import BACKLOG
from pilotlight.core.transport.pod_calls import (
    MAX_LINE_BYTES,
    OPENING_TIMEOUT_S,
    Answer,
    PodAnswer,
    PodStatement,
)

log = logging.getLogger(__name__)


class Statements(Protocol):
    """`activator.knative.pod_statements.PodStatements`."""

    def instance_of(self, statement: PodStatement, address: str) -> str | PodAnswer:
        """Return the id of the instance in the pod, or the answer to the agent."""
        ...


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

    def __repr__(self) -> str:
        return f"<PodConnections {self._sockets!r}>"

    @property
    def port(self) -> int:
        """The TCP port."""
        return int(self._listener.getsockname()[1])

    async def run(self) -> None:
        """Serve until cancelled. Connections that are open then go on."""
        server = await asyncio.get_running_loop().create_server(
            lambda: _Opening(self),
            sock=self._listener,
            ssl=self._credentials.server_context(),
            ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
            backlog=BACKLOG,
        )
        try:
            await asyncio.Event().wait()
        finally:
            server.close()

    def answer(self, transport: asyncio.Transport, line: bytes) -> asyncio.Protocol | None:
        """Answer a statement; return the protocol for the rest of the connection, or None."""
        address = str((transport.get_extra_info("peername") or ("",))[0])
        try:
            found = self._statements.instance_of(PodStatement.parse(line), address)
        except ValueError as e:
            log.warning("a node agent's statement is invalid agent=%s error=%s", address, e)
            return None
        own = None if isinstance(found, PodAnswer) else self._sockets.in_pod(found)
        if isinstance(found, PodAnswer):
            answer = found
        elif own is None:  # it takes no more calls
            answer = PodAnswer(Answer.NOT_LEASED)
        elif own.target.launch.offline:
            answer = PodAnswer(
                Answer.REFUSED, "a function with network='none' calls no other functions"
            )
        else:
            answer = PodAnswer(Answer.LEASED)
        if answer.answer is Answer.REFUSED:
            log.warning("calls of a pod refused agent=%s why=%s", address, answer.why)
        transport.write(answer.to_line())
        if own is None or answer.answer is not Answer.LEASED:
            return None
        return self._sockets.connection(own)


class _Opening(asyncio.Protocol):
    """A connection until its statement has arrived."""

    _transport: asyncio.Transport
    _bound: asyncio.TimerHandle

    def __init__(self, connections: PodConnections) -> None:
        self._connections = connections
        self._line = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        loop = asyncio.get_running_loop()
        self._bound = loop.call_later(OPENING_TIMEOUT_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        self._line += data
        line, end, rest = self._line.partition(b"\n")
        if len(line) > MAX_LINE_BYTES:
            self._transport.abort()
            return
        if not end:
            return
        self._bound.cancel()
        served = self._connections.answer(self._transport, line)
        if served is None:
            self._transport.close()
            return
        self._transport.set_protocol(served)
        served.connection_made(self._transport)
        if rest:
            served.data_received(rest)

    def connection_lost(self, exc: Exception | None) -> None:
        self._bound.cancel()
