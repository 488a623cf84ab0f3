"""Raw HTTP to functions that are web applications: `ANY /fn/{app}/{function}/…`, also under
`/t/{tenant}`. Bodies stream both ways with back-pressure. `websocket_proxy` handles WebSockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import MutableMapping
from functools import partial
from typing import Any, Final

from activator.access.grants import AccessGrant
from activator.calls.attempt import Attempt, status_of, worker_crash_error
from activator.calls.call import Call
from activator.calls.runner import CallRunner
from activator.gateway.proxy_headers import (
    answer_headers,
    call_of,
    declared_length,
    mount_path,
    request_head,
    require_web,
    restrict_public_headers,
    route_of,
)
from activator.gateway.websocket_proxy import WebSocketProxy
from activator.http.request import Request, too_large
from activator.metrics.metrics import Metrics
from activator.tracing.tracer import Tracer
from activator.worker_client.connection import (
    WorkerConnection,
    WorkerConnectionLost,
    WorkerResponse,
)
from pilotlight import errors

MAX_RESENT_BYTES: Final = 256 * 1024
"""Bytes of a body that are kept while they are forwarded: a request with a longer one is not sent
again to another instance."""
LEAST_BYTES_PER_S: Final = 64 * 1024
"""Minimum rate of a body, after `body_timeout_s`: allows files of any size, but not a trickle."""
BODY_TIMEOUT_S: Final = 60.0


class HttpProxy:
    """Streams raw requests to ASGI functions, and the permitted ones to engines."""

    def __init__(
        self,
        *,
        runner: CallRunner,
        metrics: Metrics,
        tracer: Tracer | None = None,
        body_timeout_s: float = BODY_TIMEOUT_S,
    ) -> None:
        """`body_timeout_s`: longest pause in a body, and its time limit in addition to
        LEAST_BYTES_PER_S."""
        self._runner = runner
        self._body_timeout_s = body_timeout_s
        self._metrics = metrics
        self._tracer = tracer or Tracer()
        self.websocket = WebSocketProxy(runner=runner, metrics=metrics, tracer=self._tracer).answer

    async def http(self, request: Request, entry: AccessGrant) -> None:
        """Forward one request, streamed both ways.

        Raises the errors of `Throttler.reserve`, NotFound, OverQuota, InvalidInput, TooLarge,
        WorkerCrashed."""
        target = entry.target
        if target.spec.engine is None:  # for an engine the OpenAI API has checked the path
            require_web(target)
        _require_small(request, entry.raw_body_bytes)
        call = call_of(request, entry)
        with await entry.admit() as call.admission:
            self._tracer.begin(call, request.headers)
            request.on_failed = partial(self._tracer.failed, call)
            self._runner.check(call)
            body = await self._begun_body(request, call)
            await self._run(request, call, entry, body)

    async def _run(
        self, request: Request, call: Call, entry: AccessGrant, body: _Body | None
    ) -> None:
        """Relay a request, again to another instance where its worker did not get it or was busy,
        and the body was kept. Raises Unavailable where it was not."""
        throttler, busy_since = self._runner.throttler_of(call.target), 0.0
        while True:
            reservation = await throttler.reserve(
                call.remaining_s(call.target.spec.clocks.queue_s), rank=call.caller.rank
            )
            call.reserved(reservation)
            attempt = Attempt(call, reservation)
            try:
                if await self._relay(_ProxyExchange(request, attempt, entry, body)):
                    return
                busy_since = self._runner.requeue(attempt, busy_since)
            except WorkerConnectionLost as e:
                if e.sent:
                    raise
                await self._runner.require_retryable(call, reservation, e)
            if body is not None and not body.rewind():
                raise errors.Unavailable(
                    f"the instance did not take the request, and a body of more than "
                    f"{MAX_RESENT_BYTES} bytes is not kept to be sent to another: send the request "
                    f"again",
                    retry_after_s=1,
                )

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

    async def _relay(self, exchange: _ProxyExchange) -> bool:
        """Relay a request and its response. Returns False, with the attempt still open, where the
        worker was busy and did not begin. Raises WorkerConnectionLost where it was not sent, or the
        response broke off; WorkerCrashed where there was none."""
        request, attempt = exchange.request, exchange.attempt
        try:
            async with attempt.limited("the request"):
                if not await exchange.run():
                    return False
        except BaseException as e:
            attempt.fail(e, is_noted=not request.is_answered)
            if request.is_answered:  # otherwise the error that the caller gets is observed
                is_cut = isinstance(e, WorkerConnectionLost) or e is attempt.cut_by
                exchange.observe(self._metrics, self._tracer, status_of(e), completed=not is_cut)
                if e is attempt.cut_by:
                    raise WorkerConnectionLost(str(e), sent=True) from e
            elif isinstance(e, WorkerConnectionLost) and e.sent:
                raise await worker_crash_error(attempt.reservation) from e
            raise
        exchange.observe(self._metrics, self._tracer, attempt.answer.status)
        return True


class _ProxyExchange:
    """One raw request and its response, relayed on a slot's attempt."""

    def __init__(
        self, request: Request, attempt: Attempt, entry: AccessGrant, body: _Body | None
    ) -> None:
        self.request = request
        self.attempt = attempt
        self._entry = entry
        self._body = body
        self._first_byte_ms = 0.0

    async def run(self) -> bool:
        """Send the request, relay the response, and close the attempt; False, without the last two,
        where the worker is busy. Raises WorkerConnectionLost, JournalFull, InvalidInput, TooLarge,
        ClientClosedRequest."""
        attempt = self.attempt
        answer = await self._send(await attempt.open())
        if answer.is_busy:
            return False
        if self._body is not None:
            self._body.drop()
        await self._pass_on(answer)
        attempt.close(
            status=answer.status,
            outcome="ok" if answer.status < 500 else "error",
            bytes_out=attempt.bytes_out,
        )
        return True

    async def _send(self, connection: WorkerConnection) -> WorkerResponse:
        """Send the request while its body arrives; return the response, or its head."""
        request, attempt, body = self.request, self.attempt, self._body
        attempt.dispatched_ns = time.monotonic_ns()
        future = connection.request(
            request_head(request, attempt.call, has_body=body is not None),
            loop=asyncio.get_running_loop(),
            is_head=request.verb == "HEAD",
        )
        try:
            if body is not None:
                attempt.is_sending = True
                await _send_body(
                    body,
                    connection,
                    future,
                    limit_bytes=self._entry.raw_body_bytes,
                    is_chunked=declared_length(request) is None,
                )
                attempt.is_sending = False
            attempt.answer = await future
        finally:
            if not future.cancel() and not future.cancelled():
                # retrieve it: with an incomplete body the response is not awaited
                future.exception()
        return attempt.answer

    async def _pass_on(self, answer: WorkerResponse) -> None:
        request, attempt = self.request, self.attempt
        self._first_byte_ms = (time.monotonic_ns() - attempt.call.began_ns) / 1e6
        await request.start(
            answer.status,
            restrict_public_headers(
                answer_headers(request, attempt.call, answer.headers),
                mount_path(request.scope, attempt.call.target),
            ),
        )
        if answer.body is not None:
            attempt.bytes_out = len(answer.body)
            await request.chunk(answer.body, more=False)
            return
        async for chunk in answer.chunks():
            attempt.bytes_out += len(chunk)
            await request.chunk(chunk)
        await request.chunk(b"", more=False)

    def observe(
        self, metrics: Metrics, tracer: Tracer, status: int, *, completed: bool = True
    ) -> None:
        """Record a complete or partial response in metrics and traces."""
        attempt = self.attempt
        is_stream = attempt.answer.body is None
        metrics.answered_raw(
            attempt,
            status,
            is_stream=is_stream,
            first_byte_ms=self._first_byte_ms,
            completed=completed,
        )
        tracer.answered(
            attempt,
            status,
            first_byte_ms=self._first_byte_ms if is_stream else None,
            verb=self.request.verb,
            route=route_of(attempt.call.target),
        )
        self.request.target = None


