"""A warm call without a task: admit → reserve → open the record → forward → meter, as two
callbacks.

A call whose path and key were resolved before, whose body came with its head, and for which a slot
and a connection to a worker are free never waits for anything but its worker. So it needs no task,
no ASGI messages and no timer of its own: `begin` runs when the request has been parsed,
`set_result` when the answer has, and between them the worker's connection holds the call where it
else holds a future.

Everything else is the gateway's: `begin` says False before anything has happened, and a call that
stops being simple later (its answer streams, its worker dies or is busy) goes on in a task of its
own, from where it is."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, Protocol

from activator.balancing.reservation import Reservation
from activator.balancing.throttler import Throttler
from activator.calls.runner import Call, CallRunner, Exchange, status_of
from activator.calls.shadow_traffic import ShadowTraffic
from activator.http.payloads import CONTENT_TYPE, PICKLE, TRUSTED_LINE, payload_type
from activator.http.request import MAX_ACCEPT_BYTES, Receive, Request, Scope, Send, error_answer
from activator.http.response_headers import fast_path_headers
from activator.metrics.batching import priority_lines
from activator.metrics.metrics import Metrics
from activator.quotas.admission import Admission
from activator.quotas.decision import Refusal
from activator.resilience.breaker import Outcome
from activator.resilience.retry_budget import CallerRetryBudget
from activator.routing.access import AccessGrant
from activator.routing.call_target import CallTarget
from activator.routing.traffic_split import RoutingDecision
from activator.tracing.context import kind_of, note, worker_lines
from activator.tracing.tracer import Tracer
from activator.worker_client.connection import (
    WorkerConnection,
    WorkerConnectionLost,
    WorkerResponse,
)
from pilotlight import errors
from pilotlight.protocol import new_call_id
from snapshotter.types import StartKind

if TYPE_CHECKING:
    from activator.billing.instance_meter import OpenRecord
    from activator.http.server import ClientConnection

log = logging.getLogger(__name__)

WARM: Final = StartKind.WARM.value
CLOCK_STEP_S: Final = 0.05
"""Execution clocks of warm calls are looked at this often: a call may run so much longer. Shorter
clocks than MIN_CLOCK_S are exact."""
MIN_CLOCK_S: Final = 1.0

GoOn = Callable[[Request, Coroutine[Any, Any, Exchange]], Coroutine[Any, Any, None]]
"""The gateway's: answer a request with an exchange that is still to come."""


class HasDeadline(Protocol):
    """What has an execution clock."""

    def overrun(self) -> None:
        """It ran out."""
        ...


class DeadlineWheel:
    """Calls by the step in which their execution clock runs out: one timer for each step, not for
    each call."""

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
        """Have `call.overrun` called in `seconds`, up to a step later, unless it leaves the set
        that this returns."""
        step = int((loop.time() + seconds) / CLOCK_STEP_S) + 1
        calls = self._steps.get(step)
        if calls is None:
            calls = self._steps[step] = set()
            loop.call_at(step * CLOCK_STEP_S, self._ring, step)
        calls.add(call)
        return calls

    def _ring(self, step: int) -> None:
        for call in list(self._steps.pop(step)):
            call.overrun()


