"""Proxy to the controller for all requests outside the data plane; the controller authenticates
them itself.

The number of connections to the controller is small, so their use is limited. Requests without a
known key share a small part of them, and get one only once their body, which must be small, was
read. Others stream their bodies, and must not pause; all requests of one tenant, including lookups
on its behalf, use at most half of the connections. A browser that is signed in to the dashboard
counts as the tenant of its key (`pilotlight.core.dashboard.visitor_cookie`). Callers that do not
read a response are disconnected.

While the controller is down these paths answer 503 with `Retry-After`; calls continue. The response
to a change is sent once every activator has applied the change: a function that was just deployed
can be called, a key that was just created can be used, and a revoked key is refused by all."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from activator.http.forwarding import body_of, relay, target_url
from activator.http.request import HOP_BY_HOP, Request
from activator.http.trusted_proxies import network_of
from activator.quotas.unauthenticated_limit import UnauthenticatedRateLimiter
from activator.routing.api_keys import Principal
from activator.routing.route_table import RouteTable
from pilotlight import errors
from pilotlight.core.crypto import Sealer
from pilotlight.core.dashboard import visitor_cookie
from pilotlight.core.dashboard.dashboard_origin import DASHBOARD_PATH
from pilotlight.core.transport.endpoint import Endpoint
from pilotlight.spec.collection import CollectionKind

PUBLIC_PREFIXES = ("/v1/", "/v2/", "/dashboard", "/docs", "/openapi.json", "/redoc")
"""Paths that may be forwarded. `/internal/` must never be among them."""
_DOTS = frozenset({".", ".."})
"""Segments that a server would resolve after the check of the prefix."""
_READING = ("GET", "HEAD")
_VALUES = tuple(f"{kind.path}/" for kind in CollectionKind)
"""Paths of dicts and queues, of which activators keep nothing: each operation, whichever activator
passes it on, is a transaction of the one controller's database, so that a value can be read through
all of them once its put was answered. No operation changes the feed."""
_IDLE_S = 630.0
"""Read timeout of the controller: a followed log may be silent for ten minutes; then the client
reconnects."""

MAX_CONNECTIONS = 256
MAX_OF_TENANT = MAX_CONNECTIONS // 2
MAX_STRANGER_BODY_BYTES = 65_536
"""Body limit of a request without a known key: forms of the dashboard are far smaller."""
STRANGER_BODY_S = 10.0
"""How long such a body may take to arrive."""
UNREAD_S = 10.0
"""How long a caller may leave a response unread; a caller that reads, and a stream, have no time
limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyLimits:
    """Limits of forwarded requests.

    Attributes:
        body_pause_s: longest pause in a request's body.
        stranger_connections: connections that requests without a known key may use; half of them
            for one address.
        unread_s: how long a caller may leave a response unread.
    """

    body_pause_s: float = 60.0
    stranger_connections: int = 64
    unread_s: float = UNREAD_S


