"""Sends responses to callers: whole, with the cost in a header, or streamed.

A generator's caller that asks for server-sent events gets a self-describing stream: comments while
it waits, `event: error` where it fails after its head was sent, and `event: end` last, with the
finish reason and the cost. NDJSON and pickle streams cannot express that: they are interrupted. The
attempt is closed here, exactly once: its record has what the caller really got."""

from __future__ import annotations

import json
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any, Final

from activator.calls.attempt import Attempt, worker_crash_error
from activator.calls.call import Call
from activator.calls.shadow_traffic import ShadowTraffic
from activator.http.request import Request, header_list
from activator.http.response_headers import complete_headers, streaming_headers
from activator.http.sse import (
    SseResponse,
    SseSplitter,
    data_lines,
    early_head,
    end_event,
    error_event,
    event,
    stream_headers,
)
from activator.metrics.metrics import Metrics
from activator.tracing.tracer import Tracer
from activator.worker_client.connection import WorkerConnectionLost, WorkerResponse
from pilotlight import errors
from pilotlight.protocol import CONTENT_JSON, CONTENT_SSE, HEADER_FINISH

_SSE: Final = CONTENT_SSE.encode()
_JSON: Final = CONTENT_JSON.encode()
_FINISH: Final = HEADER_FINISH.encode()
MAX_COLLECTED_BYTES = 16 * 1024 * 1024
"""Maximum size of a response that an adapter translates as a whole. A function with larger ones
must be called by its own name, where responses are streamed."""
WAITED_MS = 1.0
"""A call that got its slot later than this counts as having waited."""


class ResponseWriter:
    """Sends responses to callers. Owner: the event loop.

    Attributes:
        shadows: copies calls whose responses were sent; None = no copies.
    """

    def __init__(
        self,
        *,
        metrics: Metrics,
        tracer: Tracer,
        heartbeat_s: float,
        shadows: ShadowTraffic | None = None,
    ) -> None:
        """`heartbeat_s`: longest silence of a stream of events."""
        self._metrics = metrics
        self._tracer = tracer
        self._heartbeat_s = heartbeat_s
        self.shadows = shadows

    def __repr__(self) -> str:
        return f"<ResponseWriter {'with' if self.shadows is not None else 'without'} shadows>"

    async def answer(self, request: Request, step: Coroutine[Any, Any, Attempt]) -> None:
        """Send the caller of `request.call` the result of `step`.

        Raises the errors of `step`, which the caller already got where a stream had begun;
        WorkerConnectionLost when the worker's connection breaks in a stream that cannot express
        it."""
        call = request.call
        if call is None or _SSE not in call.accept:
            await self._give(request, await step)
            return
        async with SseResponse(
            request, every_s=self._heartbeat_s, head=partial(early_head, request)
        ) as stream:
            try:
                attempt = await (stream.during(step) if must_answer_as_sse(call) else step)
            except errors.PilotlightError as e:
                if stream.is_begun:
                    await stream.close(
                        error_event(e, request.id)
                        + end_event(finish_reason="error", cost="0", exec_ms=0.0, start="")
                    )
                    self._tracer.failed(call, e.type, e.status)
                raise
            if stream.is_begun or (attempt.answer.body is None and _is_events(attempt.answer)):
                self._waited(attempt.call)
                await self._stream_events(request, attempt, stream)
            else:
                await self._give(request, attempt)

    def _waited(self, call: Call) -> None:
        if call.queued_ms >= WAITED_MS:
            self._metrics.waited(call.rank.priority.value, call.queued_ms / 1000)

    async def _give(self, request: Request, attempt: Attempt) -> None:
        self._waited(attempt.call)
        if attempt.answer.body is None:
            await self._stream(request, attempt)
        else:
            await self._whole(request, attempt, attempt.answer.body)

    # -- whole -------------------------------------------------------------------------------------
    async def _whole(self, request: Request, attempt: Attempt, body: bytes) -> None:
        self._close_whole(request, attempt, body)
        answer = attempt.answer
        end = _end_of(attempt, "stop") if _is_events(answer) else b""  # a declared stream
        await request.respond_whole(answer.status, complete_headers(attempt), body + end)
        self._copy(attempt, body)
        self._tracer.answered(attempt, answer.status)

    def _close_whole(self, request: Request, attempt: Attempt, body: bytes) -> None:
        status = attempt.answer.status
        attempt.close(status=status, outcome="ok" if status < 400 else "error", bytes_out=len(body))
        self._metrics.answered(attempt, status)
        request.target = None  # observed

    def _copy(self, attempt: Attempt, body: bytes) -> None:
        if attempt.call.choice is not None and self.shadows is not None:
            status = attempt.answer.status
            self.shadows.copy(attempt.call, status=status, body=body, exec_ms=attempt.exec_ms)

    # -- for adapters ------------------------------------------------------------------------------
    async def collect(self, request: Request, attempt: Attempt) -> tuple[int, bytes, bytes]:
        """Read the whole response for an adapter that translates it, and close, count and trace
        the attempt. Returns status, header lines and body.

        Raises TooLarge, TooManyRequests (no memory for the response), DeadlineExceeded,
        WorkerCrashed."""
        self._waited(attempt.call)
        try:
            body = await _read_whole(request, attempt)
        except WorkerConnectionLost as e:
            attempt.fail(e)
            raise attempt.cut_by or await worker_crash_error(attempt.reservation) from e
        except BaseException as e:
            attempt.fail(e)
            raise
        self._close_whole(request, attempt, body)
        self._copy(attempt, body)
        self._tracer.answered(attempt, attempt.answer.status)
        return attempt.answer.status, complete_headers(attempt), body

    # -- raw stream --------------------------------------------------------------------------------
    async def _stream(self, request: Request, attempt: Attempt) -> None:
        ending = _StreamOutcome(self._metrics, self._tracer, request, attempt)
        try:
            await request.start(
                attempt.answer.status, stream_headers(header_list(streaming_headers(attempt)))
            )
            async for chunk in attempt.answer.chunks():
                ending.passed(len(chunk))
                await request.chunk(chunk)
            ending.by_itself()
        except WorkerConnectionLost:
            ending.broken()
            raise
        finally:
            ending.close()
        await request.chunk(b"", more=False)

    # -- event stream ------------------------------------------------------------------------------
    async def _stream_events(self, request: Request, attempt: Attempt, stream: SseResponse) -> None:
        ending = _StreamOutcome(self._metrics, self._tracer, request, attempt)
        cutter = SseSplitter()
        last = b""
        try:
            if attempt.answer.body is not None:
                last = _as_events(attempt.answer, attempt.answer.body)
            else:
                await stream.begin(stream_headers(header_list(streaming_headers(attempt))))
                async for events in stream.pass_on(attempt.answer, cutter):
                    ending.passed(len(events))
            ending.by_itself()
        except WorkerConnectionLost:
            ending.broken()
            if (
                cutter.is_inside
            ):  # part of an event was sent: only a broken connection can signal the error
                raise
            last = error_event(
                attempt.cut_by or await worker_crash_error(attempt.reservation), request.id
            )
        finally:
            ending.close()
        await stream.close(last + _end_of(attempt, ending.finish))


