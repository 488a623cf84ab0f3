"""httpx's transport, whose errors say what is wrong with whose certificate. Apart from `transport`,
so that a process without TLS connections starts without httpx."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from typing import Any

import httpx

from pilotlight.core.tls import explain_tls_error, find_tls_error


class ExplainedTransport(httpx.AsyncHTTPTransport):
    """httpx's, whose errors say what is wrong with whose certificate."""

    def __init__(self, name: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._name = name

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            response = await super().handle_async_request(request)
        except (httpx.TransportError, ssl.SSLError) as e:
            # TLS 1.3 (RFC 8446, 4.4.2): a refusal of our own certificate comes with the first read,
            # after our side of the handshake, where httpx has no name for it
            error = find_tls_error(e)
            if error is None:
                raise
            raise httpx.ConnectError(explain_tls_error(error, self._name), request=request) from e
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _ExplainedStream(response.stream, request, self._name)
        return response


class _ExplainedStream(httpx.AsyncByteStream):
    """An answer's body, whose TLS errors are httpx's: whoever follows it knows no others."""

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
