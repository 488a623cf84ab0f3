"""Sends an engine's answer to its caller: whole, or as a stream that ends with its usage, or with
the reason of its failure.

After the engine's last event comes `data: [DONE]`, where OpenAI's clients stop reading, and after
it our end event. A failed stream has an error in OpenAI's format in place of `[DONE]`, which their
clients raise. The attempt is closed here exactly once, however it ends, and bills the tokens that
were read until then."""

from __future__ import annotations

import json
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any, Final

from activator.calls.attempt import Attempt, worker_crash_error
from activator.gateway.response_writer import WAITED_MS
from activator.http.request import Request, header_list
from activator.http.response_headers import complete_headers, streaming_headers
from activator.http.sse import SseResponse, early_head, end_event, stream_headers
from activator.llm.openai.errors import error_event
from activator.llm.openai.parser import DONE, NO_COUNTS, BodyParser, StreamParser, status_of
from activator.llm.openai.request import OpenAIRequest
from activator.llm.token_reservation import TokenReservation
from activator.metrics.metrics import Metrics
from activator.tracing.tracer import Tracer
from activator.worker_client.connection import WorkerConnectionLost
from pilotlight import errors
from pilotlight.protocol import CONTENT_SSE

_SSE: Final = CONTENT_SSE.encode()


class OpenAIResponseWriter:
    """Sends the answers of engines to callers. Stateless. Owner: the event loop."""

    def __init__(self, *, metrics: Metrics, tracer: Tracer, heartbeat_s: float) -> None:
        self._metrics = metrics
        self._tracer = tracer
        self._heartbeat_s = heartbeat_s

    def __repr__(self) -> str:
        return f"<Answers with a heartbeat each {self._heartbeat_s:g} s>"

    async def send(
        self,
        request: Request,
        asked: OpenAIRequest,
        use: TokenReservation,
        step: Coroutine[Any, Any, Attempt],
    ) -> None:
        """Send the result of `step` to the caller. Raises what `step` raises; if a stream had
        begun, the caller already got the error."""
        if not asked.is_stream:
            await self._send_whole(request, asked, use, await step)
            return
        async with SseResponse(
            request, every_s=self._heartbeat_s, head=partial(early_head, request)
        ) as stream:
            try:
                attempt = await stream.during(step)
            except errors.PilotlightError as e:
                if stream.is_begun:
                    end = end_event(finish_reason="error", cost="0", exec_ms=0.0, start="")
                    await stream.close(error_event(e) + end)
                    if request.call is not None:
                        self._tracer.failed(request.call, e.type, e.status)
                raise
            if attempt.answer.body is None:
                self._waited(attempt)
                await _Streamed(self, request, asked, use, attempt).run(stream)
            elif stream.is_begun or attempt.answer.status < 400:
                await self._as_stream(request, asked, use, attempt, stream)
            else:
                await self._send_whole(request, asked, use, attempt)

    def _waited(self, attempt: Attempt) -> None:
        call = attempt.call
        if call.queued_ms >= WAITED_MS:
            self._metrics.waited(call.rank.priority.value, call.queued_ms / 1000)

    def close(
        self,
        request: Request,
        attempt: Attempt,
        status: int,
        outcome: str,
        *,
        first_byte_ms: float = 0.0,
        is_own_word: bool = False,
    ) -> None:
        """Close the attempt: bill, count and trace it."""
        is_stream = attempt.answer.body is None
        attempt.close(
            status=status, outcome=outcome, bytes_out=attempt.bytes_out, is_own_word=is_own_word
        )
        self._metrics.answered(
            attempt, status, first_byte_ms=first_byte_ms, completed=outcome == "ok"
        )
        request.target = None  # observed
        self._tracer.answered(
            attempt, status, **({"first_byte_ms": first_byte_ms} if is_stream else {})
        )

    # -- whole -------------------------------------------------------------------------------------
    async def _send_whole(
        self, request: Request, asked: OpenAIRequest, use: TokenReservation, attempt: Attempt
    ) -> None:
        self._waited(attempt)
        if attempt.answer.body is None:
            await self._pass_on(request, asked, use, attempt)
            return
        status, body = self._read(request, asked, use, attempt)
        await request.respond_whole(status, complete_headers(attempt), body)

    def _read(
        self, request: Request, asked: OpenAIRequest, use: TokenReservation, attempt: Attempt
    ) -> tuple[int, bytes]:
        """Status and body of a complete answer. An answer that did not come from an engine uses no
        tokens. Closes the attempt."""
        status, body = 502, b""
        reading = BodyParser(
            use if attempt.held is not None else NO_COUNTS,
            asked,
            asked.adapter or attempt.call.target.spec.name,
        )
        try:
            status, body = reading.collected(attempt.answer.status, attempt.answer.body or b"")
        finally:
            attempt.bytes_out = len(body)
            self.close(request, attempt, status, "ok" if status < 400 else "error")
        return status, body

    async def _pass_on(
        self, request: Request, asked: OpenAIRequest, use: TokenReservation, attempt: Attempt
    ) -> None:
        """Pass on an answer that is too long to be buffered and not a stream; its usage is at its
        end."""
        reading = BodyParser(use, asked, "")
        status, outcome, first_byte_ms = 499, "cancelled", 0.0
        attempt.on_cut = request.abort_if_unread
        try:
            await request.start(attempt.answer.status, header_list(streaming_headers(attempt)))
            async for chunk in attempt.answer.chunks():
                first_byte_ms = first_byte_ms or _since_ms(attempt)
                reading.feed(chunk, 0)
                attempt.bytes_out += len(chunk)
                await request.chunk(chunk)
            reading.end()
            status, outcome = (
                attempt.answer.status,
                "ok" if attempt.answer.status < 400 else "error",
            )
        except WorkerConnectionLost:
            status, outcome = 504 if attempt.cut_by else 502, "error"
            raise
        finally:
            self.close(request, attempt, status, outcome, first_byte_ms=first_byte_ms)
        await request.chunk(b"", more=False)

    async def _as_stream(
        self,
        request: Request,
        asked: OpenAIRequest,
        use: TokenReservation,
        attempt: Attempt,
        stream: SseResponse,
    ) -> None:
        """Send a whole answer (a refusal, or a declared fallback) to a caller that expects a
        stream."""
        status, body = self._read(request, asked, use, attempt)
        is_well = status < 400
        events = b"data: %b\n\n%b" % (as_chunk(body), DONE) if is_well else b"data: %b\n\n" % body
        await stream.begin(
            stream_headers(
                [(b"content-type", _SSE), *_without_type(header_list(streaming_headers(attempt)))]
            )
        )
        await stream.close(events + end_of(attempt, use, "" if is_well else "error"))


