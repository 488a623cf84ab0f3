"""Header lines of responses to calls, built as bytes: each ends in CRLF. The hot path reads each
header once."""

from __future__ import annotations

from activator.calls.attempt import Attempt
from activator.calls.call import Call
from activator.http.content_types import GUARD_LINES, call_type
from activator.worker_client.connection import WorkerResponse
from snapshotter.types import StartKind

PASSED_ON = (b"content-type", b"pilotlight-outcome", b"cache-control")
"""A worker's headers that are forwarded to the caller; the others are internal."""


def streaming_headers(attempt: Attempt) -> bytes:
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
        quota_lines(call),
        _passed_on(attempt.answer),
    )


def complete_headers(attempt: Attempt) -> bytes:
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


def fast_path_headers(call: Call, answer: WorkerResponse, *, cost: str, exec_ms: float) -> bytes:
    """Return `complete_headers` and the content-length of a call that waited for nothing."""
    quotas = call.admission.head() if call.admission is not None else b""
    if call.choice is not None:
        quotas += call.choice.head
    return (
        b"x-request-id: %b\r\n%b%b%bpilotlight-cost: %b\r\nserver-timing: queue;dur=0.00, "
        b"start;dur=0.00, exec;dur=%.2f\r\n"
        b"content-length: %d\r\n"
    ) % (
        call.id.encode(),
        call.target.warm_head,
        quotas,
        _passed_on(answer),
        cost.encode(),
        exec_ms,
        len(answer.body or b""),
    )


def quota_lines(call: Call) -> bytes:
    """Return `RateLimit` and `RateLimit-Policy` of an admitted call; b"" where no quota applies."""
    return call.admission.head() if call.admission is not None else b""


def _passed_on(answer: WorkerResponse) -> bytes:
    lines: list[bytes] = [GUARD_LINES]
    for name, value in answer.headers:
        if name in PASSED_ON:
            lines += (name, b": ", call_type(value) if name == b"content-type" else value, b"\r\n")
    return b"".join(lines)
