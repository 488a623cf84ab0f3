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
import os
import time
from collections.abc import Callable, Coroutine
from functools import partial
from random import random
from typing import TYPE_CHECKING, Any, Final, Protocol

from activator.balancing.instance import Reservation
from activator.calls.attempt import Attempt
from activator.calls.call import AnsweredCall, Call
from activator.calls.runner import CallRunner
from activator.gateway.route_cache import FastPathRoute, WarmHead
from activator.gateway.shadow_traffic import ShadowTraffic
from activator.http.compression import MIN_COMPRESSED_BYTES, is_compressible
from activator.http.payloads import PICKLE
from activator.http.problems import error_answer
from activator.http.request import Receive, Request, Scope, Send
from activator.metrics.metrics import Metrics
from activator.quotas.admission import UNCOUNTED, Admission
from activator.quotas.store_protocol import QuotaCheck
from activator.quotas.token_bucket import Refusal
from activator.tracing.tracer import Tracer
from activator.worker_client.connection import WorkerConnectionLost, WorkerResponse
from pilotlight import errors
from pilotlight.protocol import new_call_id

if TYPE_CHECKING:
    from activator.http.server import ClientConnection

CLOCK_STEP_S: Final = 0.05
"""Resolution of the execution clocks of warm calls: a call may run longer by this."""

ID_BYTES: Final = 10
IDS_AT_ONCE: Final = 100

ContinueInTask = Callable[
    [Request, Call, Coroutine[Any, Any, AnsweredCall]], Coroutine[Any, Any, None]
]
"""Callback of the gateway that answers a request with a pending attempt."""


class HasDeadline(Protocol):
    """A call with an execution clock."""

    def overrun(self) -> None:
        """Called when the execution clock has run out."""


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


class CallIds:
    """Makes ids like `protocol.new_call_id`, and reads the random bits of many at once.

    Not for processes that fork or are restored from a snapshot: both would make the same ids.
    Owner: the event loop."""

    def __init__(self) -> None:
        self._random = b""
        self._at = 0

    def __repr__(self) -> str:
        return f"<CallIds {len(self._random) - self._at} random bytes left>"

    def new(self) -> str:
        """Return a new call id."""
        at = self._at
        if at == len(self._random):
            self._random, at = os.urandom(ID_BYTES * IDS_AT_ONCE), 0
        self._at = end = at + ID_BYTES
        return f"req-{time.time_ns() // 1_000_000:012x}{self._random[at:end].hex()}"


class FastPath:
    """Begins warm calls. Owner: the event loop."""

    def __init__(
        self,
        *,
        runner: CallRunner,
        metrics: Metrics,
        continue_in_task: ContinueInTask,
        tracer: Tracer | None = None,
        shadows: ShadowTraffic | None = None,
    ) -> None:
        self.throttler_of = runner.throttler_of
        self.runner = runner
        self.metrics = metrics
        self.continue_in_task = continue_in_task
        self.tracer = tracer or Tracer()
        self.shadows = shadows
        self.clocks = DeadlineWheel()
        self.call_ids = CallIds()

    def begin(
        self,
        connection: ClientConnection,
        warm: WarmHead,
        body: bytes,
    ) -> bool:
        """Send a call to its worker, or refuse it by its quotas. Returns False, without side
        effects, when it cannot be sent at once."""
        began_ns = time.monotonic_ns()
        quota_check = warm.route.entry.quota_check
        if quota_check is None:
            return self._begin(connection, warm, body, UNCOUNTED, began_ns)
        refusal = quota_check.try_acquire_nowait(1, 1, 0)
        if refusal is not None:
            self._refuse(connection, warm.route, quota_check, refusal)
            return True
        admission, is_begun = Admission(quota_check), False
        try:
            is_begun = self._begin(connection, warm, body, admission, began_ns)
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
        self.metrics.count_rejected(error, route.entry.caller.tenant, route.target, route.arm)
        connection.answer(error.status, head + quota_check.head(), body)

    def _begin(
        self,
        connection: ClientConnection,
        warm: WarmHead,
        body: bytes,
        admission: Admission,
        began_ns: int,
    ) -> bool:
        route = warm.route
        target = route.target
        payload = warm.payload
        if payload.content_type is not PICKLE:
            try:
                route.check(body)
            except errors.InvalidInput:
                return False
        call = Call(
            id=self.call_ids.new(),
            target=target,
            method=route.method,
            payload=payload,
            caller=warm.caller,
            admission=admission,
            choice=route.choice,
        )
        call.body = body
        call.began_ns = call.routed_ns = began_ns
        call.reserved_ns = call.received_ns
        now = call.received_ns / 1e9
        reservation = self.throttler_of(target).reserve_nowait(now=now)
        if reservation is None:
            return False
        worker = reservation.instance.connections.acquire_nowait(now)
        if worker is None:
            reservation.release_unused()
            return False
        attempt = FastPathCall(self, route, call, client=connection, reservation=reservation)
        try:
            attempt.open_warm(worker, warm.mark)
        except errors.PilotlightError:
            return False
        if route.retry_budget is None:
            route.retry_budget = self.runner.retries.budgets.for_caller(route.key_id, now)
        route.retry_budget.calls += 1
        tracer = self.tracer
        if warm.is_traced:
            tracer.join(call, warm.headers)
        elif random() < tracer.share:
            tracer.draw(call)
        trace_lines = call.trace_lines() if call.trace is not None else b""
        connection.on_gone = attempt.abandon
        attempt.steps = self.clocks.watch(attempt, connection.loop, route.execution_s)
        worker.send(
            b"".join((warm.request_head, call.id.encode(), trace_lines, b"\r\n\r\n", body)),
            attempt,
        )
        return True


