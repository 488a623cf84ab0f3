"""`POST /v1/functions/{path}:{verb}`: invoke a function, submit a call, warm it up, or bind
it; and `PUT /v1/calls/{id}`, which submits a call under the caller's own id."""

from __future__ import annotations

from functools import partial

from activator.access.grants import AccessGrant, split_function
from activator.access.resolver import RequestResolver
from activator.async_calls.service import AsyncCalls
from activator.async_calls.submission import function_of_put, id_under_key, is_under_key
from activator.autoscaler.warm_up import WarmUp
from activator.calls.call import Call
from activator.control_plane.bindings import BindingsApi
from activator.gateway import warmup_stream
from activator.gateway.pipeline import CallPipeline
from activator.gateway.route_cache import CachedRoute, CountersOf, Handler, RouteCache
from activator.http.request import Request
from activator.llm.openai.api import OpenAI
from activator.llm.openai.call import EngineCall, release_unless_stored
from activator.settings import ActivatorSettings
from pilotlight import errors
from pilotlight.spec.identifiers import Scope as KeyScope


class FunctionsApi:
    """Handles the requests of paths below `/v1/functions/`. Owner: the event loop.

    Attributes:
        verbs: handlers by verb.
        routes: their results of routing and authentication, by path and key.
    """

    def __init__(
        self,
        *,
        settings: ActivatorSettings,
        resolver: RequestResolver,
        pipeline: CallPipeline,
        openai: OpenAI,
        calls: AsyncCalls,
        warm_up: WarmUp,
        counters_of: CountersOf,
        bindings: BindingsApi,
    ) -> None:
        """`counters_of`: where warm calls are counted."""
        self._settings = settings
        self._resolver = resolver
        self._pipeline = pipeline
        self._openai = openai
        self._calls = calls
        self._warm_up = warm_up
        self.verbs: dict[str, Handler] = {
            "invoke": self.invoke,
            "submit": self.submit,
            "warmup": self.warmup,
            "bind": bindings.bind,
        }
        calls.admit_line = self.admit_line
        self.routes = RouteCache(resolver=resolver, verbs=self.verbs, counters_of=counters_of)

    def __repr__(self) -> str:
        return f"<FunctionsApi {self.routes!r}>"

    async def answer(self, request: Request, owner: str | None, place: str) -> bool:
        """Answer a request; False where its path has no verb. Raises what calls raise."""
        resolved = self.routes.resolve(request, owner, place)
        if resolved is not None:
            await resolved.handler(request, self._enter(request, resolved), resolved.method)
        elif self.routes.is_verb(place):
            request.require_method("POST")
        return resolved is not None

    def entry_of(self, request: Request, owner: str | None, place: str) -> AccessGrant:
        """Return the access grant of a call that is not run yet. Raises the same errors as running
        it."""
        resolved = self.routes.resolve(request, owner, place)
        if resolved is None:
            raise errors.NotFound(f"nothing is served at {request.verb} {request.path}")
        return self._enter(request, resolved)

    def _enter(self, request: Request, resolved: CachedRoute) -> AccessGrant:
        return self._resolver.enter(
            request, resolved.caller, resolved.routed, resolved.tag, unasked=resolved.unasked
        )

    async def invoke(self, request: Request, entry: AccessGrant, method: str) -> None:
        """Handle `POST …:invoke`, of an engine by its own API."""
        if entry.target.spec.language_model is not None:
            await self._openai.invoke(request, entry)
        elif entry.target.spec.sandbox:
            raise errors.InvalidInput(
                "this function makes sandboxes: submit its call, whose id is the sandbox's"
            )
        else:
            await self._pipeline.invoke(request, entry, method)

    async def submit(self, request: Request, entry: AccessGrant, method: str) -> None:
        """Handle `POST …:submit`: store the call in the journal, then answer 202; the caller polls
        `GET /v1/calls/{id}`."""
        if is_under_key(request) and await self._calls.forward_put(
            request, entry.caller, id_under_key(request, entry.caller)
        ):
            return
        call = await self._admit_later(request, entry, method)
        with release_unless_stored(call):
            await self._calls.submit(request, entry.caller, call)

    async def put_call(self, request: Request, own_id: str) -> None:
        """Handle `PUT /v1/calls/{id}?function=app/function`: submit under the caller's own id, so
        that a repeat is the same call."""
        caller = self._resolver.reader(request)
        if await self._calls.forward_put(request, caller, own_id):
            return
        owner, function = split_function(function_of_put(request))
        routed, method, tag = self._resolver.routed(request, caller, function, owner)
        entry = self._resolver.enter(request, caller, routed, tag)
        call = await self._admit_later(request, entry, method)
        with release_unless_stored(call):
            await self._calls.put(request, caller, call, own_id)

    async def _admit_later(self, request: Request, entry: AccessGrant, method: str) -> Call:
        """Admit a call that counts as a request now, and towards the concurrency quota when it
        runs."""
        if entry.caller.is_anonymous:
            raise errors.Unauthenticated(
                "submitting a call needs an API key, which is required to read its result: send an "
                "Authorization header"
            )
        entry.caller.require_key()
        with self._calls.reading(entry.caller.tenant, _size_of(request, entry)):
            if entry.target.spec.language_model is not None:
                return await self._openai.admit_later(request, entry)
            admission = await entry.admit(holds=0)
            return await self._pipeline.admit(request, entry, method, admission)

    async def admit_line(self, entry: AccessGrant, call: Call) -> None:
        """Admit the call of a batch's line before its first attempt: its arguments, or its tokens,
        and the quotas of its key. Raises InvalidInput, OverQuota, TooManyRequests, Unavailable."""
        if isinstance(call, EngineCall):
            await self._openai.admit_line(entry, call)
        else:
            await self._pipeline.admit_line(entry, call)

    async def warmup(self, request: Request, entry: AccessGrant, method: str) -> None:
        """Handle `POST …:warmup`: make the next start fast. Counts as a request, and needs scope
        `deploy` of the function's own tenant.

        `?snapshot=false` skips the snapshot; with `Accept: application/x-ndjson` the response
        streams the stages."""
        if entry.calling_tenant or not entry.caller.scope.reaches(KeyScope.DEPLOY):
            raise errors.Forbidden(
                "warming up needs an API key of scope 'deploy' of the function's own tenant"
            )
        request.target = None  # not a call, whatever the result
        await entry.admit(holds=0)
        self._pipeline.runner.check_start(entry.target)
        await request.body(limit_bytes=entry.body_bytes, timeout_s=self._settings.body_timeout_s)
        snapshot = b"snapshot=false" not in request.scope["query_string"].split(b"&")
        if warmup_stream.accepts_progress(request):
            await warmup_stream.stream(
                request, partial(self._warm_up.run, entry.target, snapshot=snapshot)
            )
        else:
            await request.respond_json(
                200, await self._warm_up.run(entry.target, snapshot=snapshot)
            )


def _size_of(request: Request, entry: AccessGrant) -> int:
    """Return the maximum size of a request's body in bytes."""
    declared = request.headers.get(b"content-length", b"")
    if b"content-encoding" in request.headers:
        return entry.body_bytes
    return min(int(declared), entry.body_bytes) if declared.isdigit() else entry.body_bytes
