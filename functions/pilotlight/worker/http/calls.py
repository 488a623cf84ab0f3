"""`POST /invoke/<method>`: handles one call from its request body to its response.

Unpickling executes code of the caller. A pickle is therefore refused, unread, unless the activator
states that it comes from the function's own tenant (HEADER_TRUSTED_PICKLE).

`async def` functions run in the request's own task, synchronous ones in a call thread. When the
caller disconnects or the deadline passes, the call is stopped: the task is cancelled, or
CallCancelled is raised in the thread. A call counts as running until the function has ended, even
if its caller has disconnected; calls beyond `max_inputs` are answered 503 with outcome `busy`,
which is safe to retry elsewhere."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import math
import types
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any

from pilotlight.errors import InvalidInput, NotFound, Unavailable, UnsupportedMediaType
from pilotlight.protocol import (
    CONTENT_JSON,
    CONTENT_PICKLE,
    CONTENT_SSE,
    HEADER_ATTEMPT,
    HEADER_CALL,
    HEADER_DEADLINE,
    HEADER_FINISH,
    HEADER_PRIORITY,
    HEADER_TRUSTED_PICKLE,
    WORKER_INVOKE,
    is_pickle,
)
from pilotlight.sdk.batches import WrongResults
from pilotlight.sdk.context import CURRENT_CALL as RUNNING
from pilotlight.sdk.spans import CURRENT_RECORDER
from pilotlight.worker.batching.batcher import Batcher
from pilotlight.worker.http.execution_deadlines import ExecutionDeadlines
from pilotlight.worker.http.http_responses import (
    end,
    read_body,
    send_document,
    send_problem,
    send_response,
    start,
)
from pilotlight.worker.process.call_threads import CallThread, CallThreads, Outcome
from pilotlight.worker.user_code import output, serialization, user_errors
from pilotlight.worker.user_code.current_call import RunningCall
from pilotlight.worker.user_code.spans import CallSpans
from pilotlight.worker.user_code.target import Method, Style

if TYPE_CHECKING:
    from uvicorn._types import ASGIReceiveCallable, ASGISendCallable, HTTPScope

_ATTEMPT = HEADER_ATTEMPT.encode()
_CALL = HEADER_CALL.encode()
_DEADLINE = HEADER_DEADLINE.encode()
_FINISH = HEADER_FINISH.encode()
_PRIORITY = HEADER_PRIORITY.encode()
_JSON = CONTENT_JSON.encode()
_PICKLE = CONTENT_PICKLE.encode()
_SSE = CONTENT_SSE.encode()
_TRUSTED = HEADER_TRUSTED_PICKLE.encode()
_PREFIX = len(WORKER_INVOKE)


class Call:
    """One running call. Owned by the event loop.

    Attributes:
        speaks_pickle: whether the caller is the SDK of the function's own tenant: it sent
            cloudpickle, and gets it back.
        priority: from the activator, for methods whose calls are batched.
        seconds: remaining time of the execution clock; 0 for no limit.
        expires_at: the event loop's time at which it expires; set by ExecutionDeadlines.
        stopped: None, or why it was stopped: `left` or `deadline`.
        spans: spans that its own code records.
    """

    __slots__ = (
        "_task",
        "accept",
        "expires_at",
        "id",
        "priority",
        "seconds",
        "spans",
        "speaks_pickle",
        "stopped",
        "thread",
    )

    def __init__(
        self, headers: Mapping[bytes, bytes], *, speaks_pickle: bool, slow_s: float = math.inf
    ) -> None:
        self.id = headers.get(_CALL, b"").decode("latin-1")
        self.spans = CallSpans(
            self.id, headers.get(b"traceparent"), headers.get(_ATTEMPT), slow_s=slow_s
        )
        self.speaks_pickle = speaks_pickle
        self.accept = headers.get(b"accept", b"")
        self.priority = headers.get(_PRIORITY)
        self.seconds = _seconds(headers[_DEADLINE]) if _DEADLINE in headers else 0.0
        self.expires_at = 0.0
        self.stopped: str | None = None
        self.thread: CallThread | None = None
        self._task: asyncio.Task[Any] | None = None

    def __repr__(self) -> str:
        return f"<Call {self.id} {self.stopped or 'running'}>"

    def begin(self, task: asyncio.Task[Any] | None) -> None:
        """Set the task that a stop cancels; None if the call runs in a thread."""
        self._task = task

    def leave(self) -> None:
        """Stop the call: the caller has disconnected."""
        self._stop("left")

    def expire(self) -> None:
        """Stop the call: its deadline has passed."""
        self._stop("deadline")

    def _stop(self, reason: str) -> None:
        if self.stopped is None:
            self.stopped = reason
            if self.thread is not None:
                self.thread.interrupt()
            elif self._task is not None:
                self._task.cancel()


class Calls:
    """Runs calls on the target's methods. Owned by the event loop: no lock."""

    def __init__(
        self, methods: Mapping[str, Method], *, max_inputs: int, slow_s: float = math.inf
    ) -> None:
        """`slow_s`: the spans of a call that takes longer are sent even if it is not sampled."""
        self._methods = methods
        self._slow_s = slow_s
        self._max_inputs = max_inputs
        self._running = 0
        self._threads = CallThreads()
        self._deadlines = ExecutionDeadlines()
        self._batches = Batcher(methods, max_inputs=max_inputs, threads=self._threads)

    def __repr__(self) -> str:
        return f"<Calls running={self._running}/{self._max_inputs}>"

    @property
    def running(self) -> int:
        """Number of calls whose function has not ended."""
        return self._running

    def drain(self) -> None:
        """Prepare for the end of the instance: no more calls will arrive."""
        self._batches.drain()

    def make_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        """Create a call thread before the first call."""
        self._threads.make_ahead(loop)

    async def invoke(
        self, scope: HTTPScope, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> None:
        """Handle one request."""
        headers = dict(scope["headers"])
        content_type = headers.get(b"content-type", _JSON)
        speaks_pickle = content_type != _JSON and is_pickle(content_type)
        if speaks_pickle and headers.get(_TRUSTED) != b"1":
            await send_problem(
                send,
                _untrusted(),
                outcome=b"invalid",
                call=headers.get(_CALL, b"").decode("latin-1"),
            )
            return
        body = await read_body(receive)
        if body is None:
            return
        method = self._methods.get(scope["path"][_PREFIX:]) if scope["method"] == "POST" else None
        if method is None:
            await send_problem(
                send,
                NotFound(
                    f"this function has no method {scope['path'][_PREFIX:]!r} to be called by POST"
                ),
                outcome=b"invalid",
            )
        elif self._running >= self._max_inputs:
            full = Unavailable(
                f"all {self._max_inputs} slots of this instance are in use", retry_after_s=0
            )
            await send_problem(send, full, outcome=b"busy")
        else:
            call = Call(headers, speaks_pickle=speaks_pickle, slow_s=self._slow_s)
            RUNNING.set(RunningCall(headers, call.spans))
            await self._run(method, call, scope, body, send)

    async def _run(
        self, method: Method, call: Call, scope: HTTPScope, body: bytes, send: ASGISendCallable
    ) -> None:
        output.CALL.set(call.id)
        CURRENT_RECORDER.set(call.spans)
        call.spans.make_current()
        connection: Any = scope["extensions"]["connection"]  # set by server.Connection
        connection.on_leave(call.leave)
        if call.seconds > 0:
            self._deadlines.watch(call, seconds=call.seconds)
        self._running += 1
        try:
            await self._perform(method, call, body, send)
        finally:
            self._running -= 1
            connection.on_leave(None)
            self._deadlines.forget(call)
            output.end_call(call.id)

    async def _perform(
        self, method: Method, call: Call, body: bytes, send: ASGISendCallable
    ) -> None:
        try:
            args, kwargs = (
                method.binder.from_pickle(body)
                if call.speaks_pickle
                else method.binder.from_json(body)
            )
        except InvalidInput as e:
            await send_problem(send, e, outcome=b"invalid", call=call.id)
            return
        try:
            if method.batch is not None:
                await self._in_batch(method, call, args, kwargs, send)
                return
            if method.style is Style.COROUTINE:
                call.begin(asyncio.current_task())
                value = await method.call(*args, **kwargs)
            elif method.style is Style.THREAD:
                ok, value = await self._in_thread(call, method.call, args, kwargs)
                if not ok:  # not raised here: a StopIteration cannot leave a coroutine (PEP 479)
                    await _answer_raised(
                        call, value, send, arguments=method.binder.shapes(args, kwargs)
                    )
                    return
                if inspect.iscoroutine(value):  # from a plain function: a decorator without `async`
                    call.begin(asyncio.current_task())
                    value = await value
            else:
                value = method.call(*args, **kwargs)
            call.begin(None)
            if type(value) in _STREAMS:
                await self._stream(call, value, send)
            else:
                await _answer_value(call, value, send)
        except (
            BaseException
        ) as e:  # user code may raise anything, SystemExit too; it is answered as data
            call.begin(None)
            await _answer_raised(call, e, send, arguments=method.binder.shapes(args, kwargs))

    async def _in_batch(
        self, method: Method, call: Call, args: Any, kwargs: Any, send: ASGISendCallable
    ) -> None:
        call.begin(asyncio.current_task())
        share = await self._batches.share(method.name, call, args, kwargs, call.priority)
        call.begin(None)
        if share.ok:
            await _answer_value(call, share.value, send, line=share.line)
        else:
            shapes = method.binder.shapes(args, kwargs)
            await _answer_raised(call, share.value, send, line=share.line, arguments=shapes)

    async def _in_thread(self, call: Call, function: Any, args: Any, kwargs: Any) -> Outcome:
        call.thread = thread = self._threads.take()
        try:
            return await thread.run(contextvars.copy_context(), function, args, kwargs)
        finally:
            call.thread = None
            self._threads.give_back(thread)

    async def _stream(self, call: Call, source: Any, send: ASGISendCallable) -> None:
        """Send items as they are produced; a generator that raises before its first item is
        answered like any function."""
        framer = _framer(call)
        items = self._items(call, source)
        try:
            first = await anext(items, _NOTHING)
            head = b"" if first is _NOTHING else framer.item(first)
            await start(send, 200, framer.content_type.encode(), b"ok")
            await send({"type": "http.response.body", "body": head, "more_body": True})
            try:
                while first is not _NOTHING and call.stopped is None:
                    first = await anext(items, _NOTHING)
                    if first is not _NOTHING:
                        await send(
                            {
                                "type": "http.response.body",
                                "body": framer.item(first),
                                "more_body": True,
                            }
                        )
                tail, finish = (
                    (b"", b"stop")
                    if call.stopped is None
                    else (framer.error(_late(call)), b"error")
                )
            except (
                BaseException
            ) as e:  # as in _perform: the headers are out, so the error travels in the stream
                tail, finish = framer.error(_late(call) if call.stopped else e), b"error"
            await end(send, tail, b"%b: %b\r\n%b" % (_FINISH, finish, call.spans.line(200)))
        finally:
            await items.aclose()

    async def _items(self, call: Call, source: Any) -> AsyncGenerator[Any, None]:
        if inspect.isasyncgen(source):
            call.begin(asyncio.current_task())
            try:
                async for item in source:
                    call.begin(None)  # while the item is being sent, a stop only sets its flag
                    yield item
                    call.begin(asyncio.current_task())
                return
            finally:
                call.begin(None)
                await source.aclose()
        thread, context = self._threads.take(), contextvars.copy_context()
        try:
            while True:
                call.thread = thread
                ok, item = await thread.run(context, next, (source, _NOTHING), {})
                call.thread = None
                if not ok:
                    raise item
                if item is _NOTHING:
                    return
                yield item
        finally:
            await thread.run(context, source.close, (), {})
            self._threads.give_back(thread)


async def _answer_value(
    call: Call, value: Any, send: ASGISendCallable, *, line: bytes = b""
) -> None:
    if call.speaks_pickle:
        await send_response(
            send,
            200,
            _PICKLE,
            b"ok",
            serialization.as_pickle(value),
            lines=line + call.spans.line(200),
        )
    else:
        await send_response(
            send, 200, _JSON, b"ok", serialization.as_json(value), lines=line + call.spans.line(200)
        )


async def _answer_raised(
    call: Call,
    error: BaseException,
    send: ASGISendCallable,
    *,
    arguments: str,
    line: bytes = b"",
) -> None:
    if call.stopped is not None and isinstance(
        error, asyncio.CancelledError | user_errors.CallCancelled
    ):
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
        if call.stopped == "deadline":
            await send_problem(send, _late(call), outcome=b"raised", call=call.id)
        return
    if isinstance(error, serialization.ResultNotSerializable | WrongResults):
        await send_problem(send, error, outcome=b"raised", call=call.id)
        return
    user_errors.report(error, arguments=arguments)
    if call.speaks_pickle:
        await send_response(
            send,
            500,
            _PICKLE,
            b"raised",
            user_errors.as_pickle(error),
            lines=line + call.spans.line(500),
        )
    else:
        lines = line + call.spans.line(500)
        await send_document(
            send, user_errors.as_problem(error), outcome=b"raised", call=call.id, lines=lines
        )


def _framer(call: Call) -> serialization.Framer:
    if call.speaks_pickle:
        return serialization.PickleFrames()
    return serialization.SseFrames() if _SSE in call.accept else serialization.NdjsonFrames()


def _untrusted() -> UnsupportedMediaType:
    return UnsupportedMediaType(
        f"a pickled body requires the header {HEADER_TRUSTED_PICKLE}, which only the activator "
        f"sets: send JSON"
    )


def _late(call: Call) -> serialization.ExecutionTimeout:
    return serialization.ExecutionTimeout(
        f"the call exceeded its execution deadline of {call.seconds:g} s", clock="execution"
    )


def _seconds(value: bytes) -> float:
    try:
        return float(value)
    except ValueError:
        return 0.0


_NOTHING = object()
_STREAMS = frozenset({types.GeneratorType, types.AsyncGeneratorType})
