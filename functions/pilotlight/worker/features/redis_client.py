"""A client of one Redis that only reads, for one instance: calls share a connection, which is made
by the first one and made again behind the calls while the server is down.

Not redis-py: images of functions need not have it, and there a read that is given up closes its
connection. Here its reply is discarded when it comes, so calls to a slow server do not connect
again and again."""

from __future__ import annotations

import asyncio
import sys
import urllib.parse
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from pilotlight.core.backoff import Backoff
from pilotlight.worker.features.replies import (
    ProtocolError,
    Reply,
    ReplyError,
    ReplyReader,
    Value,
    command,
    require_values,
)

CONNECT_S: Final = 1.0
SILENT_S: Final = 1.0
"""A connection on which a reply is due for longer is closed."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 2.0
MAX_WAITING: Final = 1024
"""Replies that are due on a connection."""
_PORT: Final = 6379


class ReadFailed(Exception):
    """Raised when keys could not be read. `reason`: `deadline` or `unavailable`."""

    def __init__(self, reason: str, why: str = "") -> None:
        super().__init__(why or reason)
        self.reason = reason


class _Lost(Exception):
    """Raised when the connection ended before the reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAddress:
    """A parsed address. `path`: of a Unix socket; "" = TCP. Its repr has no password."""

    host: str = ""
    port: int = _PORT
    path: str = ""
    is_tls: bool = False
    credentials: tuple[str, ...] = ()
    database: int = 0

    def __repr__(self) -> str:
        return f"<RedisAddress {self.path or f'{self.host}:{self.port}'}>"

    @classmethod
    def parse(cls, url: str) -> RedisAddress:
        """Parse `redis://[user:password@]host[:port][/database]`, `rediss://…` or
        `unix:///path[?db=…]`. Raises ValueError, which does not quote the address."""
        parts = urllib.parse.urlsplit(url.strip())
        unquoted = (
            None if one is None else urllib.parse.unquote(one)
            for one in (parts.username or None, parts.password)
        )
        credentials = tuple(one for one in unquoted if one is not None)
        if parts.scheme == "unix":
            number = urllib.parse.parse_qs(parts.query).get("db", ["0"])[0]
            if parts.path and number.isdigit():
                return cls(path=parts.path, credentials=credentials, database=int(number))
        elif parts.scheme in ("redis", "rediss") and parts.hostname:
            number = parts.path.strip("/") or "0"
            if number.isdigit():
                return cls(
                    host=parts.hostname,
                    port=parts.port or _PORT,
                    is_tls=parts.scheme == "rediss",
                    credentials=credentials,
                    database=int(number),
                )
        raise ValueError("must be redis://host:port/database, rediss://… or unix:///path")


