"""Runs a submitted call to its end: one attempt after the other, by its function's `retries`.

Calls run at least once: an attempt whose instance or activator died may have done its work, and is
repeated. The function gets the number of its attempt (`pilotlight.context().attempt`), and so do
readers of its stream; no attempt's output is the call's result before the attempt has ended. A
failed attempt may be followed by another until the caller's own deadline and the expiry of its
result. Pauses between attempts hold no slot, quota or queue place. The retry budget of the caller
does not apply, because concurrent submitted calls are limited to the capacity of their function's
instances."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

from activator.access.grants import AccessCache
from activator.async_calls.pending import PendingCalls
from activator.async_calls.pending_call import PendingCall
from activator.async_calls.records import answered, collect, failed
from activator.calls.call import AnsweredCall, Call
from activator.calls.runner import CallRunner, is_for_retry
from activator.metrics.metrics import Metrics
from activator.quotas.admission import Admission
from activator.resilience.declared_retries import may_retry, pause_s
from activator.routing.call_target import CallTarget
from activator.tracing.tracer import Tracer
from pilotlight import errors
from pilotlight.protocol import CallRecord


class AsyncConcurrencyLimiter:
    """Semaphores by revision and key; unused ones are garbage-collected. Owner: the event loop."""

    def __init__(self) -> None:
        self._gates: WeakValueDictionary[tuple[str, ...], asyncio.Semaphore] = WeakValueDictionary()

    def __repr__(self) -> str:
        return f"<AsyncConcurrencyLimiter {len(self._gates)}>"

    def for_revision(self, target: CallTarget) -> asyncio.Semaphore:
        """Return the semaphore of a revision."""
        return self._gate((target.key,), target)

    def for_key(self, key_id: str, target: CallTarget) -> asyncio.Semaphore:
        """Return the semaphore of one key's calls of a revision."""
        return self._gate((target.key, key_id), target)

    def _gate(self, whose: tuple[str, ...], target: CallTarget) -> asyncio.Semaphore:
        scaling = target.spec.scaling
        gate = self._gates.get(whose)
        if gate is None:
            gate = self._gates[whose] = asyncio.Semaphore(
                scaling.max_instances * scaling.max_inputs
            )
        return gate


