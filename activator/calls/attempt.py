"""One attempt to have a call answered: the slot, journal record, execution deadline and worker
connection that it holds.

Every access uses it (JSON, event streams, OpenAI, raw HTTP, WebSocket, submitted calls, shadow
copies, fallbacks and the fast path), so that records are opened and closed here alone. An attempt
ends exactly once, by the first of `close`, `fail` and its deadline; what comes later changes
nothing. A caller that leaves mid-stream ends it through `calls.attempt_end.ResponseReader`. What
follows a lost worker is decided by `calls.runner` before the first byte of the response, and by
`gateway.response_writer` after it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Final, Protocol

from activator.balancing.instance import CANCELLED, TENANT_SUSPENDED, WARM, Reservation
from activator.billing.budgets.applicable import borrow_and_retry
from activator.billing.instance_account import OpenRecord
from activator.billing.usage_pricing import encode_optional_fields
from activator.calls.call import AnsweredCall, Call
from activator.calls.degradation import degradation_of
from activator.calls.trace_context import kind_of
from activator.resilience.breaker import Outcome
from activator.worker_client.connection import (
    WorkerConnection,
    WorkerConnectionLost,
    WorkerResponse,
)
from pilotlight import errors
from pilotlight.spec.pricing import BUSY, NOT_RUN, UNSENT

LIVELY = 20
"""An engine that produced output in the last twentieth of its call's time counts as still
producing."""
GONE_REASON_WAIT_S = 0.5
"""A broken connection is detected before the agent reports the reason: wait this long for it, so
that the caller gets "out of memory", not "reset"."""
_WARM: Final = WARM.value
_UNJUDGED: Final = NOT_RUN | {CANCELLED}
"""Outcomes that say nothing about the function."""


class Abortable(Protocol):
    """A connection that can be broken off (`asyncio.WriteTransport`)."""

    def abort(self) -> None:
        """Close it without sending what is buffered."""


class Attempt(AnsweredCall):
    """An attempt on a reserved slot. Its holder must end it by `close` or `fail` on every path.

    The execution deadline lasts until the last byte of the response (`spec.function.Clocks`): an
    attempt that exceeds it is interrupted and billed, and its instance, which may hang, is replaced
    once its other calls have finished. A caller's own deadline only interrupts.

    Attributes:
        record: its open usage record; None before `open`.
        connection: its connection to the worker; None before `open`, and for a WebSocket.
        is_sending: its caller is still sending the request's body.
        callees: connections on which its function waits for calls that it made; None = none yet.
    """

    record: OpenRecord | None = None
    connection: WorkerConnection | None = None
    is_sending = False
    callees: set[Abortable] | None = None
    _is_blameless = False
    _is_closed = False
    _is_last_of_instance = False
    _pending: asyncio.Future[WorkerResponse] | None = None
    _timer: asyncio.TimerHandle | None = None
    _limit: asyncio.Timeout | None = None

    def __init__(self, call: Call, reservation: Reservation, *, is_shadow: bool = False) -> None:
        """`is_shadow`: a copy, which costs nothing and whose outcome does not count."""
        self.call = call
        self.reservation = reservation
        self.is_shadow = is_shadow

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "open"
        return f"<{type(self).__name__} {self.call.attempt} of {self.call.id} {state}>"

    @property
    def held(self) -> Reservation | None:
        """The reservation of its slot; None where no instance answered."""
        return self.reservation

    @property
    def is_closed(self) -> bool:
        """Whether it has ended."""
        return self._is_closed

    @property
    def record_id(self) -> str:
        """Id of its usage record."""
        return f"{self.call.id}/{self.call.attempt}"

    @property
    def calling_tenant(self) -> str:
        """The tenant that calls, where it is not the function's own, else ""."""
        return self.call.caller.tenant

    def remaining_s(self) -> float:
        """Return the seconds until its deadline: of the execution clock, or its caller's own."""
        ran_s = (time.monotonic_ns() - self.dispatched_ns) / 1e9 if self.dispatched_ns else 0.0
        return self.call.remaining_s(self.call.target.spec.clocks.execution_s - ran_s)

    # -- begin -------------------------------------------------------------------------------------
    async def open(self) -> WorkerConnection:
        """Open its record, and connect to the worker.

        Raises JournalFull, OverBudget, BudgetReserved, Unavailable, WorkerConnectionLost."""
        await self.open_record()
        connections = self.reservation.instance.connections
        connection = self.connection = connections.acquire_nowait(
            self.call.reserved_ns / 1e9
        ) or await connections.open(asyncio.get_running_loop())
        return connection

    async def open_record(self) -> None:
        """Reserve budget, write the attempt to the journal and start its meter. Raises JournalFull,
        OverBudget, BudgetReserved, Unavailable."""
        self.record = await borrow_and_retry(self._open_record_nowait)
        call, instance = self.call, self.reservation.instance
        instance.running[call.id] = self
        self._is_last_of_instance = call.target.spec.sandbox
        if call.on_open is not None:
            call.on_open(instance)

    def _open_record_nowait(self) -> OpenRecord:
        call, reservation = self.call, self.reservation
        return reservation.instance.account.open(
            call=call.id,
            attempt=call.attempt,
            key=call.caller.key_id,
            method=call.method,
            start_kind=reservation.start_kind.value,
            queued_ms=0 if self.is_shadow else int(call.queued_ms),
            start_ms=0 if self.is_shadow else int(reservation.start_ms),
            now_ns=time.monotonic_ns(),
            at_ns=time.time_ns(),
            caller=call.caller.tenant,
            limit_ns=None
            if call.deadline_s is None
            else max(0, int(call.remaining_s(call.deadline_s) * 1e9)),
            mark=call.mark,
            tokens=call.tokens,
            is_shadow=self.is_shadow,
            customer=call.caller.customer,
        )

    def open_warm(self, connection: WorkerConnection, mark: str) -> None:
        """Open the record of a first attempt that waited for nothing, as of its reservation, with
        the connection that it has acquired, which gets it next. `mark`: `Call.mark`. Releases slot
        and connection where that fails.

        Raises JournalFull, OverBudget, BudgetReserved, AllowanceNeeded."""
        call, instance = self.call, self.reservation.instance
        self.connection = connection
        now_ns = self.dispatched_ns = call.reserved_ns
        try:
            self.record = instance.account.open(
                call=call.id,
                attempt=1,
                key=call.caller.key_id,
                method=call.method,
                start_kind=_WARM,
                queued_ms=0,
                start_ms=0,
                now_ns=now_ns,
                at_ns=call.at_ns,
                caller=call.caller.tenant,
                mark=mark,
                customer=call.caller.customer,
            )
        except BaseException:
            instance.connections.release(connection, now_ns / 1e9)
            self.reservation.release_unused()
            raise
        instance.running[call.id] = self

    async def crash_error(self) -> errors.WorkerCrashed:
        """Return the error of an attempt whose worker's connection broke; drains the instance."""
        return await worker_crash_error(self.reservation)

    async def request_whole(self, connection: WorkerConnection) -> WorkerResponse:
        """Send the call with its body on its connection, and return the response, or its head if it
        streams.

        Raises WorkerConnectionLost, DeadlineExceeded."""
        loop, call = asyncio.get_running_loop(), self.call
        whole_s = call.target.spec.clocks.execution_s
        left_s = call.remaining_s(whole_s)
        self.dispatched_ns = time.monotonic_ns()
        self._pending = connection.request(call.request_head(left_s) + call.body, loop=loop)
        self._timer = self._deadline(left_s, whole_s, loop)
        answer = self.answer = await self._pending
        if answer.body is not None:
            self._timer.cancel()
        return answer

    def watch_stream(self) -> None:
        """Start the deadline of a response that streams, and that `request_whole` did not send."""
        ran_s = (time.monotonic_ns() - self.dispatched_ns) / 1e9
        whole_s = self.call.target.spec.clocks.execution_s - ran_s
        self._timer = self._deadline(
            self.call.remaining_s(whole_s), whole_s, asyncio.get_running_loop()
        )

    def _deadline(
        self, left_s: float, whole_s: float, loop: asyncio.AbstractEventLoop
    ) -> asyncio.TimerHandle:
        """Interrupt in `left_s`: by the caller's own deadline where that is before the execution
        deadline, in `whole_s`."""
        is_whole = left_s >= whole_s
        return loop.call_later(
            max(0.0, left_s), self._overrun if is_whole else self._on_caller_deadline
        )

    @contextlib.asynccontextmanager
    async def limited(self, what: str) -> AsyncIterator[None]:
        """Limit the block by the execution deadline, where the caller sends while it receives.
        Raises DeadlineExceeded, which names `what`."""
        execution_s = self.call.target.spec.clocks.execution_s
        limit = self.limit_until(asyncio.get_running_loop().time() + execution_s)
        try:
            async with limit:
                yield
        except TimeoutError as e:
            if not limit.expired():
                raise
            if self.cut_by is not None:
                raise self.cut_by from e
            self.overran(is_blameless=self._is_progressing)
            self.cut_by = errors.DeadlineExceeded(
                f"{what} ran longer than {execution_s:g} s", clock="execution"
            )
            raise self.cut_by from e

    def limit_until(self, at: float) -> asyncio.Timeout:
        """A timeout of the task that relays the call, at a time of the event loop; `cut` makes it
        expire, with `cut_by` set."""
        self._limit = asyncio.timeout_at(at)
        return self._limit

    # -- deadlines ---------------------------------------------------------------------------------
    @property
    def _is_progressing(self) -> bool:
        """Whether the instance makes progress, and only its caller does not read or send, or
        requested more than fits into the time."""
        is_ahead = self.connection is not None and self.connection.is_ahead
        return self.is_sending or (is_ahead and self.dispatched_ns > 0) or self._is_generating

    @property
    def _is_generating(self) -> bool:
        """Whether a language model has just produced output."""
        tokens = self.call.tokens
        lively_ns = self.call.target.spec.clocks.execution_s * 1e9 / LIVELY
        return (
            tokens is not None
            and tokens.last_ns > 0
            and time.monotonic_ns() - tokens.last_ns < lively_ns
        )

    def overran(self, *, is_blameless: bool) -> None:
        """The execution deadline has passed. Unless `is_blameless`, the instance may hang: it gets
        no more calls, and is replaced once its other calls have finished."""
        self._is_blameless = is_blameless
        if not is_blameless:
            self.reservation.instance.is_stuck = True
            # drain before its slot is free, so that no other call gets it
            self.reservation.throttler.drain(self.reservation.instance)

    def _overrun(self) -> None:
        if self._may_interrupt():
            self.overran(is_blameless=self._has_answer and self._is_progressing)
            execution_s = self.call.target.spec.clocks.execution_s
            self._interrupt(
                errors.DeadlineExceeded(
                    f"the call ran longer than {execution_s:g} s", clock="execution"
                )
            )

    def _on_caller_deadline(self) -> None:
        """The caller's own deadline has passed. The instance is not replaced, because short
        deadlines do not mean that it hangs."""
        if self._may_interrupt():
            self._interrupt(
                errors.DeadlineExceeded(
                    f"the caller's deadline of {self.call.deadline_s:g} s expired before the end "
                    f"of the response",
                    clock="execution",
                )
            )

    def cut(self, error: errors.PilotlightError) -> None:
        """End it with `error` where it still runs. Its instance is not replaced. May be called
        again until it has ended."""
        if self._limit is not None and not self._is_closed:
            with contextlib.suppress(RuntimeError):  # it has expired, or its next one follows
                self._limit.reschedule(asyncio.get_running_loop().time())
                self.cut_by = error
        elif self._may_interrupt():
            self._interrupt(error)

    @property
    def _has_answer(self) -> bool:
        return self._pending is None or self._pending.done()

    def _may_interrupt(self) -> bool:
        """Whether the attempt still runs. A response that arrived at this moment is taken."""
        pending = self._pending
        if self._is_closed:
            return False
        if pending is None or not pending.done():
            return True
        if pending.cancelled() or pending.exception() is not None:
            return False
        if "answer" not in vars(self):  # otherwise it was taken, and perhaps replaced by a guard
            self.answer = pending.result()
        return self.answer.body is None

    def _interrupt(self, error: errors.PilotlightError) -> None:
        self.cut_by = error
        if self._pending is not None and not self._pending.done():
            self._pending.set_exception(self.cut_by)
            return
        if self.connection is not None:
            self.connection.close()
        self.fail(self.cut_by, is_noted=False, finish="error")
        if self.on_cut is not None:
            self.on_cut()

    # -- end ---------------------------------------------------------------------------------------
    def close(
        self,
        *,
        status: int,
        outcome: str,
        bytes_out: int,
        finish: str = "",
    ) -> str:
        """End an attempt that its worker answered: close the record, release the connection and
        the slot. Returns the cost as text.

        `finish`: why a stream ended (`engines.FINISH_REASONS`), where the call has no `tokens` with
        it."""
        if self._is_closed:
            return self.cost
        call, record = self.call, self.record
        if call.target.has_online_features and record is not None and not call.degradation:
            record.mark += encode_optional_fields(degraded=degradation_of(self))
        if status >= 500:
            self.reservation.ending = Outcome.NEITHER if self._is_blameless else Outcome.RAISED
        self._end(status, outcome, bytes_out, finish)
        return self.cost

    def refused_as_busy(self) -> None:
        """End an attempt whose worker was busy: nothing ran, and its instance is tried again
        later."""
        self.reservation.instance.block(time.monotonic())
        self.close(status=503, outcome=BUSY, bytes_out=0)

    def fail(self, error: BaseException, *, finish: str = "", is_noted: bool = True) -> None:
        """End an attempt that `error` ended: close the record, the connection and the slot.

        `finish`: as in `close`. `is_noted`: record it for the call's trace; False where the caller
        already got a part of its response, which is traced as a whole."""
        if self._is_closed:
            return
        if is_noted:
            self.call.record_attempt(
                self.reservation,
                dispatched_ns=self.dispatched_ns,
                ended_ns=time.monotonic_ns(),
                error=kind_of(error),
            )
        is_blamed = not self._is_blameless and isinstance(
            error, WorkerConnectionLost | errors.DeadlineExceeded | errors.WorkerCrashed
        )
        self.reservation.ending = self.call.blame if is_blamed else Outcome.NEITHER
        if self.connection is not None:
            self.connection.close()
        self._end(status_of(error), outcome_of(error), self.bytes_out, finish)

    def _end(self, status: int, outcome: str, bytes_out: int, finish: str) -> None:
        self._is_closed = True
        call, record, reservation = self.call, self.record, self.reservation
        instance = reservation.instance
        if finish and call.tokens is None and record is not None:
            record.mark += encode_optional_fields(finish=finish)
        instance.running.pop(call.id, None)
        if self._timer is not None:
            self._timer.cancel()
        if self.callees:
            for connection in tuple(self.callees):
                connection.abort()
        now_ns = time.monotonic_ns()
        if self.dispatched_ns:
            self.exec_ms = (now_ns - self.dispatched_ns) / 1e6
        if outcome not in NOT_RUN:
            instance.busy_answers = 0
        if self.is_shadow or outcome in _UNJUDGED:
            reservation.ending = Outcome.NEITHER
        try:
            if record is not None:
                bill = instance.account.close(
                    record,
                    status=status,
                    outcome=outcome,
                    bytes_in=len(call.body),
                    bytes_out=bytes_out,
                    now_ns=now_ns,
                    at_ns=time.time_ns(),
                )
                self.cost, self.picos = bill.cost, bill.picos
        finally:  # a record that cannot be closed must not leak the slot
            if self.connection is not None:
                instance.connections.release(self.connection, now_ns / 1e9)
            if self._is_last_of_instance:
                # a sandbox's slot is used once, and its code gets no time to clean up
                instance.is_stuck = True
                reservation.throttler.drain(instance)
            reservation.throttler.release(instance, reservation.ending)


