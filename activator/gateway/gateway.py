"""The ASGI application: a request passes the middleware to the API of its path, and errors become
problem documents.

`POST …:invoke` and the other verbs are `functions_api`, models by the protocols of others
`llm.openai` and `open_inference`. `/fn/` streams raw HTTP (`http_proxy`), and paths that are not
known here go to the controller. `/t/{tenant}/` serves functions that another tenant shares or that
are public."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from activator.access.grants import AccessGrant, parse_tenant_prefix
from activator.access.resolver import FUNCTIONS, RAW, RequestResolver
from activator.async_calls.api import methods_of
from activator.async_calls.service import AsyncCalls
from activator.calls.call import AnsweredCall, Call
from activator.control_plane.proxy import ControlPlaneProxy
from activator.coordination.peers import HEALTH
from activator.gateway.fast_path import FastPath
from activator.gateway.forwarded_callers import ForwardedCallers
from activator.gateway.functions_api import FunctionsApi
from activator.gateway.health import READY, HealthApi
from activator.gateway.http_proxy import HttpProxy
from activator.gateway.pipeline import CallPipeline
from activator.gateway.route_cache import WarmHead
from activator.gateway.shadow_traffic import ShadowTraffic
from activator.http.bodies import Bodies
from activator.http.dashboard_host import DashboardHost
from activator.http.request import FORWARDED, Handle, Receive, Request, Scope, Send
from activator.llm.openai.api import OpenAI, is_one_model, is_openai_path
from activator.metrics.metrics import Metrics
from activator.open_inference.api import V1, OpenInferenceApi, is_model_path
from activator.worker_client.connection import WorkerConnectionLost
from pilotlight import errors
from pilotlight.spec.sandboxes import SANDBOXES_PATH

log = logging.getLogger(__name__)

CALLS = "/v1/calls/"
_STORAGE = ("/v1/volumes/", "/v1/volume-chunks/", "/v1/dicts/", "/v1/queues/")
"""Paths whose requests count as operations, and are the controller's."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Apis:
    """What answers requests, by their path; `resolver` finds the callers."""

    resolver: RequestResolver
    functions: FunctionsApi
    openai: OpenAI
    models: OpenInferenceApi
    http_proxy: HttpProxy
    calls: AsyncCalls
    control: ControlPlaneProxy
    health: HealthApi


