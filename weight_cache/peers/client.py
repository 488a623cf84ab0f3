"""Client of peers: requests over kept-alive connections with a timeout; each failure is classified
by one word."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass

from weight_cache.peers import http1
from weight_cache.peers.discovery import split_host_port
from weight_cache.peers.peer_health import PeerFailure

_MAX_IDLE = 8
"""Idle connections per peer: the default number of concurrent chunks."""
_MAX_MESSAGE_BYTES = 1024
"""Limit of a response that is not a chunk."""
_BUFFER_BYTES = 1024 * 1024
_ANSWERS = (200, 202, 303, 304)
_FAILURES = {
    404: PeerFailure.ABSENT,
    503: PeerFailure.BUSY,
    401: PeerFailure.REFUSED,
    403: PeerFailure.REFUSED,
}


class PeerRequestFailed(Exception):
    """Raised when a peer did not deliver."""

    def __init__(self, failure: PeerFailure, message: str) -> None:
        super().__init__(message)
        self.failure = failure


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerResponse:
    """A peer's response."""

    head: http1.ResponseHead
    body: bytes


@dataclass(frozen=True, slots=True, eq=False)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class PeerClient:
    """Connections to peers by address. Owner: one event loop; at most `_MAX_IDLE` idle ones per
    peer."""

    def __init__(self, *, tls: ssl.SSLContext | None = None, tls_name: str | None = None) -> None:
        """`tls_name`: the name required in certificates of peers addressed by IP; None: their own
        hosts."""
        self._tls = tls
        self._tls_name = tls_name if tls is not None else None
        self._idle: dict[str, list[_Connection]] = {}

    def __repr__(self) -> str:
        return f"<PeerClient {sum(map(len, self._idle.values()))} idle>"

    async def get(
        self,
        address: str,
        target: str,
        *,
        ticket: str,
        answer_s: float,
        bytes_per_s: float,
        most_bytes: int,
        etag: str | None = None,
    ) -> PeerResponse:
        """Send GET `target`. Raises PeerRequestFailed.

        Args:
            answer_s: timeout to connect, and to receive the response head.
            bytes_per_s: slower bodies are aborted.
            most_bytes: longer bodies are refused.
        """
        headers = {
            "Host": address,
            "Authorization": ticket,
            **({"If-None-Match": etag} if etag else {}),
        }
        try:
            async with self._connected(address, answer_s) as connection:
                async with asyncio.timeout(answer_s):
                    connection.writer.write(http1.request_head(target, headers))
                    await connection.writer.drain()
                    head = await http1.read_head(connection.reader)
                if head.length_bytes > (most_bytes if head.status == 200 else _MAX_MESSAGE_BYTES):
                    raise http1.ProtocolViolation(
                        f"a body of {head.length_bytes} bytes; at most {most_bytes} were expected"
                    )
                async with asyncio.timeout(answer_s + head.length_bytes / bytes_per_s):
                    body = await http1.read_body(connection.reader, head.length_bytes)
        except TimeoutError as e:
            raise PeerRequestFailed(
                PeerFailure.SLOW, f"{address} did not answer within its time"
            ) from e
        except (http1.ProtocolViolation, OSError) as e:
            raise PeerRequestFailed(PeerFailure.BROKEN, f"{address}: {e}") from e
        if head.status not in _ANSWERS:
            raise PeerRequestFailed(
                _FAILURES.get(head.status, PeerFailure.BROKEN),
                f"{address} answered {head.status}: {body[:200].decode('latin-1')}",
            )
        return PeerResponse(head=head, body=body)

    def hang_up(self, address: str) -> None:
        """Close the idle connections to a peer."""
        for connection in self._idle.pop(address, []):
            connection.writer.close()

    def close(self) -> None:
        """Close all idle connections."""
        for address in list(self._idle):
            self.hang_up(address)

    @contextlib.asynccontextmanager
    async def _connected(self, address: str, connect_s: float) -> AsyncIterator[_Connection]:
        """A connection, kept for reuse unless an error occurs on it."""
        connection = self._pop_connection(address) or await self._connect(address, connect_s)
        try:
            yield connection
        except BaseException:
            connection.writer.transport.abort()
            raise
        idle = self._idle.setdefault(address, [])
        if len(idle) < _MAX_IDLE and not connection.reader.at_eof():
            idle.append(connection)
        else:
            connection.writer.close()

    def _pop_connection(self, address: str) -> _Connection | None:
        idle = self._idle.get(address, [])
        while idle:
            connection = idle.pop()
            if not connection.reader.at_eof() and not connection.writer.is_closing():
                return connection
            connection.writer.close()
        return None

    async def _connect(self, address: str, connect_s: float) -> _Connection:
        host, port = split_host_port(address)
        try:
            async with asyncio.timeout(connect_s):
                opened = await asyncio.open_connection(
                    host, port, ssl=self._tls, server_hostname=self._tls_name, limit=_BUFFER_BYTES
                )
                return _Connection(*opened)
        except (TimeoutError, OSError) as e:
            raise PeerRequestFailed(
                PeerFailure.UNREACHABLE, f"{address} does not accept connections: {e or 'timeout'}"
            ) from e
