"""The response to a call: its header lines, built as bytes, each ending in CRLF, and the form that
an API gives to its body and its events."""

from __future__ import annotations

import contextlib
import json
from typing import Any, Final

from activator.calls.call import AnsweredCall, Call, ResponseFilter
from activator.calls.degradation import DEGRADED, degradation_of, is_features_reason
from activator.http.payloads import GUARD_LINES, call_type
from activator.http.sse import SseSplitter, data_lines, end_event, error_event, event
from activator.worker_client.connection import WorkerResponse
from pilotlight import errors
from pilotlight.protocol import CONTENT_JSON, CONTENT_SSE
from pilotlight.spec.pricing import CACHED
from snapshotter.types import StartKind

_SSE: Final = CONTENT_SSE.encode()
_JSON: Final = CONTENT_JSON.encode()
PASSED_ON = (b"content-type", b"pilotlight-outcome", b"cache-control")
"""A worker's headers that are forwarded to the caller; the others are internal."""


def streaming_headers(attempt: AnsweredCall) -> bytes:
    """Return the header lines of every call response."""
    call = attempt.call
    head = call.target.warm_head
    if call.start_kind is not StartKind.WARM:
        head = head.replace(b"WARM", call.start_kind.encode())
    if call.cache_result:
        head = _with_cache(head, call)
    if call.choice is not None:
        head += call.choice.head
    if degradation := call.degradation:
        head += b"pilotlight-degraded: %b\r\n" % degradation.encode()
    return b"x-request-id: %b\r\n%b%b%b" % (
        call.id.encode(),
        head,
        call.admission.head(),
        GUARD_LINES + forwarded_lines(attempt.answer),
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


def _with_cache(head: bytes, call: Call) -> bytes:
    """Return a head with what the response cache did; `Age` is that of RFC 9111 §5.1."""
    lines = b"%bpilotlight-cache: %b\r\n" % (head, call.cache_result.encode())
    if call.start_name != CACHED:
        return lines
    return b"%bage: %d\r\n" % (lines.replace(b"WARM", CACHED.encode(), 1), call.cache_age_s)


def weights_timing(call: Call) -> bytes:
    """Return a Server-Timing entry with the weight source of the start that a call waited for, and
    one of the response cache; b"" where there is neither."""
    timing = b', weights;desc="%b"' % call.weights.encode() if call.weights else b""
    if call.cache_result:
        timing += b', cache;desc="%b"' % call.cache_result.encode()
    return timing


def forwarded_lines(answer: WorkerResponse) -> bytes:
    """Return the header lines of a worker's response that its caller gets, formatted once for all
    that share its head."""
    head = answer.head
    if head is not None and head.forwarded:
        return head.forwarded
    lines: list[bytes] = []
    for name, value in answer.headers:
        if name in PASSED_ON or (name == DEGRADED and is_features_reason(value)):
            lines += (name, b": ", call_type(value) if name == b"content-type" else value, b"\r\n")
    formatted = b"".join(lines)
    if head is not None:
        head.forwarded = formatted
    return formatted


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
        if answer.header(b"content-type").endswith(b"json"):
            # the worker's word for it: user code may have taken its place
            with contextlib.suppress(ValueError, RecursionError):
                return event("error", json.loads(body))
        return b"event: error\n" + data_lines(body)

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
        start=call.start_name,
        degraded=degradation_of(attempt) or None,
        **more,
    )
