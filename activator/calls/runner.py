"""Runs an admitted call up to a worker's response: reserve → open the record → forward, with the
platform's retry rule.

An attempt that fails before any byte of the request reached a worker is repeated once on another
instance, because it had no effect; one that fails later is repeated only when the function is
declared idempotent and its caller has received nothing. A worker that answers "busy" (it still runs
a call whose caller disconnected) has not begun either: the call is requeued at the front.

`RetryExecutor` runs the retries that a function declares: decide, release the slot, wait, begin
again. A call is not retried once its caller has received a byte. Each retry is billed like a call,
counts as a request of the caller's quotas, and uses one retry of its budget; where one of them is
used up, the failure is returned."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from activator.balancing.instance import Reservation
from activator.balancing.throttler import Throttler
from activator.calls.attempt import Attempt, worker_crash_error
from activator.calls.call import AnsweredCall, Call
from activator.calls.fallback import FallbackChain
from activator.quotas.token_reservation import TokenReservation
from activator.resilience.declared_retries import RetryBudgets, may_retry, pause_s
from activator.routing.route_table import CallTarget
from activator.worker_client.connection import (
    WorkerConnectionLost,
    WorkerResponse,
)
from pilotlight import errors
from pilotlight.protocol import HEADER_RETRY
from pilotlight.spec.pricing import BUSY


class RetryExecutor:
    """Runs calls with their retries. Owner: the CallRunner."""

    def __init__(
        self,
        budgets: RetryBudgets,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.budgets = budgets
        self._clock = clock
        self._rng = random.Random()

    def __repr__(self) -> str:
        return f"<RetryExecutor {self.budgets!r}>"

    def count(self, key_id: str) -> None:
        """Count a call of this caller, which adds a share of a retry to its budget."""
        self.budgets.for_caller(key_id, self._clock()).calls += 1

    async def run(
        self,
        call: Call,
        step: Coroutine[Any, Any, AnsweredCall],
        again: Callable[[Call], Coroutine[Any, Any, AnsweredCall]],
    ) -> AnsweredCall:
        """Return the attempt of the first attempt, which is `step`, or of a later one. Raises the
        error of the last attempt."""
        while True:
            try:
                attempt = await step
            except errors.PilotlightError as e:
                wait_s = await self._pause_s(call, e)
                if wait_s is None:
                    raise
            else:
                wait_s = await self._pause_raised_s(call, attempt)
                if wait_s is None:
                    return attempt
                attempt.discard()
                attempt.record_retried(str(attempt.answer.status))
            call.attempt += 1
            call.retries += 1
            await asyncio.sleep(wait_s)
            step = again(call)

    async def _pause_raised_s(self, call: Call, attempt: AnsweredCall) -> float | None:
        """Return the pause after a response in which user code raised; None for others. Closes the
        attempt when it is cancelled."""
        if not _is_raised(attempt):
            return None
        try:
            return await self._pause_s(call, _RAISED)
        except BaseException:
            attempt.discard()
            raise

    async def _pause_s(self, call: Call, error: errors.PilotlightError) -> float | None:
        """Return the pause before another attempt, charged to quotas and budget; None when there is
        none."""
        if not may_retry(error, call):
            return None
        wait_s = pause_s(call, left_s=call.remaining_s(math.inf), rng=self._rng)
        if wait_s is None or not self.budgets.try_acquire(call.caller.key_id, self._clock()):
            return None
        try:
            await call.admission.count_retry()
        except (errors.OverQuota, errors.Unavailable):
            return None  # the caller gets the failure, not the reason why it cannot be retried
        return wait_s


_RAISED = errors.FunctionRaised("user code raised")


def is_for_retry(answer: WorkerResponse) -> bool:
    """Return whether the function's retries are for what it raised."""
    return answer.header(_RETRY) != b"no"


_RETRY = HEADER_RETRY.encode()


def _is_raised(attempt: AnsweredCall) -> bool:
    """Return whether user code failed before the caller received any part of the response."""
    answer = attempt.answer
    return (
        answer.status >= 500
        and answer.body is not None
        and answer.header(b"pilotlight-outcome") == b"raised"
        and is_for_retry(answer)
    )


BUSY_PATIENCE_S = 2.0
"""A worker that is still busy with an abandoned call after this long is replaced."""


class MayPay(Protocol):
    """Raises when the budgets do not allow a call of so many seconds and tokens, for a customer."""

    def __call__(
        self,
        target: CallTarget,
        limit_s: float,
        tokens: TokenReservation | None = None,
        customer: str = "",
    ) -> None: ...