def _require_small(request: Request, limit_bytes: int | None) -> None:
    declared = request.headers.get(b"content-length", b"")
    if limit_bytes is not None and declared.isdigit() and int(declared) > limit_bytes:
        raise too_large(limit_bytes)


class _Body:
    """A body that is forwarded as it arrives, with a time limit: bytes received extend the
    remaining time, up to `timeout_s`.

    Its beginning, up to MAX_RESENT_BYTES, is kept until the worker has answered, within the memory
    limits of its tenant."""

    def __init__(self, request: Request, timeout_s: float) -> None:
        self._request = request
        self._timeout_s = self._left_s = timeout_s
        self._pieces: list[MutableMapping[str, Any]] = []
        self._next = 0
        self._kept_bytes = 0
        self._is_kept = True

    async def begin(self) -> None:
        """Wait for its first piece. Raises the errors of `next`."""
        await self.next()
        self._next = 0

    async def next(self) -> MutableMapping[str, Any]:
        """Return the next piece, an ASGI message. Raises InvalidInput when it arrives too slowly,
        ClientClosedRequest."""
        if self._next == len(self._pieces):
            piece = await self._receive()
            self._reserve(len(piece["body"]))
            if not self._is_kept:
                self._pieces, self._next = [], 0
            self._pieces.append(piece)
        self._next += 1
        return self._pieces[self._next - 1]

    def rewind(self) -> bool:
        """Begin again with the first piece. Returns False where it was dropped."""
        self._next = 0
        return self._is_kept

    def drop(self) -> None:
        """Keep no more of it: it is not sent again."""
        self._pieces, self._next = [], 0
        self._is_kept = False
        if self._request.room is not None and self._kept_bytes:
            self._request.room.release(self._kept_bytes)
        self._kept_bytes = 0

    def _reserve(self, size: int) -> None:
        room = self._request.room
        if not self._is_kept:
            return
        if room is None or self._kept_bytes + size > MAX_RESENT_BYTES:
            self.drop()
            return
        try:
            room.acquire(size)
            self._kept_bytes += size
        except errors.TooManyRequests:
            self.drop()

    async def _receive(self) -> MutableMapping[str, Any]:
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


async def _send_body(
    whole: _Body,
    connection: WorkerConnection,
    answer: asyncio.Future[WorkerResponse],
    *,
    limit_bytes: int | None,
    is_chunked: bool,
) -> None:
    """Forward the body as it arrives; a worker that answers meanwhile that it is busy gets no more
    of it. Raises TooLarge when a body without a declared length exceeds
    its limit, and the errors of `_Body.next`."""
    sent = 0
    while True:
        message = await whole.next()
        if _is_busy(answer):
            connection.close()  # the worker waits for the rest
            return
        if body := message["body"]:
            sent += len(body)
            if limit_bytes is not None and sent > limit_bytes:
                # close: the worker must not take a partial request for a whole one
                connection.close()
                raise too_large(limit_bytes)
            await connection.write(b"%x\r\n%s\r\n" % (len(body), body) if is_chunked else body)
        if not message.get("more_body", False):
            if is_chunked:
                await connection.write(b"0\r\n\r\n")
            return


def _is_busy(answer: asyncio.Future[WorkerResponse]) -> bool:
    is_answered = answer.done() and not answer.cancelled() and answer.exception() is None
    return is_answered and answer.result().is_busy
