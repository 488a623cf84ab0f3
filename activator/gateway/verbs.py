"""The verbs besides `invoke`: submit a call, submit it under the caller's own id, or warm up a
function."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from activator.access.grants import AccessGrant, split_function
from activator.access.resolver import RequestResolver
from activator.async_calls.service import AsyncCalls, function_of_put, id_under_key, is_under_key
from activator.autoscaler.autoscaler_loop import AutoscalerLoop
from activator.calls.call import Call
from activator.calls.runner import CallRunner
from activator.gateway import warmup_stream
from activator.http.request import Request
from activator.llm.openai.call import kept_or_left
from activator.settings import ActivatorSettings
from pilotlight import errors
from pilotlight.spec.identifiers import Scope as KeyScope

AdmitLater = Callable[[Request, AccessGrant, str], Awaitable[Call]]
"""Callback of the gateway that counts a request, reads its body and checks its arguments."""


class SubmitAndWarmup:
    """The gateway's verbs except `invoke`."""

    def __init__(
        self,
        *,
        settings: ActivatorSettings,
        resolver: RequestResolver,
        calls: AsyncCalls,
        runner: CallRunner,
        scaler: AutoscalerLoop,
        admit: AdmitLater,
    ) -> None:
        self._settings = settings
        self._resolver = resolver
        self._calls = calls
        self._runner = runner
        self._scaler = scaler
        self._admit = admit

    def __repr__(self) -> str:
        return f"<SubmitAndWarmup {self._calls!r}>"

    async def submit(self, request: Request, entry: AccessGrant, method: str) -> None:
        """Handle `POST …:submit`: store the call in the journal, then answer 202; the caller polls
        `GET /v1/calls/{id}`."""
        if is_under_key(request) and await self._calls.forward_put(
            request, entry.caller, id_under_key(request, entry.caller)
        ):
            return
        call = await self._admit_later(request, entry, method)
        with kept_or_left(call):
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
        with kept_or_left(call):
            await self._calls.put(request, caller, call, own_id)

    async def _admit_later(self, request: Request, entry: AccessGrant, method: str) -> Call:
        """Admit a call that counts as a request now, and towards the concurrency quota when it
        runs."""
        if entry.caller.is_anonymous:
            raise errors.Unauthenticated(
                "submitting a call needs an API key, which is required to read its result: send an "
                "Authorization header"
            )
        with self._calls.reading(entry.caller.tenant, _size_of(request, entry)):
            return await self._admit(request, entry, method)

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
        self._runner.check_start(entry.target)
        await request.body(limit_bytes=entry.body_bytes, timeout_s=self._settings.body_timeout_s)
        snapshot = b"snapshot=false" not in request.scope["query_string"].split(b"&")
        if warmup_stream.accepts_progress(request):
            await warmup_stream.stream(
                request, partial(self._scaler.warm_up, entry.target, snapshot=snapshot)
            )
        else:
            await request.respond_json(
                200, await self._scaler.warm_up(entry.target, snapshot=snapshot)
            )


def _size_of(request: Request, entry: AccessGrant) -> int:
    """Return the maximum size of a request's body in bytes."""
    declared = request.headers.get(b"content-length", b"")
    if b"content-encoding" in request.headers:
        return entry.body_bytes
    return min(int(declared), entry.body_bytes) if declared.isdigit() else entry.body_bytes