class Gateway:
    """The ASGI application that handles all requests. Owner: the event loop.

    Attributes:
        warm: begins the calls that need no task.
        find_warm, find_known, remember: find and keep the heads of calls that need no task
            (`server.FastPathApplication`).
    """

    def __init__(
        self,
        *,
        apis: Apis,
        pipeline: CallPipeline,
        metrics: Metrics,
        bodies: Bodies,
        shadows: ShadowTraffic | None = None,
        middleware: Sequence[Middleware] = (),
        dashboard: DashboardHost | None = None,
        forwarded: ForwardedCallers | None = None,
    ) -> None:
        """`bodies`: memory of bodies while they are read. `middleware`: features around requests,
        outermost first. `dashboard`: decides between the origins, if the dashboard has its own.
        `forwarded`: None = every request comes from its caller itself."""
        self._resolver = apis.resolver
        self._functions = apis.functions
        self._openai = apis.openai
        self._models = apis.models
        self._http_proxy = apis.http_proxy
        self._calls = apis.calls
        self._control = apis.control
        self._health = apis.health
        self._writer = pipeline.writer
        self._metrics = metrics
        self.bodies = bodies
        self._dashboard = dashboard
        self._forwarded = forwarded
        handle: Handle = self._route
        for layer in reversed(middleware):
            handle = _around(
                handle, partial(layer.handle, inner=handle, gateway=self), layer.header
            )
        self._handle = handle
        self.warm = FastPath(
            runner=pipeline.runner,
            metrics=metrics,
            continue_in_task=self._continue_in_task,
            tracer=pipeline.tracer,
            shadows=shadows,
        )
        self._routes = routes = apis.functions.routes
        self.find_warm = routes.find_warm if dashboard is None else self._find_warm_elsewhere
        self.find_known, self.remember = routes.find_known, routes.remember

    def __repr__(self) -> str:
        return f"<Gateway {self._functions!r}>"

    def _find_warm_elsewhere(self, url: bytes, headers: dict[bytes, bytes]) -> WarmHead | None:
        """Find none at the dashboard's host, which serves no calls."""
        if self._dashboard is not None and self._dashboard.owns(headers):
            return None
        return self._routes.find_warm(url, headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI 3."""
        if self._forwarded is not None:
            self._forwarded.record(scope)
        if scope["type"] == "http":
            request = Request(scope, receive, send)
            await self._answer(request, self._handle(request))
        elif scope["type"] == "websocket":
            await self._http_proxy.websocket(
                scope, receive, send, self._web_socket_entry, self.bodies
            )

    async def _web_socket_entry(self, request: Request) -> AccessGrant:
        """Return the access grant of a WebSocket's function. Raises NotFound, and the errors of
        `RequestResolver.raw_entry`."""
        if self._dashboard is not None and self._dashboard.owns(request.headers):
            raise self._dashboard.not_here(request)
        await self._resolver.verify_token(request)
        return self._resolver.raw_entry(request)

    def entry_of(self, request: Request) -> AccessGrant:
        """Return the access grant of a call that is not run yet. Raises the same errors as running
        it."""
        owner, place = parse_tenant_prefix(request.path)
        api = self._functions if place.startswith(FUNCTIONS) else self._models
        return api.entry_of(request, owner, place)

    async def respond(self, request: Request, inner: Handle) -> None:
        """Answer a request that a middleware made, by its `inner`, errors included."""
        await self._answer(request, inner(request))

    async def _continue_in_task(
        self, request: Request, call: Call, step: Coroutine[Any, Any, AnsweredCall]
    ) -> None:
        """Continue a fast path call in a task."""
        await self._answer(request, self._writer.answer(request, call, step))

    async def _answer(self, request: Request, work: Coroutine[Any, Any, None]) -> None:
        """Answer one request. Errors are converted to problem documents only here."""
        connection = request.scope.get("connection")
        task = asyncio.current_task()
        if connection is not None and task is not None:
            connection.on_gone = task.cancel
        try:
            await work
        except errors.PilotlightError as e:
            # of activators that do not hold a call, the one that asks them counts it
            if FORWARDED not in request.scope or not isinstance(e, errors.NotFound):
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
            self._metrics.count_aborted(request.target, request.arm)
            if request.on_failed is not None and not request.is_answered:
                request.on_failed("cancelled", 499)
        finally:
            if connection is not None:
                connection.on_gone = None

    async def _route(self, request: Request) -> None:
        """Answer a request by the API of its path. Raises PilotlightError."""
        path = request.path
        owner, place = parse_tenant_prefix(path)
        with self.bodies.room(request):
            if place.startswith(FUNCTIONS) and await self._functions.answer(request, owner, place):
                return
            if is_openai_path(place):
                await self._openai.answer(request, owner, place)
            elif is_model_path(place):
                if not (
                    is_one_model(request, place)
                    and await self._openai.describe(request, owner, place.removeprefix(V1))
                ):
                    await self._models.answer(request, owner, place)
            elif place.startswith(RAW):
                request.require_method(*RAW_METHODS)
                entry = self._resolver.raw_entry(request)
                await (
                    self._http_proxy.http
                    if entry.target.spec.language_model is None
                    else self._openai.answer_raw
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
                await self._functions.put_call(request, path[len(CALLS) :])
            elif path.startswith(CALLS):
                async with self._resolver.operation(request) as caller:
                    await self._calls.answer(request, caller, path[len(CALLS) :])
            elif path.startswith(SANDBOXES_PATH):
                async with self._resolver.operation(request) as caller:
                    await self._calls.sandboxes.answer(request, caller, path[len(SANDBOXES_PATH) :])
            elif path in (HEALTH, READY):
                await self._health.answer(request)
            elif path.startswith(_STORAGE):
                async with self._resolver.storage_operation(request):
                    await self._control.forward(request)
            else:
                await self._control.forward(request)


def _around(inner: Handle, outer: Handle, header: bytes) -> Handle:
    """Return a handler by `outer` for requests with `header` (b"" = all), by `inner` for others."""
    if not header:
        return outer
    return lambda request: (outer if header in request.headers else inner)(request)
