"""What happens to a call: route → authenticate → admit → reserve → forward → meter.

`routing` has found the function and its caller before (`AccessGrant`). Here the call is admitted:
quotas, body, arguments. `CallRunner` reserves a slot and forwards it, `ResponseWriter` sends the
response and closes the attempt, which meters it. The fast path takes the same steps for a warm call
without a task (`fast_path`)."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from activator.access.grants import AccessGrant
from activator.arguments import binary_bodies
from activator.arguments.checker import ArgumentChecker
from activator.calls.call import AnsweredCall, Call
from activator.calls.runner import CallRunner
from activator.gateway.response_writer import ResponseWriter
from activator.http.payloads import CONTENT_TYPE, JSON, TENSORS, Payload, binary_type
from activator.http.request import Request, accept_of
from activator.quotas.admission import Admission
from activator.response_cache.cached_calls import CachedCalls
from activator.tracing.tracer import Tracer
from pilotlight.core.binary_tensors import values_of
from pilotlight.protocol import CONTENT_BYTES

ReadArguments = Callable[[], Awaitable[Payload]]
"""Reads a request, and returns arguments in JSON or TENSORS."""


class CallPipeline:
    """Runs calls whose callers wait for the response. Owner: the event loop.

    Attributes:
        runner: runs admitted calls.
        writer: sends responses to callers.
        tracer: traces calls."""

    def __init__(
        self,
        *,
        runner: CallRunner,
        writer: ResponseWriter,
        arguments: ArgumentChecker,
        tracer: Tracer,
        body_timeout_s: float,
        cached: CachedCalls,
    ) -> None:
        """`body_timeout_s`: how long a caller may take to send its body. `cached`: runs calls of
        functions with a response cache."""
        self.runner = runner
        self.writer = writer
        self._arguments = arguments
        self.tracer = tracer
        self._body_timeout_s = body_timeout_s
        self._cached = cached

    def __repr__(self) -> str:
        return f"<CallPipeline {self.runner!r}>"

    async def invoke(self, request: Request, entry: AccessGrant, method: str) -> None:
        """Run a call and send its response. Raises what `admit`, the runner and the writer
        raise."""
        with await entry.admit() as admission:
            call = await self.admit(request, entry, method, admission)
            await self.writer.answer(request, call, self._begin(request, call))

    async def run_whole(
        self, request: Request, entry: AccessGrant, method: str, read_arguments: ReadArguments
    ) -> tuple[int, bytes, bytes]:
        """Run a call for an adapter that translates its arguments and its whole response. Returns
        status, header lines and body."""
        with await entry.admit() as admission:
            call = await self.admit(
                request, entry, method, admission, read_arguments=read_arguments
            )
            return await self.writer.collect(request, await self._begin(request, call))

    def _begin(self, request: Request, call: Call) -> Coroutine[Any, Any, AnsweredCall]:
        terms = call.target.cache
        if terms is None or call.is_replay:
            return self.runner.begin(call)
        return self._cached.begin(call, terms, request.headers)

    async def admit(
        self,
        request: Request,
        entry: AccessGrant,
        method: str,
        admission: Admission,
        *,
        read_arguments: ReadArguments | None = None,
    ) -> Call:
        """Check the content type, read the body within its limits and check the arguments, before
        anything is started or billed. `read_arguments`: reads arguments in the body's place, for an
        adapter.

        Raises NotFound, InvalidInput, TooLarge, TooManyRequests, UnsupportedMediaType."""
        check = entry.target.check(method)
        caller = entry.caller_of(request.headers, request.origin)
        if read_arguments is None:
            read_arguments = self._reader(request, entry, method)
        asked_ns = time.monotonic_ns()
        payload = await read_arguments()
        upload_ns = time.monotonic_ns() - asked_ns  # time spent by the caller
        if payload.content_type is JSON:
            await self._arguments.check(check, payload.body, tenant=entry.target.tenant)
        elif payload.content_type is TENSORS:
            await self._arguments.check(
                entry.target.tensor_check(method),
                values_of(payload.body),
                tenant=entry.target.tenant,
            )
        call = Call(
            id=request.id,
            target=entry.target,
            method=method,
            payload=payload,
            caller=caller,
            admission=admission,
            choice=request.choice,
            deadline_s=request.deadline_s(),
        )
        call.began_ns, call.routed_ns = request.began_ns + upload_ns, request.routed_ns + upload_ns
        self.tracer.begin(call, request.headers)
        request.on_failed = partial(self.tracer.failed, call)
        return call

    def _reader(self, request: Request, entry: AccessGrant, method: str) -> ReadArguments:
        """Return what reads the body of a call by its content type. Raises InvalidInput,
        UnsupportedMediaType."""
        content_type = entry.content_type(request.headers)
        accept = accept_of(request.headers)
        binary = binary_type(request.headers.get(CONTENT_TYPE)).decode()
        parameter = ""
        if binary:
            parameter = binary_bodies.parameter_of(binary, entry.target.method(method))
            if not parameter and binary != CONTENT_BYTES:  # which is JSON for other functions
                raise binary_bodies.not_taken(binary)

        async def read() -> Payload:
            body = await request.body(limit_bytes=entry.body_bytes, timeout_s=self._body_timeout_s)
            if parameter:
                return Payload(binary_bodies.packed(binary, parameter, body), TENSORS, accept)
            return Payload(body, content_type, accept)

        return read

    async def admit_line(self, entry: AccessGrant, call: Call) -> None:
        """Admit the call of a batch's line, whose body is loaded. Raises InvalidInput, OverQuota,
        TooManyRequests, Unavailable."""
        check = entry.target.check(call.method)
        await self._arguments.check(check, call.body, tenant=entry.target.tenant)
        call.admission = await entry.admit(holds=0)