async def worker_crash_error(reservation: Reservation) -> errors.WorkerCrashed:
    """Return the error for a worker whose connection broke during a call; drains the instance."""
    instance = reservation.instance
    reason = instance.exit_reason or await instance.wait_exited(GONE_REASON_WAIT_S)
    if not instance.is_gone:
        reservation.throttler.drain(instance)
    if reason == TENANT_SUSPENDED:
        return errors.WorkerCrashed(
            "the instance was stopped during this call: its tenant is suspended",
            reason=reason,
            worker=instance.id,
        )
    why = {"out_of_memory": "ran out of memory", "": "died"}.get(reason, f"ended ({reason})")
    return errors.WorkerCrashed(
        f"the instance {why} during this call; another one replaces it",
        reason=reason or "crashed",
        worker=instance.id,
    )


def status_of(error: BaseException) -> int:
    """Return the status for the record of an attempt that failed with `error`."""
    if isinstance(error, errors.PilotlightError):
        return error.status
    return 499 if isinstance(error, asyncio.CancelledError) else 502


def outcome_of(error: BaseException) -> str:
    """Return the outcome for the record of an attempt that failed with `error`."""
    if isinstance(error, WorkerConnectionLost) and not error.sent:
        return UNSENT
    is_left = isinstance(error, asyncio.CancelledError | errors.ClientClosedRequest)
    return CANCELLED if is_left else "error"