def _free(
    target: CallTarget,
    limit_s: float,
    tokens: TokenReservation | None = None,
    customer: str = "",
) -> None:
    """Accept all calls: no budgets apply."""


class PredictionObserver(Protocol):
    """Gets answered calls for prediction logs."""

    def add(self, attempt: AnsweredCall, status: int, body: bytes | None) -> None:
        """An instance answered a call of a function with a log. `body`: None for a stream."""
        ...


class CallGuard(Protocol):
    """Checks calls of functions with a guard."""

    async def check_prompt(self, call: Call) -> None:
        """Raise an error for a call that its guard refuses, before anything runs for it."""

    async def check_answer(self, call: Call, attempt: AnsweredCall) -> None:
        """Have the answer of a call pass its guard, by replacing it. Ends the attempt where that
        fails."""


class CallRunner:
    """Runs calls on reserved slots.

    Attributes:
        retries: runs the retries.
        fallbacks: runs the fallbacks; None = none.
        predictions: gets the answered calls of functions with a prediction log (`log_answer`);
            None = there are no logs.
        guard: checks the calls of functions with a guard; None = such calls are refused.
    """

    def __init__(
        self,
        *,
        throttler_of: Callable[[CallTarget], Throttler],
        may_pay: MayPay = _free,
        retry_budget: float = 0.2,
    ) -> None:
        """`may_pay`: checks budgets before a call waits for a slot.

        `retry_budget`: retries that a caller may cause, as a share of its calls.
        """
        self.throttler_of = throttler_of
        self._may_pay = may_pay
        self.retries = RetryExecutor(RetryBudgets(retry_budget))
        self.fallbacks: FallbackChain | None = None
        self.predictions: PredictionObserver | None = None
        self.guard: CallGuard | None = None

    def log_answer(self, attempt: AnsweredCall, status: int, body: bytes | None) -> None:
        """Give an answered attempt to its function's prediction log, where it has one. The one that
        ends a call calls it once. `body`: None for a stream. Answers that no instance gave are no
        predictions."""
        if (
            attempt.call.target.log is not None
            and self.predictions is not None
            and attempt.held is not None
        ):
            self.predictions.add(attempt, status, body)

    def check(self, call: Call) -> None:
        """Check the budgets of a call before it waits or starts an instance. Raises OverBudget,
        BudgetReserved."""
        self._may_pay(
            call.target,
            call.remaining_s(call.target.spec.clocks.execution_s),
            call.tokens,
            call.caller.customer,
        )

    def check_start(self, target: CallTarget) -> None:
        """Check the budgets before a start without a call: they must allow one call. Raises
        OverBudget, BudgetReserved."""
        self._may_pay(target, target.spec.clocks.execution_s)

    async def begin(
        self, call: Call, *, is_patient: bool = True, has_fallback: bool = True
    ) -> AnsweredCall:
        """Reserve, open the record, forward; returns when the response (or its head) has arrived.

        `is_patient`: failures are retried by the function's policy. `has_fallback`: fallbacks
        answer where the function cannot.

        Raises TooManyRequests, DeadlineExceeded, StartFailed, Unavailable, CircuitOpen,
        WorkerCrashed, JournalFull, OverBudget; what a guard raises. Cancelling it frees
        everything."""
        self.retries.count(call.caller.key_id)
        if call.target.guard:
            await self._guard_of(call).check_prompt(call)
        attempt = await self.finish(
            call, self._begin(call), is_patient=is_patient, has_fallback=has_fallback
        )
        if call.target.guard:
            await self._guard_of(call).check_answer(call, attempt)
        return attempt

    def _guard_of(self, call: Call) -> CallGuard:
        if self.guard is None:
            raise errors.Unavailable(
                f"{call.target.app}/{call.target.function} has a guard, and nothing checks it here"
            )
        return self.guard

    async def finish(
        self,
        call: Call,
        step: Coroutine[Any, Any, AnsweredCall],
        *,
        is_patient: bool = True,
        has_fallback: bool = True,
    ) -> AnsweredCall:
        """Finish a call whose first attempt, `step`, is in progress: apply retries and
        fallbacks."""
        spec = call.target.spec
        try:
            if spec.retries is not None and is_patient:
                attempt = await self.retries.run(call, step, self._begin)
            else:
                attempt = await step
        except errors.PilotlightError as e:
            if not has_fallback:
                raise
            return await self._run_fallback(call, e)
        if spec.fallback:
            self.remember(attempt.call, attempt.answer)
        return attempt

    async def run_fallback(self, call: Call, failure: errors.PilotlightError) -> AnsweredCall:
        """Run the declared fallbacks of the call's function, after its last attempt. Raises
        `failure`, or a similar error."""
        attempt = await self._run_fallback(call, failure)
        if call.target.guard:
            await self._guard_of(call).check_answer(call, attempt)
        return attempt

    async def _run_fallback(self, call: Call, failure: errors.PilotlightError) -> AnsweredCall:
        spec = call.target.spec
        if self.fallbacks is None or call.is_replay or not (spec.fallback or spec.variants):
            raise failure
        return await self.fallbacks.run_fallbacks(call, failure, self._begin)

    def remember(self, call: Call, answer: WorkerResponse) -> None:
        """Store the response of a function with fallbacks, where one is cached."""
        if self.fallbacks is not None and not call.is_replay:
            self.fallbacks.remember(call, answer)

    async def _begin(self, call: Call, held: Reservation | None = None) -> Attempt:
        """Run one attempt, or two by the platform's retry rule; `held`: a slot that is already
        reserved."""
        throttler = self.throttler_of(call.target)
        busy_since = 0.0
        while True:
            reservation = held or throttler.reserve_nowait(call.affinity)
            held = None
            if reservation is None:
                self.check(call)
                if (
                    call.target.spec.variants
                    and (attempt := await self._begin_by_variant(call, throttler)) is not None
                ):
                    return attempt
                reservation = await throttler.reserve(
                    call.remaining_s(call.target.spec.clocks.queue_s),
                    rank=call.caller.rank,
                    affinity=call.affinity,
                    tokens=call.tokens.estimated_in if call.tokens is not None else 0,
                )
            call.reserved(reservation)
            try:
                attempt = await self._forward(call, reservation)
            except WorkerConnectionLost as e:
                await self.require_retryable(call, reservation, e)
                continue
            if not attempt.answer.is_busy or call.target.spec.sandbox:
                return attempt  # a sandbox's code would have its command executed again
            busy_since = self.requeue(attempt, busy_since)

    async def _begin_by_variant(self, call: Call, throttler: Throttler) -> Attempt | None:
        """Run a free variant instead of waiting, and start an own instance meanwhile. Returns None
        where there is none."""
        found = (
            self.fallbacks.try_reserve_variant(call)
            if self.fallbacks is not None and not call.degraded and not call.is_replay
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
            other.attempt += 1  # the next attempt has another number
            return None
        finally:
            call.attempt = other.attempt

    async def begin_after_busy(self, busy: Attempt) -> AnsweredCall:
        """Run `begin` again for a call whose worker answered "busy"."""
        self.requeue(busy)
        return await self.finish(busy.call, self._begin(busy.call))

    async def begin_after_crash(
        self, call: Call, reservation: Reservation, gone: WorkerConnectionLost
    ) -> AnsweredCall:
        """Run `begin` again for a call whose worker died, where the retry rule allows it. Raises
        WorkerCrashed otherwise."""
        return await self.finish(call, self._begin_after_crash(call, reservation, gone))

    async def _begin_after_crash(
        self, call: Call, reservation: Reservation, gone: WorkerConnectionLost
    ) -> Attempt:
        await self.require_retryable(call, reservation, gone)
        return await self._begin(call)

    async def _forward(self, call: Call, reservation: Reservation) -> Attempt:
        attempt = Attempt(call, reservation)
        try:
            await attempt.request_whole(await attempt.open())
        except BaseException as e:
            attempt.fail(e)
            raise
        return attempt

    async def require_retryable(
        self, call: Call, reservation: Reservation, gone: WorkerConnectionLost
    ) -> None:
        """Return when the call may be sent again, as a request of its quotas where it was sent
        before. Raises WorkerCrashed otherwise; OverQuota, Unavailable."""
        instance = reservation.instance
        if not call.is_repeated and (not gone.sent or call.target.spec.idempotent):
            call.is_repeated = True
            call.attempt += 1
            reservation.throttler.drain(instance)
            if gone.sent:  # otherwise nothing ran
                await call.admission.count_retry()
            return
        raise await worker_crash_error(reservation) from gone

    def requeue(self, attempt: Attempt, busy_since: float = 0.0) -> float:
        """End an attempt whose worker was busy; its call may be sent again.

        `busy_since`: when the first of several such attempts in a row ended; 0 = this is the first.
        Returns it, monotonic seconds. An instance that stays busy for BUSY_PATIENCE_S is
        replaced."""
        now = time.monotonic()
        attempt.refused_as_busy()
        attempt.record_retried(BUSY)
        attempt.call.attempt += 1
        if busy_since and now - busy_since > BUSY_PATIENCE_S:
            attempt.reservation.throttler.drain(attempt.reservation.instance)
        return busy_since or now
