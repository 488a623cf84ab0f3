"""How an answer goes to its caller: whole, with its cost in a header, or as it comes.

A generator's caller who asks for server-sent events gets a stream that tells all of itself:
comments while it waits, `event: error` where it fails after its head went out, and `event: end`
last, with why it ended and what it cost. NDJSON and pickles have no place for that: they break off.
The exchange is closed here, exactly once, whatever happens: its record says what the caller really
got."""

from __future__ import annotations

import json
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any, Final

from activator.calls.call import Call, Exchange
from activator.calls.runner import worker_crash_error
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
WAITED_MS = 1.0
"""A call that was given its slot later than this has waited for it."""


class ResponseWriter:
    """Gives callers their answers. Owner: the event loop.

    Attributes:
        shadows: copy calls whose answers went out; None = none do.
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
        return f"<Relay {'with' if self.shadows is not None else 'without'} shadows>"

    async def answer(self, request: Request, step: Coroutine[Any, Any, Exchange]) -> None:
        """Give the caller of `request.call` what `step` comes to.

        Raises what `step` raises, told to the caller already where a stream had begun;
        WorkerConnectionLost when the worker breaks off in the middle of what cannot say so."""
        call = request.call
        if call is None or _SSE not in call.accept:
            await self._give(request, await step)
            return
        async with SseResponse(
            request, every_s=self._heartbeat_s, head=partial(early_head, request)
        ) as stream:
            try:
                exchange = await (stream.during(step) if must_answer_as_sse(call) else step)
            except errors.PilotlightError as e:
                if stream.is_begun:
                    await stream.close(
                        error_event(e, request.id)
                        + end_event(finish_reason="error", cost="0", exec_ms=0.0, start="")
                    )
                    self._tracer.failed(call, e.type, e.status)
                raise
            if stream.is_begun or (exchange.answer.body is None and _is_events(exchange.answer)):
                self._waited(exchange.call)
                await self._stream_events(request, exchange, stream)
            else:
                await self._give(request, exchange)

    def _waited(self, call: Call) -> None:
        if call.queued_ms >= WAITED_MS:
            self._metrics.waited(call.rank.priority.value, call.queued_ms / 1000)

    async def _give(self, request: Request, exchange: Exchange) -> None:
        self._waited(exchange.call)
        if exchange.answer.body is None:
            await self._stream(request, exchange)
        else:
            await self._whole(request, exchange, exchange.answer.body)

    # -- whole -------------------------------------------------------------------------------------
    async def _whole(self, request: Request, exchange: Exchange, body: bytes) -> None:
        answer = exchange.answer
        outcome = "ok" if answer.status < 400 else "error"
        cost = exchange.close(status=answer.status, outcome=outcome, bytes_out=len(body))
        self._metrics.answered(exchange, answer.status)
        request.target = None  # observed
        end = _end_of(exchange, "stop") if _is_events(answer) else b""  # a declared one
        await request.respond_whole(answer.status, complete_headers(exchange, cost), body + end)
        if exchange.call.choice is not None and self.shadows is not None:
            self.shadows.copy(
                exchange.call, status=answer.status, body=body, exec_ms=exchange.exec_ms
            )
        self._tracer.answered(exchange, answer.status)

    # -- as it comes, without a word of ours -------------------------------------------------------
    async def _stream(self, request: Request, exchange: Exchange) -> None:
        ending = _StreamOutcome(self._metrics, self._tracer, request, exchange)
        try:
            await request.start(
                exchange.answer.status, stream_headers(header_list(streaming_headers(exchange)))
            )
            async for chunk in exchange.answer.chunks():
                ending.passed(len(chunk))
                await request.chunk(chunk)
            ending.by_itself()
        except WorkerConnectionLost:
            ending.broken()
            raise
        finally:
            ending.close()
        await request.chunk(b"", more=False)

    # -- as events ---------------------------------------------------------------------------------
    async def _stream_events(
        self, request: Request, exchange: Exchange, stream: SseResponse
    ) -> None:
        ending = _StreamOutcome(self._metrics, self._tracer, request, exchange)
        cutter = SseSplitter()
        last = b""
        try:
            if exchange.answer.body is not None:
                last = _as_events(exchange.answer, exchange.answer.body)
            else:
                await stream.begin(stream_headers(header_list(streaming_headers(exchange))))
                async for events in stream.pass_on(exchange.answer, cutter):
                    ending.passed(len(events))
            ending.by_itself()
        except WorkerConnectionLost:
            ending.broken()
            if cutter.is_inside:  # half an event went out: only a broken connection tells the truth
                raise
            last = error_event(
                exchange.cut_by or await worker_crash_error(exchange.reservation), request.id
            )
        finally:
            ending.close()
        await stream.close(last + _end_of(exchange, ending.finish))


class _StreamOutcome:
    """How a stream ends, for its record and for those who watch. A caller that leaves is the ending
    unless another one comes first."""

    __slots__ = (
        "_exchange",
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
        self, metrics: Metrics, tracer: Tracer, request: Request, exchange: Exchange
    ) -> None:
        self._metrics = metrics
        self._tracer = tracer
        self._request = request
        self._exchange = exchange
        exchange.on_cut = request.give_up
        self._first_byte_ms = 0.0
        self._status, self._outcome, self.finish = 499, "cancelled", "cancelled"
        self._is_own_word = False

    def passed(self, size: int) -> None:
        """So many bytes more are on their way to the caller."""
        exchange = self._exchange
        self._first_byte_ms = (
            self._first_byte_ms or (time.monotonic_ns() - exchange.call.began_ns) / 1e6
        )
        exchange.bytes_out += size

    def by_itself(self) -> None:
        """The worker ended it, and said how."""
        answer = self._exchange.answer
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
        """The worker is gone, or a clock cut it off."""
        self._status, self._outcome, self.finish = (
            504 if self._exchange.cut_by else 502,
            "error",
            "error",
        )

    def close(self) -> None:
        """It is over, whether or not the caller has read all of it."""
        exchange, request = self._exchange, self._request
        finish = self.finish if exchange.answer.body is None else ""
        exchange.close(
            status=self._status,
            outcome=self._outcome,
            bytes_out=exchange.bytes_out,
            finish=finish,
            is_own_word=self._is_own_word,
        )
        self._metrics.answered(
            exchange,
            self._status,
            first_byte_ms=self._first_byte_ms,
            completed=self.finish == "stop",
        )
        request.target = None  # observed
        self._tracer.answered(exchange, self._status, first_byte_ms=self._first_byte_ms)


def must_answer_as_sse(call: Call) -> bool:
    """Whether a call is answered by events whatever becomes of it: its function is a generator, and
    its caller asked for them."""
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
    """A whole answer where the caller is being sent events already."""
    if _is_events(answer):
        return body
    if answer.status < 400:
        return data_lines(body)
    return (
        event("error", json.loads(body))
        if answer.header(b"content-type").endswith(b"json")
        else b"event: error\n" + data_lines(body)
    )


def _end_of(exchange: Exchange, finish: str) -> bytes:
    call = exchange.call
    return end_event(
        finish_reason=finish,
        cost=exchange.cost,
        exec_ms=exchange.exec_ms,
        start=call.start_kind.value,
        degraded=call.degraded or None,
    )
