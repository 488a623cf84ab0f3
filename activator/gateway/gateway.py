"""The ASGI application: a request passes the middleware to its API (`router`), and errors become
problem documents."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any, Protocol

from activator.access.grants import AccessGrant
from activator.calls.call import AnsweredCall, Call
from activator.gateway.fast_path import FastPath
from activator.gateway.forwarded_callers import ForwardedCallers
from activator.gateway.pipeline import CallPipeline
from activator.gateway.route_cache import WarmHead
from activator.gateway.router import RequestRouter
from activator.gateway.shadow_traffic import ShadowTraffic
from activator.http.bodies import Bodies
from activator.http.dashboard_host import DashboardHost
from activator.http.request import Handle, Receive, Request, Scope, Send
from activator.metrics.metrics import Metrics
from activator.worker_client.connection import WorkerConnectionLost
from pilotlight import errors

log = logging.getLogger(__name__)


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


class Gateway:
    """The ASGI application that handles all requests.

    Attributes:
        warm: begins the calls that need no task.
        find_warm, find_known, remember: find and keep the heads of calls that need no task
            (`server.FastPathApplication`).
    """

    def __init__(
        self,
        *,
        router: RequestRouter,
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
        self._router = router
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
        self.find_warm = router.find_warm if dashboard is None else self._find_warm_elsewhere
        self.find_known, self.remember = router.find_known, router.remember

    def __repr__(self) -> str:
        return f"<Gateway {self._router!r}>"

    def _find_warm_elsewhere(self, url: bytes, headers: dict[bytes, bytes]) -> WarmHead | None:
        """Find none at the dashboard's host, which serves no calls."""
        if self._dashboard is not None and self._dashboard.owns(headers):
            return None
        return self._router.find_warm(url, headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI 3."""
        if self._forwarded is not None:
            self._forwarded.record(scope)
        if scope["type"] == "http":
            request = Request(scope, receive, send)
            await self._answer(request, self._handle(request))
        elif scope["type"] == "websocket":
            await self._router.websocket(scope, receive, send, self._web_socket_entry, self.bodies)

    def _web_socket_entry(self, request: Request) -> AccessGrant:
        """Return the access grant of a WebSocket's function. Raises NotFound, and the errors of
        `RequestResolver.raw_entry`."""
        if self._dashboard is not None and self._dashboard.owns(request.headers):
            raise self._dashboard.not_here(request)
        return self._router.raw_entry(request)

    def entry_of(self, request: Request) -> AccessGrant:
        """Return the access grant of a call that is not run yet. Raises the same errors as running
        it."""
        return self._router.entry_of(request)

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
            await self._router.answer(request)


def _around(inner: Handle, outer: Handle, header: bytes) -> Handle:
    """Return a handler by `outer` for requests with `header` (b"" = all), by `inner` for others."""
    if not header:
        return outer
    return lambda request: (outer if header in request.headers else inner)(request)
