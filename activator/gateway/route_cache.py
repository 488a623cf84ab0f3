"""Cache of the routing and authentication results by path and key, valid until the route table
changes, and what the fast path has precomputed of them.

Owner: the event loop; every method is synchronous. A call whose path and key are cached here can
run without a task (`activator.gateway.fast_path`), if nothing else affects it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

from activator.access.grants import CUSTOMER, AccessGrant
from activator.access.resolver import FUNCTIONS, REPLAY, TAG, RequestResolver
from activator.billing.usage_pricing import encode_optional_fields
from activator.calls.call import Call, priority_lines
from activator.calls.caller import Caller
from activator.calls.response import forwarded_lines
from activator.http.payloads import (
    CONTENT_TYPE,
    GUARD_LINES,
    JSON,
    PICKLE,
    TRUSTED_LINE,
    Payload,
    binary_type,
    payload_type,
)
from activator.http.request import MAX_ACCEPT_BYTES, Request
from activator.http.server import KnownHead
from activator.metrics.call_counters import WarmCounters
from activator.resilience.declared_retries import CallerRetryBudget
from activator.routing.api_keys import Principal
from activator.routing.route_table import CallTarget, FunctionRouter
from activator.routing.traffic_split import RoutingDecision
from activator.worker_client.connection import WorkerResponse
from pilotlight import errors

MAX_RESOLVED = 16_384
"""Most cached results; each is small, but a flood of paths must not fill the memory."""
MAX_HEADS = 2048
"""Most request heads that are kept, of at most `server.MAX_KNOWN_HEAD_BYTES` each."""
MAX_PATH_LENGTH = 512
"""Longest cached path, in characters: fits five names of the maximum length."""
MIN_CLOCK_S: Final = 1.0
"""Shortest execution clock of the fast path, whose clocks have the resolution
`fast_path.CLOCK_STEP_S`."""

Handler = Callable[[Request, AccessGrant, str], Awaitable[None]]
CountersOf = Callable[[CallTarget, str], WarmCounters]
"""Where warm calls of a revision and arm are counted (`metrics.Metrics.warm_counters`)."""


class FastPathRoute:
    """What all warm calls of one path, key and routing decision share, and where they are counted.

    Attributes:
        choice: None where a single revision answers all calls.
        is_followed: whether answers are used after their callers got them: for a copy of the call,
            a prediction log or a fallback.
        retry_budget: of the caller; None before its first call.
    """

    def __init__(
        self,
        entry: AccessGrant,
        method: str,
        *,
        counters: WarmCounters,
        choice: RoutingDecision | None,
    ) -> None:
        """Raises NotFound for a method that the revision does not have."""
        self.entry = entry
        self.method = method
        self.counters = counters
        self.choice = choice
        self.arm, self.line, self.mark, head = (
            (choice.arm, choice.line, choice.mark, choice.head)
            if choice is not None
            else ("", b"", "", b"")
        )
        self.target = target = entry.target
        self.key_id = entry.caller.key_id
        self.check = target.check(method).check
        self.execution_s = target.spec.clocks.execution_s
        self.is_followed = (
            choice is not None or target.log is not None or bool(target.spec.fallback)
        )
        self.retry_budget: CallerRetryBudget | None = None
        self.request_line = (
            b"POST /invoke/%b HTTP/1.1\r\nhost: worker\r\npilotlight-deadline-s: %.3f\r\n"
            b"content-type: " % (method.encode(), self.execution_s)
        )
        self.response_template = (
            b"x-request-id: %%b\r\n%b%%b%b%b%%bpilotlight-cost: %%b\r\nserver-timing: "
            b"queue;dur=0.00, start;dur=0.00, exec;dur=%%.2f\r\ncontent-length: %%d\r\n"
            % (target.warm_head.replace(b"%", b"%%"), head.replace(b"%", b"%%"), GUARD_LINES)
        )

    def response_headers(
        self, call: Call, answer: WorkerResponse, *, cost: str, exec_ms: float
    ) -> bytes:
        """Return the header lines of the response to a call that waited for nothing:
        `response.complete_headers`, and the content-length."""
        return self.response_template % (
            call.id.encode(),
            call.admission.head(),
            forwarded_lines(answer),
            cost.encode(),
            exec_ms,
            len(answer.body or b""),
        )

    def with_choice(self, choice: RoutingDecision) -> FastPathRoute:
        """Return the same route for another unit of the same arm of an experiment."""
        other = object.__new__(FastPathRoute)
        other.__dict__.update(self.__dict__)
        other.choice, other.mark = choice, choice.mark
        return other


class WarmHead:
    """What follows from the head of a warm request: its route, and what `FastPath.begin` needs of
    its headers. Immutable.

    Attributes:
        payload: content type (JSON or PICKLE) and `Accept`; its body is empty.
        is_traced: whether it has a `traceparent`.
        is_lasting: whether the same bytes have the same route, until the route table changes, and
            may come again.
        mark: `Call.mark`.
        request_head: the request to the worker up to the call's id: that of `Call.request_head`.
    """

    __slots__ = (
        "caller",
        "headers",
        "is_lasting",
        "is_traced",
        "mark",
        "payload",
        "request_head",
        "route",
    )

    def __init__(
        self,
        route: FastPathRoute,
        headers: dict[bytes, bytes],
        *,
        caller: Caller,
        content_type: bytes,
        is_lasting: bool,
    ) -> None:
        self.route = route
        self.headers = headers
        self.caller = caller
        accept = headers.get(b"accept", b"")
        self.payload = Payload(b"", content_type, accept)
        self.is_traced = b"traceparent" in headers
        self.is_lasting = is_lasting and not self.is_traced
        self.mark = route.mark + encode_optional_fields(customer=caller.customer)
        self.request_head = b"".join(
            (
                route.request_line,
                content_type,
                TRUSTED_LINE if content_type is PICKLE else b"",
                b"\r\naccept: " + accept if accept else b"",
                route.line,
                priority_lines(route.target, caller.rank),
                b"\r\ncontent-length: ",
                headers.get(b"content-length", b"0"),
                b"\r\npilotlight-call: ",
            )
        )


@dataclass(slots=True)
class CachedRoute:
    """The routing and authentication result for one path and key.

    Attributes:
        unasked: the revision of requests that name none, where it is not the one that answers.
        fast_route: of all its calls; None where there is none, or each call chooses its own.
        fast_routes: by decision, as far as calls have needed them; None where they choose none.
    """

    handler: Handler
    caller: Principal
    routed: FunctionRouter
    method: str
    tag: str
    unasked: str = ""
    fast_route: FastPathRoute | None = None
    fast_routes: dict[RoutingDecision | CallTarget, FastPathRoute | None] | None = None

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


def is_simple(headers: dict[bytes, bytes], *, max_body_bytes: int) -> bool:
    """Return whether a request needs no task, by its head: its body has a known, small length, it
    has no own deadline, and it does not ask for an event stream, which needs heartbeats."""
    length, accept = headers.get(b"content-length", b"0"), headers.get(b"accept", b"")
    return (
        length.isdigit()
        and int(length) <= max_body_bytes
        and b"transfer-encoding" not in headers
        and b"content-encoding" not in headers
        and b"pilotlight-timeout" not in headers
        and b"idempotency-key" not in headers
        and b"text/event-stream" not in accept
        and len(accept) <= MAX_ACCEPT_BYTES
    )


class RouteCache:
    """Caches routing and authentication results."""

    def __init__(
        self,
        *,
        resolver: RequestResolver,
        verbs: Mapping[str, Handler],
        counters_of: CountersOf,
    ) -> None:
        """`verbs`: handlers of `POST …:<verb>`."""
        self._counters_of = counters_of
        self._table = resolver.table
        self._resolver = resolver
        self._access = resolver.access
        self._verbs = verbs
        self._known: dict[tuple[str, bytes, bytes], CachedRoute] = {}
        self._heads: dict[bytes, KnownHead] = {}
        self._known_at = -1

    def __repr__(self) -> str:
        return f"<RouteCache {len(self._known)} routes, {len(self._heads)} heads>"

    def find_known(self, head: bytes) -> KnownHead | None:
        """Return what is known of a request head, byte by byte, as long as routes are the same."""
        return self._heads.get(head) if self._known_at == self._table.generation else None

    def remember(self, head: bytes, known: KnownHead) -> None:
        """Keep a head for `find_known`, unless it will not come again."""
        if known.warm.is_lasting and self._known_at == self._table.generation:
            if len(self._heads) >= MAX_HEADS:
                self._heads.clear()
            self._heads[head] = known

    def find_warm(self, url: bytes, headers: dict[bytes, bytes]) -> WarmHead | None:
        """Return the route and the rest of a call's head; None when it needs a task, or was not
        resolved before."""
        if self._known_at != self._table.generation:
            return None
        asked = (
            url.decode("latin-1"),
            headers.get(b"authorization", b""),
            headers.get(b"pilotlight-environment", b""),
        )
        resolved = self._known.get(asked)
        if resolved is None or TAG in headers or REPLAY in headers:
            return None
        fast_route = resolved.fast_route or self._chosen_fast_route(resolved, headers)
        if fast_route is None or not is_simple(headers, max_body_bytes=fast_route.entry.body_bytes):
            return None
        caller = fast_route.entry.callers.get(headers.get(b"pilotlight-priority"))
        given = headers.get(CONTENT_TYPE, JSON)
        if given != JSON and binary_type(given):
            return None  # it may become TENSORS
        content_type = payload_type(given)
        if caller is None or (content_type is PICKLE and not caller.accepts_pickle):
            return None  # refused with the reason
        if CUSTOMER in headers:
            try:
                caller = fast_route.entry.caller_of(headers)
            except errors.PilotlightError:
                return None
        if caller.customer and self._access.has_quotas(fast_route.target, caller.customer):
            return None  # they are counted in a task
        return WarmHead(
            fast_route,
            headers,
            caller=caller,
            content_type=content_type,
            is_lasting=resolved.fast_route is not None,
        )

    def _enable_fast_path(self, resolved: CachedRoute) -> None:
        """Enable the fast path for the calls of a path and key, where possible."""
        routed, tag = resolved.routed, resolved.tag
        only = routed.choose(resolved.caller, {}, tag) if tag else routed.only
        if only is None:
            resolved.fast_routes = {}
        else:
            resolved.fast_route = self._fast_route(
                resolved, only, has_choice=bool(tag) or not routed.is_plain
            )

    def _chosen_fast_route(
        self, resolved: CachedRoute, headers: dict[bytes, bytes]
    ) -> FastPathRoute | None:
        """Return the fast path route of a call whose revision depends on the call; None when it
        needs a task."""
        fast_routes = resolved.fast_routes
        if fast_routes is None:
            return None
        choice = resolved.routed.choose(resolved.caller, headers)
        # there are many units, whose cache is bounded elsewhere
        key = choice.target if choice.unit else choice
        if key not in fast_routes:
            try:
                fast_routes[key] = self._fast_route(resolved, choice)
            except errors.PilotlightError:  # the slow path answers with the reason
                fast_routes[key] = None
        fast_route = fast_routes[key]
        if fast_route is None or fast_route.choice is choice:
            return fast_route
        if fast_route.arm != choice.arm:
            return self._fast_route(resolved, choice)
        return fast_route.with_choice(choice)

    def _fast_route(
        self, resolved: CachedRoute, choice: RoutingDecision, *, has_choice: bool = True
    ) -> FastPathRoute | None:
        target = choice.target
        if (
            target.spec.language_model is not None
            or target.spec.sandbox
            or target.cache is not None
            or target.spec.clocks.execution_s < MIN_CLOCK_S
        ):
            return None  # its tokens are counted, its answers may be stored, its clock is exact
        entry = self._access.entry(resolved.caller, target)
        if entry.quota_check is not None and not entry.quota_check.is_immediate:
            return None
        arm = choice.arm if has_choice else ""
        return FastPathRoute(
            entry,
            resolved.method,
            counters=self._counters_of(target, arm),
            choice=choice if has_choice else None,
        )

    def is_verb(self, place: str) -> bool:
        """Whether a path below FUNCTIONS is that of a call, or another verb: `…:<verb>`."""
        return place.rpartition(":")[2] in self._verbs

    def resolve(self, request: Request, owner: str | None, place: str) -> CachedRoute | None:
        """Route and authenticate a request below FUNCTIONS; None when it is not a call.

        Raises the errors of `RequestResolver.routed`.
        """
        if self._known_at != self._table.generation or len(self._known) > MAX_RESOLVED:
            self._known.clear()
            self._heads.clear()
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
                self._enable_fast_path(resolved)
            is_worth_it = (
                resolved.is_lasting and resolved.is_real and len(request.path) <= MAX_PATH_LENGTH
            )
            if is_worth_it and self._table.is_known(asked[1]):
                self._known[asked] = resolved
        return resolved if request.verb == "POST" else None
