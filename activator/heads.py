"""Header lines of answered calls, made as bytes: each ends in CRLF. The hot path looks at no header twice."""

from __future__ import annotations

from collections.abc import Mapping

from activator.dispatch import Exchange
from snapshotter.types import StartKind

_PASSED_ON = (b"content-type", b"pilotlight-outcome", b"cache-control")
"""A worker's headers that reach the caller; the rest are between the activator and the worker."""
_TRACE = (b"traceparent", b"tracestate")


def call_head(exchange: Exchange) -> bytes:
    """What every answered call carries."""
    call = exchange.call
    head = call.target.warm_head
    if call.start_kind is not StartKind.WARM:
        head = head.replace(b"WARM", call.start_kind.encode())
    head = b"x-request-id: %b\r\n%b" % (call.id.encode(), head)
    for name, value in exchange.answer.headers:
        if name in _PASSED_ON:
            head += b"%b: %b\r\n" % (name, value)
    return head


def closed_head(exchange: Exchange, cost: str) -> bytes:
    """What a call carries that is over when its answer begins: its cost and its times too."""
    call = exchange.call
    return b"%bpilotlight-cost: %b\r\nserver-timing: queue;dur=%.2f, start;dur=%.2f, exec;dur=%.2f\r\n" % (
        call_head(exchange), cost.encode(), call.queued_ms, call.start_ms, exchange.exec_ms,
    )  # fmt: skip


def trace_lines(headers: Mapping[bytes, bytes]) -> bytes:
    """W3C trace context goes on to the worker as it came (https://www.w3.org/TR/trace-context/); each line *begins* with CRLF."""
    if b"traceparent" not in headers and b"tracestate" not in headers:
        return b""
    return b"".join([b"\r\n%b: %b" % (name, value) for name in _TRACE if (value := headers.get(name))])