class _Streamed:
    """A stream in progress. It counts as cancelled by the caller unless it ends in another way."""

    def __init__(
        self,
        answers: OpenAIResponseWriter,
        request: Request,
        asked: OpenAIRequest,
        use: TokenReservation,
        attempt: Attempt,
    ) -> None:
        self._answers = answers
        self._request = request
        self._use = use
        self._attempt = attempt
        attempt.on_cut = request.abort_if_unread
        self._reading = StreamParser(use, asked)
        self._first_byte_ms = 0.0
        self._status, self._outcome = 499, "cancelled"
        self._is_own_word = False

    async def run(self, stream: SseResponse) -> None:
        """Run the stream to its end. Raises WorkerConnectionLost only in the middle of an event,
        where only a broken connection reports the failure."""
        attempt, reading = self._attempt, self._reading
        last = DONE
        try:
            await stream.begin(stream_headers(header_list(streaming_headers(attempt))))
            await self._pass_on(stream)
            if reading.error is not None:
                last = self._failed(reading.error)
            elif not reading.is_done:
                raise WorkerConnectionLost("the engine closed the stream before its end", sent=True)
            else:
                self._status, self._outcome = attempt.answer.status, "ok"
        except WorkerConnectionLost:
            self._status, self._outcome = 504 if attempt.cut_by else 502, "error"
            if reading.is_inside:
                raise
            last = error_event(attempt.cut_by or await worker_crash_error(attempt.reservation))
        finally:
            self._answers.close(
                self._request,
                attempt,
                self._status,
                self._outcome,
                first_byte_ms=self._first_byte_ms,
                is_own_word=self._is_own_word,
            )
        await stream.close(
            last + end_of(attempt, self._use, "" if self._outcome == "ok" else "error")
        )

    async def _pass_on(self, stream: SseResponse) -> None:
        attempt, reading = self._attempt, self._reading
        async for chunk in attempt.answer.chunks():
            out = reading.feed(chunk, time.monotonic_ns())
            if out:
                self._first_byte_ms = self._first_byte_ms or _since_ms(attempt)
                attempt.bytes_out += len(out)
                await stream.send(out, is_inside=reading.is_inside)

    def _failed(self, error: dict[str, Any]) -> bytes:
        """Handle an error in the engine's stream; its own status counts if it is valid."""
        self._status = status_of(error)
        self._outcome, self._is_own_word = "error", True
        return b"data: %b\n\n" % json.dumps({"error": error}).encode()


def end_of(attempt: Attempt, use: TokenReservation, finish: str = "") -> bytes:
    """The last event of an engine's stream: finish reason, usage and cost."""
    call = attempt.call
    return end_event(
        finish_reason=finish or use.finish or "stop",
        cost=attempt.cost,
        exec_ms=attempt.exec_ms,
        start=call.start_kind.value,
        degraded=call.degradation or None,
        tokens_in=use.tokens_in,
        tokens_out=use.tokens_out,
        tokens_cached=use.tokens_cached,
    )


def _since_ms(attempt: Attempt) -> float:
    return (time.monotonic_ns() - attempt.call.began_ns) / 1e6


def _without_type(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name != b"content-type"]


def as_chunk(body: bytes) -> bytes:
    """Convert a whole answer to a single chunk of a stream."""
    try:
        document = json.loads(body)
    except ValueError:
        return body
    choices = (
        document.get("choices")
        if isinstance(document, dict) and document.get("object") == "chat.completion"
        else None
    )
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        return body
    choices = [
        {**{k: v for k, v in choice.items() if k != "message"}, "delta": choice.get("message")}
        for choice in choices
    ]
    return json.dumps({**document, "object": "chat.completion.chunk", "choices": choices}).encode()
