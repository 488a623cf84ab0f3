"""Runs the retries that a function declares: decide, release the slot, wait, begin again.

A call is not retried once the caller has received a byte: streams are forwarded as they are. Each
retry is billed like a call, counts as a request of the caller's quotas, and uses one retry of its
budget (`retry_budget`); where one of them is used up, the failure is returned."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from activator.calls.trace_context import note_answer
from activator.resilience.retry_budget import RetryBudgets
from activator.resilience.retry_policy import may_retry, pause_s
from pilotlight import errors

if TYPE_CHECKING:
    from activator.calls.attempt import Attempt
    from activator.calls.call import Call


class RetryExecutor:
    """Runs calls with their retries. Owner: the CallRunner."""

    def __init__(
        self,
        budgets: RetryBudgets,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        sleep: Callable[[float], Coroutine[Any, Any, None]] = asyncio.sleep,
    ) -> None:
        self.budgets = budgets
        self._clock = clock
        self._rng = rng or random.Random()
        self._sleep = sleep

    def __repr__(self) -> str:
        return f"<RetryExecutor {self.budgets!r}>"

    def count(self, key_id: str) -> None:
        """Count a call of this caller, which adds a share of a retry to its budget."""
        self.budgets.for_caller(key_id, self._clock()).calls += 1

    async def run(
        self,
        call: Call,
        step: Coroutine[Any, Any, Attempt],
        again: Callable[[Call], Coroutine[Any, Any, Attempt]],
    ) -> Attempt:
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
                note_answer(attempt, str(attempt.answer.status))
            call.attempt += 1
            call.retries += 1
            await self._sleep(wait_s)
            step = again(call)

    async def _pause_raised_s(self, call: Call, attempt: Attempt) -> float | None:
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
        if wait_s is None or not self.budgets.try_acquire(call.key_id, self._clock()):
            return None
        if call.admission is not None:
            try:
                await call.admission.count_retry()
            except (errors.OverQuota, errors.Unavailable):
                return None  # the caller gets the failure, not the reason why it cannot be retried
        return wait_s


_RAISED = errors.FunctionRaised("user code raised")


def _is_raised(attempt: Attempt) -> bool:
    """Return whether user code failed before the caller received any part of the response."""
    answer = attempt.answer
    return (
        answer.status >= 500
        and answer.body is not None
        and answer.header(b"pilotlight-outcome") == b"raised"
    )
