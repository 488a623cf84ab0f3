"""Requests of other sites' web pages to public functions, which name the origins that may call them
(`cors=`): the CORS protocol of the Fetch standard, section 3.2.

It applies under `/t/{tenant}/`, to requests with an `Origin`. A preflight is answered here: nothing
starts, and no call is counted. An origin that is not named gets responses without CORS headers,
which browsers keep from the page's script. Credentials are never permitted, so a browser sends no
cookies; a script sends an API key in `Authorization`."""

from __future__ import annotations

import re
from collections.abc import Coroutine
from typing import Any, Final, Protocol

from activator.access.grants import parse_tenant_prefix
from activator.access.resolver import FUNCTIONS, RAW, RequestResolver
from activator.http.request import Handle, Headers, Request
from activator.routing.api_keys import ANONYMOUS
from activator.routing.route_table import RouteTable
from pilotlight import errors
from pilotlight.protocol import (
    HEADER_ARM,
    HEADER_CACHE,
    HEADER_COST,
    HEADER_DEGRADED,
    HEADER_OUTCOME,
    HEADER_RATE_LIMIT,
    HEADER_RATE_LIMIT_POLICY,
    HEADER_REPLAYED,
    HEADER_REQUEST_ID,
    HEADER_REVISION,
    HEADER_SERVER_TIMING,
    HEADER_START,
)
from pilotlight.spec.cors import ANY_ORIGIN
from pilotlight.spec.identifiers import FunctionAddress, TenantId, parse_function_path

ORIGIN: Final = b"origin"
VARY: Final = (b"vary", b"Origin")
"""Caches must not give the response for one origin to another."""
MAX_AGE_S: Final = 600
"""How long a browser may remember a preflight's answer; Chromium's limit is 7200."""
_METHOD, _HEADERS = b"access-control-request-method", b"access-control-request-headers"
_RAW_METHODS = frozenset({b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS"})
_MAX_HEADERS_BYTES = 1024
_TOKENS = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+( *, *[!#$%&'*+.^_`|~0-9a-z-]+)*")
_OWN = (
    HEADER_REQUEST_ID,
    HEADER_REVISION,
    HEADER_START,
    HEADER_COST,
    HEADER_SERVER_TIMING,
    HEADER_ARM,
    HEADER_DEGRADED,
    HEADER_CACHE,
    HEADER_REPLAYED,
    HEADER_OUTCOME,
    HEADER_RATE_LIMIT,
    HEADER_RATE_LIMIT_POLICY,
    "age",
    "retry-after",
)
"""The platform's own response headers, which scripts may read."""
_EXPOSED: Final = ", ".join(_OWN).encode()


class Answers(Protocol):
    """Answers requests (the gateway)."""

    async def respond(self, request: Request, inner: Handle) -> None:
        """Answer a request by `inner`, errors included."""


class CrossOrigin:
    """Middleware for the requests of other sites' pages. Owner: the event loop."""

    header: Final = ORIGIN

    def __init__(self, table: RouteTable) -> None:
        self._table = table

    def __repr__(self) -> str:
        return f"<CrossOrigin {self._table!r}>"

    def handle(
        self, request: Request, *, inner: Handle, gateway: Answers
    ) -> Coroutine[Any, Any, None]:
        """Answer a preflight; answer a request to a function with `cors` by `inner` with CORS
        headers, and others by `inner`."""
        if not (origins := self._origins(request)):
            return inner(request)
        cross_origin = CrossOriginRequest(request, origins)
        if cross_origin.is_preflight:
            return cross_origin.answer_preflight()
        return gateway.respond(cross_origin, inner)

    def _origins(self, request: Request) -> frozenset[str]:
        owner, place = parse_tenant_prefix(request.path)
        if owner is None:
            return frozenset()
        if place.startswith(RAW):
            path = "/".join(place[len(RAW) :].split("/", 2)[:2])
        elif place.startswith(FUNCTIONS):
            path = place[len(FUNCTIONS) :].rpartition(":")[0]
        else:
            return frozenset()
        tenant = self._table.tenants.named(owner)
        try:
            app, function, _ = parse_function_path(path.partition("@")[0])
        except ValueError:
            return frozenset()
        if tenant is None:
            return frozenset()
        environment = RequestResolver.environment_of(request, ANONYMOUS)
        return self._table.origins_of(
            FunctionAddress(
                tenant=TenantId(tenant),
                environment=environment,
                app=app,
                function=function,
                method="",
            )
        )


class CrossOriginRequest(Request):
    """A request with an `Origin` to a function with `cors`. Its responses, errors included, have
    the platform's CORS headers in place of the function's own."""

    __slots__ = ("_cors",)

    def __init__(self, request: Request, origins: frozenset[str]) -> None:
        super().__init__(request.scope, request._receive, request._send)
        origin = self.headers[ORIGIN]
        self._cors: Headers = [VARY]
        if ANY_ORIGIN in origins or origin.decode("latin-1") in origins:
            permitted = b"*" if ANY_ORIGIN in origins else origin
            self._cors += [
                (b"access-control-allow-origin", permitted),
                (b"access-control-expose-headers", _EXPOSED),
            ]

    @property
    def is_preflight(self) -> bool:
        """Whether the browser asks if it may send the script's request."""
        return self.verb == "OPTIONS" and _METHOD in self.headers

    async def answer_preflight(self) -> None:
        """Answer a preflight: 204 with what the script may send, or 403."""
        if len(self._cors) == 1:
            await self.respond_error(
                errors.Forbidden(
                    "this function does not permit this origin: its owner names origins with cors="
                )
            )
            return
        method = self.headers[_METHOD]
        is_raw = parse_tenant_prefix(self.path)[1].startswith(RAW)
        permitted = method if is_raw and method in _RAW_METHODS else b"POST"
        headers = [
            (b"access-control-allow-methods", permitted),
            (b"access-control-max-age", b"%d" % MAX_AGE_S),
            (b"x-request-id", self.id.encode()),
        ]
        asked = self.headers.get(_HEADERS, b"").lower()
        if len(asked) <= _MAX_HEADERS_BYTES and _TOKENS.fullmatch(asked):
            headers.append((b"access-control-allow-headers", asked))
        self._cors += headers
        await self.respond(204, [], b"")

    async def start(self, status: int, headers: Headers) -> None:
        """Start a response, with the platform's CORS headers."""
        kept = [
            header
            for header in headers
            if header != VARY and not header[0].startswith(b"access-control-")
        ]
        await super().start(status, kept + self._cors)

    async def respond_whole(self, status: int, head: bytes, body: bytes) -> None:
        """Send a complete response, with the platform's CORS headers."""
        lines = b"".join(b"%b: %b\r\n" % header for header in self._cors)
        await super().respond_whole(status, head + lines, body)