async def _read_whole(request: Request, attempt: Attempt) -> bytes:
    answer, room = attempt.answer, request.room
    if answer.body is not None:
        if room is not None and answer.body:
            room.acquire(len(answer.body))
        return answer.body
    pieces = []
    async for piece in answer.chunks():
        attempt.bytes_out += len(piece)
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


class _StreamOutcome:
    """The outcome of a stream, for its record, metrics and traces: a disconnect of the caller,
    unless another outcome is set first."""

    __slots__ = (
        "_attempt",
        "_first_byte_ms",
        "_is_own_word",
        "_metrics",
        "_outcome",
        "_request",
        "_status",
        "_tracer",
        "finish",
    )

    def __init__(
        self, metrics: Metrics, tracer: Tracer, request: Request, attempt: Attempt
    ) -> None:
        self._metrics = metrics
        self._tracer = tracer
        self._request = request
        self._attempt = attempt
        attempt.on_cut = request.abort_if_unread
        self._first_byte_ms = 0.0
        self._status, self._outcome, self.finish = 499, "cancelled", "cancelled"
        self._is_own_word = False

    def passed(self, size: int) -> None:
        """Count `size` bytes that are being sent to the caller."""
        attempt = self._attempt
        self._first_byte_ms = (
            self._first_byte_ms or (time.monotonic_ns() - attempt.call.began_ns) / 1e6
        )
        attempt.bytes_out += size

    def by_itself(self) -> None:
        """The worker ended the stream: take its outcome."""
        answer = self._attempt.answer
        if answer.status >= 400:
            self._status, self._outcome, self.finish = answer.status, "error", "error"
        elif answer.header(_FINISH) == b"error":
            self._status, self._outcome, self.finish, self._is_own_word = (
                500,
                "error",
                "error",
                True,
            )
        else:
            self._status, self._outcome, self.finish = answer.status, "ok", "stop"

    def broken(self) -> None:
        """The worker's connection broke, or the execution clock ran out."""
        self._status, self._outcome, self.finish = (
            504 if self._attempt.cut_by else 502,
            "error",
            "error",
        )

    def close(self) -> None:
        """Close the attempt, whether or not the caller has read all of it."""
        attempt, request = self._attempt, self._request
        finish = self.finish if attempt.answer.body is None else ""
        attempt.close(
            status=self._status,
            outcome=self._outcome,
            bytes_out=attempt.bytes_out,
            finish=finish,
            is_own_word=self._is_own_word,
        )
        self._metrics.answered(
            attempt,
            self._status,
            first_byte_ms=self._first_byte_ms,
            completed=self.finish == "stop",
        )
        request.target = None  # observed
        self._tracer.answered(attempt, self._status, first_byte_ms=self._first_byte_ms)


def must_answer_as_sse(call: Call) -> bool:
    """Return whether a call is always answered with an event stream: its function is a generator,
    and its caller asked for one."""
    method = call.target.spec.method(call.method)
    return (
        method is not None
        and method.is_generator
        and call.content_type == _JSON
        and _SSE in call.accept
    )


def _is_events(answer: WorkerResponse) -> bool:
    return answer.header(b"content-type").startswith(_SSE)


def _as_events(answer: WorkerResponse, body: bytes) -> bytes:
    """Convert a whole response to events, where the event stream has already begun."""
    if _is_events(answer):
        return body
    if answer.status < 400:
        return data_lines(body)
    return (
        event("error", json.loads(body))
        if answer.header(b"content-type").endswith(b"json")
        else b"event: error\n" + data_lines(body)
    )


def _end_of(attempt: Attempt, finish: str) -> bytes:
    call = attempt.call
    return end_event(
        finish_reason=finish,
        cost=attempt.cost,
        exec_ms=attempt.exec_ms,
        start=call.start_kind.value,
        degraded=call.degraded or None,
    )
