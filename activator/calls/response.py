"""Reads a worker's response once, ends its attempt with it, and gives it the form of an API.

How an attempt that was answered ends is decided here alone, for every API and for submitted calls:
as its worker ended the response, as an error that interrupted it, or as a disconnect of its caller.
`ResponseFilter`s change bytes and report a status; a `ResponseFormat` decides nothing.

The header lines of responses are built as bytes, each ending in CRLF; the hot path reads each
header once."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Final, Self

from activator.calls.attempt import outcome_of, status_of
from activator.calls.call import AnsweredCall, Call, ResponseFilter
from activator.http.payloads import GUARD_LINES, call_type
from activator.http.sse import SseSplitter, data_lines, end_event, error_event, event
from activator.worker_client.connection import WorkerConnectionLost, WorkerResponse
from pilotlight import errors
from pilotlight.protocol import CONTENT_JSON, CONTENT_SSE, HEADER_FINISH
from snapshotter.types import StartKind

_SSE: Final = CONTENT_SSE.encode()
_JSON: Final = CONTENT_JSON.encode()
_FINISH: Final = HEADER_FINISH.encode()
_FINISHES: Final = {"ok": "stop", "cancelled": "cancelled"}


class ResponseReader:
    """The response of one attempt. Owner: the task of its call.

        with ResponseReader(attempt) as response:  # ends the attempt
            async for piece in response:
                await send(piece)
            await send(response.end())

    Attributes:
        status, outcome: of the attempt's record, once it has ended.
        first_byte_ms: of a stream, from the call's beginning to its first piece; 0 = none.
    """

    __slots__ = ("_attempt", "_filter", "_is_sent", "first_byte_ms", "outcome", "status")

    def __init__(
        self,
        attempt: AnsweredCall,
        response_filter: ResponseFilter | None = None,
        *,
        is_sent: bool = False,
    ) -> None:
        """`response_filter`: None = its bytes are passed on as they are. `is_sent`: the caller gets
        them as they arrive; False: once all are there, or none."""
        self._attempt = attempt
        self._is_sent = is_sent
        self._filter = response_filter
        self.first_byte_ms = 0.0
        self.status, self.outcome = 499, "cancelled"

    def __repr__(self) -> str:
        return f"<ResponseReader {self.status} of {self._attempt!r}>"

    @property
    def is_inside(self) -> bool:
        """Whether a part of an event was returned, and its end was not."""
        return self._filter is not None and self._filter.is_inside

    @property
    def finish(self) -> str:
        """Why the response ended: stop, cancelled or error."""
        return _FINISHES.get(self.outcome, "error")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        attempt = self._attempt
        is_stream = attempt.answer.body is None
        if error is None:
            attempt.close(
                status=self.status,
                outcome=self.outcome,
                bytes_out=attempt.bytes_out,
                finish=self.finish if is_stream else "",
            )
            return
        if not isinstance(error, WorkerConnectionLost | errors.PilotlightError):
            error = asyncio.CancelledError()  # its caller left, or it could not be sent
        error = attempt.cut_by or error
        self.status, self.outcome = status_of(error), outcome_of(error)
        finish = "length" if isinstance(error, errors.TooLarge) else self.finish
        attempt.fail(error, finish=finish if is_stream else "", is_noted=not self._is_sent)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the pieces of a streamed response as they arrive. Raises WorkerConnectionLost."""
        attempt, response_filter = self._attempt, self._filter
        async for piece in attempt.answer.chunks():
            if response_filter is not None:
                piece = response_filter.feed(piece, time.monotonic_ns())
                if not piece:
                    continue
            self._count(piece)
            yield piece

    def end(self) -> bytes:
        """Take the outcome of a stream that its worker ended, and return its last bytes. Raises
        WorkerConnectionLost where it is incomplete."""
        status, rest = self._worker_status, b""
        if self._filter is not None:
            status, rest = self._filter.end(status)
        if rest:
            self._count(rest)
        self.status, self.outcome = status, "ok" if status < 400 else "error"
        return rest

    def whole(self, body: bytes | None = None) -> bytes:
        """Take the outcome of a response that was received, or collected as `body`, and return its
        body. Raises WorkerConnectionLost where it is incomplete."""
        answer = self._attempt.answer
        status, whole = (
            (answer.status, answer.body or b"") if body is None else (self._worker_status, body)
        )
        if self._filter is not None:
            status, whole = self._filter.collected(status, whole)
        self._attempt.bytes_out = len(whole)
        self.status, self.outcome = status, "ok" if status < 400 else "error"
        return whole

    @property
    def _worker_status(self) -> int:
        """The status of its head, or 500 where user code failed in the stream behind it."""
        answer = self._attempt.answer
        if answer.status < 400 and answer.header(_FINISH) == b"error":
            return 500
        return answer.status

    def _count(self, piece: bytes) -> None:
        attempt = self._attempt
        if not self.first_byte_ms:
            self.first_byte_ms = (time.monotonic_ns() - attempt.call.began_ns) / 1e6
        attempt.bytes_out += len(piece)


