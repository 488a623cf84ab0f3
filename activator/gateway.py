"""A request's life, in one sentence: route → authenticate → admit → reserve → forward → meter.

`Gateway.invoke` is that sentence for a call that waits for its answer. Its neighbours are elsewhere (`variations`: `submit` hands the same
call to `calls`, `warmup` starts without calling); `/fn/` streams raw HTTP (`passthrough`), and every path that is not the data plane's goes
to the controller. Under `/t/{tenant}/` are the functions that another tenant shares, or that are public.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from activator.admission import StrangerLimit
from activator.callers import Caller
from activator.calls import SubmittedCalls
from activator.choice import Choice
from activator.control import ControlPlane
from activator.dispatch import Call, Dispatcher, Exchange
from activator.entry import Entrance, Entry, split_tenant
from activator.idempotency.layer import KEY, Idempotency
from activator.idempotency.process import ProcessIdempotency
from activator.idempotency.store import IdempotencyStore
from activator.metrics import Metrics
from activator.model_servers import ModelServers, is_model_path
from activator.passthrough import Passthrough
from activator.quotas.admission import Admission
from activator.reception import RAW, TAG, Reception
from activator.relay import Relay
from activator.request import Receive, Request, Scope, Send
from activator.routes import Routed, RouteTable, Target
from activator.scaler import Scaler
from activator.settings import ActivatorSettings
from activator.shadows import Shadows
from activator.siblings import HEALTH, PASSED_ON
from activator.tracing.tracer import Tracer
from activator.upstream import UpstreamGone
from activator.variations import Variations
from activator.warm import WarmCalls, Way, is_simple
from pilotlight import errors
from pilotlight.protocol import CONTENT_PICKLE

log = logging.getLogger(__name__)

FUNCTIONS = "/v1/functions/"
CALLS = "/v1/calls/"
_PICKLE = CONTENT_PICKLE.encode()
_JSON = b"application/json"


MAX_RESOLVED = 16_384
"""Answers of route and authenticate that are remembered; each is small, and a flood of paths must not fill the memory."""

Handler = Callable[[Request, Entry, str], Awaitable[None]]


class _Resolved:
    """What route and authenticate found for one path and key."""

    __slots__ = ("caller", "handler", "method", "routed", "tag", "unasked", "way", "ways")

    def __init__(self, handler: Handler, caller: Caller, routed: Routed, method: str, tag: str) -> None:
        self.handler = handler
        self.caller = caller
        self.routed = routed
        self.method = method
        self.tag = tag
        self.unasked = ""
        self.way: Way | None = None
        self.ways: dict[Choice | Target, Way | None] | None = None

    @property
    def is_lasting(self) -> bool:
        """Whether it holds for further requests: not for a key that expires, nor for a caller who is known by its address only."""
        return self.caller.expires_at is None and not self.caller.is_anonymous

    def let_warm(self, entrance: Entrance) -> None:
        """From now on its calls may go without a task, where that is possible: `way` is for all of them, else `ways` by their choice."""
        routed, caller = self.routed, self.caller
        only = routed.choose(caller, {}, self.tag) if self.tag else routed.only
        if only is None:
            self.ways = {}
        else:
            self.way = _way(entrance, caller, only, self.method, is_told=bool(self.tag) or not routed.is_plain)

    def warm_way(self, entrance: Entrance, headers: dict[bytes, bytes]) -> Way | None:
        """The way of a call whose revision depends on the call; None when it cannot go without a task."""
        ways = self.ways
        if ways is None:
            return None
        choice = self.routed.choose(self.caller, headers)
        key = choice.target if choice.unit else choice  # there are many units, and what is remembered of them is bounded elsewhere
        if key in ways:
            way = ways[key]
        else:
            try:
                way = ways[key] = _way(entrance, self.caller, choice, self.method)
            except errors.PilotlightError:  # as an ordinary request it is told why
                way = ways[key] = None
        return way if way is None or way.choice is choice else way.told(choice)


def _way(entrance: Entrance, caller: Caller, choice: Choice, method: str, *, is_told: bool = True) -> Way | None:
    entry = entrance.entry(caller, choice.target)
    if entry.gate is not None and not entry.gate.is_immediate:
        return None
    return Way(entry, method, choice if is_told else None)


class Gateway:
    """The ASGI application in front of everything."""

    def __init__(
        self,
        *,
        settings: ActivatorSettings,
        table: RouteTable,
        entrance: Entrance,
        strangers: StrangerLimit,
        dispatcher: Dispatcher,
        calls: SubmittedCalls,
        scaler: Scaler,
        passthrough: Passthrough,
        control: ControlPlane,
        metrics: Metrics,
        tracer: Tracer | None = None,
        shadows: Shadows | None = None,
        idempotency: IdempotencyStore | None = None,
    ) -> None:
        self._settings = settings
        self._table = table
        self._entrance = entrance
        self._dispatcher = dispatcher
        self._calls = calls
        self._reception = Reception(table=table, entrance=entrance, strangers=strangers)
        self._variations = Variations(
            settings=settings, reception=self._reception, calls=calls, dispatcher=dispatcher, scaler=scaler, admit=self.admit
        )
        self.idempotency = Idempotency(
            idempotency or ProcessIdempotency(), reception=self._reception, ttl_s=settings.idempotency_ttl_s,
            max_body_bytes=settings.max_body_bytes, body_timeout_s=settings.body_timeout_s,
        )  # fmt: skip
        self._models = ModelServers(settings=settings, reception=self._reception, invoke=self.invoke)
        self._passthrough = passthrough
        self._control = control
        self._metrics = metrics
        self._tracer = tracer or Tracer()
        self._relay = Relay(metrics=metrics, tracer=self._tracer, heartbeat_s=settings.heartbeat_s, shadows=shadows)
        self.warm = WarmCalls(
            throttler_of=dispatcher.throttler_of, dispatcher=dispatcher, metrics=metrics, go_on=self._go_on, tracer=self._tracer,
            shadows=shadows,
        )  # fmt: skip
        self._resolved: dict[tuple[str, bytes, bytes], _Resolved] = {}
        self._resolved_at = -1
        self._verbs: dict[str, Handler] = {
            "invoke": self.invoke,
            "submit": self._variations.submit,
            "warmup": self._variations.warmup,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI 3."""
        if scope["type"] == "http":
            request = Request(scope, receive, send)
            is_once = KEY in request.headers and self.idempotency.concerns(request)
            await self._answer(request, self.idempotency.answer(request, self._plain) if is_once else self._route(request))
        elif scope["type"] == "websocket":
            await self._passthrough.websocket(scope, receive, send, self._reception.raw_entry)

    async def _plain(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The same for a request whose idempotency key was looked at."""
        request = Request(scope, receive, send)
        await self._answer(request, self._route(request))

    def find_warm(self, url: bytes, headers: dict[bytes, bytes]) -> Way | None:
        """What is known of a call that may go without a task (`activator.warm`); None when it must not, or was never resolved."""
        if self._resolved_at != self._table.generation:
            return None
        asked = (url.decode("latin-1"), headers.get(b"authorization", b""), headers.get(b"pilotlight-environment", b""))
        resolved = self._resolved.get(asked)
        if resolved is None or TAG in headers:
            return None
        way = resolved.way or resolved.warm_way(self._entrance, headers)
        if way is None or not is_simple(headers, max_body_bytes=way.entry.body_bytes):
            return None
        return way

    async def _go_on(self, request: Request, step: Coroutine[Any, Any, Exchange]) -> None:
        """A warm call that went out without a task stopped being simple."""
        await self._answer(request, self._finish(request, step))

    async def _answer(self, request: Request, work: Coroutine[Any, Any, None]) -> None:
        """Answer one request, whatever happens: errors become problem documents here and nowhere else."""
        connection = request.scope.get("connection")
        if connection is not None:
            connection.on_gone = asyncio.current_task().cancel  # type: ignore[union-attr]
        try:
            await work
        except errors.PilotlightError as e:
            self._metrics.turned_away(e, request.tenant, request.target, request.arm)
            if not request.is_answered:
                await request.respond_error(e)
                if request.call is not None:
                    self._tracer.failed(request.call, e.type, e.status)
        except UpstreamGone as e:
            log.warning("answer cut short call=%s error=%s", request.id, e)
            if connection is not None:
                connection.transport.abort()  # half an answer went out: only a broken connection tells the truth
        except asyncio.CancelledError:
            if connection is None or not connection.transport.is_closing():
                raise
            self._metrics.refused(499, request.target, request.arm)
            if request.call is not None and not request.is_answered:
                self._tracer.failed(request.call, "cancelled", 499)
        finally:
            if connection is not None:
                connection.on_gone = None

    async def _route(self, request: Request) -> None:
        path = request.path
        owner, place = split_tenant(path)
        if place.startswith(FUNCTIONS):
            resolved = self._resolve(request, owner, place)
            if resolved is not None:
                entry = self._reception.enter(request, resolved.caller, resolved.routed, resolved.tag, unasked=resolved.unasked)
                await resolved.handler(request, entry, resolved.method)
                return
        if is_model_path(place):
            await self._models.answer(request, owner, place)
        elif place.startswith(RAW):
            await self._passthrough.http(request, self._reception.raw_entry(request))
        elif owner is not None:
            raise errors.NotFound(f"nothing is served at {path}: functions of another tenant are under /t/<tenant>/v1/functions/ or /fn/")
        elif path.startswith(CALLS) and request.verb == "PUT":
            await self._variations.put_call(request, path[len(CALLS) :])
        elif path.startswith(CALLS):
            await self._calls.answer(request, self._reception.reader(request), path[len(CALLS) :])
        elif path == HEALTH:
            if PASSED_ON in request.headers and not request.address:  # a sibling, over our Unix socket
                await self._control.catch_up()
            await request.respond_json(200, {"status": "ok", "routes": self._table.version})
        else:
            await self._control.forward(request)

    def _resolve(self, request: Request, owner: str | None, place: str) -> _Resolved | None:
        """Route and authenticate, remembering the answer until anything that it rests on changes."""
        if self._resolved_at != self._table.generation or len(self._resolved) > MAX_RESOLVED:
            self._resolved.clear()
            self._resolved_at = self._table.generation
        headers = request.headers
        asked = (request.path, headers.get(b"authorization", b""), headers.get(b"pilotlight-environment", b""))
        resolved = self._resolved.get(asked)
        if resolved is None:
            address, _, verb = place[len(FUNCTIONS) :].rpartition(":")
            handler = self._verbs.get(verb)
            if handler is None or request.verb != "POST":
                return None
            caller = self._reception.identify(request, owner)
            routed, method, tag = self._reception.routed(request, caller, address, owner)
            resolved = _Resolved(handler, caller, routed, method, tag)
            if resolved.is_lasting and self._table.is_known(asked[1]):
                self._resolved[asked] = resolved
            if verb == "warmup" and caller.tenant == routed.tenant:
                resolved.unasked = routed.document.heaviest()  # not who answers until it is there
            if verb == "invoke" and resolved.is_lasting:
                resolved.let_warm(self._entrance)
        return resolved if request.verb == "POST" else None

    # -- the sentence -------------------------------------------------------------------------------------------------
    async def invoke(self, request: Request, entry: Entry, method: str) -> None:
        """`POST …:invoke`: call and wait for the answer."""
        admission = await entry.admit()
        try:
            call = await self.admit(request, entry, method, admission)
            await self._finish(request, self._dispatcher.begin(call))
        finally:
            if admission is not None:
                admission.release()

    async def _finish(self, request: Request, step: Coroutine[Any, Any, Exchange]) -> None:
        await self._relay.answer(request, step)

    async def admit(self, request: Request, entry: Entry, method: str, admission: Admission | None) -> Call:
        """Read the body within its bounds and check the arguments, before anything is started or billed."""
        check = entry.target.check(method)
        rank = entry.rank(request.headers)
        asked_ns = time.monotonic_ns()
        body = await request.body(limit_bytes=entry.body_bytes, timeout_s=self._settings.body_timeout_s)
        upload_ns = time.monotonic_ns() - asked_ns  # the caller's own time
        content_type = request.headers.get(b"content-type", _JSON)
        if content_type.startswith(_PICKLE):
            content_type = _PICKLE
        else:
            check.check(body)
            content_type = _JSON
        choice = request.choice
        call = request.call = Call(
            id=request.id,
            target=entry.target,
            method=method,
            key_id=entry.caller.key_id,
            body=body,
            content_type=content_type,
            accept=request.headers.get(b"accept", b""),
            deadline_s=_deadline(request),
            admission=admission,
            rank=rank,
            caller=entry.foreign,
            choice=choice,
            extra_headers=choice.line if choice is not None else b"",
        )
        call.began_ns, call.routed_ns = request.began_ns + upload_ns, request.routed_ns + upload_ns
        self._tracer.begin(call, request.headers)
        return call


def _deadline(request: Request) -> float | None:
    given = request.headers.get(b"pilotlight-timeout")
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= 7 * 86_400:
        raise errors.InvalidInput("header pilotlight-timeout: write the seconds you will wait, more than 0, at most 604800")
    return seconds
