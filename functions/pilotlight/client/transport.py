"""HTTP transport with retries: which requests are retried, after which delay, and for how long.

The rule (`retry_delay_s`, pure): after a failed connection attempt, and after status 429 or 503,
nothing has run, so every request may be retried. After a lost connection, only idempotent requests
may be (GET, HEAD, PUT, DELETE). The total delay of one request stays within `budget_s`."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from pilotlight.client.errors import error_from_response, retry_after_s
from pilotlight.client.json_stream import iter_json_objects
from pilotlight.client.socket_http import AsyncSocketClient, ConnectionFailed, SocketClient
from pilotlight.errors import PilotlightError, Unauthenticated, Unavailable
from pilotlight.profile import Profile
from pilotlight.protocol import HEADER_ENVIRONMENT

if TYPE_CHECKING:
    import httpx

DEFAULT_BUDGET_S = 60.0
"""Seconds that one request may wait between attempts in total: longer than the usual Retry-After of
a cold start, short enough for an interactive user."""
_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 5.0
_CONNECT_TIMEOUT_S = 10.0
_WRITE_TIMEOUT_S = 120.0
_MAX_CONNECTIONS = 512
_REPEATABLE = frozenset({"GET", "HEAD", "PUT", "DELETE"})
_REFUSED = frozenset({429, 503})
"""Statuses of requests that have not run and may be retried."""


def retry_delay_s(
    *, attempt: int, waited_s: float, budget_s: float, may_repeat: bool, retry_after: float | None
) -> float | None:
    """Return the seconds to wait before the next attempt, None to give up. `attempt` counts from 0;
    `retry_after` is that of the server."""
    if not may_repeat:
        return None
    delay = (
        min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2**attempt) if retry_after is None else retry_after
    )
    return delay if waited_s + delay <= budget_s else None


class _Retries:
    """The retries of one request."""

    def __init__(
        self, profile: Profile, method: str, path: str, *, budget_s: float, repeatable: bool | None
    ) -> None:
        self._profile = profile
        self._method, self._path = method, path
        self._repeatable = method in _REPEATABLE if repeatable is None else repeatable
        self._budget_s = _budget_s(profile, budget_s)
        self._attempt = 0
        self._waited_s = 0.0

    def after_status(self, status: int, headers: Mapping[str, str], body: bytes) -> float:
        """Return the seconds to wait after this response. Raises its error instead of the last
        retry."""
        delay = self._next(may_repeat=status in _REFUSED, retry_after=retry_after_s(headers))
        if delay is None:
            raise _refused(self._profile, status, headers, body)
        return delay

    def after_failure(self, error: Exception) -> float:
        """Return the seconds to wait after a failed connection. Raises Unavailable instead of the
        last retry."""
        delay = self._next(may_repeat=self._repeatable or not _was_sent(error), retry_after=None)
        if delay is None:
            raise _lost(self._profile, self._method, self._path, error) from error
        return delay

    def after_error(self, error: Unavailable) -> float:
        """Return the seconds to wait after an error that a streamed response ended with, as after
        its status. Raises it instead of the last retry."""
        delay = self._next(may_repeat=True, retry_after=error.retry_after_s)
        if delay is None:
            raise error
        return delay

    def _next(self, *, may_repeat: bool, retry_after: float | None) -> float | None:
        delay = retry_delay_s(
            attempt=self._attempt,
            waited_s=self._waited_s,
            budget_s=self._budget_s,
            may_repeat=may_repeat,
            retry_after=retry_after,
        )
        self._attempt += 1
        self._waited_s += delay or 0.0
        return delay


def _httpx_options(profile: Profile) -> dict[str, Any]:
    import httpx

    headers = {HEADER_ENVIRONMENT: profile.environment, "user-agent": "pilotlight-sdk"}
    if profile.api_key:
        headers["authorization"] = f"Bearer {profile.api_key}"
    # No read timeout: the timeouts of the function limit the wait, and TCP keep-alive detects a
    # dead server.
    timeout = httpx.Timeout(
        connect=_CONNECT_TIMEOUT_S, read=None, write=_WRITE_TIMEOUT_S, pool=None
    )
    return {"base_url": profile.base_url, "headers": headers, "timeout": timeout}


def _transport_options(profile: Profile) -> dict[str, Any]:
    import ssl

    import httpx

    # Reading the trusted certificates of the system takes 30 ms: only for https.
    verify = (
        True
        if profile.url.lower().startswith("https:")
        else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    )
    limits = httpx.Limits(
        max_connections=_MAX_CONNECTIONS, max_keepalive_connections=_MAX_CONNECTIONS
    )
    if profile.socket_path is not None:
        return {"limits": limits, "uds": profile.socket_path, "verify": verify}
    options = [
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    ]
    return {"limits": limits, "socket_options": options, "verify": verify}


def connection_errors() -> tuple[type[Exception], ...]:
    """Errors of a connection that cannot be made or is lost. httpx is among them where it was
    loaded: an instance may have none."""
    httpx = sys.modules.get("httpx")
    return (ConnectionFailed,) if httpx is None else (ConnectionFailed, httpx.HTTPError)


def _was_sent(error: Exception) -> bool:
    if isinstance(error, ConnectionFailed):
        return error.was_sent
    import httpx

    return not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)


def _calling_headers() -> dict[str, str]:
    from pilotlight.current_call.context import calling_headers

    return {"user-agent": "pilotlight-sdk", **calling_headers()}


def _budget_s(profile: Profile, budget_s: float) -> float:
    """Seconds that a request may wait between attempts: in an instance at most what the current
    call has left."""
    if not profile.is_instance:
        return budget_s
    from pilotlight.current_call.context import remaining_s

    return min(budget_s, remaining_s())


def _lost(profile: Profile, method: str, path: str, error: Exception) -> Unavailable:
    if _was_sent(error) or profile.is_instance:
        what = "was lost before the response arrived" if _was_sent(error) else "failed"
        return Unavailable(
            f"{method} {path}: the connection to {profile.url} {what}: {error}",
            reason="connection",
        )
    return Unavailable(
        f"no platform answers at {profile.url}: {error}; start one with 'pilotlight up', or "
        f"correct PILOTLIGHT_URL or the profile",
        reason="connection",
        hint="`pilotlight doctor` shows which platform your profile means and whether it runs.",
    )


def _refused(
    profile: Profile, status: int, headers: Mapping[str, str], body: bytes
) -> PilotlightError:
    if status == 401 and not profile.api_key:
        return Unauthenticated(
            f"{profile.url} requires an API key, but none is set: run 'pilotlight up' on this "
            f"machine, or set PILOTLIGHT_API_KEY"
        )
    if status == 401 and not body:  # to HEAD
        return Unauthenticated(f"{profile.url} does not accept this API key")
    return error_from_response(status, headers, body)


def path_segment(name: str) -> str:
    """A name as one segment of a path. One of dots would lead to another path."""
    return quote(name, safe="") if name.strip(".") else name.replace(".", "%2E")


def _client(profile: Profile) -> httpx.Client | SocketClient:
    if profile.is_instance:
        return SocketClient(profile.socket_path or "", _calling_headers)
    import httpx

    from pilotlight.core.transport.cookies import no_cookies

    return httpx.Client(
        **_httpx_options(profile),
        transport=httpx.HTTPTransport(**_transport_options(profile)),
        cookies=no_cookies(),
    )


def _async_client(profile: Profile) -> httpx.AsyncClient | AsyncSocketClient:
    if profile.is_instance:
        return AsyncSocketClient(profile.socket_path or "", _calling_headers)
    import httpx

    from pilotlight.core.transport.cookies import no_cookies

    return httpx.AsyncClient(
        **_httpx_options(profile),
        transport=httpx.AsyncHTTPTransport(**_transport_options(profile)),
        cookies=no_cookies(),
    )


@dataclass(frozen=True, slots=True)
class _Accepted:
    """Which responses are results: success, and these statuses; `is_read`: once their bodies are
    complete."""

    statuses: frozenset[int]
    is_read: bool = False

    def includes(self, response: httpx.Response) -> bool:
        return response.is_success or response.status_code in self.statuses


class Transport:
    """A synchronous HTTP client with a connection pool for one profile. Thread-safe, like the pool
    of httpx. Closed by its owner."""

    def __init__(self, profile: Profile, *, budget_s: float = DEFAULT_BUDGET_S) -> None:
        self.profile = profile
        self._budget_s = budget_s
        self._http: Any = _client(profile)

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def request(
        self,
        method: str,
        path: str,
        *,
        repeatable: bool | None = None,
        accept_status: frozenset[int] = frozenset(),
        **options: Any,
    ) -> httpx.Response:
        """Send a request and return the response, fully read: one that breaks off is as one that
        never came. Raises the PilotlightError of its problem document, except for a status in
        `accept_status`."""
        accepted = _Accepted(accept_status, is_read=True)
        return self._open(method, path, repeatable, accepted, options)

    @contextlib.contextmanager
    def stream(
        self,
        method: str,
        path: str,
        *,
        repeatable: bool | None = None,
        accept_status: frozenset[int] = frozenset(),
        **options: Any,
    ) -> Iterator[httpx.Response]:
        """Send a request and yield the response once its headers have arrived. Raises like
        `request`."""
        response = self._open(method, path, repeatable, _Accepted(accept_status), options)
        try:
            yield response
        finally:
            response.close()

    def stream_objects(self, method: str, path: str, **options: Any) -> Iterator[dict[str, Any]]:
        """Send a request that may be repeated, and yield the JSON objects of its NDJSON response.
        It is repeated, and its objects yielded again, where the response breaks off or ends with
        Unavailable. Raises like `request`."""
        retries = _Retries(self.profile, method, path, budget_s=self._budget_s, repeatable=True)
        while True:
            with self.stream(method, path, repeatable=True, **options) as response:
                try:
                    yield from iter_json_objects(response)
                    return
                except connection_errors() as e:
                    delay = retries.after_failure(e)
                except Unavailable as e:
                    delay = retries.after_error(e)
            time.sleep(delay)

    def _open(
        self,
        method: str,
        path: str,
        repeatable: bool | None,
        accepted: _Accepted,
        options: dict[str, Any],
    ) -> httpx.Response:
        retries = _Retries(
            self.profile, method, path, budget_s=self._budget_s, repeatable=repeatable
        )
        while True:
            response: httpx.Response | None = None
            try:
                response = self._http.send(
                    self._http.build_request(method, path, **options), stream=True
                )
                is_accepted = accepted.includes(response)
                body = response.read() if accepted.is_read or not is_accepted else b""
            except connection_errors() as e:
                delay = retries.after_failure(e)
            except BaseException:
                if response is not None:
                    response.close()  # interrupted
                raise
            else:
                if is_accepted:
                    return response
                delay = retries.after_status(response.status_code, response.headers, body)
            time.sleep(delay)


class AsyncTransport:
    """An asynchronous HTTP client with a connection pool for one profile and event loop."""

    def __init__(self, profile: Profile, *, budget_s: float = DEFAULT_BUDGET_S) -> None:
        self.profile = profile
        self._budget_s = budget_s
        self._http: Any = _async_client(profile)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def request(
        self,
        method: str,
        path: str,
        *,
        repeatable: bool | None = None,
        accept_status: frozenset[int] = frozenset(),
        **options: Any,
    ) -> httpx.Response:
        """Asynchronous form of `Transport.request`. Cancelling it closes its connection, which
        frees the slot of the call."""
        accepted = _Accepted(accept_status, is_read=True)
        return await self._open(method, path, repeatable, accepted, options)

    @contextlib.asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        repeatable: bool | None = None,
        accept_status: frozenset[int] = frozenset(),
        **options: Any,
    ) -> AsyncIterator[httpx.Response]:
        """Asynchronous form of `Transport.stream`."""
        response = await self._open(method, path, repeatable, _Accepted(accept_status), options)
        try:
            yield response
        finally:
            await response.aclose()

    async def _open(
        self,
        method: str,
        path: str,
        repeatable: bool | None,
        accepted: _Accepted,
        options: dict[str, Any],
    ) -> httpx.Response:
        retries = _Retries(
            self.profile, method, path, budget_s=self._budget_s, repeatable=repeatable
        )
        while True:
            response: httpx.Response | None = None
            try:
                response = await self._http.send(
                    self._http.build_request(method, path, **options), stream=True
                )
                is_accepted = accepted.includes(response)
                body = await response.aread() if accepted.is_read or not is_accepted else b""
            except connection_errors() as e:
                delay = retries.after_failure(e)
            except BaseException:
                if response is not None:
                    await response.aclose()  # cancelled
                raise
            else:
                if is_accepted:
                    return response
                delay = retries.after_status(response.status_code, response.headers, body)
            await asyncio.sleep(delay)
