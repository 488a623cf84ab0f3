"""The ASGI application: which handler answers a request, and errors as problem documents.

`POST …:invoke` is a call (`pipeline`); `verbs` has the others (`submit` passes the call to
`async_calls`, `warmup` starts without a call). `/fn/` streams raw HTTP (`http_proxy`), and paths
that are not known here go to the controller. `/t/{tenant}/` serves functions that another tenant
shares or that are public."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any, Protocol

from activator.access.grants import AccessCache, AccessGrant, parse_tenant_prefix
from activator.access.resolver import FUNCTIONS, RAW, RequestResolver
from activator.arguments.checker import ArgumentChecker
from activator.async_calls.api import methods_of
from activator.async_calls.service import AsyncCalls
from activator.autoscaler.autoscaler_loop import AutoscalerLoop
from activator.calls.call import AnsweredCall, Call
from activator.calls.runner import CallRunner
from activator.control_plane.proxy import ControlPlaneProxy
from activator.coordination.peers import CALLING_FUNCTION, HEALTH, PASSED_ON, PLATFORM_TOKEN
from activator.gateway.fast_path import FastPath
from activator.gateway.health import READY, Health
from activator.gateway.http_proxy import HttpProxy
from activator.gateway.pipeline import CallPipeline
from activator.gateway.response_writer import CallObserver, ResponseWriter
from activator.gateway.route_cache import FastPathRoute, Handler, RouteCache
from activator.gateway.shadow_traffic import ShadowTraffic
from activator.gateway.verbs import SubmitAndWarmup
from activator.http.bodies import Bodies
from activator.http.dashboard_host import DashboardHost
from activator.http.request import CALLING, Handle, Receive, Request, Scope, Send
from activator.http.trusted_proxies import TrustedProxies
from activator.llm.openai.api import OpenAI, is_one_model, is_openai_path
from activator.llm.token_admission import TokenAdmission
from activator.metrics.metrics import Metrics
from activator.open_inference.api import V1, OpenInferenceApi, is_model_path
from activator.routing.call_origin import CallingFunction
from activator.routing.route_table import RouteTable
from activator.settings import ActivatorSettings
from activator.tracing.tracer import Tracer
from activator.worker_client.connection import WorkerConnectionLost
from pilotlight import errors

log = logging.getLogger(__name__)

CALLS = "/v1/calls/"
RAW_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
"""Methods of a web application: not TRACE, which would return a request's key to a script."""


class Middleware(Protocol):
    """A feature around requests (`activator.app` lists them).

    Attributes:
        header: it gets the requests with this header only; b"" = all.
    """

    @property
    def header(self) -> bytes: ...

    def handle(
        self, request: Request, *, inner: Handle, gateway: Gateway
    ) -> Coroutine[Any, Any, None]:
        """Answer a request, by `inner` where it does not concern this feature."""
        ...


