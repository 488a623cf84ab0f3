"""Sends responses to callers: whole, with the cost in a header, or streamed.

A stream of events is self-describing: comments while its caller waits, an error event where it
fails after its head was sent, and `event: end` last, with the finish reason and the cost. Other
streams cannot express that: they are interrupted. A `ResponseFormat` says how bodies and events of
an API look; when and how the attempt ends is decided in `calls.attempt_end`, and is counted and
traced here, exactly once."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Protocol

from activator.calls.attempt_end import ResponseReader
from activator.calls.call import AnsweredCall, Call
from activator.calls.response import (
    AS_WRITTEN,
    ResponseFormat,
    complete_headers,
    streaming_headers,
)
from activator.http.request import Headers, Request, header_list
from activator.http.sse import (
    SseResponse,
    early_head,
    stream_headers,
)
from activator.metrics.metrics import Metrics
from activator.worker_client.connection import WorkerConnectionLost
from pilotlight import errors
from pilotlight.protocol import CONTENT_SSE

_SSE: Final = CONTENT_SSE.encode()
MAX_COLLECTED_BYTES = 16 * 1024 * 1024
"""Maximum size of a response that an adapter translates as a whole. A function with larger ones
must be called by its own name, where responses are streamed."""
WAITED_MS = 1.0
"""A call that got its slot later than this counts as having waited."""


class CallObserver(Protocol):
    """A feature that sees calls at their end (`activator.app` lists them)."""

    def answered(
        self, attempt: AnsweredCall, status: int, *, body: bytes | None, first_byte_ms: float | None
    ) -> None:
        """An attempt was answered and has ended. `body`: the response as its caller got it, None
        for a stream. `first_byte_ms`: of a stream (`ResponseReader`), None for others."""

    def failed(self, call: Call, error: str, status: int) -> None:
        """A call ended with a platform error of type `error` in a stream that had begun."""


LogAnswer = Callable[[AnsweredCall, int, bytes | None], None]


class ResponseWriter:
    """Sends responses to callers. Owner: the event loop."""

    def __init__(
        self,
        *,
        metrics: Metrics,
        log_answer: LogAnswer,
        observers: Sequence[CallObserver],
        heartbeat_s: float,
    ) -> None:
        """`log_answer`: `CallRunner.log_answer`. `observers`: called in this order for each
        answered call. `heartbeat_s`: longest silence
        of a stream of events."""
        self._metrics = metrics
        self._log_answer = log_answer
        self._observers = observers
        self._heartbeat_s = heartbeat_s

    def __repr__(self) -> str:
        return f"<ResponseWriter {len(self._observers)} observers>"

    async def answer(
        self,
        request: Request,
        call: Call,
        step: Coroutine[Any, Any, AnsweredCall],
        form: ResponseFormat = AS_WRITTEN,
    ) -> None:
        """Send the caller the result of `step`, which runs `call`.

        Raises the errors of `step`, which the caller already got where a stream had begun;
        WorkerConnectionLost when the worker's connection breaks in a stream that cannot express
        it."""
        if not form.accepts_events(call):
            await self._send(request, await step, form)
            return
        async with SseResponse(
            request, every_s=self._heartbeat_s, head=partial(early_head, request)
        ) as stream:
            try:
                attempt = await (stream.during(step) if form.requires_events(call) else step)
            except errors.PilotlightError as e:
                if stream.is_begun:
                    await stream.close(form.error(e, request.id) + form.end(None, "error"))
                    for observer in self._observers:
                        observer.failed(call, e.type, e.status)
                raise
            if stream.is_begun or form.is_events(attempt.answer):
                await self._send_events(request, attempt, form, stream)
            else:
                await self._send(request, attempt, form)

    async def collect(self, request: Request, attempt: AnsweredCall) -> tuple[int, bytes, bytes]:
        """Read the whole response for an adapter that translates it. Returns status, header lines
        and body.

        Raises TooLarge, TooManyRequests (no memory for the response), DeadlineExceeded,
        WorkerCrashed."""
        self._waited(attempt.call)
        try:
            with ResponseReader(attempt) as response:
                body = response.whole(await _collected(request, attempt, response))
        except WorkerConnectionLost as e:
            raise attempt.cut_by or await attempt.crash_error() from e
        self._count(request, attempt, response)
        self._observe(attempt, response, body)
        return response.status, complete_headers(attempt), body

    async def _send(self, request: Request, attempt: AnsweredCall, form: ResponseFormat) -> None:
        """Send a response as it is: whole, or its pieces as they arrive."""
        self._waited(attempt.call)
        answer = attempt.answer
        if answer.body is not None:
            response, body = self._read(request, attempt, form, is_events=False)
            await request.respond_whole(
                response.status, complete_headers(attempt), body + form.rest(attempt)
            )
            self._observe(attempt, response, body)
            return
        with self._streaming(request, attempt, form, is_events=False) as response:
            await request.start(answer.status, stream_headers(_headers(attempt)))
            async for piece in response:
                await request.chunk(piece)
            if last := response.end():
                await request.chunk(last)
        await request.chunk(b"", more=False)

    async def _send_events(
        self, request: Request, attempt: AnsweredCall, form: ResponseFormat, stream: SseResponse
    ) -> None:
        """Send a response as events, and end them."""
        self._waited(attempt.call)
        answer = attempt.answer
        if answer.body is not None:
            response, body = self._read(request, attempt, form, is_events=True)
            self._observe(attempt, response)
            lines = [line for line in _headers(attempt) if line[0] != b"content-type"]
            await stream.begin(stream_headers([(b"content-type", _SSE), *lines]))
            events = form.as_events(answer, body)
            await stream.close(events + form.end(attempt, response.finish))
            return
        last = b""
        try:
            with self._streaming(request, attempt, form, is_events=True) as response:
                await stream.begin(stream_headers(_headers(attempt)))
                async for events in response:
                    await stream.send(events, is_inside=response.is_inside)
                last = response.end()
        except WorkerConnectionLost:
            if (
                response.is_inside
            ):  # part of an event was sent: only a broken connection can signal the error
                raise
            last = form.error(attempt.cut_by or await attempt.crash_error(), request.id)
        await stream.close(last + form.end(attempt, response.finish))

    # -- the end of an attempt ---------------------------------------------------------------------
    def _read(
        self, request: Request, attempt: AnsweredCall, form: ResponseFormat, *, is_events: bool
    ) -> tuple[ResponseReader, bytes]:
        """Read a response that was received whole; ends the attempt."""
        with ResponseReader(attempt, form.filter(attempt, is_events=is_events)) as response:
            body = response.whole()
        self._count(request, attempt, response)
        return response, body

    @contextmanager
    def _streaming(
        self, request: Request, attempt: AnsweredCall, form: ResponseFormat, *, is_events: bool
    ) -> Iterator[ResponseReader]:
        """Return the reader of a response that its caller gets as it arrives; ends the attempt,
        however much of it the caller got."""
        attempt.on_cut = request.abort_if_unread
        response = ResponseReader(attempt, form.filter(attempt, is_events=is_events), is_sent=True)
        try:
            with response:
                yield response
        finally:
            self._count(request, attempt, response)
            self._observe(attempt, response)

    def _count(self, request: Request, attempt: AnsweredCall, response: ResponseReader) -> None:
        """Count an attempt that has ended in metrics, once."""
        self._metrics.answered(
            attempt,
            response.status,
            first_byte_ms=response.first_byte_ms,
            completed=response.outcome == "ok",
        )
        request.target = None

    def _observe(
        self, attempt: AnsweredCall, response: ResponseReader, body: bytes | None = None
    ) -> None:
        is_stream = attempt.answer.body is None
        self._log_answer(attempt, response.status, body)
        for observer in self._observers:
            observer.answered(
                attempt,
                response.status,
                body=body,
                first_byte_ms=response.first_byte_ms if is_stream else None,
            )

    def _waited(self, call: Call) -> None:
        if call.queued_ms >= WAITED_MS:
            self._metrics.waited(call.caller.rank.priority.value, call.queued_ms / 1000)


async def _collected(request: Request, attempt: AnsweredCall, response: ResponseReader) -> bytes:
    """Return the whole body, within the memory limits of the request."""
    room, pieces = request.room, [attempt.answer.body or b""]
    if room is not None and pieces[0]:
        room.acquire(len(pieces[0]))
    async for piece in response:
        if attempt.bytes_out > MAX_COLLECTED_BYTES:
            raise errors.TooLarge(
                f"the answer has more than {MAX_COLLECTED_BYTES} bytes: call the function by its "
                f"own name, where answers are streamed",
                limit_bytes=MAX_COLLECTED_BYTES,
            )
        if room is not None:
            room.acquire(len(piece))
        pieces.append(piece)
    return b"".join(pieces)


def _headers(attempt: AnsweredCall) -> Headers:
    return header_list(streaming_headers(attempt))
