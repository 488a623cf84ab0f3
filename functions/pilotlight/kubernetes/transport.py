"""Sends requests to the API server over two connection pools of the official client, each with its
own deadline.

Calls and streams (watches, logs) have separate pools: a hundred watches never delay a write. Only
this module converts the client's exceptions, to `ClusterUnreachable`; `api_errors` interprets
statuses."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import re
import socket
import sys
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from pilotlight.kubernetes.api_errors import ApiResponse, from_status
from pilotlight.kubernetes.api_request import ApiRequest
from pilotlight.kubernetes.credentials import Credentials
from pilotlight.kubernetes.errors import ClusterUnreachable
from pilotlight.kubernetes.official_client import ApiClient

_CALLS = 32  # concurrent; beyond that the API server queues
# watches and followed logs: the reconciler has a watch of Secrets in each tenant's namespace
_STREAMS = 8192
_CONNECT_S = 5.0
_WARNING = re.compile(r'^\d{3} \S+ "((?:[^"\\]|\\.)*)"')
_BUFFER = 2 * 1024 * 1024  # of a response, as in the official client
_MOST_BYTES = 64 * 1024 * 1024  # of one answer; a page of 500 pods is some 10 MB


class Transport:
    """The connections to one API server. Owner: one event loop. Close it."""

    def __init__(self, credentials: Credentials, *, knative_namespace: str) -> None:
        self.credentials = credentials
        self._knative_namespace = knative_namespace
        self._calls = _client(credentials.configuration, _CALLS)
        self._streams = _client(credentials.configuration, _STREAMS)
        self._open_streams: set[aiohttp.ClientResponse] = set()
        self.heard = 0
        """Counts responses and pieces of streams: unchanged as long as nothing arrives."""

    @property
    def host(self) -> str:
        """The API server's URL."""
        return str(self.credentials.configuration.host)

    async def call(
        self,
        deed: ApiRequest,
        method: str,
        *,
        path: str | None = None,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        timeout_s: float,
    ) -> ApiResponse:
        """Send one request and read the whole response.

        Raises:
            ClusterUnreachable: no connection, or no complete response within `timeout_s`.
            BadCredentials: the kubeconfig's plugin failed.
        """
        with _translated(deed, self.host, timeout_s):
            async with asyncio.timeout(timeout_s):
                timeout = aiohttp.ClientTimeout(
                    total=timeout_s, sock_connect=min(_CONNECT_S, timeout_s)
                )
                asked = _Asked(method, path or deed.path, query or {}, body, content_type)
                response = await _request(self._calls, asked, timeout)
                self.heard += 1
                async with response:
                    data = await _read_all(response, deed)
        return ApiResponse(
            status=response.status,
            body=data,
            warnings=_warnings(response.headers.getall("Warning", [])),
            retry_after_s=_seconds(response.headers.get("Retry-After")),
            knative_namespace=self._knative_namespace,
        )

    @contextlib.asynccontextmanager
    async def stream(
        self,
        deed: ApiRequest,
        *,
        query: Mapping[str, str],
        open_s: float,
        silence_s: float | None,
        lost_s: float,
    ) -> AsyncIterator[tuple[ApiResponse, AsyncIterator[bytes]]]:
        """Send a GET and stream its response. `ApiResponse.body` is filled only for refusals.

        Args:
            open_s: timeout of the response's head.
            silence_s: timeout between two pieces of its body; None = unlimited.
            lost_s: timeout of a connection whose other end no longer acknowledges anything.
        """
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=min(_CONNECT_S, open_s), sock_read=silence_s
        )
        with _translated(deed, self.host, open_s):
            async with asyncio.timeout(open_s):
                response = await _request(self._streams, _Asked("GET", deed.path, query), timeout)
        self.heard += 1
        self._open_streams.add(response)
        try:
            with _translated(deed, self.host, silence_s or open_s):
                _probe_connection(response, lost_s)
                body = b"" if response.status == 200 else await _read_all(response, deed)
            retry_after_s = _seconds(response.headers.get("Retry-After"))
            answer = ApiResponse(
                status=response.status,
                body=body,
                retry_after_s=retry_after_s,
                knative_namespace=self._knative_namespace,
            )
            yield answer, self._pieces(response, deed, silence_s)
        finally:
            self._open_streams.discard(response)
            response.close()  # not released, which would read the rest of the stream

    async def _pieces(
        self, response: aiohttp.ClientResponse, deed: ApiRequest, silence_s: float | None
    ) -> AsyncIterator[bytes]:
        with _translated(deed, self.host, silence_s or 0.0):
            async for piece in response.content.iter_any():
                self.heard += 1
                yield piece

    def end_streams(self, why: ClusterUnreachable) -> None:
        """Have the readers of all open streams fail with `why`."""
        for response in self._open_streams:
            response.content.set_exception(ClusterUnreachable(str(why), deed=why.deed))

    @contextlib.asynccontextmanager
    async def socket(
        self,
        deed: ApiRequest,
        *,
        query: Sequence[tuple[str, str]],
        protocols: Sequence[str],
        open_s: float,
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a WebSocket for reading; yields its messages.

        Raises:
            ClusterError: it was refused.
        """
        headers: dict[str, str] = {}
        await self._streams.update_params_for_auth(headers, [], ["BearerToken"])
        pool: aiohttp.ClientSession = self._streams.rest_client.pool_manager
        where: dict[str, Any] = {
            "server_hostname": self._streams.rest_client.server_hostname,
            "proxy": self._streams.rest_client.proxy,
        }
        with _translated(deed, self.host, open_s):
            try:
                async with asyncio.timeout(open_s):
                    url = f"{self.host}{deed.path}"
                    opened = await pool.ws_connect(
                        url, params=list(query), headers=headers, protocols=protocols, **where
                    )
            except aiohttp.WSServerHandshakeError as error:
                # aiohttp drops the response's body, which has the reason
                status = {
                    "code": error.status,
                    "message": error.message,
                    "details": {"name": deed.name},
                }
                raise from_status(
                    deed, status, knative_namespace=self._knative_namespace
                ) from error
        async with opened:
            yield _messages(opened, deed, self.host)

    async def aclose(self) -> None:
        """Close both pools."""
        try:
            await self._streams.close()
        finally:
            await self._calls.close()


@dataclass(frozen=True, slots=True)
class _Asked:
    method: str
    path: str
    query: Mapping[str, str]
    body: Any = None
    content_type: str = "application/json"


async def _request(
    client: Any, asked: _Asked, timeout: aiohttp.ClientTimeout
) -> aiohttp.ClientResponse:
    response: aiohttp.ClientResponse = await client.call_api(
        asked.path,
        asked.method,
        path_params={},
        query_params=list(asked.query.items()),
        header_params={"Accept": "application/json", "Content-Type": asked.content_type},
        body=asked.body,
        auth_settings=["BearerToken"],
        _preload_content=False,
        _request_timeout=timeout,
    )
    return response


def _probe_connection(response: aiohttp.ClientResponse, lost_s: float) -> None:
    """Have the kernel probe the connection while it is silent: packets that are dropped on the way
    reset nothing, and a watch sends nothing that could fail."""
    if response.connection is None or response.connection.transport is None:
        return  # the whole response has arrived
    found = response.connection.transport.get_extra_info("socket")
    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        each_s = max(1, round(lost_s / 3))  # silence, then two probes
        for option, value in (
            (socket.TCP_KEEPIDLE, each_s),
            (socket.TCP_KEEPINTVL, each_s),
            (socket.TCP_KEEPCNT, 2),
        ):
            found.setsockopt(socket.IPPROTO_TCP, option, value)


def _client(configuration: Any, connections: int) -> Any:
    own = copy.copy(configuration)  # shares the token with the other pool, but not its size
    own.connection_pool_maxsize = connections
    own.proxy = own.proxy or _proxy_of(str(own.host))
    client = ApiClient(own)
    client.user_agent = "pilotlight"
    # The official client's session reads the environment's proxies and ~/.netrc anew, in a thread,
    # for each request: a quarter of its processor time.
    rest, session = client.rest_client, client.rest_client.pool_manager
    rest.pool_manager = aiohttp.ClientSession(
        connector=session.connector, read_bufsize=_BUFFER, cookie_jar=aiohttp.DummyCookieJar()
    )
    session.detach()
    return client


def _proxy_of(host: str) -> str | None:
    """The proxy of the environment (`HTTPS_PROXY`, unless `NO_PROXY` names the host)."""
    url = urllib.parse.urlsplit(host)
    if urllib.request.proxy_bypass(url.netloc):
        return None
    return urllib.request.getproxies().get(url.scheme)


async def _read_all(response: aiohttp.ClientResponse, deed: ApiRequest) -> bytes:
    data = bytearray()
    async for piece in response.content.iter_any():
        data += piece
        if len(data) > _MOST_BYTES:
            raise ClusterUnreachable(
                f"cannot {deed}: the response exceeds {_MOST_BYTES} bytes", deed=deed
            )
    return bytes(data)


async def _messages(
    socket: aiohttp.ClientWebSocketResponse, deed: ApiRequest, host: str
) -> AsyncIterator[bytes]:
    with _translated(deed, host, 0.0):
        async for message in socket:
            if message.type is aiohttp.WSMsgType.ERROR:
                raise ClusterUnreachable(
                    f"cannot {deed}: the connection broke: {message.data}", deed=deed
                )
            if message.type in (aiohttp.WSMsgType.BINARY, aiohttp.WSMsgType.TEXT):
                yield (
                    message.data if isinstance(message.data, bytes) else str(message.data).encode()
                )


@contextlib.contextmanager
def _translated(deed: ApiRequest, host: str, timeout_s: float) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        sent = not isinstance(error, aiohttp.ConnectionTimeoutError)
        said = f"cannot {deed}: no answer from the API server {host} within {timeout_s:g} s"
        raise ClusterUnreachable(said, sent=sent, deed=deed) from error
    except aiohttp.ClientConnectorError as error:
        said = (
            f"cannot {deed}: no connection to the API server {host}: {error}. Check that it is up "
            f"and that the kubeconfig's server is right"
        )
        raise ClusterUnreachable(said, sent=False, deed=deed) from error
    except (aiohttp.ClientError, OSError) as error:
        said = (
            f"cannot {deed}: the connection to the API server {host} broke: "
            f"{type(error).__name__} {error}"
        )
        raise ClusterUnreachable(said, deed=deed) from error


def _warnings(headers: Sequence[str]) -> tuple[str, ...]:
    found = [_WARNING.match(text) for text in headers]
    return tuple(
        re.sub(r"\\(.)", r"\1", match.group(1)) if match else text
        for match, text in zip(found, headers, strict=True)
    )


def _seconds(text: str | None) -> float | None:
    try:
        return max(0.0, float(text)) if text is not None else None
    except ValueError:
        return None  # a date, which API servers do not send
