"""`POST /invoke/<method>`: handles one call from its request body to its response.

Unpickling executes code of the caller. A pickle is therefore refused, unread, unless the activator
states that it comes from the function's own tenant (HEADER_TRUSTED_PICKLE).

`async def` functions run in a task, whose first step is taken at once (`start_task`), synchronous
ones in a call thread. When the caller disconnects or the deadline passes, the call is stopped: the
task is cancelled, or CallCancelled is raised in the thread. A call counts as running until the
function has ended, even if its caller has disconnected; calls beyond `max_inputs` are answered 503
with outcome `busy`, which is safe to retry elsewhere."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import math
import types
import urllib.parse
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import TYPE_CHECKING, Any

from pilotlight.errors import InvalidInput, NotFound, Unavailable, UnsupportedMediaType
from pilotlight.protocol import (
    CONTENT_JSON,
    CONTENT_PICKLE,
    CONTENT_SSE,
    CONTENT_TENSORS,
    HEADER_FINISH,
    HEADER_RETRY,
    HEADER_TRUSTED_PICKLE,
    WORKER_INVOKE,
    is_pickle,
)
from pilotlight.sdk.batches import WrongResults
from pilotlight.spec.features.sources import PARAMETER
from pilotlight.worker.batching.batcher import Batcher
from pilotlight.worker.http.call import CALL_ID, Call
from pilotlight.worker.http.connection import Request
from pilotlight.worker.http.execution_deadlines import ExecutionDeadlines
from pilotlight.worker.http.first_step import start_task
from pilotlight.worker.process.call_threads import CallThreads, Outcome
from pilotlight.worker.user_code import output, serialization, tensors, user_errors
from pilotlight.worker.user_code.target import Method, Style

if TYPE_CHECKING:
    from pilotlight.worker.features.reader import FeatureReader

_FINISH = HEADER_FINISH.encode()
_JSON = CONTENT_JSON.encode()
_PICKLE = CONTENT_PICKLE.encode()
_SSE = CONTENT_SSE.encode()
_TENSORS = CONTENT_TENSORS.encode()
_TRUSTED = HEADER_TRUSTED_PICKLE.encode()
_PREFIX = len(WORKER_INVOKE)
_NOT_AGAIN = f"{HEADER_RETRY}: no\r\n".encode()
_NOTHING = object()
_STREAMED = object()
"""In place of a value that was answered already."""
_STREAMS = frozenset({types.GeneratorType, types.AsyncGeneratorType})
_UNFINISHED = frozenset({types.CoroutineType, *_STREAMS})
"""Types of results behind which there is more to run."""


class Calls:
    """Runs calls on the target's methods. Owned by the event loop: no lock."""

    def __init__(
        self, methods: Mapping[str, Method], *, max_inputs: int, slow_s: float = math.inf
    ) -> None:
        """`slow_s`: the spans of a call that takes longer are sent even if it is not sampled."""
        self._methods = methods
        self._by_url = {f"{WORKER_INVOKE}{name}".encode(): m for name, m in methods.items()}
        self._slow_s = slow_s
        self._max_inputs = max_inputs
        self._running = 0
        self._threads = CallThreads()
        self._deadlines = ExecutionDeadlines()
        self._batches = Batcher(methods, max_inputs=max_inputs, threads=self._threads)
        self._on_end: Callable[[], None] | None = None

    def __repr__(self) -> str:
        return f"<Calls running={self._running}/{self._max_inputs}>"

    @property
    def running(self) -> int:
        """Number of calls whose function has not ended."""
        return self._running

    def drain(self, *, on_end: Callable[[], None]) -> None:
        """Prepare for the end of the instance: no more calls will arrive. `on_end`: called after
        each that ends."""
        self._on_end = on_end
        self._batches.drain()

    def make_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        """Create a call thread before the first call."""
        self._threads.make_ahead(loop)

    def begin(self, request: Request) -> None:
        """Handle one request, whose body is complete."""
        headers = request.headers
        content_type = headers.get(b"content-type", _JSON)
        speaks_pickle = content_type != _JSON and is_pickle(content_type)
        if speaks_pickle and headers.get(_TRUSTED) != b"1":
            identity = headers.get(CALL_ID, b"").decode("latin-1")
            request.respond_error(_untrusted(), outcome=b"invalid", call=identity)
            return
        method = self._by_url.get(request.url) or self._methods.get(_path(request.url)[_PREFIX:])
        if method is None:
            request.respond_error(no_method(_path(request.url)), outcome=b"invalid")
        elif self._running >= self._max_inputs:
            full = Unavailable(
                f"all {self._max_inputs} slots of this instance are in use", retry_after_s=0
            )
            request.respond_error(full, outcome=b"busy")
        else:
            call = Call(request, method, speaks_pickle=speaks_pickle, slow_s=self._slow_s)
            if content_type == _TENSORS:
                call.takes_tensors = True
            self._run(call)

    def _run(self, call: Call) -> None:
        call.request.connection.leave = call.leave
        if call.seconds > 0:
            self._deadlines.watch(call, seconds=call.seconds)
        self._running += 1
        method = call.method
        if method.batch is not None:
            call.task = start_task(self._perform_in_batch(call))
        elif method.features is not None:
            call.task = start_task(self._perform_with_features(call, method.features))
        elif method.style is not Style.THREAD:
            call.task = start_task(self._perform(call))
        else:
            call.variables = contextvars.copy_context()
            try:
                call.variables.run(call.enter)
            except BaseException as e:  # of the user's own types, too, which may raise anything
                call.variables.run(self._finish, call, False, e)
                return
            done = functools.partial(self._returned, call)
            call.job = self._threads.start(
                call.variables, method.call, call.args, call.kwargs, done
            )

    def _returned(self, call: Call, outcome: Outcome) -> None:
        """The function has ended in its thread."""
        call.job = None
        ok, value = outcome
        if ok and type(value) in _UNFINISHED:
            # from a plain function: a decorator without `async`, or one that returns a generator
            call.task = call.variables.run(start_task, self._perform_rest(call, value))
        else:
            # in the call's own context: the user's types may write while they are encoded
            call.variables.run(self._finish, call, ok, value, call.line)

    def _finish(self, call: Call, ok: bool, value: Any, line: bytes = b"") -> None:
        """Answer, and end the call."""
        call.is_awaiting = False
        try:
            _answer(call, ok, value, line)
        finally:
            self._running -= 1
            call.request.connection.leave = None
            if call.seconds > 0:
                self._deadlines.forget(call)
            if output.PENDING:
                output.end_call(call.id)
            if self._on_end is not None:
                self._on_end()

    async def _perform(self, call: Call) -> None:
        """Run what does not run in a thread."""
        try:
            call.enter()
            method = call.method
            value = method.call(*call.args, **call.kwargs)
            if method.style is Style.COROUTINE:
                call.is_awaiting = True
                value = await value
            if type(value) in _STREAMS:
                await self._stream(call, value)
                value = _STREAMED
        except (
            BaseException
        ) as e:  # user code may raise anything, SystemExit too; it is answered as data
            self._finish(call, False, e)
        else:
            self._finish(call, True, value)

    async def _perform_rest(self, call: Call, value: Any) -> None:
        """Run what a thread returned."""
        try:
            if type(value) is types.CoroutineType:
                call.is_awaiting = True
                value = await value
            if type(value) in _STREAMS:
                await self._stream(call, value)
                value = _STREAMED
        except BaseException as e:  # as in _perform
            self._finish(call, False, e, call.line)
        else:
            self._finish(call, True, value, call.line)

    async def _perform_with_features(self, call: Call, reader: FeatureReader) -> None:
        """Read the features of a call, then run it."""
        method = call.method
        try:
            call.enter()
            await _read_features(call, reader)
            if method.style is Style.THREAD:
                call.variables = contextvars.copy_context()
                done = functools.partial(self._returned, call)
                call.job = self._threads.start(
                    call.variables, method.call, call.args, call.kwargs, done
                )
                return
            value = method.call(*call.args, **call.kwargs)
        except BaseException as e:  # as in _perform
            self._finish(call, False, e, call.line)
        else:
            await self._perform_rest(call, value)

    async def _perform_in_batch(self, call: Call) -> None:
        try:
            call.enter()
            if call.method.features is not None:
                await _read_features(call, call.method.features)
            call.is_awaiting = True
            share = await self._batches.share(
                call.method.name, call, call.args, call.kwargs, call.priority
            )
        except BaseException as e:  # as in _perform
            self._finish(call, False, e)
        else:
            self._finish(call, share.ok, share.value, share.line + call.line)

    async def _stream(self, call: Call, source: Any) -> None:
        """Send items as they are produced; a generator that raises before its first item is
        answered like any function."""
        call.is_awaiting = False
        request, framer = call.request, _framer(call)
        items = self._items(call, source)
        try:
            first = await anext(items, _NOTHING)
            head = b"" if first is _NOTHING else framer.item(first)
            request.start(framer.content_type.encode(), b"ok", head, call.line)
            try:
                while first is not _NOTHING and call.stopped is None:
                    first = await anext(items, _NOTHING)
                    if first is not _NOTHING:
                        await request.send(framer.item(first))
                tail, finish = (
                    (b"", b"stop")
                    if call.stopped is None
                    else (framer.error(_late(call)), b"error")
                )
            except (
                BaseException
            ) as e:  # as in _perform: the headers are out, so the error travels in the stream
                tail, finish = framer.error(_late(call) if call.stopped else e), b"error"
            request.end(tail, b"%b: %b\r\n%b" % (_FINISH, finish, call.spans.line(200)))
        finally:
            await items.aclose()

    async def _items(self, call: Call, source: Any) -> AsyncGenerator[Any, None]:
        if inspect.isasyncgen(source):
            call.is_awaiting = True
            try:
                async for item in source:
                    call.is_awaiting = (
                        False  # while the item is being sent, a stop only sets its flag
                    )
                    yield item
                    call.is_awaiting = True
                return
            finally:
                call.is_awaiting = False
                await source.aclose()
        thread, context = self._threads.acquire(), contextvars.copy_context()
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
            self._threads.release(thread)


