"""HTTP to the activator, over a Unix socket, on behalf of gRPC callers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import httpx

from pilotlight.core.transport.cookies import no_cookies
from pilotlight.protocol import HEADER_GRPC_CALLER, HEADER_GRPC_TOKEN

MAX_CONNECTIONS: Final = 1024
CONNECT_S: Final = 5.0


class ActivatorClient:
    """Sends requests to one activator. Owner: the event loop."""

    def __init__(self, socket: Path, *, token: str) -> None:
        self._token = token
        self._client = httpx.AsyncClient(
            base_url="http://activator",
            cookies=no_cookies(),
            transport=httpx.AsyncHTTPTransport(
                uds=str(socket), limits=httpx.Limits(max_connections=MAX_CONNECTIONS)
            ),
            timeout=httpx.Timeout(None, connect=CONNECT_S, pool=CONNECT_S),
        )

    async def get(self, path: str, headers: Mapping[str, str], *, caller: str) -> httpx.Response:
        """Send a GET request. Raises httpx.HTTPError."""
        return await self._client.get(path, headers=self._headers(headers, caller))

    async def post(
        self,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
        *,
        caller: str,
        acquire: Callable[[int], None],
    ) -> httpx.Response:
        """Send a POST request. `acquire`: reserves memory for the answer, before it is read. Raises
        httpx.HTTPError, and what `acquire` raises."""
        async with self._client.stream(
            "POST", path, content=body, headers=self._headers(headers, caller)
        ) as response:
            acquire(int(response.headers.get("content-length", 0)))
            await response.aread()
        return response

    def _headers(self, headers: Mapping[str, str], caller: str) -> dict[str, str]:
        return {
            **headers,
            "accept-encoding": "identity",
            HEADER_GRPC_TOKEN: self._token,
            HEADER_GRPC_CALLER: caller,
        }

    async def aclose(self) -> None:
        """Close all connections."""
        await self._client.aclose()
