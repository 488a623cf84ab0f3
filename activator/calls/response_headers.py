"""Header lines of responses to calls, built as bytes, each ending in CRLF."""

from __future__ import annotations

from activator.calls.call import AnsweredCall, Call
from activator.http.payloads import GUARD_LINES, call_type
from activator.worker_client.connection import WorkerResponse
from snapshotter.types import StartKind

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


def weights_timing(call: Call) -> bytes:
    """Return a Server-Timing entry with the weight source of the start that a call waited for; b""
    when it waited for none."""
    return b', weights;desc="%b"' % call.weights.encode() if call.weights else b""


def forwarded_lines(answer: WorkerResponse) -> bytes:
    """Return the header lines of a worker's response that its caller gets, formatted once for all
    that share its head."""
    head = answer.head
    if head is not None and head.forwarded:
        return head.forwarded
    lines: list[bytes] = []
    for name, value in answer.headers:
        if name in PASSED_ON:
            lines += (name, b": ", call_type(value) if name == b"content-type" else value, b"\r\n")
    formatted = b"".join(lines)
    if head is not None:
        head.forwarded = formatted
    return formatted
