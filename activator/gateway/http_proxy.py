"""Raw HTTP to functions that are web applications: `ANY /fn/{app}/{function}/…`, also under
`/t/{tenant}`. Bodies stream both ways with back-pressure. `websocket_proxy` handles WebSockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import MutableMapping
from typing import Any, Final

from activator.balancing.reservation import Reservation
from activator.billing.instance_meter import OpenRecord
from activator.calls.runner import Call, CallRunner
from activator.gateway.proxy_calls import call_of, expect_web, route_of
from activator.gateway.proxy_headers import answer_headers, request_head, restrict_public_headers
from activator.gateway.websocket_proxy import WebSocketProxy
from activator.http.request import Request, too_large
from activator.metrics.metrics import Metrics
from activator.resilience.breaker import Outcome
from activator.routing.access import AccessGrant
from activator.routing.call_target import CallTarget
from activator.tracing.context import note
from activator.tracing.tracer import Tracer
from activator.worker_client.connection import (
    WorkerConnection,
    WorkerConnectionLost,
    WorkerResponse,
)
from pilotlight import errors

LEAST_BYTES_PER_S: Final = 64 * 1024
"""Minimum rate of a body, after `body_timeout_s`: allows files of any size, but not a trickle."""
BODY_TIMEOUT_S: Final = 60.0


class HttpProxy:
    """Streams raw requests to ASGI functions, and the permitted ones to engines."""

    def __init__(
        self,
        *,
        dispatcher: CallRunner,
        metrics: Metrics,
        tracer: Tracer | None = None,
        body_timeout_s: float = BODY_TIMEOUT_S,
    ) -> None:
        """`body_timeout_s`: longest pause in a body, and its time limit in addition to
        LEAST_BYTES_PER_S."""
        self._dispatcher = dispatcher
        self._body_timeout_s = body_timeout_s
        self._metrics = metrics
        self._tracer = tracer or Tracer()
        self.websocket = WebSocketProxy(
            dispatcher=dispatcher, metrics=metrics, tracer=self._tracer
        ).answer

    async def http(self, request: Request, entry: AccessGrant) -> None:
        """Forward one request, streamed both ways.

        Raises the errors of `Throttler.reserve`, NotFound, OverQuota, InvalidInput, TooLarge,
        WorkerCrashed."""
        target = entry.target
        if target.spec.engine is None:  # for an engine the OpenAI API has checked the path
            expect_web(target)
        _expect_small(request, entry.raw_body_bytes)
        call = call_of(request, entry)
        admission = call.admission = await entry.admit()
        self._tracer.begin(call, request.headers)
        try:
            self._dispatcher.check(call)
            body = await self._begun_body(request, call)
            reservation = await self._dispatcher.throttler_of(target).reserve(
                call.remaining_s(target.spec.clocks.queue_s), rank=call.rank
            )
            call.reserved_ns = time.monotonic_ns()
            call.start_kind, call.start_ms, call.weights = (
                reservation.start_kind,
                reservation.start_ms,
                reservation.weights,
            )
            await self._relay(target, _Relay(request, call, reservation, entry, body), request)
        finally:
            if admission is not None:
                admission.release()

    async def _begun_body(self, request: Request, call: Call) -> _Body | None:
        """Return the body once its first piece has arrived, because a slot is reserved only then.
        None where there is no body."""
        if b"content-length" not in request.headers and b"transfer-encoding" not in request.headers:
            return None
        body = _Body(request, self._body_timeout_s)
        began_ns = time.monotonic_ns()
        await body.begin()
        waited_ns = time.monotonic_ns() - began_ns  # time spent by the caller
        call.began_ns += waited_ns
        call.routed_ns += waited_ns
        return body

    async def _relay(self, target: CallTarget, relay: _Relay, request: Request) -> None:
        try:
            async with asyncio.timeout(target.spec.clocks.execution_s):
                await relay.run()
        except WorkerConnectionLost as e:
            relay.status, relay.outcome, relay.ending = 502, "error", Outcome.FAILED
            if request.is_answered:
                raise
            raise errors.WorkerCrashed(
                "the instance died during this request; another one replaces it", reason="crashed"
            ) from e
        except TimeoutError as e:
            relay.status, relay.outcome, relay.ending = 504, "error", Outcome.FAILED
            if request.is_answered:
                raise WorkerConnectionLost(
                    "the execution clock ran out before the end of the response", sent=True
                ) from e
            raise errors.DeadlineExceeded(
                f"the request ran longer than {target.spec.clocks.execution_s:g} s",
                clock="execution",
            ) from e
        finally:
            relay.close()
            if request.is_answered:  # otherwise the resulting error is observed
                relay.observe(self._metrics, self._tracer)
            else:
                relay.remember()


class _Relay:
    """One raw request on a reserved slot. `close` it on every path."""

    def __init__(
        self,
        request: Request,
        call: Call,
        reservation: Reservation,
        entry: AccessGrant,
        body: _Body | None,
    ) -> None:
        self._entry = entry
        self._body = body
        self._request = request
        self._call = call
        self._reservation = reservation
        self._ticket: OpenRecord | None = None
        self._connection: WorkerConnection | None = None
        self._sent = 0
        self._is_stream = False
        self._first_byte_ms = 0.0
        self._cost = "0"
        self._dispatched_ns = 0
        self._answer: WorkerResponse | None = None
        self.status = 499
        self.outcome = "cancelled"
        self.ending = Outcome.ANSWERED

    async def run(self) -> None:
        """Open the record, send the request, relay the response. Raises WorkerConnectionLost,
        JournalFull, InvalidInput, TooLarge."""
        request, loop = self._request, asyncio.get_running_loop()
        self._ticket = await self._reservation.open_paid(self._call)
        connections = self._reservation.instance.connections
        connection = self._connection = connections.acquire_nowait(
            self._call.reserved_ns / 1e9
        ) or await connections.open(loop)
        has_body = self._body is not None
        self._dispatched_ns = time.monotonic_ns()
        future = connection.request(
            request_head(request, self._call, has_body=has_body),
            loop=loop,
            is_head=request.verb == "HEAD",
        )
        try:
            if self._body is not None:
                await _send_body(self._body, connection, self._entry.raw_body_bytes)
            answer = self._answer = await future
        finally:
            if not future.cancel() and not future.cancelled():
                # retrieve it: with an incomplete body the response is not awaited
                future.exception()
        self._is_stream, self._first_byte_ms = (
            answer.body is None,
            (time.monotonic_ns() - self._call.began_ns) / 1e6,
        )
        await request.start(
            answer.status,
            restrict_public_headers(answer_headers(request, self._call, answer.headers)),
        )
        if answer.body is not None:
            self._sent = len(answer.body)
            await request.chunk(answer.body, more=False)
        else:
            async for chunk in answer.chunks():
                self._sent += len(chunk)
                await request.chunk(chunk)
            await request.chunk(b"", more=False)
        self.status, self.outcome = answer.status, "ok" if answer.status < 500 else "error"
        self.ending = Outcome.ANSWERED if answer.status < 500 else Outcome.RAISED

    def close(self) -> None:
        """Close the record and release the slot and the connection."""
        self._reservation.ending = self.ending if self._ticket is not None else Outcome.NEITHER
        try:
            if self._ticket is not None:
                self._cost = self._reservation.close(
                    self._ticket,
                    status=self.status,
                    outcome=self.outcome,
                    bytes_in=0,
                    bytes_out=self._sent,
                )
        finally:
            if self._connection is not None:
                self._reservation.instance.connections.release(self._connection, time.monotonic())
            self._reservation.release()

    def remember(self) -> None:
        """Record a failure before the response began."""
        note(
            self._call,
            self._reservation,
            dispatched_ns=self._dispatched_ns,
            ended_ns=time.monotonic_ns(),
            error=str(self.status),
        )

    def observe(self, metrics: Metrics, tracer: Tracer) -> None:
        """Record a complete or partial response in metrics and traces."""
        metrics.answered_raw(
            self._call,
            self.status,
            cost=self._cost,
            is_stream=self._is_stream,
            first_byte_ms=self._first_byte_ms,
            completed=self.ending is not Outcome.FAILED,
        )
        tracer.ended(
            self._call,
            self._reservation,
            self._answer,
            status=self.status,
            dispatched_ns=self._dispatched_ns,
            cost=self._cost,
            first_byte_ms=self._first_byte_ms if self._is_stream else None,
            verb=self._request.verb,
            route=route_of(self._call.target),
        )
        self._request.target = None


def _expect_small(request: Request, limit_bytes: int | None) -> None:
    declared = request.headers.get(b"content-length", b"")
    if limit_bytes is not None and declared.isdigit() and int(declared) > limit_bytes:
        raise too_large(limit_bytes)


class _Body:
    """A body that is forwarded as it arrives, with a time limit: bytes received extend the
    remaining time, up to `timeout_s`."""

    def __init__(self, request: Request, timeout_s: float) -> None:
        self._request = request
        self._timeout_s = self._left_s = timeout_s
        self._first: MutableMapping[str, Any] | None = None

    async def begin(self) -> None:
        """Wait for its first piece. Raises the errors of `next`."""
        self._first = await self.next()

    async def next(self) -> MutableMapping[str, Any]:
        """Return the next piece, an ASGI message. Raises InvalidInput when it arrives too slowly,
        ClientClosedRequest."""
        if (first := self._first) is not None:
            self._first = None
            return first
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(self._left_s):
                message = await self._request.receive()
        except TimeoutError as e:
            text = (
                f"the body arrived too slowly: the limit is {self._timeout_s:g} s, and a second "
                f"for each {LEAST_BYTES_PER_S} bytes"
            )
            raise errors.InvalidInput(text) from e
        if message["type"] == "http.disconnect":
            raise errors.ClientClosedRequest("the caller disconnected while sending its body")
        earned_s = len(message["body"]) / LEAST_BYTES_PER_S - (time.monotonic() - began_s)
        self._left_s = min(self._timeout_s, self._left_s + earned_s)
        return message


async def _send_body(whole: _Body, connection: WorkerConnection, limit_bytes: int | None) -> None:
    """Forward the body as it arrives. Raises TooLarge when a body without a declared length exceeds
    its limit, and the errors of `_Body.next`."""
    sent = 0
    while True:
        message = await whole.next()
        if body := message["body"]:
            sent += len(body)
            if limit_bytes is not None and sent > limit_bytes:
                # close: the worker must not take a partial request for a whole one
                connection.close()
                raise too_large(limit_bytes)
            await connection.write(b"%x\r\n%s\r\n" % (len(body), body))
        if not message.get("more_body", False):
            await connection.write(b"0\r\n\r\n")
            return
