"""How an answer goes to its caller: whole, with its cost in a header, or as it comes, with the cost behind it.

The exchange is closed here, exactly once, whatever happens: its record says what the caller really got.
"""

from __future__ import annotations

import time

from activator.call import Exchange
from activator.heads import call_head, closed_head
from activator.metrics import Metrics
from activator.request import Request, header_list
from activator.shadows import Shadows
from activator.tracing.tracer import Tracer
from activator.upstream import UpstreamGone
from pilotlight.protocol import CONTENT_SSE

_SSE = CONTENT_SSE.encode()
WAITED_MS = 1.0
"""A call that was given its slot later than this has waited for it."""


class Relay:
    """Gives callers their answers. Of no state of its own; owner: the event loop."""

    def __init__(self, *, metrics: Metrics, tracer: Tracer, shadows: Shadows | None = None) -> None:
        """`shadows` copy calls whose answers went out; None = none do."""
        self._metrics = metrics
        self._tracer = tracer
        self._shadows = shadows

    def __repr__(self) -> str:
        return f"<Relay {'with' if self._shadows is not None else 'without'} shadows>"

    async def answer(self, request: Request, exchange: Exchange) -> None:
        """Give the caller what the worker answered. Raises UpstreamGone when it breaks off in the middle."""
        call = exchange.call
        if call.queued_ms >= WAITED_MS:
            self._metrics.waited(call.rank.priority.value, call.queued_ms / 1000)
        if exchange.answer.body is None:
            await self._stream(request, exchange)
        else:
            await self._whole(request, exchange, exchange.answer.body)

    async def _whole(self, request: Request, exchange: Exchange, body: bytes) -> None:
        answer = exchange.answer
        outcome = "ok" if answer.status < 400 else "error"
        cost = exchange.close(status=answer.status, outcome=outcome, bytes_out=len(body))
        self._metrics.answered(exchange, answer.status)
        request.target = None  # observed
        await request.respond_whole(answer.status, closed_head(exchange, cost), body)
        if exchange.call.choice is not None and self._shadows is not None:
            self._shadows.copy(exchange.call, status=answer.status, body=body, exec_ms=exchange.exec_ms)
        self._tracer.answered(exchange, answer.status)

    async def _stream(self, request: Request, exchange: Exchange) -> None:
        answer = exchange.answer
        sent, outcome, status, first_byte_ms = 0, "cancelled", 499, 0.0
        try:
            await request.start(answer.status, header_list(call_head(exchange)))
            async for chunk in answer.chunks():
                first_byte_ms = first_byte_ms or (time.monotonic_ns() - exchange.call.began_ns) / 1e6
                sent += len(chunk)
                await request.chunk(chunk)
            outcome, status = ("ok", answer.status) if answer.status < 400 else ("error", answer.status)
        except UpstreamGone:
            outcome, status = "error", 502
            raise
        finally:
            cost = exchange.close(status=status, outcome=outcome, bytes_out=sent)
            self._metrics.answered(exchange, status, first_byte_ms=first_byte_ms, completed=status == answer.status)
            request.target = None  # observed
            self._tracer.answered(exchange, status, first_byte_ms=first_byte_ms)
        is_events = answer.header(b"content-type").startswith(_SSE)
        await request.chunk(_usage_event(exchange, cost) if is_events else b"", more=False)


def _usage_event(exchange: Exchange, cost: str) -> bytes:
    """The last event of a server-sent stream: what the call cost and how long it took (WHATWG HTML §9.2)."""
    data = b'{"cost":"%s","exec_ms":%.2f,"start":"%s"}' % (cost.encode(), exchange.exec_ms, exchange.call.start_kind.encode())
    return b"event: usage\ndata: " + data + b"\n\n"
