"""Resolves the caller and the function of a request: the first two steps of calls, raw HTTP and
WebSockets.

A caller of the function's own tenant may name a tag or a revision: in the path
(`app/function@tag`), in the header `Pilotlight-Tag`, or, for calls, as `?tag=`; of several the
first in this order applies. The query of `/fn/` requests belongs to the function, and is not read.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import parse_qs

from activator.access.grants import AccessCache, AccessGrant, parse_tenant_prefix
from activator.http.request import CALLING, FORWARDED, Request
from activator.quotas.admission import Operation, admit
from activator.quotas.store_protocol import QuotaCheck
from activator.quotas.unauthenticated_limit import UnauthenticatedRateLimiter
from activator.routing.api_keys import ANONYMOUS, Principal
from activator.routing.route_table import FunctionRouter, RouteTable
from pilotlight import errors
from pilotlight.protocol import HEADER_REPLAY, HEADER_TAG
from pilotlight.spec.identifiers import (
    DEFAULT_ENVIRONMENT,
    FunctionAddress,
    TenantId,
    parse_function_path,
)

RAW = "/fn/"
FUNCTIONS = "/v1/functions/"
TAG = HEADER_TAG.encode()
REPLAY = HEADER_REPLAY.encode()
NO_TENANT = "-"
"""Placeholder for the id of a tenant that does not exist."""


class RequestResolver:
    """Resolves callers, functions and access grants. Owner: the event loop; every method but
    `verify_token` is synchronous."""

    def __init__(
        self, *, table: RouteTable, access: AccessCache, unauthenticated: UnauthenticatedRateLimiter
    ) -> None:
        self.table = table
        self.access = access
        self._unauthenticated = unauthenticated

    def __repr__(self) -> str:
        return f"<RequestResolver {self.table!r}>"

    def authenticate(self, request: Request) -> Principal:
        """Return the caller. Raises Unauthenticated, or TooManyRequests after too many failed
        attempts from its address."""
        if (calling := request.scope.get(CALLING)) is not None:
            principal: Principal = calling.principal
            return principal
        try:
            return self.table.authenticate(request.headers.get(b"authorization", b""), time.time())
        except errors.Unauthenticated:
            self._count(request)
            raise

    async def verify_token(self, request: Request) -> None:
        """Verify the token of a request, if it has one of an issuer, so that its caller is known to
        the other methods. Raises Unauthenticated, TooManyRequests, Unavailable."""
        if self.table.tokens is not None:
            await self.table.tokens.verify(
                request.headers.get(b"authorization", b""), request.address
            )

    def identify(self, request: Request, owner: str | None) -> Principal:
        """Return the caller, which may be anonymous where the path names a tenant, for public
        functions."""
        if owner is not None and b"authorization" not in request.headers:
            return ANONYMOUS
        return self.authenticate(request)

    def reader(self, request: Request) -> Principal:
        """Return the caller of a request about a submitted call. Raises Forbidden for a key that
        may not call, for a token of an issuer, and for a suspended tenant."""
        caller = self.authenticate(request)
        caller.check_may_call()
        caller.require_key()
        self.access.check_not_suspended(caller.tenant)
        return caller

    @asynccontextmanager
    async def operation(self, request: Request) -> AsyncIterator[Principal]:
        """Count a request to a sandbox or about a submitted call while it runs, and what it moves,
        unless the activator that forwards it has. Yields the caller. Raises what `reader` raises,
        OverQuota, Unavailable."""
        caller = self.reader(request)
        request.tenant = caller.tenant
        if FORWARDED in request.scope:
            yield caller
            return
        quota_check = self.access.operations(caller)
        request.rate_limits = quota_check
        with await admit(quota_check):
            if quota_check is not None:
                request.on_bytes = Operation(quota_check).count_bytes
            yield caller

    @asynccontextmanager
    async def storage_operation(self, request: Request) -> AsyncIterator[None]:
        """Count a request to a volume, dict or queue while it runs, where its key is known: the
        controller authenticates it. Raises OverQuota, Unavailable."""
        try:
            caller = self.table.authenticate(
                request.headers.get(b"authorization", b""), time.time()
            )
        except errors.Unauthenticated:
            yield  # counted, and bounded, with all that have no valid key
            return
        caller.require_key()
        quota_check = self.access.operations(caller)
        request.rate_limits, request.tenant = quota_check, caller.tenant
        with await admit(quota_check):
            yield

    def before(self, request: Request, caller: Principal) -> tuple[QuotaCheck | None, int]:
        """Return the quotas and the body limit by the caller alone (`AccessCache.before`). Raises
        Forbidden for a suspended tenant."""
        self.access.check_not_suspended(caller.tenant)
        request.tenant = caller.tenant
        return self.access.before(caller, request.address)

    def routed(
        self, request: Request, caller: Principal, path: str, owner: str | None = None
    ) -> tuple[FunctionRouter, str, str]:
        """Return the function at `path`, and the method and the tag that the path names. Raises
        NotFound, Forbidden, Unauthenticated, Unavailable."""
        path, _, tag = path.partition("@")
        try:
            app, function, method = parse_function_path(path)
        except ValueError as e:
            raise errors.NotFound(str(e)) from e
        environment = self.environment_of(request, caller)
        caller.check_reach(environment=environment, app=app, function=function)
        tenant = caller.tenant if owner is None else self.table.tenants.named(owner) or NO_TENANT
        address = FunctionAddress(
            tenant=TenantId(tenant),
            environment=environment,
            app=app,
            function=function,
            method=method,
        )
        try:
            return self.table.routed_for(caller, address), method, tag
        except errors.NotFound as e:
            if not caller.is_anonymous:
                raise
            raise self.stranger(request) from e

    @staticmethod
    def environment_of(request: Request, caller: Principal) -> str:
        """Return the environment of a request: the one it names, else its key's own."""
        asked = request.headers.get(b"pilotlight-environment", b"").decode("latin-1")
        return asked or caller.environment or DEFAULT_ENVIRONMENT

    def stranger(self, request: Request) -> errors.PilotlightError:
        """Return the error for a caller without a key that requests a non-public function. Raises
        TooManyRequests after too many attempts."""
        self._count(request)
        return errors.Unauthenticated("no API key: send the header 'Authorization: Bearer <key>'")

    def _count(self, request: Request) -> None:
        """Count a failed attempt. Raises TooManyRequests; requests with a valid key are never
        counted."""
        now = time.monotonic()
        self._unauthenticated.guard(request.address, now)
        self._unauthenticated.check(request.address, now)

    def enter(
        self,
        request: Request,
        caller: Principal,
        routed: FunctionRouter,
        tag: str,
        *,
        is_raw: bool = False,
        unasked: str = "",
    ) -> AccessGrant:
        """Return the access grant, and set it on the request so that every response has quota
        headers. Raises Forbidden, NotFound; InvalidInput for an invalid customer, and for a replay
        that names no revision.

        `unasked`: the revision for a caller of the function's own tenant that names none; "" = by
        the traffic split."""
        if not tag and (asked := request.headers.get(TAG)) is not None:
            tag = asked.decode("latin-1")
        if not tag and not is_raw:
            tag = tag_in_query(request)
        choice = (
            routed.choose_for_replay(caller, tag)
            if REPLAY in request.headers
            else routed.choose(caller, request.headers, tag or unasked)
        )
        if choice is not routed.only or not routed.is_plain:
            request.choice = choice
        entry = self.access.entry(caller, choice.target, request.address)
        if customer := entry.customer_of(request.headers):
            entry = self.access.entry(caller, choice.target, customer=customer)
        request.rate_limits = entry.quota_check
        request.tenant = caller.tenant or entry.target.tenant
        request.target = entry.target
        request.routed_ns = time.monotonic_ns()
        return entry

    def raw_entry(self, request: Request) -> AccessGrant:
        """Return the access grant for `/fn/{app}/{function}/rest`, also under `/t/{tenant}`."""
        owner, place = parse_tenant_prefix(request.path)
        app, _, rest = place.removeprefix(RAW).partition("/")
        caller = self.identify(request, owner)
        routed, _, tag = self.routed(request, caller, f"{app}/{rest.partition('/')[0]}", owner)
        return self.enter(request, caller, routed, tag, is_raw=True)


def tag_in_query(request: Request) -> str:
    """Return the `?tag=` query parameter; "" where it is missing."""
    query: bytes = request.scope["query_string"]
    return parse_qs(query.decode("latin-1")).get("tag", [""])[0] if b"tag=" in query else ""
