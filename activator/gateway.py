"""A request's life, in one sentence: route → authenticate → admit → reserve → forward → meter.

`Gateway.invoke` is that sentence for a call that waits for its answer. Its neighbours are variations: `submit` hands the same call to
`calls`, `warmup` starts without calling, `/fn/` streams raw HTTP (`passthrough`), and every path that is not the data plane's goes to the
controller. Under `/t/{tenant}/` are the functions that another tenant shares, or that are public.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from activator import warmups
from activator.admission import StrangerLimit
from activator.callers import ANONYMOUS, Caller
from activator.calls import SubmittedCalls, function_of_put
from activator.control import ControlPlane
from activator.dispatch import Call, Dispatcher, Exchange
from activator.entry import Entrance, Entry, split_function, split_tenant
from activator.heads import call_head, closed_head, trace_lines
from activator.metrics import Metrics
from activator.passthrough import Passthrough
from activator.quotas.admission import Admission
from activator.request import Receive, Request, Scope, Send, header_list
from activator.routes import RouteTable
from activator.scaler import Scaler
from activator.settings import ActivatorSettings
from activator.siblings import HEALTH, PASSED_ON
from activator.targets import Targets, choose
from activator.upstream import UpstreamGone
from activator.warm import WarmCalls, Way, is_simple
from pilotlight import errors
from pilotlight.protocol import CONTENT_PICKLE, CONTENT_SSE
from pilotlight.types import DEFAULT_ENVIRONMENT, FunctionAddress, TenantId, parse_function_path
from pilotlight.types import Scope as KeyScope

log = logging.getLogger(__name__)

FUNCTIONS = "/v1/functions/"
CALLS = "/v1/calls/"
RAW = "/fn/"
_PICKLE = CONTENT_PICKLE.encode()
_JSON = b"application/json"
_SSE = CONTENT_SSE.encode()


MAX_RESOLVED = 16_384
"""Answers of route and authenticate that are remembered; each is small, and a flood of paths must not fill the memory."""
NOBODY = "-"
"""Stands for the id of a tenant that there is not."""
WAITED_MS = 1.0
"""A call that was given its slot later than this has waited for it."""

Handler = Callable[[Request, Entry, str], Awaitable[None]]


class _Resolved:
    """What route and authenticate found for one path and key."""

    __slots__ = ("caller", "handler", "method", "targets", "way")

    def __init__(self, handler: Handler, caller: Caller, targets: Targets, method: str) -> None:
        self.handler = handler
        self.caller = caller
        self.targets = targets
        self.method = method
        self.way: Way | None = None

    @property
    def is_lasting(self) -> bool:
        """Whether it holds for further requests: not for a key that expires, nor for a caller who is known by its address only."""
        return self.caller.expires_at is None and not self.caller.is_anonymous


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
    ) -> None:
        self._settings = settings
        self._table = table
        self._entrance = entrance
        self._strangers = strangers
        self._dispatcher = dispatcher
        self._calls = calls
        self._scaler = scaler
        self._passthrough = passthrough
        self._control = control
        self._metrics = metrics
        self.warm = WarmCalls(throttler_of=dispatcher.throttler_of, dispatcher=dispatcher, metrics=metrics, go_on=self._go_on)
        self._resolved: dict[tuple[str, bytes, bytes], _Resolved] = {}
        self._resolved_at = -1
        self._verbs: dict[str, Handler] = {
            "invoke": self.invoke,
            "submit": self.submit,
            "warmup": self.warmup,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI 3."""
        if scope["type"] == "http":
            request = Request(scope, receive, send)
            await self._answer(request, self._route(request))
        elif scope["type"] == "websocket":
            await self._passthrough.websocket(scope, receive, send, self._raw_entry)

    def find_warm(self, url: bytes, headers: dict[bytes, bytes]) -> Way | None:
        """What is known of a call that may go without a task (`activator.warm`); None when it must not, or was never resolved."""
        if self._resolved_at != self._table.generation:
            return None
        asked = (url.decode("latin-1"), headers.get(b"authorization", b""), headers.get(b"pilotlight-environment", b""))
        resolved = self._resolved.get(asked)
        if resolved is None or resolved.way is None or not is_simple(headers, max_body_bytes=resolved.way.entry.body_bytes):
            return None
        return resolved.way

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
            self._metrics.turned_away(e, request.tenant)
            if not request.is_answered:
                await request.respond_error(e)
        except UpstreamGone as e:
            log.warning("answer cut short call=%s error=%s", request.id, e)
            if connection is not None:
                connection.transport.abort()  # half an answer went out: only a broken connection tells the truth
        except asyncio.CancelledError:
            if connection is None or not connection.transport.is_closing():
                raise
            self._metrics.refused(499)
        finally:
            if connection is not None:
                connection.on_gone = None

    async def _route(self, request: Request) -> None:
        path = request.path
        owner, place = split_tenant(path)
        if place.startswith(FUNCTIONS):
            resolved = self._resolve(request, owner, place)
            if resolved is not None:
                entry = self._enter(request, resolved.caller, resolved.targets)
                await resolved.handler(request, entry, resolved.method)
                return
        if place.startswith(RAW):
            await self._passthrough.http(request, self._raw_entry(request))
        elif owner is not None:
            raise errors.NotFound(f"nothing is served at {path}: functions of another tenant are under /t/<tenant>/v1/functions/ or /fn/")
        elif path.startswith(CALLS) and request.verb == "PUT":
            await self.put_call(request, path[len(CALLS) :])
        elif path.startswith(CALLS):
            await self._calls.answer(request, self._reader(request), path[len(CALLS) :])
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
            caller = self._identify(request, owner)
            targets, method = self._targets(request, caller, address, owner)
            resolved = _Resolved(handler, caller, targets, method)
            if resolved.is_lasting and self._table.is_known(asked[1]):
                self._resolved[asked] = resolved
            if verb == "invoke" and resolved.is_lasting and len(targets) == 1:
                entry = self._entrance.entry(caller, targets[0][1])
                if entry.gate is None or entry.gate.is_immediate:
                    resolved.way = Way(entry, method)
        return resolved if request.verb == "POST" else None

    def _enter(self, request: Request, caller: Caller, targets: Targets) -> Entry:
        """The way in, of which the answer tells the quotas whatever becomes of the request. Raises Forbidden."""
        entry = self._entrance.entry(caller, choose(targets), request.address)
        request.gate = entry.gate
        request.tenant = caller.tenant or entry.target.tenant
        return entry

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
        exchange = await step
        call = exchange.call
        if call.queued_ms >= WAITED_MS:
            self._metrics.waited(call.rank.priority.value, call.queued_ms / 1000)
        if exchange.answer.body is None:
            await self._relay(request, exchange)
        else:
            await self._reply(request, exchange, exchange.answer.body)

    def authenticate(self, request: Request) -> Caller:
        """Who is calling. Raises Unauthenticated, or TooManyRequests for an address that keeps guessing."""
        authorization = request.headers.get(b"authorization", b"")
        if not self._table.is_known(authorization):
            self._strangers.guard(request.address, time.monotonic())
        try:
            return self._table.authenticate(authorization, time.time())
        except errors.Unauthenticated:
            self._strangers.check(request.address, time.monotonic())
            raise

    def _identify(self, request: Request, owner: str | None) -> Caller:
        """`authenticate`, but that a public function of a tenant that is named may be called without a key."""
        if owner is not None and b"authorization" not in request.headers:
            return ANONYMOUS
        return self.authenticate(request)

    def _reader(self, request: Request) -> Caller:
        """Who asks for a submitted call. Raises Forbidden for a key that may not call, and for a suspended tenant's."""
        caller = self.authenticate(request)
        caller.check_may_call()
        self._entrance.check_not_suspended(caller.tenant)
        return caller

    def _targets(self, request: Request, caller: Caller, path: str, owner: str | None = None) -> tuple[Targets, str]:
        try:
            app, function, method = parse_function_path(path)
        except ValueError as e:
            raise errors.NotFound(str(e)) from e
        asked = request.headers.get(b"pilotlight-environment", b"").decode("latin-1")
        environment = asked or caller.environment or DEFAULT_ENVIRONMENT
        caller.check_reach(environment=environment, app=app, function=function)
        tenant = caller.tenant if owner is None else self._table.tenant_named(owner) or NOBODY
        address = FunctionAddress(tenant=TenantId(tenant), environment=environment, app=app, function=function, method=method)
        try:
            return self._table.targets_for(caller, address), method
        except errors.NotFound as e:
            if not caller.is_anonymous:
                raise
            self._strangers.guard(request.address, time.monotonic())
            self._strangers.check(request.address, time.monotonic())
            raise errors.Unauthenticated("no API key: send the header 'Authorization: Bearer <key>'") from e

    async def admit(self, request: Request, entry: Entry, method: str, admission: Admission | None) -> Call:
        """Read the body within its bounds and check the arguments, before anything is started or billed."""
        check = entry.target.check(method)
        rank = entry.rank(request.headers)
        body = await request.body(limit_bytes=entry.body_bytes, timeout_s=self._settings.body_timeout_s)
        content_type = request.headers.get(b"content-type", _JSON)
        if content_type.startswith(_PICKLE):
            content_type = _PICKLE
        else:
            check.check(body)
            content_type = _JSON
        return Call(
            id=request.id,
            target=entry.target,
            method=method,
            key_id=entry.caller.key_id,
            body=body,
            content_type=content_type,
            accept=request.headers.get(b"accept", b""),
            deadline_s=_deadline(request),
            extra_headers=trace_lines(request.headers),
            admission=admission,
            rank=rank,
            caller=entry.foreign,
        )

    async def _reply(self, request: Request, exchange: Exchange, body: bytes) -> None:
        answer = exchange.answer
        outcome = "ok" if answer.status < 400 else "error"
        cost = exchange.close(status=answer.status, outcome=outcome, bytes_out=len(body))
        self._metrics.answered(exchange, answer.status)
        await request.respond_whole(answer.status, closed_head(exchange, cost), body)

    async def _relay(self, request: Request, exchange: Exchange) -> None:
        answer = exchange.answer
        sent, outcome, status = 0, "cancelled", 499
        try:
            await request.start(answer.status, header_list(call_head(exchange)))
            async for chunk in answer.chunks():
                sent += len(chunk)
                await request.chunk(chunk)
            outcome, status = ("ok", answer.status) if answer.status < 400 else ("error", answer.status)
        except UpstreamGone:
            outcome, status = "error", 502
            raise
        finally:
            cost = exchange.close(status=status, outcome=outcome, bytes_out=sent)
            self._metrics.answered(exchange, status)
        is_events = answer.header(b"content-type").startswith(_SSE)
        await request.chunk(_usage_event(exchange, cost) if is_events else b"", more=False)

    # -- variations ---------------------------------------------------------------------------------------------------
    async def submit(self, request: Request, entry: Entry, method: str) -> None:
        """`POST …:submit`: durable in the journal, then 202; the caller polls `GET /v1/calls/{id}`."""
        call = await self._admit_later(request, entry, method)
        await self._calls.submit(request, entry.caller, call)

    async def put_call(self, request: Request, own_id: str) -> None:
        """`PUT /v1/calls/{id}?function=app/function`: submit under an id of the caller's, so that a repeat is the same call."""
        caller = self._reader(request)
        if await self._calls.put_elsewhere(request, caller, own_id):
            return
        owner, function = split_function(function_of_put(request))
        targets, method = self._targets(request, caller, function, owner)
        entry = self._enter(request, caller, targets)
        call = await self._admit_later(request, entry, method)
        await self._calls.put(request, caller, call, own_id)

    async def _admit_later(self, request: Request, entry: Entry, method: str) -> Call:
        """A call that counts as a request now, and among those that run at once when it runs."""
        if entry.caller.is_anonymous:
            raise errors.Unauthenticated("submitting a call needs an API key: without one nobody could ask for its result")
        return await self.admit(request, entry, method, await entry.admit(holds=0))

    async def warmup(self, request: Request, entry: Entry, method: str) -> None:
        """`POST …:warmup`: make the next start fast; counts as a request. Needs scope `deploy` of the function's own tenant.

        `?snapshot=false` leaves the snapshot out; with `Accept: application/x-ndjson` its stages are told as they come.
        """
        if entry.foreign or not entry.caller.scope.reaches(KeyScope.DEPLOY):
            raise errors.Forbidden("warming up needs an API key of scope 'deploy' of the function's own tenant")
        await entry.admit(holds=0)
        self._dispatcher.check_start(entry.target)
        await request.body(limit_bytes=entry.body_bytes, timeout_s=self._settings.body_timeout_s)
        snapshot = b"snapshot=false" not in request.scope["query_string"].split(b"&")
        if warmups.wants_stages(request):
            await warmups.stream(request, partial(self._scaler.warm_up, entry.target, snapshot=snapshot))
        else:
            await request.respond_json(200, await self._scaler.warm_up(entry.target, snapshot=snapshot))

    def _raw_entry(self, request: Request) -> Entry:
        """`/fn/{app}/{function}/rest`, also under `/t/{tenant}`: the caller at the function."""
        owner, place = split_tenant(request.path)
        app, _, rest = place.removeprefix(RAW).partition("/")
        caller = self._identify(request, owner)
        targets, _ = self._targets(request, caller, f"{app}/{rest.partition('/')[0]}", owner)
        return self._enter(request, caller, targets)


def _usage_event(exchange: Exchange, cost: str) -> bytes:
    """The last event of a server-sent stream: what the call cost and how long it took (WHATWG HTML §9.2)."""
    data = b'{"cost":"%s","exec_ms":%.2f,"start":"%s"}' % (cost.encode(), exchange.exec_ms, exchange.call.start_kind.encode())
    return b"event: usage\ndata: " + data + b"\n\n"


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