class ControlPlaneProxy:
    """Forwards requests to the controller."""

    def __init__(
        self,
        controller: Endpoint,
        *,
        table: RouteTable,
        visitors: Sealer,
        unauthenticated: UnauthenticatedRateLimiter,
        catch_up: Callable[[], Awaitable[None]],
        others_catch_up: Callable[[], Awaitable[None]] | None = None,
        limits: ProxyLimits | None = None,
    ) -> None:
        """`visitor_cookie` decrypts the dashboard's cookies.

        `catch_up` returns once this process has applied all changes of the controller,
        `others_catch_up` once the other activators have."""
        self._limits = limits or ProxyLimits()
        self._of_unauthenticated: Counter[str] = Counter()
        self._of_tenants: Counter[str] = Counter()
        self._table = table
        self._visitors = visitors
        self.catch_up = catch_up
        self._others_catch_up = others_catch_up
        self._unauthenticated = unauthenticated
        self._client = controller.client(
            timeout=httpx.Timeout(10.0, read=_IDLE_S, write=_IDLE_S),
            limits=httpx.Limits(max_connections=MAX_CONNECTIONS),
        )

    def __repr__(self) -> str:
        return f"<ControlPlaneProxy {self.held} requests>"

    @property
    def held(self) -> int:
        """Number of requests in progress at the controller."""
        return self._of_unauthenticated.total() + self._of_tenants.total()

    async def forward(self, request: Request) -> None:
        """Forward one request, streaming both ways. Raises NotFound, Unavailable, TooManyRequests,
        TooLarge, InvalidInput."""
        path = request.path
        caller = self._caller(request)
        if (not path.startswith(PUBLIC_PREFIXES) and path != "/") or not _DOTS.isdisjoint(
            path.split("/")
        ):
            raise errors.NotFound(
                f"nothing is served at {path}: the API is under /v1/, its description at /docs"
            )
        raw_path = request.scope["raw_path"] if path != "/" else b"/dashboard"
        url = target_url(self._client, request, raw_path)
        headers = [
            (k, v)
            for k, v in request.scope["headers"]
            if k not in HOP_BY_HOP and k != b"x-request-id"
        ]
        headers.append((b"x-request-id", request.id.encode()))
        hops = dict.fromkeys(
            (request.peer, request.address)
        )  # the last entry is added by this activator
        headers += [(b"x-forwarded-for", hop.encode()) for hop in hops]
        has_body = b"content-length" in request.headers or b"transfer-encoding" in request.headers
        body: bytes | AsyncIterator[bytes] | None = None
        if has_body and caller is None:
            body = await request.raw_body(
                limit_bytes=MAX_STRANGER_BODY_BYTES, timeout_s=STRANGER_BODY_S
            )
            headers = [(k, v) for k, v in headers if k != b"content-length"]
        elif has_body:
            body = body_of(request, self._limits.body_pause_s)
        with self._share(caller, request.address):
            out = self._client.build_request(request.verb, url, headers=headers, content=body)
            try:
                response = await self._client.send(out, stream=True)
            except httpx.HTTPError as e:
                raise errors.Unavailable(
                    f"the control plane does not answer ({type(e).__name__}); calls to functions "
                    f"still work",
                    retry_after_s=2,
                ) from e
            async with aclosing(response):
                if (
                    request.verb not in _READING
                    and response.is_success
                    and not path.startswith(_VALUES)
                ):
                    await self._all_catch_up()
                await relay(request, response, self._limits.unread_s)

    @contextmanager
    def _share(self, caller: Principal | None, address: str = "") -> Iterator[None]:
        """Use one connection while the context lasts. Raises TooManyRequests where the caller's
        share is used up."""
        held, whose = (
            (self._of_unauthenticated, network_of(address))
            if caller is None
            else (self._of_tenants, caller.tenant)
        )
        is_full = held[whose] >= (
            MAX_OF_TENANT if caller is not None else max(1, self._limits.stranger_connections // 2)
        )
        if is_full or (caller is None and held.total() >= self._limits.stranger_connections):
            who = "without a known API key" if caller is None else "of this tenant"
            raise errors.TooManyRequests(
                f"too many requests {who} are in progress at the control plane", retry_after_s=1
            )
        held[whose] += 1
        try:
            yield
        finally:
            held[whose] -= 1
            if not held[whose]:
                del held[whose]

    def _caller(self, request: Request) -> Principal | None:
        """Return the caller by its key or dashboard session; None for a key that the data plane
        does not know. Raises Forbidden for a token of an issuer, which calls functions only."""
        if (visitor := self._visitor(request)) is not None:
            return visitor
        try:
            caller = self._table.authenticate(
                request.headers.get(b"authorization", b""), time.time()
            )
        except errors.Unauthenticated:
            now = time.monotonic()
            self._unauthenticated.guard(request.address, now)
            self._unauthenticated.check(request.address, now)
            return None
        caller.require_key()
        return caller

    def _visitor(self, request: Request) -> Principal | None:
        """Return the caller that is signed in to the dashboard, whose requests carry no key."""
        if (
            not request.path.startswith(DASHBOARD_PATH) and request.path != "/"
        ) or b"authorization" in request.headers:
            return None
        now = time.time()
        key = visitor_cookie.api_key_from_cookies(
            self._visitors, request.headers.get(b"cookie", b"").decode("latin-1"), now=now
        )
        caller = self._table.caller_of(key) if key is not None else None
        return (
            caller
            if caller is not None and (caller.expires_at is None or now < caller.expires_at)
            else None
        )

    async def get_json(
        self, path: str, caller: Principal, proof: tuple[bytes, bytes]
    ) -> httpx.Response:
        """Send one GET on behalf of a caller, counted in its tenant's share. `proof`: the header that
        the controller authenticates. Raises Unavailable, TooManyRequests."""
        with self._share(caller):
            try:
                return await self._client.get(path, headers=[proof])
            except httpx.HTTPError as e:
                raise errors.Unavailable(
                    "the control plane does not answer", retry_after_s=2
                ) from e

    async def post_json(
        self, path: str, caller: Principal, proof: tuple[bytes, bytes], body: Mapping[str, Any]
    ) -> httpx.Response:
        """Send one POST on behalf of a caller, as `get_json`. After a success every activator has
        applied the change. Raises Unavailable, TooManyRequests."""
        with self._share(caller):
            try:
                response = await self._client.post(path, headers=[proof], json=body)
            except httpx.HTTPError as e:
                raise errors.Unavailable(
                    "the control plane does not answer", retry_after_s=2
                ) from e
            if response.is_success:
                await self._all_catch_up()
            return response

    async def _all_catch_up(self) -> None:
        """Wait until every activator has applied all changes of the controller."""
        await asyncio.gather(
            self.catch_up(),
            *([self._others_catch_up()] if self._others_catch_up is not None else []),
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()