async def _read_features(call: Call, reader: FeatureReader) -> None:
    """Add online features to the arguments of a call. Raises InvalidInput, as its arguments do."""
    call.is_bound, call.is_awaiting = False, True
    found = await reader.read(call.method.binder.named(call.args, call.kwargs))
    call.is_bound, call.is_awaiting = True, False
    call.kwargs = {**call.kwargs, PARAMETER: found}
    call.line = reader.header_line(found)


def _answer(call: Call, ok: bool, value: Any, line: bytes) -> None:
    """Answer with a value, or with what was raised. `line`: a further header line."""
    if ok:
        if value is _STREAMED:
            return
        try:
            if call.speaks_pickle:
                kind, body = _PICKLE, serialization.as_pickle(value)
            elif (accept := call.request.headers.get(b"accept")) is not None and (
                found := tensors.answer(accept, value)
            ) is not None:
                kind, body = found
            else:
                kind, body = _JSON, serialization.as_json(value)
        except BaseException as e:  # the user's types may raise anything while they are encoded
            value, line = e, b""
        else:
            call.request.respond(200, kind, b"ok", body, line + call.spans.line(200))
            return
    _answer_raised(call, value, line)


def _answer_raised(call: Call, error: BaseException, line: bytes) -> None:
    request = call.request
    if isinstance(error, InvalidInput) and not call.is_bound:
        request.respond_error(error, outcome=b"invalid", call=call.id)
        return
    if call.stopped is not None and isinstance(
        error, asyncio.CancelledError | user_errors.CallCancelled
    ):
        if call.stopped == "deadline":
            request.respond_error(_late(call), outcome=b"raised", call=call.id)
        return
    if isinstance(error, serialization.ResultNotSerializable | WrongResults):
        request.respond_error(error, outcome=b"raised", call=call.id)
        return
    user_errors.report(error, arguments=call.method.binder.shapes(call.args, call.kwargs))
    if not call.method.is_retried(error):
        line += _NOT_AGAIN
    lines = line + call.spans.line(500)
    if call.speaks_pickle:
        request.respond(500, _PICKLE, b"raised", user_errors.as_pickle(error), lines)
    else:
        document = user_errors.as_problem(error)
        request.respond_problem(document, outcome=b"raised", call=call.id, lines=lines)


def no_method(path: str) -> NotFound:
    """The answer to a request at a path that is no method's, or that is no POST."""
    return NotFound(
        f"this function has no method {path.removeprefix(WORKER_INVOKE)!r} to be called by POST"
    )


def _path(url: bytes) -> str:
    return urllib.parse.unquote(url.partition(b"?")[0].decode("latin-1"))


def _framer(call: Call) -> serialization.Framer:
    if call.speaks_pickle:
        return serialization.PickleFrames()
    is_sse = _SSE in call.request.headers.get(b"accept", b"")
    return serialization.SseFrames() if is_sse else serialization.NdjsonFrames()


def _untrusted() -> UnsupportedMediaType:
    return UnsupportedMediaType(
        f"a pickled body requires the header {HEADER_TRUSTED_PICKLE}, which only the activator "
        f"sets: send JSON"
    )


def _late(call: Call) -> serialization.ExecutionTimeout:
    return serialization.ExecutionTimeout(
        f"the call exceeded its execution deadline of {call.seconds:g} s", clock="execution"
    )