class FastPathCall(Attempt):
    """One warm call at its worker, and the `ResponseSink` of its response. The first of
    `set_result`, `set_exception` and `abandon` ends its time on the fast path."""

    _is_done = False
    steps: set[HasDeadline]

    def __init__(
        self,
        calls: FastPath,
        route: FastPathRoute,
        call: Call,
        *,
        client: ClientConnection,
        reservation: Reservation,
    ) -> None:
        super().__init__(call, reservation)
        self._calls = calls
        self._route = route
        self._client = client

    def done(self) -> bool:
        """Return whether the call needs no more response."""
        return self._is_done

    def set_result(self, answer: WorkerResponse) -> None:
        """The worker's response, or its head, has arrived."""
        client, calls = self._client, self._calls
        self._is_done = True
        client.on_gone = None
        self.steps.discard(self)
        self.answer = answer
        body = answer.body
        if (
            body is None
            or answer.status >= 500
            or client.flow.write_paused
            or (
                len(body) >= MIN_COMPRESSED_BYTES
                and is_compressible(answer.header(b"content-type"), len(body))
                and client.accepts_gzip
            )
        ):
            if body is None:
                self.watch_stream()
            runner = calls.runner
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
        route = self._route
        if status >= 400 or route.target.is_counted_by_head:
            calls.metrics.answered(self, status)
        else:
            route.counters.answered(self, status)
        client.answer(
            status,
            route.response_headers(call, answer, cost=self.cost, exec_ms=self.exec_ms),
            body,
        )
        if route.is_followed:
            self._follow(answer, body)
        if self.exec_ms > route.target.slow_ms or (call.trace is not None and call.trace.kept_for):
            calls.tracer.answered(self, status)

    def _follow(self, answer: WorkerResponse, body: bytes) -> None:
        """Use the response further, where its function or route does (`FastPathRoute`)."""
        call, calls, status = self.call, self._calls, answer.status
        if call.choice is not None and calls.shadows is not None:
            calls.shadows.copy(call, status=status, body=body, exec_ms=self.exec_ms)
        if call.target.log is not None:
            calls.runner.log_answer(self, status, body)
        if call.target.spec.fallback:
            calls.runner.remember(call, answer)

    def set_exception(self, error: BaseException) -> None:
        """The worker's connection broke, or the execution clock ran out."""
        self._leave_fast_path()
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

    def cut(self, error: errors.PilotlightError) -> None:
        """As `Attempt.cut`, also before a response."""
        if self._is_done:
            super().cut(error)
        else:
            self.set_exception(error)

    def abandon(self) -> None:
        """The caller disconnected."""
        if not self._is_done:
            self._leave_fast_path()
            self.call.admission.release()
            self.fail(asyncio.CancelledError())
            self._calls.metrics.count_aborted(self.call.target, self._route.arm)
            self._calls.tracer.failed(self.call, "cancelled", 499)

    def _leave_fast_path(self) -> None:
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
                call.caller.tenant or call.target.tenant,
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
