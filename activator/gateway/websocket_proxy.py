"""WebSockets to functions that are web applications: accepted once the worker accepted, then frames
are relayed both ways until either side closes.

A WebSocket counts as one call while it is open, so it holds a slot and is billed until it closes.

A message has at most MAX_MESSAGE_BYTES in either direction, else the WebSocket is closed with 1009.
When a side does not read, some five messages for it are buffered here. The message that waits to be
sent counts towards the memory limits of its function's tenant (`bodies`); where they are reached
the WebSocket is closed with 1013."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.frames import EXTERNAL_CLOSE_CODES, CloseCode

from activator.access.grants import AccessGrant
from activator.balancing.instance import Reservation
from activator.balancing.throttler import Throttler
from activator.calls.attempt import Attempt, worker_crash_error
from activator.calls.call import Call
from activator.calls.runner import CallRunner
from activator.fairness.queue_priority import QueuePriority
from activator.gateway.proxy_headers import arm_of, call_of, mount_path, require_web, route_of
from activator.gateway.websocket_frames import WorkerSocket
from activator.http.problems import error_answer
from activator.http.request import Receive, Request, Scope, Send, header_list, subpath
from activator.llm.openai.api import require_uncounted
from activator.metrics.metrics import Metrics
from activator.tracing.tracer import Tracer
from activator.worker_client.address import configure_tcp, host_and_port, is_tcp
from activator.worker_client.connection import WorkerConnectionLost
from pilotlight import errors
from pilotlight.protocol import HEADER_CALL, HEADER_ROOT_PATH

if TYPE_CHECKING:
    from activator.http.bodies import Bodies

MAX_MESSAGE_BYTES = 1024 * 1024
"""Limit of one message in either direction: an activator buffers some five for a WebSocket whose
peer does not read, and there are thousands."""
_MAX_QUEUE = (1, 0)
"""Messages of a worker at which reading pauses, and at which it resumes: more would only use
memory."""
_CLOSE_S = 2.0
"""How long a worker may take to answer a WebSocket's close before its connection is closed."""

_REASON_LENGTH = 120
"""Limit of a close frame's reason, which has at most 123 bytes (RFC 6455 §5.5)."""

RawEntry = Callable[[Request], Awaitable[AccessGrant]]
CountBytes = Callable[[int], AbstractContextManager[None]]
"""Counts `size` bytes while the context lasts. Raises TooManyRequests."""


class WebSocketProxy:
    """Relays WebSockets. Stateless. Owner: the event loop."""

    def __init__(self, *, runner: CallRunner, metrics: Metrics, tracer: Tracer) -> None:
        self._runner = runner
        self._metrics = metrics
        self._tracer = tracer

    def __repr__(self) -> str:
        return f"<WebSocketProxy {self._runner!r}>"

    async def answer(
        self, scope: Scope, receive: Receive, send: Send, raw_entry: RawEntry, bodies: Bodies
    ) -> None:
        """Handle one WebSocket: accept it once the worker accepted it, then relay frames until
        either side closes.

        The execution clock limits its duration; then both sides are closed with 1011 (RFC 6455
        §7.4.1). `bodies`: memory limits for messages that wait to be sent."""
        message = await receive()
        assert message["type"] == "websocket.connect"
        request = Request(scope, receive, send)
        try:
            entry = await raw_entry(request)
            require_web(entry.target)
            if entry.target.spec.language_model is not None:
                require_uncounted(entry, "a WebSocket")
            call = call_of(request, entry)
            with await entry.admit() as call.admission:
                self._tracer.begin(call, request.headers)
                request.on_failed = partial(
                    self._tracer.failed, call, verb="GET", route=route_of(call.target)
                )
                self._runner.check(call)
                throttler = self._runner.throttler_of(entry.target)
                while True:
                    reservation = await _reserve_unless_left(
                        throttler, receive, entry.target.spec.clocks.queue_s, call.caller.rank
                    )
                    try:
                        await self._hold(scope, receive, send, reservation, call, bodies=bodies)
                        return
                    except WorkerConnectionLost as e:
                        await self._runner.require_retryable(call, reservation, e)
        except errors.PilotlightError as e:
            self._metrics.count_rejected(e, request.tenant, request.target, request.arm)
            await _deny(request, send, e)
            if request.on_failed is not None:
                request.on_failed(e.type, e.status)

    async def _hold(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        reservation: Reservation,
        call: Call,
        *,
        bodies: Bodies,
    ) -> None:
        """Run one WebSocket on its slot, billed as one call. Raises JournalFull and the errors of
        `_relay_frames`."""
        call.reserved(reservation)
        attempt = Attempt(call, reservation)
        try:
            await attempt.open_record()
            attempt.dispatched_ns = time.monotonic_ns()
            await _relay_frames(scope, receive, send, attempt, bodies=bodies)
        except BaseException as e:
            attempt.fail(e)
            raise
        attempt.close(status=101, outcome="ok", bytes_out=0)
        first_byte_ms = (call.reserved_ns - call.began_ns) / 1e6
        self._metrics.answered_raw(attempt, 101, is_stream=True, first_byte_ms=first_byte_ms)
        self._tracer.ended(
            call,
            reservation,
            None,
            status=101,
            dispatched_ns=attempt.dispatched_ns,
            first_byte_ms=first_byte_ms,
            verb="GET",
            route=route_of(call.target),
        )


