"""HTTP/1.1 over the Unix socket by which an instance calls other functions, with the standard
library and `httptools`, which every worker has; an image of the user's own need not have httpx.

Each request has a connection of its own, which ends with its response: a process that is forked or
snapshotted between two calls holds none, and an activator that was restarted is found at once. The
classes have the methods of httpx that `transport` and `client` use."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlencode

from pilotlight.core.transport.calls_socket import AGENT_SOCKET, POD_CALLS_SOCKET
from pilotlight.errors import Forbidden

CONNECT_S = 10.0
"""Longest wait for a connection: the activator accepts at once, unless it is being restarted."""
_READ_BYTES = 256 * 1024


class ConnectionFailed(Exception):
    """Raised when a connection cannot be made or is lost.

    Attributes:
        was_sent: a part of the request may have been received."""

    def __init__(self, message: str, *, was_sent: bool) -> None:
        super().__init__(message)
        self.was_sent = was_sent


def no_socket(path: str) -> Forbidden | ConnectionFailed:
    """Return the error of an instance whose socket is not there: it does not serve yet, or any
    more. In a pod its node's agent serves none, or is being restarted."""
    directory, _, name = path.rpartition("/")
    if name == POD_CALLS_SOCKET:
        if not os.path.exists(f"{directory}/{AGENT_SOCKET}"):
            return ConnectionFailed("the node agent is not listening", was_sent=False)
        return Forbidden(
            "the node agent serves no calls of functions (snapshotter.activators of platform.yaml "
            "is not set): use an API key: set PILOTLIGHT_API_KEY and PILOTLIGHT_URL in a secret of "
            "the function"
        )
    return Forbidden(
        "this instance cannot call functions now: it can while it runs a call, and not in "
        "enter(snap=False), in the startup of a web application or in exit(). There, use an API "
        "key: set PILOTLIGHT_API_KEY in a secret of the function"
    )


def request_bytes(
    method: str,
    path: str,
    *,
    headers: Mapping[str, str] | None = None,
    params: Mapping[str, str] | None = None,
    content: bytes = b"",
    **unknown: Any,
) -> bytes:
    """Return a complete request. Raises TypeError for what calls do not use."""
    if unknown or not isinstance(content, bytes):
        raise TypeError(
            f"not supported over an instance's socket: {', '.join(unknown) or 'stream'}"
        )
    target = f"{path}?{urlencode(params)}" if params else path
    lines = [
        f"{method} {target} HTTP/1.1",
        "host: platform",
        "connection: close",
        *(f"{name}: {value}" for name, value in (headers or {}).items()),
    ]
    if content or method == "POST":
        lines.append(f"content-length: {len(content)}")
    if any("\r" in line or "\n" in line for line in lines):
        raise ValueError("a header, or the path, has a line break")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + content


