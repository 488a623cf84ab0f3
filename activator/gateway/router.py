"""Which API answers a request, by its path.

`POST …:invoke` and the other verbs are `functions_api`, models by the protocols of others
`llm.openai` and `open_inference`. `/fn/` streams raw HTTP (`http_proxy`), and paths that are not
known here go to the controller. `/t/{tenant}/` serves functions that another tenant shares or that
are public."""

from __future__ import annotations

from activator.access.grants import AccessGrant, parse_tenant_prefix
from activator.access.resolver import FUNCTIONS, RAW, RequestResolver
from activator.async_calls.api import methods_of
from activator.async_calls.service import AsyncCalls
from activator.control_plane.proxy import ControlPlaneProxy
from activator.coordination.peers import HEALTH
from activator.gateway.functions_api import FunctionsApi
from activator.gateway.health import READY, HealthApi
from activator.gateway.http_proxy import HttpProxy
from activator.http.request import Request
from activator.llm.openai.api import OpenAI, is_one_model, is_openai_path
from activator.open_inference.api import V1, OpenInferenceApi, is_model_path
from pilotlight import errors
from pilotlight.spec.sandboxes import SANDBOXES_PATH

CALLS = "/v1/calls/"
RAW_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
"""Methods of a web application: not TRACE, which would return a request's key to a script."""


class RequestRouter:
    """Passes requests to APIs. Owner: the event loop.

    Attributes:
        find_warm, find_known, remember: find and keep the heads of calls that need no task.
        websocket: answers a WebSocket.
    """

    def __init__(
        self,
        *,
        resolver: RequestResolver,
        functions: FunctionsApi,
        openai: OpenAI,
        models: OpenInferenceApi,
        http_proxy: HttpProxy,
        calls: AsyncCalls,
        control: ControlPlaneProxy,
        health: HealthApi,
    ) -> None:
        self._resolver = resolver
        self._functions = functions
        self._openai = openai
        self._models = models
        self._http_proxy = http_proxy
        self._calls = calls
        self._control = control
        self._health = health
        routes = functions.routes
        self.find_warm, self.find_known, self.remember = (
            routes.find_warm,
            routes.find_known,
            routes.remember,
        )
        self.websocket = http_proxy.websocket

    def __repr__(self) -> str:
        return f"<RequestRouter {self._functions!r}>"

    def raw_entry(self, request: Request) -> AccessGrant:
        """Return the access grant of a WebSocket (`RequestResolver.raw_entry`)."""
        return self._resolver.raw_entry(request)

    def entry_of(self, request: Request) -> AccessGrant:
        """Return the access grant of a call that is not run yet. Raises the same errors as running
        it."""
        owner, place = parse_tenant_prefix(request.path)
        api = self._functions if place.startswith(FUNCTIONS) else self._models
        return api.entry_of(request, owner, place)

    async def answer(self, request: Request) -> None:
        """Answer a request by the API of its path. Raises PilotlightError."""
        path = request.path
        owner, place = parse_tenant_prefix(path)
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
        else:
            await self._control.forward(request)