class Gateway:
    """The ASGI application that handles all requests.

    Attributes:
        find_warm: returns the fast path route of a call that needs no task
            (`server.FastPathApplication`).
    """

    def __init__(
        self,
        *,
        settings: ActivatorSettings,
        table: RouteTable,
        access: AccessCache,
        resolver: RequestResolver,
        runner: CallRunner,
        calls: AsyncCalls,
        scaler: AutoscalerLoop,
        http_proxy: HttpProxy,
        control: ControlPlaneProxy,
        metrics: Metrics,
        bodies: Bodies,
        tracer: Tracer,
        shadows: ShadowTraffic | None,
        middleware: Sequence[Middleware],
        observers: Sequence[CallObserver],
        health: Health | None = None,
        arguments: ArgumentChecker | None = None,
        dashboard: DashboardHost | None = None,
        token: str = "",
    ) -> None:
        """`middleware`: features around requests, outermost first; `observers`: features at the end
        of calls. `dashboard`: decides between the origins, if the dashboard has its own.
        `token`: of the platform, which other activators send."""
        self._token = token.encode()
        self._dashboard = dashboard
        self._settings = settings
        self._proxies = (
            TrustedProxies(settings.trusted_proxies) if settings.trusted_proxies else None
        )
        self.bodies = bodies
        self._health = health or Health()
        self._tracer = tracer
        self._arguments = arguments or ArgumentChecker()
        self._table = table
        self._access = access
        self._runner = runner
        self._calls = calls
        self._resolver = resolver
        self._variations = SubmitAndWarmup(
            settings=settings,
            resolver=self._resolver,
            calls=calls,
            runner=runner,
            scaler=scaler,
            admit=self._admit_later,
        )
        handle: Handle = self._route
        for layer in reversed(middleware):
            handle = _around(
                handle, partial(layer.handle, inner=handle, gateway=self), layer.header
            )
        self._handle = handle
        writer = ResponseWriter(
            metrics=metrics, observers=observers, heartbeat_s=settings.heartbeat_s
        )
        self._pipeline = CallPipeline(
            runner=runner,
            writer=writer,
            arguments=self._arguments,
            tracer=self._tracer,
            body_timeout_s=settings.body_timeout_s,
        )
        self._models = OpenInferenceApi(
            settings=settings,
            resolver=self._resolver,
            run=self._pipeline.run_whole,
            arguments=self._arguments,
        )
        self._http_proxy = http_proxy
        self.openai = OpenAI(
            settings=settings,
            table=table,
            resolver=self._resolver,
            runner=runner,
            forward_raw=http_proxy.http,
            token_admission=TokenAdmission(
                waiting_of=lambda target: runner.throttler_of(target).waiting
            ),
            send=writer.answer,
            tracer=self._tracer,
        )
        self._control = control
        self._metrics = metrics
        self.warm = FastPath(
            throttler_of=runner.throttler_of,
            runner=runner,
            metrics=metrics,
            continue_in_task=self._continue_in_task,
            tracer=self._tracer,
            shadows=shadows,
        )
        verbs: dict[str, Handler] = {
            "invoke": self._invoke,
            "submit": self._variations.submit,
            "warmup": self._variations.warmup,
        }
        self._resolutions = RouteCache(
            table=table,
            resolver=self._resolver,
            access=access,
            verbs=verbs,
            counters_of=metrics.warm_counters,
        )
        self.find_warm = (
            self._resolutions.find_warm if dashboard is None else self._find_warm_elsewhere
        )

    def __repr__(self) -> str:
        return f"<Gateway {self._resolutions!r}>"

    def _find_warm_elsewhere(self, url: bytes, headers: dict[bytes, bytes]) -> FastPathRoute | None:
        """Find none at the dashboard's host, which serves no calls."""
        if self._dashboard is not None and self._dashboard.owns(headers):
            return None
        return self._resolutions.find_warm(url, headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI 3."""
        if self._proxies is not None:
            self._proxies.record_caller(scope)
        if scope["type"] == "http":
            request = Request(scope, receive, send)
            if CALLING_FUNCTION in request.headers:
                self._believe(request)
            await self._answer(request, self._handle(request))
        elif scope["type"] == "websocket":
            await self._http_proxy.websocket(
                scope, receive, send, self._web_socket_entry, self.bodies
            )

    def _believe(self, request: Request) -> None:
        """Set the function that made a request which another activator forwarded."""
        given = request.headers.get(PLATFORM_TOKEN, b"")
        if self._token and hmac.compare_digest(given, self._token):
            request.scope[CALLING] = CallingFunction.from_json(request.headers[CALLING_FUNCTION])

    def _web_socket_entry(self, request: Request) -> AccessGrant:
        """Return the access grant of a WebSocket's function. Raises NotFound, and the errors of
        `RequestResolver.raw_entry`."""
        if self._dashboard is not None and self._dashboard.owns(request.headers):
            raise self._dashboard.not_here(request)
        return self._resolver.raw_entry(request)

    def entry_of(self, request: Request) -> AccessGrant:
        """Return the access grant of a call that is not run yet. Raises the same errors as running
        it."""
        owner, place = parse_tenant_prefix(request.path)
        if not place.startswith(FUNCTIONS):
            return self._models.entry_of(request, owner, place)
        resolved = self._resolutions.resolve(request, owner, place)
        if resolved is None:
            raise errors.NotFound(f"nothing is served at {request.verb} {request.path}")
        return self._resolver.enter(
            request, resolved.caller, resolved.routed, resolved.tag, unasked=resolved.unasked
        )

    async def respond(self, request: Request, inner: Handle) -> None:
        """Answer a request that a middleware made, by its `inner`, errors included."""
        await self._answer(request, inner(request))

    async def _continue_in_task(
        self, request: Request, call: Call, step: Coroutine[Any, Any, AnsweredCall]
    ) -> None:
        """Continue a fast path call in a task."""
        await self._answer(request, self._pipeline.writer.answer(request, call, step))

    async def _answer(self, request: Request, work: Coroutine[Any, Any, None]) -> None:
        """Answer one request. Errors are converted to problem documents only here."""
        connection = request.scope.get("connection")
        task = asyncio.current_task()
        if connection is not None and task is not None:
            connection.on_gone = task.cancel
        try:
            await work
        except errors.PilotlightError as e:
            self._metrics.count_rejected(e, request.tenant, request.target, request.arm)
            if not request.is_answered:
                await request.respond_error(e)
                if request.on_failed is not None:
                    request.on_failed(e.type, e.status)
        except WorkerConnectionLost as e:
            log.warning("response interrupted call=%s error=%s", request.id, e)
            if connection is not None:
                # part of the response was sent: only a broken connection can signal the error
                connection.transport.abort()
        except asyncio.CancelledError:
            if connection is None or not connection.transport.is_closing():
                raise
            self._metrics.count_aborted(499, request.target, request.arm)
            if request.on_failed is not None and not request.is_answered:
                request.on_failed("cancelled", 499)
        finally:
            if connection is not None:
                connection.on_gone = None

    async def _route(self, request: Request) -> None:
        with self.bodies.room(request):
            await self._dispatch(request)

    async def _dispatch(self, request: Request) -> None:
        path = request.path
        owner, place = parse_tenant_prefix(path)
        if place.startswith(FUNCTIONS):
            resolved = self._resolutions.resolve(request, owner, place)
            if resolved is not None:
                entry = self._resolver.enter(
                    request,
                    resolved.caller,
                    resolved.routed,
                    resolved.tag,
                    unasked=resolved.unasked,
                )
                await resolved.handler(request, entry, resolved.method)
                return
            if self._resolutions.is_verb(place):
                request.require_method("POST")
        if is_openai_path(place):
            await self.openai.answer(request, owner, place)
        elif is_model_path(place):
            if not (
                is_one_model(request, place)
                and await self.openai.describe(request, owner, place.removeprefix(V1))
            ):
                await self._models.answer(request, owner, place)
        elif place.startswith(RAW):
            request.require_method(*RAW_METHODS)
            entry = self._resolver.raw_entry(request)
            await (
                self._http_proxy.http
                if entry.target.spec.engine is None
                else self.openai.answer_raw
            )(request, entry)
        elif owner is not None:
            raise errors.NotFound(
                f"nothing is served at {path}: functions of another tenant are under "
                f"/t/<tenant>/v1/functions/ or /fn/"
            )
        elif (
            path.startswith(CALLS)
            and request.verb == "PUT"
            and "PUT" in methods_of(path[len(CALLS) :])
        ):
            await self._variations.put_call(request, path[len(CALLS) :])
        elif path.startswith(CALLS):
            await self._calls.answer(request, self._resolver.reader(request), path[len(CALLS) :])
        elif path in (HEALTH, READY):
            await self._answer_health(request)
        else:
            await self._control.forward(request)

    async def _answer_health(self, request: Request) -> None:
        """Answer `/healthz` and `/readyz`, without authentication because probes have no key."""
        request.require_method("GET", "HEAD")
        if (
            PASSED_ON in request.headers and not request.address
        ):  # a peer activator, over our Unix socket
            await self._control.catch_up()
        await (
            self._health.require_ready() if request.path == READY else self._health.require_alive()
        )
        await request.respond_json(
            200,
            {"status": "ready" if request.path == READY else "ok", "routes": self._table.version},
        )

    # -- calls -------------------------------------------------------------------------------------
    async def _invoke(self, request: Request, entry: AccessGrant, method: str) -> None:
        """Handle `POST …:invoke`, of an engine by its own API."""
        if entry.target.spec.engine is not None:
            await self.openai.invoke(request, entry)
        else:
            await self._pipeline.invoke(request, entry, method)

    async def _admit_later(self, request: Request, entry: AccessGrant, method: str) -> Call:
        """Admit a call that counts as a request now, and towards the concurrency quota when it
        runs."""
        if entry.target.spec.engine is not None:
            return await self.openai.admit_later(request, entry)
        admission = await entry.admit(holds=0)
        return await self._pipeline.admit(request, entry, method, admission)


def _around(inner: Handle, outer: Handle, header: bytes) -> Handle:
    """Return a handler by `outer` for requests with `header` (b"" = all), by `inner` for others."""
    if not header:
        return outer
    return lambda request: (outer if header in request.headers else inner)(request)
