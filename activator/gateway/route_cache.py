"""Cache of the routing and authentication results by path and key, valid until the route table
changes.

Owner: the event loop; every method is synchronous. It also serves the fast path: a call whose path
and key are cached here can run without a task (`activator.gateway.fast_path`), if nothing else
affects it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from activator.access.grants import AccessCache, AccessGrant
from activator.access.resolver import FUNCTIONS, TAG, RequestResolver
from activator.gateway.fast_path import FastPathRoute, is_simple
from activator.http.request import Request
from activator.routing.api_keys import Principal
from activator.routing.route_table import CallTarget, FunctionRouter, RouteTable
from activator.routing.traffic_split import RoutingDecision
from pilotlight import errors

MAX_RESOLVED = 16_384
"""Most cached results; each is small, but a flood of paths must not fill the memory."""
MAX_PATH_LENGTH = 512
"""Longest cached path, in characters: fits five names of the maximum length."""

Handler = Callable[[Request, AccessGrant, str], Awaitable[None]]


class CachedRoute:
    """The routing and authentication result for one path and key."""

    __slots__ = (
        "caller",
        "fast_route",
        "fast_routes",
        "handler",
        "method",
        "routed",
        "tag",
        "unasked",
    )

    def __init__(
        self, handler: Handler, caller: Principal, routed: FunctionRouter, method: str, tag: str
    ) -> None:
        self.handler = handler
        self.caller = caller
        self.routed = routed
        self.method = method
        self.tag = tag
        self.unasked = ""
        self.fast_route: FastPathRoute | None = None
        self.fast_routes: dict[RoutingDecision | CallTarget, FastPathRoute | None] | None = None

    @property
    def is_lasting(self) -> bool:
        """Whether it is valid for further requests: not for a key that expires, nor for an
        anonymous caller."""
        return self.caller.expires_at is None and not self.caller.is_anonymous

    @property
    def is_real(self) -> bool:
        """Whether some revision of the function has the method: other paths are not cached, because
        callers can invent any number of them."""
        return any(
            target.spec.method(self.method) is not None for target in self.routed.targets.values()
        )

    def enable_fast_path(self, access: AccessCache) -> None:
        """Enable the fast path for its calls, where possible: `fast_route` is for all calls,
        else `fast_routes` has a route by decision."""
        routed, caller = self.routed, self.caller
        only = routed.choose(caller, {}, self.tag) if self.tag else routed.only
        if only is None:
            self.fast_routes = {}
        else:
            self.fast_route = _fast_route(
                access,
                caller,
                only,
                self.method,
                has_choice=bool(self.tag) or not routed.is_plain,
            )

    def fast_route_for(
        self, access: AccessCache, headers: dict[bytes, bytes]
    ) -> FastPathRoute | None:
        """Return the fast path route of a call whose revision depends on the call; None when it
        needs a task."""
        fast_routes = self.fast_routes
        if fast_routes is None:
            return None
        choice = self.routed.choose(self.caller, headers)
        # there are many units, whose cache is bounded elsewhere
        key = choice.target if choice.unit else choice
        if key in fast_routes:
            fast_route = fast_routes[key]
        else:
            try:
                fast_route = fast_routes[key] = _fast_route(
                    access, self.caller, choice, self.method
                )
            except errors.PilotlightError:  # the slow path answers with the reason
                fast_route = fast_routes[key] = None
        return (
            fast_route
            if fast_route is None or fast_route.choice is choice
            else fast_route.with_choice(choice)
        )


def _fast_route(
    access: AccessCache,
    caller: Principal,
    choice: RoutingDecision,
    method: str,
    *,
    has_choice: bool = True,
) -> FastPathRoute | None:
    if choice.target.spec.engine is not None:
        return None  # its tokens must be counted
    entry = access.entry(caller, choice.target)
    if entry.quota_check is not None and not entry.quota_check.is_immediate:
        return None
    return FastPathRoute(entry, method, choice if has_choice else None)


class RouteCache:
    """Caches routing and authentication results."""

    def __init__(
        self,
        *,
        table: RouteTable,
        resolver: RequestResolver,
        access: AccessCache,
        verbs: Mapping[str, Handler],
    ) -> None:
        """`verbs`: handlers of `POST …:<verb>`."""
        self._table = table
        self._resolver = resolver
        self._access = access
        self._verbs = verbs
        self._known: dict[tuple[str, bytes, bytes], CachedRoute] = {}
        self._known_at = -1

    def __repr__(self) -> str:
        return f"<RouteCache {len(self._known)} routes>"

    def find_warm(self, url: bytes, headers: dict[bytes, bytes]) -> FastPathRoute | None:
        """Return the fast path route of a call; None when it needs a task, or was not resolved
        before."""
        if self._known_at != self._table.generation:
            return None
        asked = (
            url.decode("latin-1"),
            headers.get(b"authorization", b""),
            headers.get(b"pilotlight-environment", b""),
        )
        resolved = self._known.get(asked)
        if resolved is None or TAG in headers:
            return None
        fast_route = resolved.fast_route or resolved.fast_route_for(self._access, headers)
        if fast_route is None or not is_simple(headers, max_body_bytes=fast_route.entry.body_bytes):
            return None
        return fast_route

    def is_verb(self, place: str) -> bool:
        """Whether a path below FUNCTIONS is that of a call, or another verb: `…:<verb>`."""
        return place.rpartition(":")[2] in self._verbs

    def resolve(self, request: Request, owner: str | None, place: str) -> CachedRoute | None:
        """Route and authenticate a request below FUNCTIONS; None when it is not a call.

        Raises the errors of `RequestResolver.routed`.
        """
        if self._known_at != self._table.generation or len(self._known) > MAX_RESOLVED:
            self._known.clear()
            self._known_at = self._table.generation
        headers = request.headers
        asked = (
            request.path,
            headers.get(b"authorization", b""),
            headers.get(b"pilotlight-environment", b""),
        )
        resolved = self._known.get(asked)
        if resolved is None:
            address, _, verb = place[len(FUNCTIONS) :].rpartition(":")
            handler = self._verbs.get(verb)
            if handler is None or request.verb != "POST":
                return None
            caller = self._resolver.identify(request, owner)
            routed, method, tag = self._resolver.routed(request, caller, address, owner)
            resolved = CachedRoute(handler, caller, routed, method, tag)
            if tag:
                # raises for an unknown tag, so that unknown names are not cached
                routed.choose(caller, {}, tag)
            if verb == "warmup" and caller.tenant == routed.tenant:
                resolved.unasked = (
                    routed.document.heaviest()
                )  # not the revision that answers during a cutover
            is_foreign = owner is not None and routed.has_cors  # responses depend on the origin
            if verb == "invoke" and resolved.is_lasting and not is_foreign:
                resolved.enable_fast_path(self._access)
            is_worth_it = (
                resolved.is_lasting and resolved.is_real and len(request.path) <= MAX_PATH_LENGTH
            )
            if is_worth_it and self._table.is_known(asked[1]):
                self._known[asked] = resolved
        return resolved if request.verb == "POST" else None
