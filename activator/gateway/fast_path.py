"""A warm call without a task: admit → reserve → open the record → forward → meter, as two
callbacks.

A call whose path and key were resolved before, whose body arrived with its head, and for which a
slot and a worker connection are free waits only for its worker. So it needs no task, no ASGI
messages and no own timer: `begin` runs when the request has been parsed, `set_result` when the
response has, and between them the worker's connection refers to the call instead of a future.

The gateway handles everything else: `begin` returns False without side effects, and a call that
stops being simple later (its response streams, its worker dies or is busy) continues in a task."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from activator.access.grants import AccessGrant
from activator.balancing.instance import Reservation
from activator.balancing.throttler import Throttler
from activator.calls.attempt import Attempt, open_fast_record
from activator.calls.call import AnsweredCall, Call, priority_lines
from activator.calls.response import fast_path_headers
from activator.calls.runner import CallRunner
from activator.calls.trace_context import worker_lines
from activator.gateway.shadow_traffic import ShadowTraffic
from activator.http.compression import MIN_COMPRESSED_BYTES, is_compressible
from activator.http.payloads import CONTENT_TYPE, PICKLE, TRUSTED_LINE, payload_type
from activator.http.request import MAX_ACCEPT_BYTES, Receive, Request, Scope, Send, error_answer
from activator.metrics.metrics import Metrics
from activator.quotas.admission import UNCOUNTED, Admission
from activator.quotas.store_protocol import QuotaCheck
from activator.quotas.token_bucket import Refusal
from activator.resilience.declared_retries import CallerRetryBudget
from activator.routing.call_target import CallTarget
from activator.routing.traffic_split import RoutingDecision
from activator.tracing.tracer import Tracer
from activator.worker_client.connection import (
    WorkerConnection,
    WorkerConnectionLost,
    WorkerResponse,
)
from pilotlight import errors
from pilotlight.protocol import new_call_id

if TYPE_CHECKING:
    from activator.billing.instance_meter import OpenRecord
    from activator.http.server import ClientConnection

log = logging.getLogger(__name__)

CLOCK_STEP_S: Final = 0.05
"""Resolution of the execution clocks of warm calls: a call may run longer by this. Clocks shorter
than MIN_CLOCK_S are exact."""
MIN_CLOCK_S: Final = 1.0

ContinueInTask = Callable[
    [Request, Call, Coroutine[Any, Any, AnsweredCall]], Coroutine[Any, Any, None]
]
"""Callback of the gateway that answers a request with a pending attempt."""


class HasDeadline(Protocol):
    """A call with an execution clock."""

    def overrun(self) -> None:
        """Called when the execution clock has run out."""
        ...


class DeadlineWheel:
    """Timer wheel: groups calls by the step in which their execution clock runs out, with one timer
    for each step."""

    def __init__(self) -> None:
        self._steps: dict[int, set[HasDeadline]] = {}

    def __repr__(self) -> str:
        return (
            f"<DeadlineWheel {sum(map(len, self._steps.values()))} calls in {len(self._steps)} "
            f"steps>"
        )

    def watch(
        self, call: HasDeadline, loop: asyncio.AbstractEventLoop, seconds: float
    ) -> set[HasDeadline]:
        """Call `call.overrun` in `seconds`, up to a step later, unless the call is removed from the
        returned set."""
        step = int((loop.time() + seconds) / CLOCK_STEP_S) + 1
        calls = self._steps.get(step)
        if calls is None:
            calls = self._steps[step] = set()
            loop.call_at(step * CLOCK_STEP_S, self._on_timer, step)
        calls.add(call)
        return calls

    def _on_timer(self, step: int) -> None:
        for call in list(self._steps.pop(step)):
            call.overrun()


class FastPathRoute:
    """Data shared by all warm calls of one path, key and routing decision. `choice`: None where a
    single revision answers all calls."""

    __slots__ = (
        "check",
        "choice",
        "entry",
        "execution_s",
        "key_id",
        "line",
        "method",
        "tally",
        "target",
        "template",
    )

    def __init__(
        self, entry: AccessGrant, method: str, choice: RoutingDecision | None = None
    ) -> None:
        """Raises NotFound for a method that the revision does not have."""
        self.entry = entry
        self.choice = choice
        self.line = choice.line if choice is not None else b""
        self.tally: CallerRetryBudget | None = None
        self.target = target = entry.target
        self.method = method
        self.key_id = entry.caller.key_id
        self.check = target.check(method).check
        self.execution_s = target.spec.clocks.execution_s
        self.template = (
            b"POST /invoke/%b HTTP/1.1\r\nhost: worker\r\npilotlight-deadline-s: "
            b"%.3f\r\npilotlight-call: %%b\r\n"
            b"content-type: %%b%%b\r\ncontent-length: %%d\r\n\r\n%%b"
            % (method.encode(), self.execution_s)
        )

    def request(self, call: Call) -> bytes:
        """Return the request to the worker: that of `Call.request_head`, and the body."""
        lines = call.extra_headers
        if call.accept:
            lines = b"\r\naccept: " + call.accept + lines
        if call.content_type is PICKLE:
            lines = TRUSTED_LINE + lines
        if self.target.batched:
            lines += priority_lines(self.target, call.rank)
        if call.trace is not None:
            lines += worker_lines(call)
        body = call.body
        return self.template % (call.id.encode(), call.content_type, lines, len(body), body)

    def with_choice(self, choice: RoutingDecision) -> FastPathRoute:
        """Return the same route for another unit of an experiment."""
        other = object.__new__(FastPathRoute)
        other.entry, other.method, other.key_id, other.target = (
            self.entry,
            self.method,
            self.key_id,
            self.target,
        )
        other.check, other.execution_s, other.template, other.tally = (
            self.check,
            self.execution_s,
            self.template,
            self.tally,
        )
        other.choice, other.line = choice, choice.line
        return other


class FastPath:
    """Begins warm calls. Owner: the event loop."""

    def __init__(
        self,
        *,
        throttler_of: Callable[[CallTarget], Throttler],
        runner: CallRunner,
        metrics: Metrics,
        continue_in_task: ContinueInTask,
        tracer: Tracer | None = None,
        shadows: ShadowTraffic | None = None,
    ) -> None:
        self.throttler_of = throttler_of
        self.runner = runner
        self.metrics = metrics
        self.continue_in_task = continue_in_task
        self.tracer = tracer or Tracer()
        self.shadows = shadows
        self.clocks = DeadlineWheel()

    def begin(
        self,
        connection: ClientConnection,
        route: FastPathRoute,
        headers: dict[bytes, bytes],
        body: bytes,
    ) -> bool:
        """Send a call to its worker, or refuse it by its quotas. Returns False, without side
        effects, when it cannot be sent at once."""
        began_ns = time.monotonic_ns()
        if route.execution_s < MIN_CLOCK_S:
            return False
        quota_check = route.entry.quota_check
        if quota_check is None:
            return self._begin(connection, route, headers, body, UNCOUNTED, began_ns=began_ns)
        refusal = quota_check.try_acquire_nowait(1, 1, 0)
        if refusal is not None:
            self._refuse(connection, route, quota_check, refusal)
            return True
        admission, is_begun = Admission(quota_check), False
        try:
            is_begun = self._begin(connection, route, headers, body, admission, began_ns=began_ns)
        finally:
            if not is_begun:
                admission.withdraw()
        return is_begun

    def _refuse(
        self,
        connection: ClientConnection,
        route: FastPathRoute,
        quota_check: QuotaCheck,
        refusal: Refusal,
    ) -> None:
        """Answer 429 at once: a flood of calls over quota must cost as little as possible."""
        error = refusal.error()
        head, body = error_answer(error, new_call_id())
        self.metrics.count_rejected(
            error,
            route.entry.caller.tenant,
            route.target,
            route.choice.arm if route.choice is not None else "",
        )
        connection.answer(error.status, head + quota_check.head(), body)

    def _begin(
        self,
        connection: ClientConnection,
        route: FastPathRoute,
        headers: dict[bytes, bytes],
        body: bytes,
        admission: Admission,
        *,
        began_ns: int,
    ) -> bool:
        target = route.target
        rank = route.entry.ranks.get(headers.get(b"pilotlight-priority"))
        if rank is None:
            return False
        content_type = payload_type(headers.get(CONTENT_TYPE))
        if content_type is PICKLE:
            if not route.entry.accepts_pickle:
                return False  # the slow path refuses it with the reason
        else:
            try:
                route.check(body)
            except errors.InvalidInput:
                return False
        reservation = self.throttler_of(target).reserve_nowait()
        if reservation is None:
            return False
        connections = reservation.instance.connections
        worker = connections.acquire_nowait(began_ns / 1e9)
        if worker is None:
            reservation.release_unused()
            return False
        call = Call(
            id=new_call_id(),
            target=target,
            method=route.method,
            key_id=route.key_id,
            body=body,
            content_type=content_type,
            accept=headers.get(b"accept", b""),
            extra_headers=route.line,
            admission=admission,
            rank=rank,
            caller=route.entry.calling_tenant,
            choice=route.choice,
            began_ns=began_ns,
            accepts_pickle=route.entry.accepts_pickle,
        )
        call.reserved_ns = call.received_ns
        try:
            record = open_fast_record(call, reservation)
        except BaseException as e:
            connections.release(worker, began_ns / 1e9)
            reservation.release_unused()
            if isinstance(e, errors.PilotlightError):
                return False
            raise
        tally = route.tally
        if tally is None:
            tally = route.tally = self.runner.retries.budgets.for_caller(
                route.key_id, began_ns / 1e9
            )
        tally.calls += 1
        self.tracer.begin(call, headers)
        warm = FastPathCall(
            self,
            call,
            client=connection,
            reservation=reservation,
            record=record,
            worker=worker,
        )
        connection.on_gone = warm.abandon
        warm.steps = self.clocks.watch(warm, connection.loop, route.execution_s)
        worker.send(route.request(call), warm)
        return True


class FastPathCall(Attempt):
    """One warm call at its worker, and the `ResponseSink` of its response. The first of
    `set_result`, `set_exception` and `abandon` ends its time on the fast path."""

    __slots__ = ("_calls", "_client", "_is_done", "steps")

    def __init__(
        self,
        calls: FastPath,
        call: Call,
        *,
        client: ClientConnection,
        reservation: Reservation,
        record: OpenRecord,
        worker: WorkerConnection,
    ) -> None:
        super().__init__(call, reservation)
        self.record = record
        self.connection = worker
        self.dispatched_ns = time.monotonic_ns()
        reservation.instance.running[call.id] = self
        self._calls = calls
        self._client = client
        self._is_done = False
        self.steps: set[HasDeadline] = set()

    def done(self) -> bool:
        """Return whether the call needs no more response."""
        return self._is_done

    def set_result(self, answer: WorkerResponse) -> None:
        """The worker's response, or its head, has arrived."""
        self._leave()
        self.answer = answer
        body = answer.body
        if (
            body is None
            or answer.status >= 500
            or self._client.is_congested
            or (
                len(body) >= MIN_COMPRESSED_BYTES
                and is_compressible(answer.header(b"content-type"), len(body))
                and self._client.accepts_gzip
            )
        ):
            if body is None:
                self.watch_stream()
            runner = self._calls.runner
            self._continue_in_task(
                runner.begin_after_busy(self)
                if answer.is_busy
                else runner.finish(self.call, _return(self))
            )
            return
        call, status = self.call, answer.status
        try:
            self.close(
                status=status, outcome="ok" if status < 400 else "error", bytes_out=len(body)
            )
        except BaseException as e:
            self._continue_in_task(_raise(e))  # the caller is still answered
            raise
        finally:
            if call.admission is not UNCOUNTED:
                call.admission.release()
        ended_ns = self.dispatched_ns + int(self.exec_ms * 1e6)
        self._calls.metrics.count_fast_path(
            call, answer, dispatched_ns=self.dispatched_ns, ended_ns=ended_ns, picos=self.picos
        )
        self._client.answer(
            status, fast_path_headers(call, answer, cost=self.cost, exec_ms=self.exec_ms), body
        )
        if call.choice is not None and self._calls.shadows is not None:
            self._calls.shadows.copy(call, status=status, body=body, exec_ms=self.exec_ms)
        if call.target.spec.fallback:
            self._calls.runner.remember(call, answer)
        if self.exec_ms > call.target.slow_ms or (call.trace is not None and call.trace.kept_for):
            self._calls.tracer.answered(self, status)

    def set_exception(self, error: BaseException) -> None:
        """The worker's connection broke, or the execution clock ran out."""
        self._leave()
        try:
            self.fail(error)
        finally:  # the caller is still answered
            runner = self._calls.runner
            if isinstance(error, WorkerConnectionLost):
                self._continue_in_task(runner.begin_after_crash(self.call, self.reservation, error))
            else:
                self._continue_in_task(runner.finish(self.call, _raise(error)))

    def overrun(self) -> None:
        """The execution clock ran out before the response."""
        if self._is_done:
            return
        self.overran(is_blameless=False)
        execution_s = self.call.target.spec.clocks.execution_s
        self.set_exception(
            errors.DeadlineExceeded(
                f"the call ran longer than {execution_s:g} s", clock="execution"
            )
        )

    def abandon(self) -> None:
        """The caller disconnected."""
        if not self._is_done:
            self._leave()
            self.call.admission.release()
            self.fail(asyncio.CancelledError())
            choice = self.call.choice
            self._calls.metrics.count_aborted(
                499, self.call.target, choice.arm if choice is not None else ""
            )
            self._calls.tracer.failed(self.call, "cancelled", 499)

    def _leave(self) -> None:
        self._is_done = True
        self._client.on_gone = None
        self.steps.discard(self)

    def _continue_in_task(self, step: Coroutine[Any, Any, AnsweredCall]) -> None:
        """Continue in a task, as an ordinary request whose body was already read."""
        call, continue_in_task = self.call, self._calls.continue_in_task

        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            request = Request(scope, receive, send)
            request.id, request.tenant, request.choice = (
                call.id,
                call.caller or call.target.tenant,
                call.choice,
            )
            request.rate_limits, request.target = call.admission, call.target
            request.on_failed = partial(self._calls.tracer.failed, call)
            try:
                await continue_in_task(request, call, step)
            finally:
                call.admission.release()

        self._client.continue_in_task(application)


async def _return(attempt: AnsweredCall) -> AnsweredCall:
    return attempt


async def _raise(error: BaseException) -> AnsweredCall:
    raise error


def is_simple(headers: dict[bytes, bytes], *, max_body_bytes: int) -> bool:
    """Return whether a request needs no task, by its head: its body has a known, small length, it
    has no own deadline, and it does not ask for an event stream, which needs heartbeats."""
    length, accept = headers.get(b"content-length", b"0"), headers.get(b"accept", b"")
    return (
        length.isdigit()
        and int(length) <= max_body_bytes
        and b"transfer-encoding" not in headers
        and b"content-encoding" not in headers
        and b"pilotlight-timeout" not in headers
        and b"idempotency-key" not in headers
        and b"text/event-stream" not in accept
        and len(accept) <= MAX_ACCEPT_BYTES
    )
