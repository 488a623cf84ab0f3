"""From an admitted call to a worker's answer: reserve → open the record → forward, and the retry
rule.

An attempt that fails before any byte of the request reached a worker is made once more elsewhere,
because nothing can have happened; one that fails later is made again only when the function is
declared idempotent and its caller has seen nothing. A worker that says it is busy (it still
finishes a call whose caller left) has not begun either: the call is put back in front."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

from activator.balancing.reservation import Reservation, SlotOwner
from activator.balancing.throttler import Throttler
from activator.billing.instance_meter import OpenRecord
from activator.calls.call import Call, Exchange
from activator.calls.retry import RetryExecutor
from activator.llm.token_reservation import TokenReservation
from activator.resilience.breaker import Outcome
from activator.resilience.retry_budget import RetryBudgets
from activator.routing.route_table import CallTarget
from activator.tracing.context import kind_of, note, note_answer
from activator.worker_client.connection import (
    WorkerConnection,
    WorkerConnectionLost,
    WorkerResponse,
)
from pilotlight import errors
from pilotlight.pricing import BUSY
from snapshotter.types import StartKind

__all__ = ["Call", "CallRunner", "Exchange", "status_of", "worker_crash_error"]

GONE_REASON_WAIT_S = 0.5
"""A broken connection is seen before the agent's word on why: wait this long for it, so that the
caller reads "out of memory", not "reset"."""
BUSY_PATIENCE_S = 2.0
"""A worker that is still busy with an abandoned call after this long is replaced."""


MayPay = Callable[[CallTarget, float, TokenReservation | None], None]
"""Raises when no budget lets a call run for so many seconds, and take these tokens."""


def _free(target: CallTarget, limit_s: float, tokens: TokenReservation | None) -> None:
    """Calls that nobody counts the money of."""


class Fallbacks(Protocol):
    """What answers where a function cannot (`resilience.ladder`)."""

    def remember(self, call: Call, answer: WorkerResponse) -> None:
        """A function answered: perhaps it may be given again."""
        ...

    def free_variant(self, call: Call) -> tuple[Call, Reservation] | None:
        """A variant that has a free slot for a call whose own function has none."""
        ...

    async def climb(
        self,
        call: Call,
        failure: errors.PilotlightError,
        run: Callable[[Call], Awaitable[Exchange]],
    ) -> Exchange:
        """The answer of something else. Raises `failure`, or one like it, when there is none."""
        ...


class CallRunner:
    """Runs calls on reserved slots.

    Attributes:
        persistence: what tries calls again.
        fallbacks: what answers in place of functions; None = nothing does.
    """

    def __init__(
        self,
        *,
        throttler_of: Callable[[CallTarget], Throttler],
        may_pay: MayPay = _free,
        retry_budget: float = 0.2,
    ) -> None:
        """`may_pay` is asked before a call waits for a slot.

        `retry_budget`: retries that a caller may cause, as a share of its calls.
        """
        self.throttler_of = throttler_of
        self._may_pay = may_pay
        self.persistence = RetryExecutor(RetryBudgets(retry_budget))
        self.fallbacks: Fallbacks | None = None

    def check(self, call: Call) -> None:
        """Refuse a call that its budgets cannot pay before it waits, or has an instance started.
        Raises OverBudget, BudgetReserved."""
        self._may_pay(
            call.target, call.remaining_s(call.target.spec.clocks.execution_s), call.tokens
        )

    def check_start(self, target: CallTarget) -> None:
        """The same for a start that no call waits for: nothing is started that could not run one.
        Raises OverBudget, BudgetReserved."""
        self._may_pay(target, target.spec.clocks.execution_s, None)

    async def begin(
        self, call: Call, *, is_patient: bool = True, has_fallback: bool = True
    ) -> Exchange:
        """Reserve, open the record, forward; returns when the answer (or its head) is there.

        `is_patient`: a failure is tried again as the function declares. `has_fallback`: where it
        cannot answer, its fallbacks may.

        Raises TooManyRequests, DeadlineExceeded, StartFailed, Unavailable, CircuitOpen,
        WorkerCrashed, JournalFull, OverBudget. Cancelling it frees everything."""
        self.persistence.count(call.key_id)
        return await self.settle(
            call, self._begin(call), is_patient=is_patient, has_fallback=has_fallback
        )

    async def settle(
        self,
        call: Call,
        step: Coroutine[Any, Any, Exchange],
        *,
        is_patient: bool = True,
        has_fallback: bool = True,
    ) -> Exchange:
        """The same for a call whose first attempt is under way: `step` ends it."""
        spec = call.target.spec
        try:
            if spec.retries is not None and is_patient:
                exchange = await self.persistence.carry(call, step, self._begin)
            else:
                exchange = await step
        except errors.PilotlightError as e:
            if not has_fallback:
                raise
            return await self.instead(call, e)
        if spec.fallback:
            self.remember(exchange.call, exchange.answer)
        return exchange

    async def instead(self, call: Call, failure: errors.PilotlightError) -> Exchange:
        """What the call's function declares to answer in its place, now that no attempt follows.
        Raises `failure`, or one like it."""
        spec = call.target.spec
        if self.fallbacks is None or not (spec.fallback or spec.variants):
            raise failure
        return await self.fallbacks.climb(call, failure, self._begin)

    def remember(self, call: Call, answer: WorkerResponse) -> None:
        """A call of a function with fallbacks was answered."""
        if self.fallbacks is not None:
            self.fallbacks.remember(call, answer)

    async def _begin(self, call: Call, held: Reservation | None = None) -> Exchange:
        """One attempt, or two by the platform's own rule; `held`: the slot that it has already."""
        throttler = self.throttler_of(call.target)
        busy_since = 0.0
        while True:
            reservation = held or throttler.reserve_nowait(call.affinity)
            held = None
            if reservation is None:
                self.check(call)
                if (
                    call.target.spec.variants
                    and (exchange := await self._by_variant(call, throttler)) is not None
                ):
                    return exchange
                reservation = await throttler.reserve(
                    call.remaining_s(call.target.spec.clocks.queue_s),
                    rank=call.rank,
                    affinity=call.affinity,
                    tokens=call.tokens.estimated_in if call.tokens is not None else 0,
                )
            call.reserved_ns = time.monotonic_ns()
            if reservation.start_kind is not StartKind.WARM:
                call.start_kind = reservation.start_kind
                call.start_ms += reservation.start_ms
                call.weights = reservation.weights
            try:
                exchange = await self._forward(call, reservation)
            except WorkerConnectionLost as e:
                await self._judge(call, reservation, e)
                await self._pay_again(call)
                continue
            if not exchange.is_busy:
                return exchange
            busy_since = self._put_back(exchange, throttler, busy_since)

    async def _by_variant(self, call: Call, throttler: Throttler) -> Exchange | None:
        """Rather than wait, be answered by a variant that is free; its own instance is started
        meanwhile. None: there is none."""
        found = (
            self.fallbacks.free_variant(call)
            if self.fallbacks is not None and not call.degraded
            else None
        )
        if found is None:
            return None
        if not throttler.starting and throttler.health is None:
            throttler.start(1)
        other, reservation = found
        try:
            return await self._begin(other, reservation)
        except errors.PilotlightError:
            other.attempt += 1  # what follows is another one
            return None
        finally:
            call.attempt = other.attempt

    async def begin_again(self, busy: Exchange) -> Exchange:
        """`begin` for a call whose worker said that it is busy."""
        self._put_back(busy, busy.reservation.throttler, 0.0)
        return await self.settle(busy.call, self._begin(busy.call))

    async def begin_after(
        self, call: Call, reservation: Reservation, gone: WorkerConnectionLost
    ) -> Exchange:
        """`begin` for a call whose worker is gone, where the retry rules allow it. Raises
        WorkerCrashed where they do not."""
        return await self.settle(call, self._after(call, reservation, gone))

    async def _after(
        self, call: Call, reservation: Reservation, gone: WorkerConnectionLost
    ) -> Exchange:
        await self._judge(call, reservation, gone)
        await self._pay_again(call)
        return await self._begin(call)

    async def _pay_again(self, call: Call) -> None:
        """An attempt more is a request more; a worker that was busy is none, because nothing ran.
        Raises OverQuota, Unavailable."""
        if call.admission is not None:
            await call.admission.count_retry()

    async def _forward(self, call: Call, reservation: Reservation) -> Exchange:
        instance = reservation.instance
        connection: WorkerConnection | None = None
        ticket: OpenRecord | None = None
        dispatched_ns = 0
        loop = asyncio.get_running_loop()
        try:
            ticket = await reservation.open_paid(call)
            connection = instance.connections.take_nowait(
                call.reserved_ns / 1e9
            ) or await instance.connections.open(loop)
            whole_s = call.target.spec.clocks.execution_s
            execution_s = call.remaining_s(whole_s)
            dispatched_ns = time.monotonic_ns()
            future = connection.request(call.request_head(execution_s) + call.body, loop=loop)
            overrun = self._overrun if execution_s >= whole_s else self._leave
            timer = loop.call_later(execution_s, overrun, future, reservation, execution_s)
            try:
                answer = await future
            finally:
                timer.cancel()
            return Exchange(
                call,
                reservation=reservation,
                ticket=ticket,
                connection=connection,
                answer=answer,
                dispatched_ns=dispatched_ns,
            )
        except BaseException as e:
            note(
                call,
                reservation,
                dispatched_ns=dispatched_ns,
                ended_ns=time.monotonic_ns(),
                error=kind_of(e),
            )
            reservation.ending = (
                call.blame
                if isinstance(e, WorkerConnectionLost | errors.DeadlineExceeded)
                else Outcome.NEITHER
            )
            if connection is not None:
                connection.close()
            try:
                if ticket is not None:
                    reservation.close(
                        ticket,
                        status=status_of(e),
                        outcome=_outcome_of(e),
                        bytes_in=len(call.body),
                        bytes_out=0,
                    )
            finally:
                reservation.release()
            raise

    def _overrun(
        self, future: asyncio.Future[WorkerResponse], reservation: Reservation, execution_s: float
    ) -> None:
        if not future.done():
            future.set_exception(
                errors.DeadlineExceeded(
                    f"the call ran longer than {execution_s:g} s", clock="execution"
                )
            )
            reservation.instance.is_stuck = True
            # it may never return: replaced, its neighbours finish first
            reservation.throttler.drain(reservation.instance)

    def _leave(
        self, future: asyncio.Future[WorkerResponse], _: Reservation, execution_s: float
    ) -> None:
        """Its caller waits no longer: no reason to think that the instance never returns, or short
        deadlines would replace it each time."""
        if not future.done():
            late = f"the caller's deadline came {execution_s:g} s after the call had begun"
            future.set_exception(errors.DeadlineExceeded(late, clock="execution"))

    async def _judge(
        self, call: Call, reservation: Reservation, gone: WorkerConnectionLost
    ) -> None:
        """Return when the call may be tried again; raise WorkerCrashed when it may not."""
        instance = reservation.instance
        may_retry = call.attempt == 1 and (not gone.sent or call.target.spec.idempotent)
        if may_retry:
            call.attempt += 1
            reservation.throttler.drain(instance)
            return
        raise await worker_crash_error(reservation) from gone

    def _put_back(self, exchange: Exchange, throttler: SlotOwner, busy_since: float) -> float:
        now = time.monotonic()
        instance = exchange.reservation.instance
        instance.block(now)
        exchange.close(status=503, outcome=BUSY, bytes_out=0)
        note_answer(exchange, BUSY)
        exchange.call.attempt += 1
        if busy_since and now - busy_since > BUSY_PATIENCE_S:
            throttler.drain(instance)
        return busy_since or now


async def worker_crash_error(reservation: Reservation) -> errors.WorkerCrashed:
    """What to say of a worker whose connection broke in the middle of a call; the instance gets no
    other call."""
    instance = reservation.instance
    reason = instance.gone_reason or await instance.wait_gone(GONE_REASON_WAIT_S)
    if not instance.is_gone:
        reservation.throttler.drain(instance)
    why = {"out_of_memory": "ran out of memory", "": "died"}.get(reason, f"ended ({reason})")
    return errors.WorkerCrashed(
        f"the instance {why} under this call; another takes its place",
        reason=reason or "crashed",
        worker=instance.id,
    )


def status_of(error: BaseException) -> int:
    """What the record of an attempt that ended so says."""
    if isinstance(error, errors.PilotlightError):
        return error.status
    return 499 if isinstance(error, asyncio.CancelledError) else 502


def _outcome_of(error: BaseException) -> str:
    return "cancelled" if isinstance(error, asyncio.CancelledError) else "error"