class FastPathRoute:
    """What all warm calls of one path, key and choice share. `choice` None: there is nothing to say
    of why the revision answers."""

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

    def told(self, choice: RoutingDecision) -> FastPathRoute:
        """The same way to the same revision, for another unit of an experiment."""
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
        dispatcher: CallRunner,
        metrics: Metrics,
        go_on: GoOn,
        tracer: Tracer | None = None,
        shadows: ShadowTraffic | None = None,
    ) -> None:
        self.throttler_of = throttler_of
        self.dispatcher = dispatcher
        self.metrics = metrics
        self.go_on = go_on
        self.tracer = tracer or Tracer()
        self.shadows = shadows
        self.clocks = DeadlineWheel()

    def begin(
        self,
        connection: ClientConnection,
        way: FastPathRoute,
        headers: dict[bytes, bytes],
        body: bytes,
    ) -> bool:
        """Take a call to its worker, or refuse it by its quotas. False when it cannot go there at
        once; then nothing has happened."""
        began_ns = time.monotonic_ns()
        if way.execution_s < MIN_CLOCK_S:
            return False
        gate = way.entry.gate
        if gate is None:
            return self._begin(connection, way, headers, body, None, began_ns=began_ns)
        refusal = gate.try_acquire_nowait(1, 1, 0)
        if refusal is not None:
            self._refuse(connection, way, refusal)
            return True
        admission = Admission(gate)
        if self._begin(connection, way, headers, body, admission, began_ns=began_ns):
            return True
        admission.withdraw()
        return False

    def _refuse(self, connection: ClientConnection, way: FastPathRoute, refusal: Refusal) -> None:
        """Answer 429 here and now: a flood of calls over their quota must cost its neighbours as
        little as can be."""
        error = refusal.error()
        head, body = error_answer(error, new_call_id())
        self.metrics.count_rejected(
            error,
            way.entry.caller.tenant,
            way.target,
            way.choice.arm if way.choice is not None else "",
        )
        connection.answer(error.status, head + way.entry.gate.head(), body)  # type: ignore[union-attr]

    def _begin(
        self,
        connection: ClientConnection,
        way: FastPathRoute,
        headers: dict[bytes, bytes],
        body: bytes,
        admission: Admission | None,
        *,
        began_ns: int,
    ) -> bool:
        target = way.target
        rank = way.entry.ranks.get(headers.get(b"pilotlight-priority"))
        if rank is None:
            return False
        content_type = payload_type(headers.get(CONTENT_TYPE))
        if content_type is PICKLE:
            if not way.entry.accepts_pickle:
                return False  # the ordinary path refuses it, with the reason
        else:
            try:
                way.check(body)
            except errors.InvalidInput:
                return False
        reservation = self.throttler_of(target).reserve_nowait()
        if reservation is None:
            return False
        connections = reservation.instance.connections
        worker = connections.take_nowait(began_ns / 1e9)
        if worker is None:
            reservation.give_back()
            return False
        call = Call(
            id=new_call_id(),
            target=target,
            method=way.method,
            key_id=way.key_id,
            body=body,
            content_type=content_type,
            accept=headers.get(b"accept", b""),
            extra_headers=way.line,
            admission=admission,
            rank=rank,
            caller=way.entry.foreign,
            choice=way.choice,
            began_ns=began_ns,
            accepts_pickle=way.entry.accepts_pickle,
        )
        call.reserved_ns = call.received_ns
        try:
            ticket = reservation.open_warm(call)
        except errors.PilotlightError:
            connections.give_back(worker, began_ns / 1e9)
            reservation.give_back()
            return False
        tally = way.tally
        if tally is None:
            tally = way.tally = self.dispatcher.persistence.budgets.of(way.key_id, began_ns / 1e9)
        tally.calls += 1
        self.tracer.begin(call, headers)
        warm = FastPathCall(
            self,
            call,
            connection=connection,
            reservation=reservation,
            ticket=ticket,
            worker=worker,
            admission=admission,
        )
        connection.on_gone = warm.abandon
        lines = (
            call.extra_headers
            if not call.accept
            else b"\r\naccept: " + call.accept + call.extra_headers
        )
        if content_type is PICKLE:
            lines = TRUSTED_LINE + lines
        if target.batched:
            lines += priority_lines(target, rank)
        if call.trace is not None:
            lines += worker_lines(call)
        warm.steps = self.clocks.watch(warm, connection.loop, way.execution_s)
        worker.send(way.template % (call.id.encode(), content_type, lines, len(body), body), warm)
        return True


