"""Who is calling, and what: the first two steps of every request, the same for calls, raw HTTP and
WebSockets.

A caller of the function's own tenant may name a tag or a revision: in the path
(`app/function@tag`), in the header `Pilotlight-Tag`, or, for calls, as `?tag=`; of several the
first one here counts. The query of what follows `/fn/` is the function's own, and is not looked at.
"""

from __future__ import annotations

import time
from urllib.parse import parse_qs

from activator.balancing.admission import UnauthenticatedRateLimiter
from activator.http.request import Request
from activator.quotas.store import QuotaCheck
from activator.routing.access import AccessCache, AccessGrant, parse_tenant_prefix
from activator.routing.api_keys import ANONYMOUS, Principal
from activator.routing.route_table import FunctionRouter, RouteTable
from pilotlight import errors
from pilotlight.types import DEFAULT_ENVIRONMENT, FunctionAddress, TenantId, parse_function_path

RAW = "/fn/"
TAG = b"pilotlight-tag"
NOBODY = "-"
"""Stands for the id of a tenant that there is not."""


class RequestResolver:
    """Finds callers, functions, and the way of the one into the other. Owner: the event loop; every
    method is synchronous."""

    def __init__(
        self, *, table: RouteTable, entrance: AccessCache, strangers: UnauthenticatedRateLimiter
    ) -> None:
        self._table = table
        self._entrance = entrance
        self._strangers = strangers

    def __repr__(self) -> str:
        return f"<RequestResolver {self._table!r}>"

    def authenticate(self, request: Request) -> Principal:
        """Who is calling. Raises Unauthenticated, or TooManyRequests for an address that keeps
        guessing."""
        try:
            return self._table.authenticate(request.headers.get(b"authorization", b""), time.time())
        except errors.Unauthenticated:
            self._count(request)
            raise

    def identify(self, request: Request, owner: str | None) -> Principal:
        """`authenticate`, but that a public function of a tenant that is named may be called
        without a key."""
        if owner is not None and b"authorization" not in request.headers:
            return ANONYMOUS
        return self.authenticate(request)

    def reader(self, request: Request) -> Principal:
        """Who asks for a submitted call. Raises Forbidden for a key that may not call, and for a
        suspended tenant's."""
        caller = self.authenticate(request)
        caller.check_may_call()
        self._entrance.check_not_suspended(caller.tenant)
        return caller

    def before(self, request: Request, caller: Principal) -> tuple[QuotaCheck | None, int]:
        """See `AccessCache.before`. Raises Forbidden for a suspended tenant's key."""
        self._entrance.check_not_suspended(caller.tenant)
        request.tenant = caller.tenant
        return self._entrance.before(caller, request.address)

    def routed(
        self, request: Request, caller: Principal, path: str, owner: str | None = None
    ) -> tuple[FunctionRouter, str, str]:
        """The function at `path`, the method and the tag that the path names. Raises NotFound,
        Forbidden, Unauthenticated, Unavailable."""
        path, _, tag = path.partition("@")
        try:
            app, function, method = parse_function_path(path)
        except ValueError as e:
            raise errors.NotFound(str(e)) from e
        environment = self.environment_of(request, caller)
        caller.check_reach(environment=environment, app=app, function=function)
        tenant = caller.tenant if owner is None else self._table.tenant_named(owner) or NOBODY
        address = FunctionAddress(
            tenant=TenantId(tenant),
            environment=environment,
            app=app,
            function=function,
            method=method,
        )
        try:
            return self._table.routed_for(caller, address), method, tag
        except errors.NotFound as e:
            if not caller.is_anonymous:
                raise
            raise self.stranger(request) from e

    @staticmethod
    def environment_of(request: Request, caller: Principal) -> str:
        """The environment that a request is about: the one it names, else its key's own."""
        asked = request.headers.get(b"pilotlight-environment", b"").decode("latin-1")
        return asked or caller.environment or DEFAULT_ENVIRONMENT

    def stranger(self, request: Request) -> errors.PilotlightError:
        """The error for a caller without a key who asks for what is not public. Raises
        TooManyRequests where it keeps asking."""
        self._count(request)
        return errors.Unauthenticated("no API key: send the header 'Authorization: Bearer <key>'")

    def _count(self, request: Request) -> None:
        """One more failed attempt. Raises TooManyRequests; who has a valid key is never counted,
        whoever else shares its address."""
        now = time.monotonic()
        self._strangers.guard(request.address, now)
        self._strangers.check(request.address, now)

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
        """The way in, of which the answer tells the quotas whatever becomes of the request. Raises
        Forbidden, NotFound.

        `unasked`: the revision for a caller of the function's own tenant who names none; "" =
        whatever the traffic says."""
        if not tag and (asked := request.headers.get(TAG)) is not None:
            tag = asked.decode("latin-1")
        if not tag and not is_raw:
            tag = tag_in_query(request)
        choice = routed.choose(caller, request.headers, tag or unasked)
        if choice is not routed.only or not routed.is_plain:
            request.choice = choice
        entry = self._entrance.entry(caller, choice.target, request.address)
        request.gate = entry.gate
        request.tenant = caller.tenant or entry.target.tenant
        request.target = entry.target
        request.routed_ns = time.monotonic_ns()
        return entry

    def raw_entry(self, request: Request) -> AccessGrant:
        """`/fn/{app}/{function}/rest`, also under `/t/{tenant}`: the caller at the function."""
        owner, place = parse_tenant_prefix(request.path)
        app, _, rest = place.removeprefix(RAW).partition("/")
        caller = self.identify(request, owner)
        routed, _, tag = self.routed(request, caller, f"{app}/{rest.partition('/')[0]}", owner)
        return self.enter(request, caller, routed, tag, is_raw=True)


def tag_in_query(request: Request) -> str:
    """What `?tag=` says; "" where it is not there."""
    query: bytes = request.scope["query_string"]
    return parse_qs(query.decode("latin-1")).get("tag", [""])[0] if b"tag=" in query else ""