BUSY_RETRY_S = 0.5
"""Pause before a submitted call that found a full queue, or no capacity, is retried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ending:
    """The outcome of an attempt: the record if it was the last one, its failure (None: none), and a
    function that records it in metrics.

    `remember`: called instead of `observe` where it was not the last attempt.
    """

    record: CallRecord
    failure: errors.PilotlightError | None
    observe: Callable[[], None]
    remember: Callable[[], None] = lambda: None


class AsyncCallRunner:
    """Runs submitted calls with their retries. Owner: the event loop.

    Attributes:
        admit_line: admits the call of a batch's line, whose body is loaded."""

    admit_line: Callable[[Call], Awaitable[None]]

    def __init__(
        self,
        *,
        held: PendingCalls,
        runner: CallRunner,
        access: AccessCache,
        metrics: Metrics,
        max_result_bytes: int,
        admission: Callable[[Call], Admission],
        load: Callable[[Call], None],
        tracer: Tracer | None = None,
    ) -> None:
        """`admission`: returns the admission, by the current quotas, of a call that was counted at
        submission. `load`: reads a parked call's body."""
        self._load = load
        self._held = held
        self._runner = runner
        self._access = access
        self._metrics = metrics
        self._max_result_bytes = max_result_bytes
        self._admission = admission
        self._rng = random.Random()
        self._tracer = tracer or Tracer()
        self._gates = AsyncConcurrencyLimiter()

    def __repr__(self) -> str:
        return f"<AsyncCallRunner {self._gates!r}>"

    async def run(self, held: PendingCall, call: Call) -> CallRecord:
        """Run a call to its end, and return its final record."""
        if held.is_uncounted or held.needs_tokens:
            is_by_body = held.is_patient or held.needs_tokens
            try:
                await (self._wait_for_line if is_by_body else self._charge_attempt)(held, call)
            except errors.PilotlightError as e:  # its key has lost the right to call
                self._refused(held, call, e).observe()
                return replace(failed(held.record, e), attempt=call.attempt - 1)
        while True:
            ending = await self._attempt(held, call)
            pause = self._pause_s(held, call, ending.failure)
            if pause is None:
                ending.observe()
                return replace(ending.record, attempt=call.attempt)
            ending.remember()
            waiting = replace(
                held.record, state="QUEUED", attempt=call.attempt, sequence=held.record.sequence + 1
            )
            self._held.record_change(held, waiting)
            call.attempt += 1
            call.retries += 1
            await asyncio.sleep(pause)
            try:
                await self._charge_attempt(held, call)
            except errors.PilotlightError as e:  # the caller has lost the right to call
                self._refused(held, call, e).observe()
                return replace(failed(held.record, e), attempt=call.attempt - 1)

    def _pause_s(
        self,
        held: PendingCall,
        call: Call,
        failure: errors.PilotlightError | None,
    ) -> float | None:
        """Return the seconds before the next attempt; None when there is none."""
        if failure is None or not may_retry(failure, call):
            return None
        left_s = min(call.remaining_s(math.inf), held.retry_until - time.time())
        return pause_s(call, left_s=left_s, rng=self._rng)

    async def _charge_attempt(self, held: PendingCall, call: Call) -> None:
        """Count an attempt as a request of its quotas; wait while they are used up."""
        call.admission = self._admission(call)
        while True:
            try:
                await call.admission.count_retry()
                return
            except (errors.OverQuota, errors.Unavailable):
                if time.time() > held.retry_until:
                    return  # `hold` raises the same error next, which ends the call
            await asyncio.sleep(BUSY_RETRY_S)

    async def _wait_for_line(self, held: PendingCall, call: Call) -> None:
        """Admit the call of a batch's line, or of a language model, which count what their bodies
        ask for; wait while its quotas are used up."""
        while True:
            try:
                self._load(call)
                await self.admit_line(call)
                return
            except (errors.TooManyRequests, errors.Unavailable):
                if time.time() > held.retry_until:
                    raise
            finally:
                call.park()
            await asyncio.sleep(BUSY_RETRY_S)

    def record_cancelled(self, held: PendingCall) -> None:
        """Record in metrics and traces that the caller cancelled a call."""
        if (call := held.call) is not None:
            self._metrics.observer.refused(call.target, 499)
            self._tracer.failed(call, "cancelled", 499, **_of_submitted(held))

    async def _attempt(self, held: PendingCall, call: Call) -> _Ending:
        try:
            attempt, status, body = await self._wait_for_quotas(held, call)
        except errors.PilotlightError as e:
            return self._refused(held, call, e)
        record = answered(held.record, attempt, status, body)
        is_failure = status >= 500 and is_for_retry(attempt.answer)
        raised = errors.FunctionRaised("user code raised") if is_failure else None

        def observe() -> None:
            self._metrics.answered(attempt, status, is_awaited=False)
            self._tracer.answered(attempt, status, **_of_submitted(held))

        return _Ending(
            record=record,
            failure=raised,
            observe=observe,
            remember=lambda: attempt.record_retried(str(status)),
        )

    def _refused(self, held: PendingCall, call: Call, error: errors.PilotlightError) -> _Ending:
        def observe() -> None:
            self._metrics.observer.refused(call.target, error.status, error)
            self._tracer.failed(call, error.type, error.status, **_of_submitted(held))

        return _Ending(record=failed(held.record, error), failure=error, observe=observe)

    async def _wait_for_quotas(
        self, held: PendingCall, call: Call
    ) -> tuple[AnsweredCall, int, bytes]:
        """Run the call. While its quotas are used up it waits until its result would expire,
        blocking only calls of its own key."""
        # lines of a batch wait among themselves: the key's other calls do not wait behind them
        key_id = f"{call.caller.key_id}/batch" if held.is_patient else call.caller.key_id
        async with self._gates.for_key(key_id, call.target):
            while True:
                try:
                    async with self._gates.for_revision(call.target):
                        return await self._run_once(held, call)
                except errors.OverQuota:
                    if time.time() > held.retry_until:
                        raise
                await asyncio.sleep(BUSY_RETRY_S)
                call.admission = self._admission(call)  # its quotas may have changed

    async def _run_once(self, held: PendingCall, call: Call) -> tuple[AnsweredCall, int, bytes]:
        try:
            self._load(call)
            attempt = await self._begin(held, call)
            status, body = await collect(attempt, self._max_result_bytes, held)
            if status < 500 or self._is_last(call):  # now: the body is parked next
                self._runner.log_answer(attempt, status, body)
            return attempt, status, body
        finally:
            call.park()
            call.admission.release()

    async def _begin(self, held: PendingCall, call: Call) -> AnsweredCall:
        """Begin the call, waiting for capacity within its queue time, or `held.retry_until`. Raises
        OverQuota at once."""
        until = time.monotonic() + call.remaining_s(call.target.spec.clocks.queue_s)
        while True:
            try:
                self._access.check_not_suspended(
                    call.caller.tenant or call.target.tenant, call.target.tenant
                )
                await call.admission.acquire_slot()
                if held.record.state != "RUNNING":
                    self._held.record_change(
                        held,
                        replace(held.record, state="RUNNING", sequence=held.record.sequence + 1),
                    )
                return await self._runner.begin(call, is_patient=False, has_fallback=False)
            except errors.OverQuota:
                raise
            except errors.PilotlightError as e:
                may_wait = (
                    isinstance(e, errors.TooManyRequests | errors.Unavailable)
                    and time.monotonic() <= until
                ) or (held.is_patient and _is_for_capacity(e) and time.time() <= held.retry_until)
                if not may_wait:
                    return await self._run_fallback(call, e)
            call.admission.release()
            await asyncio.sleep(BUSY_RETRY_S)

    async def _run_fallback(self, call: Call, failure: errors.PilotlightError) -> AnsweredCall:
        """Run the function's fallback, once no attempt is left. Raises `failure`, or a similar
        error."""
        if not self._is_last(call):
            raise failure
        return await self._runner.run_fallback(call, failure)

    def _is_last(self, call: Call) -> bool:
        """Return whether no attempt follows: a fallback answers only after the last attempt."""
        policy = call.target.spec.retries
        return policy is None or call.retries >= policy.max_retries


def _is_for_capacity(error: errors.PilotlightError) -> bool:
    """Return whether a call that waits for capacity without its queue time may go on: not where the
    function itself fails."""
    return (
        isinstance(error, errors.TooManyRequests | errors.Unavailable)
        and not isinstance(error, errors.CircuitOpen)
    ) or (isinstance(error, errors.DeadlineExceeded) and error.detail.get("clock") == "queue")


def _of_submitted(held: PendingCall) -> dict[str, Any]:
    """Return the trace attributes of a submitted call."""
    return {
        "is_submitted": True,
        "extra": {"faas.trigger": "timer", "pilotlight.schedule": held.record.schedule}
        if held.record.schedule
        else {},
    }