async def _reserve_unless_left(
    throttler: Throttler, receive: Receive, timeout_s: float, rank: QueuePriority
) -> Reservation:
    """Reserve a slot. Raises the errors of `Throttler.reserve`, and ClientClosedRequest as soon as
    the caller disconnects.

    A caller must not send anything before it is accepted (RFC 6455 §4.1), so any message ends its
    wait."""
    if (free := throttler.reserve_nowait()) is not None:
        return free
    waiting = asyncio.create_task(
        throttler.reserve(timeout_s, rank=rank), name="websocket waits for a slot"
    )
    leaving = asyncio.create_task(_received(receive), name="websocket may leave")
    is_taken = False
    try:
        await asyncio.wait((waiting, leaving), return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            raise errors.ClientClosedRequest(
                "the caller disconnected while it waited for an instance"
            )
        reservation = waiting.result()
        is_taken = True
        return reservation
    finally:
        waiting.cancel()
        leaving.cancel()
        slot, _ = await asyncio.gather(waiting, leaving, return_exceptions=True)
        if not is_taken and isinstance(slot, Reservation):
            slot.release_unused()  # it was assigned at the same moment


async def _received(receive: Receive) -> None:
    await receive()


async def _relay_frames(
    scope: Scope,
    receive: Receive,
    send: Send,
    attempt: Attempt,
    *,
    bodies: Bodies,
) -> None:
    """Relay frames until either side closes. Raises DeadlineExceeded, Forbidden (the function
    refused, or the caller's tenant is suspended), WorkerConnectionLost (there was no connection to
    it), WorkerCrashed (it ended without a close frame)."""
    call = attempt.call
    execution_s = call.target.spec.clocks.execution_s
    ends_at = asyncio.get_running_loop().time() + execution_s
    count_bytes = partial(bodies.reserved, call.target.tenant)
    worker: ClientConnection | None = None
    try:
        async with attempt.limit_until(ends_at):
            worker = await _connect(scope, attempt.reservation, call)
        async with worker:  # closed with 1011 on errors
            await _accept(send, worker, call)
            async with attempt.limit_until(ends_at), asyncio.TaskGroup() as group:
                down = group.create_task(
                    _from_worker(worker, send, count_bytes), name="websocket to caller"
                )
                up = group.create_task(
                    _from_caller(worker, receive, send, count_bytes), name="websocket to worker"
                )
                up.add_done_callback(lambda _: down.cancel())
                down.add_done_callback(lambda _: up.cancel())
        is_ended_here = any(not task.cancelled() and task.result() for task in (up, down))
        if worker.close_code == CloseCode.ABNORMAL_CLOSURE and not is_ended_here:
            raise await worker_crash_error(attempt.reservation)
    except TimeoutError as e:
        if attempt.cut_by is not None:
            raise attempt.cut_by from e
        # a worker that answers the close does not hang: WebSockets may be open for long
        attempt.overran(
            is_blameless=worker is not None and worker.close_code == CloseCode.INTERNAL_ERROR
        )
        raise errors.DeadlineExceeded(
            f"the WebSocket was open for longer than {execution_s:g} s", clock="execution"
        ) from e


async def _accept(send: Send, worker: ClientConnection, call: Call) -> None:
    quotas = header_list(call.admission.head())
    try:
        await send(
            {"type": "websocket.accept", "subprotocol": worker.subprotocol, "headers": quotas}
        )
    except OSError as e:  # ASGI 2.4
        raise errors.ClientClosedRequest("the caller disconnected before it was accepted") from e


class _Connect(connect):
    """Connects to a worker, and to nothing that it names: redirects are refused like other
    statuses."""

    def process_redirect(self, exc: Exception) -> Exception:
        """Return the error of the handshake."""
        return exc


async def _connect(scope: Scope, reservation: Reservation, call: Call) -> ClientConnection:
    where = reservation.instance.info.socket
    uri = f"ws://worker/asgi{subpath(scope).decode('latin-1')}"
    options: dict[str, Any] = {
        "subprotocols": scope.get("subprotocols") or None,
        "max_size": MAX_MESSAGE_BYTES,
        "max_queue": _MAX_QUEUE,
        "create_connection": WorkerSocket,
        "compression": None,
        "open_timeout": None,  # the execution clock limits it
        "close_timeout": _CLOSE_S,
        "additional_headers": {
            HEADER_CALL: call.id,
            HEADER_ROOT_PATH: mount_path(scope, call.target),
            **arm_of(call),
        },
    }
    try:
        if not is_tcp(where):
            return await _Connect(uri, unix=True, path=where, **options)
        host, port = host_and_port(where)
        worker = await _Connect(uri, host=host, port=port, proxy=None, **options)
        configure_tcp(worker.transport)
        return worker
    except InvalidHandshake as e:
        raise errors.Forbidden(f"the function refused the WebSocket: {e}") from e
    except OSError as e:  # of the connection: what follows is the handshake's
        raise WorkerConnectionLost(f"cannot connect to the worker: {e!r}", sent=False) from e


async def _from_worker(worker: ClientConnection, send: Send, count_bytes: CountBytes) -> bool:
    """Relay the worker's frames. Returns whether the caller or the platform ended the WebSocket,
    rather than the worker."""
    code, reason = None, None
    try:
        async for frame in worker:
            key = "text" if isinstance(frame, str) else "bytes"
            with count_bytes(len(frame)):
                await send({"type": "websocket.send", key: frame})
    except ConnectionClosed as e:
        # whether or not the worker answered the close
        if e.sent is not None and e.sent.code == CloseCode.MESSAGE_TOO_BIG:
            code, reason = (
                e.sent.code,
                f"the function sent a message of more than {MAX_MESSAGE_BYTES} bytes",
            )
    except errors.TooManyRequests as e:
        await _close(send, CloseCode.TRY_AGAIN_LATER, str(e))
        return True
    except OSError:
        return True  # the caller disconnected (ASGI 2.4)
    if code is None and worker.close_code == CloseCode.ABNORMAL_CLOSURE:
        return False  # it died, or its caller left and it did not answer the close
    is_ended_here = code is not None
    if code is None:
        code = worker.close_code if worker.close_code not in (None, 1005) else 1000
    await _close(send, code, reason or worker.close_reason or "")
    return is_ended_here


async def _from_caller(
    worker: ClientConnection, receive: Receive, send: Send, count_bytes: CountBytes
) -> bool:
    """Relay the caller's frames. Returns whether the caller or the platform ended the WebSocket,
    rather than the worker."""
    while True:
        message = await receive()
        if message["type"] == "websocket.disconnect":
            await worker.close(_close_code(message.get("code")))
            return True
        frame: Any = message.get("text")
        if frame is None:
            frame = message["bytes"]
        try:
            with count_bytes(len(frame)):
                await worker.send(frame)
        except ConnectionClosed:
            return False
        except errors.TooManyRequests as e:
            await _close(send, CloseCode.TRY_AGAIN_LATER, str(e))
            return True


async def _close(send: Send, code: int, reason: str) -> None:
    # the caller disconnected, or closed at the same moment
    with contextlib.suppress(OSError, RuntimeError):
        await send({"type": "websocket.close", "code": code, "reason": reason[:_REASON_LENGTH]})


async def _deny(request: Request, send: Send, error: errors.PilotlightError) -> None:
    """Refuse a WebSocket with an HTTP status where the server supports it, with close code 1011
    where it was already accepted."""
    if "websocket.http.response" in request.scope.get("extensions", {}):
        head, body = error_answer(error, request.id)
        headers = header_list(head) + request.quota_headers()
        with contextlib.suppress(OSError, RuntimeError):
            await send(
                {
                    "type": "websocket.http.response.start",
                    "status": error.status,
                    "headers": headers,
                }
            )
            await send({"type": "websocket.http.response.body", "body": body})
            return
    with contextlib.suppress(OSError, RuntimeError):
        await send({"type": "websocket.close", "code": 1011, "reason": str(error)[:_REASON_LENGTH]})


def _close_code(code: int | None) -> int:
    """Return the close code to send for a received one: reserved codes, which mean that none was
    received, must not be sent (RFC 6455 §7.4.1)."""
    if code in (None, 1005):
        return 1000
    return code if code in EXTERNAL_CLOSE_CODES or 3000 <= code < 5000 else 1001