PASSED_ON = (b"content-type", b"pilotlight-outcome", b"cache-control")
"""A worker's headers that are forwarded to the caller; the others are internal."""


def streaming_headers(attempt: AnsweredCall) -> bytes:
    """Return the header lines of every call response."""
    call = attempt.call
    head = call.target.warm_head
    if call.start_kind is not StartKind.WARM:
        head = head.replace(b"WARM", call.start_kind.encode())
    if call.choice is not None:
        head += call.choice.head
    if degradation := call.degradation:
        head += b"pilotlight-degraded: %b\r\n" % degradation.encode()
    return b"x-request-id: %b\r\n%b%b%b" % (
        call.id.encode(),
        head,
        call.admission.head(),
        _passed_on(attempt.answer),
    )


def complete_headers(attempt: AnsweredCall) -> bytes:
    """Return the header lines of a call that has ended before its response begins: with its cost
    and times."""
    call = attempt.call
    return (
        b"%bpilotlight-cost: %b\r\nserver-timing: queue;dur=%.2f, start;dur=%.2f, "
        b"exec;dur=%.2f%b\r\n"
        % (
            streaming_headers(attempt),
            attempt.cost.encode(),
            call.queued_ms,
            call.start_ms,
            attempt.exec_ms,
            weights_timing(call),
        )
    )


def weights_timing(call: Call) -> bytes:
    """Return a Server-Timing entry with the weight source of the start that a call waited for; b""
    when it waited for none."""
    return b', weights;desc="%b"' % call.weights.encode() if call.weights else b""


def _passed_on(answer: WorkerResponse) -> bytes:
    lines: list[bytes] = [GUARD_LINES]
    for name, value in answer.headers:
        if name in PASSED_ON:
            lines += (name, b": ", call_type(value) if name == b"content-type" else value, b"\r\n")
    return b"".join(lines)


class ResponseFormat:
    """The form of an API's responses, bodies and events: here those of functions, as their workers
    write them. An API with other ones has a subclass."""

    def accepts_events(self, call: Call) -> bool:
        """Return whether the caller reads a stream of events: here by its `Accept` header."""
        return _SSE in call.accept

    def requires_events(self, call: Call) -> bool:
        """Return whether it gets one whatever the response is, so that heartbeats may begin it:
        here from generators."""
        method = call.target.spec.method(call.method)
        return method is not None and method.is_generator and call.content_type == _JSON

    def is_events(self, answer: WorkerResponse) -> bool:
        """Return whether a response is sent as events to a caller that accepts them."""
        return answer.body is None and _is_events(answer)

    def filter(self, attempt: AnsweredCall, *, is_events: bool) -> ResponseFilter | None:
        """Return a new filter of an attempt's response; None where it is sent as it is."""
        return SseSplitter() if is_events else None

    def as_events(self, answer: WorkerResponse, body: bytes) -> bytes:
        """Convert a whole response to events: a value to one, an error to one with that name."""
        if _is_events(answer):
            return body
        if answer.status < 400:
            return data_lines(body)
        return (
            event("error", json.loads(body))
            if answer.header(b"content-type").endswith(b"json")
            else b"event: error\n" + data_lines(body)
        )

    def error(self, error: errors.PilotlightError, request_id: str) -> bytes:
        """Return the event of an error."""
        return error_event(error, request_id)

    def end(self, attempt: AnsweredCall | None, finish: str) -> bytes:
        """Return the last events, with the finish reason and the cost; `attempt`: None = it was not
        answered."""
        return end_of(attempt, finish)

    def rest(self, attempt: AnsweredCall) -> bytes:
        """Return what follows a whole response's body: the end of a declared stream."""
        return self.end(attempt, "stop") if _is_events(attempt.answer) else b""


AS_WRITTEN: Final = ResponseFormat()


def _is_events(answer: WorkerResponse) -> bool:
    return answer.header(b"content-type").startswith(_SSE)


def end_of(attempt: AnsweredCall | None, finish: str, **more: Any) -> bytes:
    """Return the last event of an attempt's stream; `attempt`: None = no attempt answered."""
    if attempt is None:
        return end_event(finish_reason=finish, cost="0", exec_ms=0.0, start="")
    call = attempt.call
    return end_event(
        finish_reason=finish,
        cost=attempt.cost,
        exec_ms=attempt.exec_ms,
        start=call.start_kind.value,
        degraded=call.degradation or None,
        **more,
    )