class ResponseReader:
    """An incremental parser of one response.

    Attributes:
        status_code: 0 before the head is complete.
        headers: names in lower case.
        parts: pieces of the body that were not taken yet.
        is_complete: the whole response was parsed."""

    def __init__(self) -> None:
        import httptools

        self._parser = httptools.HttpResponseParser(self)
        self._broken = httptools.HttpParserError
        self.status_code = 0
        self.headers: dict[str, str] = {}
        self.parts: deque[bytes] = deque()
        self.is_complete = False

    def feed(self, data: bytes) -> None:
        """Parse more bytes; none = the connection has ended. Raises ConnectionFailed for an
        incomplete or invalid response."""
        if not data:
            raise ConnectionFailed(
                "the connection was closed before the end of the response", was_sent=True
            )
        try:
            self._parser.feed_data(data)
        except self._broken as e:
            raise ConnectionFailed(f"invalid response: {e}", was_sent=True) from e

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer, which is ignored."""
        if not self.status_code:
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """The head is complete."""
        self.status_code = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        self.parts.append(data)

    def on_message_complete(self) -> None:
        """The end of the response."""
        self.is_complete = True


class _Response:
    """A response whose head has arrived.

    Attributes:
        content: the body, once it was read."""

    def __init__(self, reader: ResponseReader) -> None:
        self._reader = reader
        self.status_code = reader.status_code
        self.headers = reader.headers
        self.content = b""

    @property
    def is_success(self) -> bool:
        """Whether the status is 2xx."""
        return 200 <= self.status_code < 300

    def json(self) -> Any:
        """Return the body, which was read, as JSON."""
        return json.loads(self.content)


class SocketResponse(_Response):
    """A response over a blocking socket."""

    def __init__(self, connection: socket.socket, reader: ResponseReader) -> None:
        super().__init__(reader)
        self._connection = connection

    def iter_bytes(self) -> Iterator[bytes]:
        """Yield the body as it arrives. Raises ConnectionFailed."""
        reader = self._reader
        while True:
            while reader.parts:
                yield reader.parts.popleft()
            if reader.is_complete:
                self.close()
                return
            reader.feed(_received(self._connection))

    def read(self) -> bytes:
        """Read the whole body, and return it."""
        self.content = b"".join(self.iter_bytes())
        return self.content

    def close(self) -> None:
        """Close the connection, which ends a call that was not answered yet."""
        self._connection.close()


class _Requests:
    """Makes the requests to the socket at a path."""

    def __init__(self, path: str, headers: Callable[[], Mapping[str, str]]) -> None:
        """`headers`: returns those that a request has besides its own."""
        self._path = path
        self._headers = headers

    def build_request(self, method: str, path: str, **options: Any) -> bytes:
        """Return a request for `send`."""
        return request_bytes(method, path, **_with_headers(self._headers(), options))


class SocketClient(_Requests):
    """Sends requests over blocking connections. Thread-safe: it has no state."""

    def send(self, request: bytes, *, stream: bool) -> SocketResponse:
        """Send a request and return the response once its head has arrived; the caller reads and
        closes it. Raises ConnectionFailed, Forbidden."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            try:
                connection.settimeout(CONNECT_S)
                connection.connect(self._path)
            except FileNotFoundError:
                raise no_socket(self._path) from None
            except OSError as e:
                raise ConnectionFailed(str(e), was_sent=False) from e
            connection.settimeout(None)  # the platform ends calls that take too long
            reader = ResponseReader()
            # it may be answered, and the connection closed, before its end: read that answer
            with contextlib.suppress(OSError):
                connection.sendall(request)
            while not reader.status_code:
                reader.feed(_received(connection))
            return SocketResponse(connection, reader)
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        """Nothing is held between requests."""


class AsyncSocketResponse(_Response):
    """A response over a connection of the running loop."""

    def __init__(
        self, stream: asyncio.StreamReader, writer: asyncio.StreamWriter, reader: ResponseReader
    ) -> None:
        super().__init__(reader)
        self._stream = stream
        self._writer = writer

    async def aiter_bytes(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raises ConnectionFailed."""
        reader = self._reader
        while True:
            while reader.parts:
                yield reader.parts.popleft()
            if reader.is_complete:
                await self.aclose()
                return
            reader.feed(await _read(self._stream))

    async def aread(self) -> bytes:
        """Read the whole body, and return it."""
        self.content = b"".join([part async for part in self.aiter_bytes()])
        return self.content

    async def aclose(self) -> None:
        """Close the connection, which ends a call that was not answered yet."""
        self._writer.transport.abort()


class AsyncSocketClient(_Requests):
    """Sends requests over connections of the running loop. It has no state."""

    async def send(self, request: bytes, *, stream: bool) -> AsyncSocketResponse:
        """Send a request and return the response once its head has arrived; the caller reads and
        closes it. Raises ConnectionFailed, Forbidden. Cancelling it ends the call."""
        try:
            async with asyncio.timeout(CONNECT_S):
                source, writer = await asyncio.open_unix_connection(self._path)
        except FileNotFoundError:
            raise no_socket(self._path) from None
        except OSError as e:  # TimeoutError, too
            raise ConnectionFailed(str(e), was_sent=False) from e
        try:
            reader = ResponseReader()
            writer.write(request)
            # it may be answered, and the connection closed, before its end: read that answer
            with contextlib.suppress(OSError):
                await writer.drain()
            while not reader.status_code:
                reader.feed(await _read(source))
            return AsyncSocketResponse(source, writer, reader)
        except BaseException:
            writer.transport.abort()
            raise

    async def aclose(self) -> None:
        """Nothing is held between requests."""


def _with_headers(headers: Mapping[str, str], options: Mapping[str, Any]) -> dict[str, Any]:
    return {**options, "headers": {**headers, **(options.get("headers") or {})}}


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(_READ_BYTES)
    except OSError as e:
        raise ConnectionFailed(str(e), was_sent=True) from e


async def _read(stream: asyncio.StreamReader) -> bytes:
    try:
        return await stream.read(_READ_BYTES)
    except OSError as e:
        raise ConnectionFailed(str(e), was_sent=True) from e
