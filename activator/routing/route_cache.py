"""What route and authenticate found for a path and a key, remembered until anything that it rests
on changes.

Owner: the event loop; every method is synchronous. Its other use is the warm way: a call whose path
and key are known here may go without a task (`activator.gateway.fast_path`), if nothing of it
depends on anything else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from activator.gateway.fast_path import FastPathRoute, is_simple
from activator.http.request import Request
from activator.routing.access import AccessCache, AccessGrant
from activator.routing.api_keys import Principal
from activator.routing.resolver import TAG, RequestResolver
from activator.routing.route_table import CallTarget, FunctionRouter, RouteTable
from activator.routing.traffic_split import RoutingDecision
from pilotlight import errors

FUNCTIONS = "/v1/functions/"
MAX_RESOLVED = 16_384
"""Answers of route and authenticate that are remembered; each is small, and a flood of paths must
not fill the memory."""
MAX_PATH_LENGTH = 512
"""Of a path that is remembered, in characters: five names of the greatest length fit."""

Handler = Callable[[Request, AccessGrant, str], Awaitable[None]]


class CachedRoute:
    """What route and authenticate found for one path and key."""

    __slots__ = ("caller", "handler", "method", "routed", "tag", "unasked", "way", "ways")

    def __init__(
        self, handler: Handler, caller: Principal, routed: FunctionRouter, method: str, tag: str
    ) -> None:
        self.handler = handler
        self.caller = caller
        self.routed = routed
        self.method = method
        self.tag = tag
        self.unasked = ""
        self.way: FastPathRoute | None = None
        self.ways: dict[RoutingDecision | CallTarget, FastPathRoute | None] | None = None

    @property
    def is_lasting(self) -> bool:
        """Whether it holds for further requests: not for a key that expires, nor for a caller who
        is known by its address only."""
        return self.caller.expires_at is None and not self.caller.is_anonymous

    @property
    def is_real(self) -> bool:
        """Whether some revision of the function has the method: there are no other paths, and a
        caller may make up any number of those."""
        return any(
            target.spec.method(self.method) is not None for target in self.routed.targets.values()
        )

    def let_warm(self, entrance: AccessCache) -> None:
        """From now on its calls may go without a task, where that is possible: `way` is for all of
        them, else `ways` by their choice."""
        routed, caller = self.routed, self.caller
        only = routed.choose(caller, {}, self.tag) if self.tag else routed.only
        if only is None:
            self.ways = {}
        else:
            self.way = _way(
                entrance, caller, only, self.method, is_told=bool(self.tag) or not routed.is_plain
            )

    def warm_way(self, entrance: AccessCache, headers: dict[bytes, bytes]) -> FastPathRoute | None:
        """The way of a call whose revision depends on the call; None when it cannot go without a
        task."""
        ways = self.ways
        if ways is None:
            return None
        choice = self.routed.choose(self.caller, headers)
        # there are many units, and what is remembered of them is bounded elsewhere
        key = choice.target if choice.unit else choice
        if key in ways:
            way = ways[key]
        else:
            try:
                way = ways[key] = _way(entrance, self.caller, choice, self.method)
            except errors.PilotlightError:  # as an ordinary request it is told why
                way = ways[key] = None
        return way if way is None or way.choice is choice else way.told(choice)


def _way(
    entrance: AccessCache,
    caller: Principal,
    choice: RoutingDecision,
    method: str,
    *,
    is_told: bool = True,
) -> FastPathRoute | None:
    if choice.target.spec.engine is not None:
        return None  # its tokens are counted
    entry = entrance.entry(caller, choice.target)
    if entry.gate is not None and not entry.gate.is_immediate:
        return None
    return FastPathRoute(entry, method, choice if is_told else None)


class RouteCache:
    """See the module."""

    def __init__(
        self,
        *,
        table: RouteTable,
        reception: RequestResolver,
        entrance: AccessCache,
        verbs: Mapping[str, Handler],
    ) -> None:
        """`verbs`: what handles `POST …:<verb>`."""
        self._table = table
        self._reception = reception
        self._entrance = entrance
        self._verbs = verbs
        self._known: dict[tuple[str, bytes, bytes], CachedRoute] = {}
        self._known_at = -1

    def __repr__(self) -> str:
        return f"<RouteCache {len(self._known)}>"

    def find_warm(self, url: bytes, headers: dict[bytes, bytes]) -> FastPathRoute | None:
        """What is known of a call that may go without a task; None when it must not, or was never
        resolved."""
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
        way = resolved.way or resolved.warm_way(self._entrance, headers)
        if way is None or not is_simple(headers, max_body_bytes=way.entry.body_bytes):
            return None
        return way

    def resolve(self, request: Request, owner: str | None, place: str) -> CachedRoute | None:
        """Route and authenticate a request below FUNCTIONS; None when it is no call of ours.

        Raises what `RequestResolver.routed` raises.
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
            caller = self._reception.identify(request, owner)
            routed, method, tag = self._reception.routed(request, caller, address, owner)
            resolved = CachedRoute(handler, caller, routed, method, tag)
            if tag:
                # what is remembered is there: nobody fills the memory with names of nothing
                routed.choose(caller, {}, tag)
            if verb == "warmup" and caller.tenant == routed.tenant:
                resolved.unasked = routed.document.heaviest()  # not who answers until it is there
            if verb == "invoke" and resolved.is_lasting:
                resolved.let_warm(self._entrance)
            is_worth_it = (
                resolved.is_lasting and resolved.is_real and len(request.path) <= MAX_PATH_LENGTH
            )
            if is_worth_it and self._table.is_known(asked[1]):
                self._known[asked] = resolved
        return resolved if request.verb == "POST" else None