class FastPathCall:
    """One warm call at its worker; `upstream.Waiter` for its answer. Ends exactly once, by
    whichever of its methods comes first."""

    __slots__ = (
        "_admission",
        "_call",
        "_calls",
        "_connection",
        "_dispatched_ns",
        "_is_done",
        "_reservation",
        "_ticket",
        "_worker",
        "steps",
    )

    def __init__(
        self,
        calls: FastPath,
        call: Call,
        *,
        connection: ClientConnection,
        reservation: Reservation,
        ticket: OpenRecord,
        worker: WorkerConnection,
        admission: Admission | None,
    ) -> None:
        self._admission = admission
        self._calls = calls
        self._connection = connection
        self._call = call
        self._reservation = reservation
        self._ticket = ticket
        self._worker = worker
        self._dispatched_ns = time.monotonic_ns()
        self._is_done = False
        self.steps: set[HasDeadline] = set()

    def __repr__(self) -> str:
        return f"<FastPathCall {self._call.id} {'done' if self._is_done else 'waiting'}>"

    def done(self) -> bool:
        """Whether it has ended."""
        return self._is_done

    def set_result(self, answer: WorkerResponse) -> None:
        """The worker answered, or began to."""
        self._end()
        body = answer.body
        if body is None or answer.status >= 500 or self._connection.is_congested:
            self._go_on(self._as_exchange(answer))
            return
        call, reservation, status = self._call, self._reservation, answer.status
        instance = reservation.instance
        now_ns = time.monotonic_ns()
        exec_ms = (now_ns - self._dispatched_ns) / 1e6
        try:
            bill = instance.account.close(
                self._ticket,
                status=status,
                outcome="ok" if status < 400 else "error",
                now_ns=now_ns,
                at_ns=time.time_ns(),
                bytes_in=len(call.body),
                bytes_out=len(body),
            )
        except BaseException as e:
            self._worker.close()  # whoever reads from it sees this error too, and gives up on it
            self._go_on(_raise(e))  # the caller is answered all the same
            raise
        finally:
            instance.connections.give_back(self._worker, now_ns / 1e9)
            reservation.release()
            if self._admission is not None:
                self._admission.release()
        self._calls.metrics.count_fast_path(
            call, answer, dispatched_ns=self._dispatched_ns, ended_ns=now_ns, picos=bill.picos
        )
        self._connection.answer(
            status, fast_path_headers(call, answer, cost=bill.cost, exec_ms=exec_ms), body
        )
        if call.choice is not None and self._calls.shadows is not None:
            self._calls.shadows.copy(call, status=status, body=body, exec_ms=exec_ms)
        if call.target.spec.fallback:
            self._calls.dispatcher.remember(call, answer)
        if (
            status >= 500
            or exec_ms > call.target.slow_ms
            or (call.trace is not None and call.trace.kept_for)
        ):
            self._calls.tracer.ended(
                call,
                reservation,
                answer,
                status=status,
                dispatched_ns=self._dispatched_ns,
                ended_ns=now_ns,
                cost=bill.cost,
            )

    def _as_exchange(self, answer: WorkerResponse) -> Coroutine[Any, Any, Exchange]:
        exchange = Exchange(
            self._call,
            reservation=self._reservation,
            ticket=self._ticket,
            connection=self._worker,
            answer=answer,
            dispatched_ns=self._dispatched_ns,
        )
        dispatcher = self._calls.dispatcher
        return (
            dispatcher.begin_again(exchange)
            if exchange.is_busy
            else dispatcher.settle(self._call, _return(exchange))
        )

    def set_exception(self, error: BaseException) -> None:
        """The worker's connection broke, or a clock ran out."""
        self._end()
        note(
            self._call,
            self._reservation,
            dispatched_ns=self._dispatched_ns,
            ended_ns=time.monotonic_ns(),
            error=kind_of(error),
        )
        try:
            self._close(status_of(error), "error")
        finally:  # the caller is answered all the same
            if isinstance(error, WorkerConnectionLost):
                self._go_on(
                    self._calls.dispatcher.begin_after(self._call, self._reservation, error)
                )
            else:
                self._go_on(self._calls.dispatcher.settle(self._call, _raise(error)))

    def overrun(self) -> None:
        """The execution clock ran out: the instance may never return, so it is replaced; its
        neighbours finish first."""
        if self._is_done:
            return
        execution_s, reservation = self._call.target.spec.clocks.execution_s, self._reservation
        reservation.instance.is_stuck = True
        # before its slot is free: no other call must get it
        reservation.throttler.drain(reservation.instance)
        self.set_exception(
            errors.DeadlineExceeded(
                f"the call ran longer than {execution_s:g} s", clock="execution"
            )
        )

    def abandon(self) -> None:
        """The caller left."""
        if not self._is_done:
            self._end()
            self._release()
            self._close(499, "cancelled")
            choice = self._call.choice
            self._calls.metrics.count_aborted(
                499, self._call.target, choice.arm if choice is not None else ""
            )

    def _end(self) -> None:
        self._is_done = True
        self._connection.on_gone = None
        self.steps.discard(self)

    def _close(self, status: int, outcome: str) -> None:
        self._worker.close()
        self._reservation.ending = Outcome.FAILED  # `close` knows better of a caller who left
        try:
            self._reservation.close(
                self._ticket,
                status=status,
                outcome=outcome,
                bytes_in=len(self._call.body),
                bytes_out=0,
            )
        finally:
            self._reservation.release()

    def _release(self) -> None:
        if self._admission is not None:
            self._admission.release()

    def _go_on(self, step: Coroutine[Any, Any, Exchange]) -> None:
        """The rest in a task, as an ordinary request whose body was read."""
        call, go_on, admission = self._call, self._calls.go_on, self._admission

        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            request = Request(scope, receive, send)
            request.id, request.tenant, request.choice = (
                call.id,
                call.caller or call.target.tenant,
                call.choice,
            )
            request.gate, request.call, request.target = admission, call, call.target
            try:
                await go_on(request, step)
            finally:
                self._release()

        self._connection.continue_in_task(application)


async def _return(exchange: Exchange) -> Exchange:
    return exchange


async def _raise(error: BaseException) -> Exchange:
    raise error


def is_simple(headers: dict[bytes, bytes], *, max_body_bytes: int) -> bool:
    """Whether a request's head promises nothing that needs a task: a body of known, small length,
    no clock of the caller's, and no stream of events, which is kept alive while nothing comes."""
    length, accept = headers.get(b"content-length", b"0"), headers.get(b"accept", b"")
    return (
        length.isdigit()
        and int(length) <= max_body_bytes
        and b"transfer-encoding" not in headers
        and b"pilotlight-timeout" not in headers
        and b"idempotency-key" not in headers
        and b"text/event-stream" not in accept
        and len(accept) <= MAX_ACCEPT_BYTES
    )