class _RedisConnection(asyncio.Protocol):
    """One connection; replies come in the order of the commands. Owner: the event loop."""

    def __init__(self) -> None:
        self._replies = ReplyReader()
        self._waiting: deque[tuple[float, asyncio.Future[Reply]]] = deque()
        self._transport: asyncio.Transport | None = None
        self.is_usable = True

    def __repr__(self) -> str:
        return f"<_RedisConnection {len(self._waiting)} replies due>"

    def is_silent(self, now: float) -> bool:
        """Whether a reply is due for too long."""
        return bool(self._waiting) and now - self._waiting[0][0] > SILENT_S

    @property
    def is_full(self) -> bool:
        """Whether no further reply may be due."""
        return len(self._waiting) >= MAX_WAITING

    async def ask(self, data: bytes) -> Reply:
        """Send a command and wait for its reply. Raises _Lost."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Reply] = loop.create_future()
        if self._transport is None or not self.is_usable:
            raise _Lost
        self._waiting.append((loop.time(), future))
        self._transport.write(data)
        return await future

    def close(self) -> None:
        """Close it now."""
        self.is_usable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for reply in self._replies.feed(data):
                if not self._waiting:
                    raise ProtocolError("a reply that was not asked for")
                _, future = self._waiting.popleft()
                if not future.done():  # else its call has given up
                    future.set_result(reply)
        except ProtocolError:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_usable = False
        for _, future in self._waiting:
            if not future.done():
                future.set_exception(_Lost())
        self._waiting.clear()


class RedisClient:
    """Reads keys. Owner: the event loop of an instance; no lock.

    While the server is known to be down, one call at a time tries it; the others do not wait."""

    def __init__(self, address: RedisAddress, *, name: str) -> None:
        """`name`: of the server in messages, which never have its address."""
        self._address = address
        self._name = name
        self._connection: _RedisConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._backoff = Backoff(first_s=FIRST_PAUSE_S, max_s=MAX_PAUSE_S)
        self._retry_at = 0.0

    def __repr__(self) -> str:
        state = "down" if self._backoff.failures else self._connection or "idle"
        return f"<RedisClient {self._name} {state}>"

    async def mget(self, keys: Sequence[str], *, within_s: float) -> Sequence[Value]:
        """Return the values of keys, None for those that do not exist. Raises ReadFailed."""
        data = command("MGET", *keys)
        try:
            async with asyncio.timeout(within_s):
                return require_values(await self._request(data), len(keys))
        except TimeoutError:
            raise ReadFailed("deadline") from None
        except ReplyError as e:
            raise ReadFailed("unavailable", str(e)) from e
        except ProtocolError as e:
            self._fail(str(e))
            raise ReadFailed("unavailable", str(e)) from e

    def connect(self) -> None:
        """Begin to connect, before the first call."""
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(
                self._connect(), name="features: connect"
            )

    def close(self) -> None:
        """Close the connection."""
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None:
            self._connection.close()

    async def _request(self, data: bytes) -> Reply:
        connection = await self._connected()
        try:
            return await connection.ask(data)
        except _Lost:
            # the server may have closed an idle connection: reading is repeated once
            try:
                return await (await self._connected()).ask(data)
            except _Lost:
                self._fail("it closed the connection")
                raise ReadFailed("unavailable") from None

    async def _connected(self) -> _RedisConnection:
        """Return a connection, made now if there is none. Raises ReadFailed."""
        now = asyncio.get_running_loop().time()
        connection = self._connection
        if connection is not None and connection.is_usable:
            if connection.is_full or connection.is_silent(now):
                self._fail("it does not answer")
                raise ReadFailed("unavailable")
            return connection
        if self._connecting is None:
            if now < self._retry_at:
                raise ReadFailed("unavailable")
            self.connect()
        elif self._backoff.failures:
            raise ReadFailed("unavailable")
        assert self._connecting is not None
        await asyncio.shield(self._connecting)
        if self._connection is None or not self._connection.is_usable:
            raise ReadFailed("unavailable")
        return self._connection

    async def _connect(self) -> None:
        connection: _RedisConnection | None = None
        try:
            async with asyncio.timeout(CONNECT_S):
                connection = await self._open()
                await self._greet(connection)
        except (
            OSError,
            ValueError,
            _Lost,
            ReplyError,
            ProtocolError,
        ) as e:  # ValueError: no host name
            if connection is not None:
                connection.close()
            self._fail(_reason(e))
        else:
            if self._backoff.failures:
                _log(f"{self._name} is reachable again")
            self._backoff.reset()
            self._connection = connection
        finally:
            self._connecting = None

    async def _open(self) -> _RedisConnection:
        loop, address = asyncio.get_running_loop(), self._address
        if address.path:
            _, connection = await loop.create_unix_connection(_RedisConnection, address.path)
            return connection
        tls: Any = None
        if address.is_tls:
            import ssl

            tls = ssl.create_default_context()
        _, connection = await loop.create_connection(
            _RedisConnection, address.host, address.port, ssl=tls
        )
        return connection

    async def _greet(self, connection: _RedisConnection) -> None:
        """Sign in, select the database, and see that it answers."""
        address = self._address
        if address.credentials:
            await _send(connection, command("AUTH", *address.credentials))
        if address.database:
            await _send(connection, command("SELECT", str(address.database)))
        await _send(connection, command("PING"))

    def _fail(self, why: str) -> None:
        """Note that the server does not serve: calls stop waiting for it."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if not self._backoff.failures:
            _log(f"{self._name} is not reachable: {why}; calls get defaults")
        self._retry_at = asyncio.get_running_loop().time() + self._backoff.next_s()


async def _send(connection: _RedisConnection, data: bytes) -> None:
    reply = await connection.ask(data)
    if isinstance(reply, ReplyError):
        raise reply
    if isinstance(reply, list):
        raise ProtocolError("a list in reply to a greeting")


def _reason(error: BaseException) -> str:
    """What went wrong, without the address."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or ("it does not answer" if isinstance(error, TimeoutError) else "it hung up")


def _log(text: str) -> None:
    print(f"features: {text}", file=sys.stderr, flush=True)
