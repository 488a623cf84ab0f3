"""Everything that is not the data plane's: passed through to the controller, which authenticates it itself.

While the controller is down these paths answer 503 with `Retry-After`; calls go on. The answer to a change is sent once every activator
knows of the change: who deploys and then calls, or makes a key and then uses it, is never told that it does not exist, and a key that was
revoked is refused by all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx

from activator.admission import StrangerLimit
from activator.request import HOP_BY_HOP, Headers, Request
from activator.routes import RouteTable
from pilotlight import errors
from weight_cache.addresses import Address

PUBLIC_PREFIXES = ("/v1/", "/v2/", "/dashboard", "/docs", "/openapi.json", "/redoc")
"""Paths that may be passed on. `/internal/` is not among them, and never will be."""
_DOTS = frozenset({".", ".."})
"""Segments that would be resolved on the way, behind the look at the prefix."""
_READING = ("GET", "HEAD")
_IDLE_S = 630.0
"""Read time-out towards the controller: a followed log may be silent for ten minutes; then the client connects again."""


class ControlPlane:
    """The way to the controller."""

    def __init__(
        self,
        controller: Address,
        *,
        table: RouteTable,
        strangers: StrangerLimit,
        catch_up: Callable[[], Awaitable[None]],
        others_catch_up: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`catch_up` returns once this process knows what the controller knows, `others_catch_up` once the other activators do."""
        self._table = table
        self.catch_up = catch_up
        self._others_catch_up = others_catch_up
        self._strangers = strangers
        self._client = httpx.AsyncClient(
            transport=controller.transport(limits=httpx.Limits(max_connections=256)),
            base_url=controller.base_url,
            timeout=httpx.Timeout(10.0, read=_IDLE_S, write=_IDLE_S),
        )

    async def forward(self, request: Request) -> None:
        """Pass one request through, streaming both ways. Raises NotFound, Unavailable."""
        path = request.path
        self._limit_strangers(request)
        if (not path.startswith(PUBLIC_PREFIXES) and path != "/") or not _DOTS.isdisjoint(path.split("/")):
            raise errors.NotFound(f"nothing is served at {path}: the API is under /v1/, its description at /docs")
        raw_path = request.scope["raw_path"] if path != "/" else b"/dashboard"
        query = request.scope["query_string"]
        url = self._client.base_url.copy_with(raw_path=raw_path + (b"?" + query if query else b""))
        headers = [(k, v) for k, v in request.scope["headers"] if k not in HOP_BY_HOP and k != b"x-request-id"]
        headers += [(b"x-request-id", request.id.encode()), (b"x-forwarded-for", request.address.encode())]
        has_body = b"content-length" in request.headers or b"transfer-encoding" in request.headers
        out = self._client.build_request(request.verb, url, headers=headers, content=_body(request) if has_body else None)
        try:
            response = await self._client.send(out, stream=True)
        except httpx.HTTPError as e:
            raise errors.Unavailable(
                f"the control plane does not answer ({type(e).__name__}); calls to functions go on", retry_after_s=2
            ) from e
        await self._relay(request, response)

    def _limit_strangers(self, request: Request) -> None:
        """A request that carries a key the data plane does not know is a stranger's, whatever the controller will say."""
        authorization = request.headers.get(b"authorization", b"")
        if not self._table.is_known(authorization):
            self._strangers.guard(request.address, time.monotonic())
        try:
            self._table.authenticate(authorization, time.time())
        except errors.Unauthenticated:
            self._strangers.check(request.address, time.monotonic())

    async def _relay(self, request: Request, response: httpx.Response) -> None:
        try:
            if request.verb not in _READING and response.is_success:
                await asyncio.gather(self.catch_up(), *([self._others_catch_up()] if self._others_catch_up is not None else []))
            headers: Headers = [(k.lower(), v) for k, v in response.headers.raw if k.lower() not in HOP_BY_HOP and k.lower() != b"date"]
            await request.start(response.status_code, headers)
            async for chunk in response.aiter_raw():
                await request.chunk(chunk)
            await request.chunk(b"", more=False)
        except httpx.HTTPError:
            request.scope["connection"].transport.abort()  # the head is out: a broken connection is the only honest end
        finally:
            await response.aclose()

    async def get_json(self, path: str, authorization: bytes) -> httpx.Response:
        """One GET on behalf of a caller. Raises Unavailable."""
        try:
            return await self._client.get(path, headers=[(b"authorization", authorization)])
        except httpx.HTTPError as e:
            raise errors.Unavailable("the control plane does not answer", retry_after_s=2) from e

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()


async def _body(request: Request) -> AsyncIterator[bytes]:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise errors.ClientClosedRequest("the caller left while sending its body")
        if message["body"]:
            yield message["body"]
        if not message.get("more_body", False):
            return
