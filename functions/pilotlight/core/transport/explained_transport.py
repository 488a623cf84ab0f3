"""An httpx transport with explained TLS errors. Separate from `transport`, so that a process
without TLS connections starts without httpx."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from typing import Any

import httpx

from pilotlight.core.transport.tls import explain_tls_error, find_tls_error


class ExplainedTransport(httpx.AsyncHTTPTransport):
    """An httpx transport whose errors explain which certificate is at fault."""

    def __init__(self, name: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._name = name

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            response = await super().handle_async_request(request)
        except (httpx.TransportError, ssl.SSLError) as e:
            # TLS 1.3 (RFC 8446, 4.4.2): a rejection of our certificate arrives with the first read,
            # after our side of the handshake, and httpx does not map it
            error = find_tls_error(e)
            if error is None:
                raise
            raise httpx.ConnectError(explain_tls_error(error, self._name), request=request) from e
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _ExplainedStream(response.stream, request, self._name)
        return response


class _ExplainedStream(httpx.AsyncByteStream):
    """A response body that raises TLS errors as httpx errors, which callers handle."""

    def __init__(self, body: httpx.AsyncByteStream, request: httpx.Request, name: str) -> None:
        self._body = body
        self._request = request
        self._name = name

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self._body:
                yield piece
        except ssl.SSLError as e:
            raise httpx.ReadError(explain_tls_error(e, self._name), request=self._request) from e

    async def aclose(self) -> None:
        await self._body.aclose()
