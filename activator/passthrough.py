"""Raw HTTP and WebSocket to functions that are web applications: `ANY /fn/{app}/{function}/…`, also under `/t/{tenant}`.

Bodies stream both ways with back-pressure; a connection counts as one call for as long as it lasts, so it holds a slot and is billed
until it closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

from websockets.asyncio.client import ClientConnection, unix_connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.frames import EXTERNAL_CLOSE_CODES

from activator.billing.account import Ticket
from activator.dispatch import Call, Dispatcher
from activator.entry import Entry
from activator.fairness.rank import Rank
from activator.metrics import Metrics
from activator.raw_heads import answer_headers, arm_of, request_head, rest, root, sandboxed
from activator.request import Receive, Request, Scope, Send, error_answer, header_list, too_large
from activator.reservation import Reservation
from activator.resilience.breaker import Ending
from activator.targets import Target
from activator.throttler import Throttler
from activator.tracing.context import note
from activator.tracing.tracer import Tracer
from activator.upstream import Answer, UpstreamGone, WorkerConnection
from pilotlight import errors
from pilotlight.protocol import HEADER_CALL, HEADER_ROOT_PATH
from pilotlight.spec import FunctionKind

_MAX_FRAME_BYTES = 16 * 1024 * 1024
_CLOSE_S = 2.0
"""How long a worker may take to answer a WebSocket's close before its connection is cut."""

RawEntry = Callable[[Request], Entry]


class Passthrough:
    """Streams raw requests to ASGI functions."""

    def __init__(self, *, dispatcher: Dispatcher, metrics: Metrics, tracer: Tracer | None = None) -> None:
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._tracer = tracer or Tracer()

    async def http(self, request: Request, entry: Entry) -> None:
        """One request, streamed both ways. Raises what `Throttler.reserve` raises, NotFound, OverQuota, TooLarge, WorkerCrashed."""
        target = entry.target
        _expect_asgi(target)
        _expect_small(request, entry.raw_body_bytes)
        call = _call_of(request, entry)
        admission = call.admission = await entry.admit()
        self._tracer.begin(call, request.headers)
        try:
            self._dispatcher.check(call)
            reservation = await self._dispatcher.throttler_of(target).reserve(call.remaining_s(target.spec.clocks.queue_s), rank=call.rank)
            call.reserved_ns = time.monotonic_ns()
            call.start_kind, call.start_ms, call.weights = reservation.start_kind, reservation.start_ms, reservation.weights
            await self._relay(target, _Relay(request, call, reservation, entry), request)
        finally:
            if admission is not None:
                admission.release()

    async def _relay(self, target: Target, relay: _Relay, request: Request) -> None:
        try:
            async with asyncio.timeout(target.spec.clocks.execution_s):
                await relay.run()
        except UpstreamGone as e:
            relay.status, relay.outcome, relay.ending = 502, "error", Ending.FAILED
            if request.is_answered:
                raise
            raise errors.WorkerCrashed("the instance died under this request; another takes its place", reason="crashed") from e
        except TimeoutError as e:
            relay.status, relay.outcome, relay.ending = 504, "error", Ending.FAILED
            if request.is_answered:
                raise UpstreamGone("the execution clock ran out in the middle of the answer", sent=True) from e
            raise errors.DeadlineExceeded(f"the request ran longer than {target.spec.clocks.execution_s:g} s", clock="execution") from e
        finally:
            relay.close()
            if request.is_answered:  # else it is observed as the error that it becomes
                relay.observe(self._metrics, self._tracer)
            else:
                relay.remember()

    async def websocket(self, scope: Scope, receive: Receive, send: Send, raw_entry: RawEntry) -> None:
        """One WebSocket: accepted once the worker accepted it, then frames both ways until either side closes.

        The execution clock bounds its whole life; then both sides are closed with 1011 (RFC 6455 §7.4.1).
        """
        message = await receive()
        assert message["type"] == "websocket.connect"
        request = Request(scope, receive, send)
        try:
            entry = raw_entry(request)
            _expect_asgi(entry.target)
            call = _call_of(request, entry)
            admission = call.admission = await entry.admit()
            self._tracer.begin(call, request.headers)
            try:
                self._dispatcher.check(call)
                throttler = self._dispatcher.throttler_of(entry.target)
                reservation = await _reserve_unless_left(throttler, receive, entry.target.spec.clocks.queue_s, call.rank)
                await self._hold(scope, receive, send, reservation, call)
            finally:
                if admission is not None:
                    admission.release()
        except errors.PilotlightError as e:
            self._metrics.turned_away(e, request.tenant, request.target, request.arm)
            await _deny(request, send, e)
            if request.call is not None:
                self._tracer.failed(request.call, e.type, e.status, verb="GET", route=_route_of(request.call.target))

    async def _hold(self, scope: Scope, receive: Receive, send: Send, reservation: Reservation, call: Call) -> None:
        """The life of one WebSocket on its slot, billed as one call. Raises JournalFull and what `_relay_frames` raises."""
        call.reserved_ns = time.monotonic_ns()
        call.start_kind, call.start_ms = reservation.start_kind, reservation.start_ms
        ticket: Ticket | None = None
        status, outcome = 500, "error"
        try:
            ticket = await reservation.open_paid(call)
            await _relay_frames(scope, receive, send, reservation, call)
            status, outcome = 101, "ok"
        except errors.PilotlightError as e:
            status = e.status
            if ticket is None or isinstance(e, errors.WorkerCrashed):
                reservation.ending = Ending.NEITHER if ticket is None else Ending.FAILED
            raise
        finally:
            try:
                if ticket is not None:
                    reservation.close(ticket, status=status, outcome=outcome, bytes_in=0, bytes_out=0)
            finally:
                reservation.release()
        first_byte_ms = (call.reserved_ns - call.began_ns) / 1e6
        self._metrics.answered_raw(call, status, is_stream=True, first_byte_ms=first_byte_ms)
        self._tracer.ended(
            call, reservation, None, status=status, dispatched_ns=call.reserved_ns, first_byte_ms=first_byte_ms, verb="GET",
            route=_route_of(call.target),
        )  # fmt: skip


async def _reserve_unless_left(throttler: Throttler, receive: Receive, timeout_s: float, rank: Rank) -> Reservation:
    """A slot. Raises what `Throttler.reserve` raises, and ClientClosedRequest as soon as the caller leaves.

    A caller that was not accepted yet has nothing to say (RFC 6455 §4.1), so whatever comes from it ends its wait.
    """
    if (free := throttler.reserve_nowait()) is not None:
        return free
    waiting = asyncio.create_task(throttler.reserve(timeout_s, rank=rank), name="websocket waits for a slot")
    leaving = asyncio.create_task(_received(receive), name="websocket may leave")
    is_taken = False
    try:
        await asyncio.wait((waiting, leaving), return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            raise errors.ClientClosedRequest("the caller left while it waited for an instance")
        reservation = waiting.result()
        is_taken = True
        return reservation
    finally:
        waiting.cancel()
        leaving.cancel()
        slot, _ = await asyncio.gather(waiting, leaving, return_exceptions=True)
        if not is_taken and isinstance(slot, Reservation):
            slot.give_back()  # it came in the same moment


async def _received(receive: Receive) -> None:
    await receive()


async def _relay_frames(scope: Scope, receive: Receive, send: Send, reservation: Reservation, call: Call) -> None:
    """Frames both ways until either side closes. Raises DeadlineExceeded, Forbidden (the function refused), WorkerCrashed."""
    execution_s = call.target.spec.clocks.execution_s
    ends_at = asyncio.get_running_loop().time() + execution_s
    try:
        async with asyncio.timeout_at(ends_at):
            worker = await _connect(scope, reservation, call)
        async with worker:  # closed with 1011 when what follows fails
            await _accept(send, worker, call)
            async with asyncio.timeout_at(ends_at), asyncio.TaskGroup() as group:
                down = group.create_task(_from_worker(worker, send), name="websocket to caller")
                up = group.create_task(_from_caller(worker, receive), name="websocket to worker")
                up.add_done_callback(lambda _: down.cancel())
                down.add_done_callback(lambda _: up.cancel())
    except TimeoutError as e:
        raise errors.DeadlineExceeded(f"the WebSocket was open for longer than {execution_s:g} s", clock="execution") from e


async def _accept(send: Send, worker: ClientConnection, call: Call) -> None:
    quotas = header_list(call.admission.head()) if call.admission is not None else []
    try:
        await send({"type": "websocket.accept", "subprotocol": worker.subprotocol, "headers": quotas})
    except OSError as e:  # ASGI 2.4
        raise errors.ClientClosedRequest("the caller left before it was accepted") from e


async def _connect(scope: Scope, reservation: Reservation, call: Call) -> ClientConnection:
    try:
        return await unix_connect(
            reservation.instance.info.socket,
            f"ws://worker/asgi{rest(scope).decode('latin-1')}",
            subprotocols=scope.get("subprotocols") or None,
            max_size=_MAX_FRAME_BYTES,
            compression=None,
            open_timeout=None,  # ours is the execution clock
            close_timeout=_CLOSE_S,
            additional_headers={HEADER_CALL: call.id, HEADER_ROOT_PATH: root(scope, call.target), **arm_of(call)},
        )
    except InvalidHandshake as e:
        raise errors.Forbidden(f"the function refused the WebSocket: {e}") from e
    except OSError as e:
        raise errors.WorkerCrashed(f"the instance died under this request: {e}", reason="crashed") from e


class _Relay:
    """One raw request on a reserved slot. `close` it on every path."""

    def __init__(self, request: Request, call: Call, reservation: Reservation, entry: Entry) -> None:
        self._entry = entry
        self._request = request
        self._call = call
        self._reservation = reservation
        self._ticket: Ticket | None = None
        self._connection: WorkerConnection | None = None
        self._sent = 0
        self._is_stream = False
        self._first_byte_ms = 0.0
        self._cost = "0"
        self._dispatched_ns = 0
        self._answer: Answer | None = None
        self.status = 499
        self.outcome = "cancelled"
        self.ending = Ending.ANSWERED

    async def run(self) -> None:
        """Open the record, send the request, relay the answer. Raises UpstreamGone, JournalFull."""
        request, loop = self._request, asyncio.get_running_loop()
        self._ticket = await self._reservation.open_paid(self._call)
        connections = self._reservation.instance.connections
        connection = self._connection = connections.take_nowait(self._call.reserved_ns / 1e9) or await connections.open(loop)
        has_body = b"content-length" in request.headers or b"transfer-encoding" in request.headers
        self._dispatched_ns = time.monotonic_ns()
        future = connection.request(request_head(request, self._call, has_body=has_body), loop=loop, is_head=request.verb == "HEAD")
        if has_body:
            await _send_body(request, connection, self._entry.raw_body_bytes)
        answer = self._answer = await future
        self._is_stream, self._first_byte_ms = answer.body is None, (time.monotonic_ns() - self._call.began_ns) / 1e6
        headers = answer_headers(request, self._call, answer.headers)
        await request.start(answer.status, sandboxed(headers) if self._entry.caller.is_anonymous else headers)
        if answer.body is not None:
            self._sent = len(answer.body)
            await request.chunk(answer.body, more=False)
        else:
            async for chunk in answer.chunks():
                self._sent += len(chunk)
                await request.chunk(chunk)
            await request.chunk(b"", more=False)
        self.status, self.outcome = answer.status, "ok" if answer.status < 500 else "error"
        self.ending = Ending.ANSWERED if answer.status < 500 else Ending.RAISED

    def close(self) -> None:
        """Close the record and give back what was held."""
        self._reservation.ending = self.ending if self._ticket is not None else Ending.NEITHER
        try:
            if self._ticket is not None:
                self._cost = self._reservation.close(
                    self._ticket, status=self.status, outcome=self.outcome, bytes_in=0, bytes_out=self._sent
                )  # fmt: skip
        finally:
            if self._connection is not None:
                self._reservation.instance.connections.give_back(self._connection, time.monotonic())
            self._reservation.release()

    def remember(self) -> None:
        """It failed before it was answered."""
        note(self._call, self._reservation, dispatched_ns=self._dispatched_ns, ended_ns=time.monotonic_ns(), error=str(self.status))

    def observe(self, metrics: Metrics, tracer: Tracer) -> None:
        """It was answered, wholly or in part."""
        metrics.answered_raw(
            self._call, self.status, cost=self._cost, is_stream=self._is_stream, first_byte_ms=self._first_byte_ms,
            completed=self.ending is not Ending.FAILED,
        )  # fmt: skip
        tracer.ended(
            self._call, self._reservation, self._answer, status=self.status, dispatched_ns=self._dispatched_ns, cost=self._cost,
            first_byte_ms=self._first_byte_ms if self._is_stream else None, verb=self._request.verb, route=_route_of(self._call.target),
        )  # fmt: skip
        self._request.target = None


async def _from_worker(worker: ClientConnection, send: Send) -> None:
    try:
        async for frame in worker:
            key = "text" if isinstance(frame, str) else "bytes"
            await send({"type": "websocket.send", key: frame})
    except ConnectionClosed:
        pass  # the code below says how it closed
    except OSError:
        return  # the caller left (ASGI 2.4)
    code = worker.close_code if worker.close_code not in (None, 1005, 1006) else 1000
    with contextlib.suppress(OSError, RuntimeError):  # the caller left, or closed in the same moment
        await send({"type": "websocket.close", "code": code, "reason": worker.close_reason or ""})


async def _from_caller(worker: ClientConnection, receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] == "websocket.disconnect":
            await worker.close(_close_code(message.get("code")))
            return
        frame: Any = message.get("text")
        try:
            await worker.send(message["bytes"] if frame is None else frame)
        except ConnectionClosed:
            return


async def _deny(request: Request, send: Send, error: errors.PilotlightError) -> None:
    """Refuse a WebSocket with an HTTP status where the server can, with close code 1011 where it was accepted already."""
    if "websocket.http.response" in request.scope.get("extensions", {}):
        head, body = error_answer(error, request.id)
        headers = header_list(head) + request.quota_headers()
        with contextlib.suppress(OSError, RuntimeError):
            await send({"type": "websocket.http.response.start", "status": error.status, "headers": headers})
            await send({"type": "websocket.http.response.body", "body": body})
            return
    with contextlib.suppress(OSError, RuntimeError):
        await send({"type": "websocket.close", "code": 1011, "reason": str(error)[:120]})


def _route_of(target: Target) -> str:
    return f"/fn/{target.app}/{target.function}"


def _call_of(request: Request, entry: Entry) -> Call:
    call = request.call = Call(
        id=request.id, target=entry.target, method="", key_id=entry.caller.key_id, body=b"", rank=entry.rank(request.headers),
        caller=entry.foreign, choice=request.choice,
    )  # fmt: skip
    call.began_ns, call.routed_ns = request.began_ns, request.routed_ns
    return call


def _expect_small(request: Request, limit_bytes: int | None) -> None:
    declared = request.headers.get(b"content-length", b"")
    if limit_bytes is not None and declared.isdigit() and int(declared) > limit_bytes:
        raise too_large(limit_bytes)


def _expect_asgi(target: Target) -> None:
    if target.spec.kind is not FunctionKind.ASGI:
        raise errors.NotFound(
            f"{target.app}/{target.function} is not a web application: call it at /v1/functions/{target.app}/{target.function}:invoke"
        )


def _close_code(code: int | None) -> int:
    """What may be sent for a close code that was received: those that only say that none came may not (RFC 6455 §7.4.1)."""
    if code in (None, 1005):
        return 1000
    return code if code in EXTERNAL_CLOSE_CODES or 3000 <= code < 5000 else 1001


async def _send_body(request: Request, connection: WorkerConnection, limit_bytes: int | None) -> None:
    """Pass the body on as it comes. Raises TooLarge in the middle of one that did not say how long it is, ClientClosedRequest."""
    sent = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise errors.ClientClosedRequest("the caller left while sending its body")
        if body := message["body"]:
            sent += len(body)
            if limit_bytes is not None and sent > limit_bytes:
                connection.close()  # half a request went out: the worker must not take it for a whole one
                raise too_large(limit_bytes)
            await connection.write(b"%x\r\n%s\r\n" % (len(body), body))
        if not message.get("more_body", False):
            await connection.write(b"0\r\n\r\n")
            return
