"""Carries a call through the retries that its function declares: decide, give the slot back, wait,
begin again.

Nothing is tried again once the caller has seen a byte: what streams is handed on as it is. Each
attempt more is charged like one, takes a request of the caller's quotas, and one retry of its
budget (`retry_budget`); where any of them has none left, the failure stands."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from activator.resilience.retries import may_retry, pause_s
from activator.resilience.retry_budget import RetryBudgets
from activator.tracing.context import note_answer
from pilotlight import errors

if TYPE_CHECKING:
    from activator.calls.runner import Call, Exchange


class RetryExecutor:
    """See the module. Owner: the CallRunner."""

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
        """A call of this caller's came: it earns a part of a retry."""
        self.budgets.of(key_id, self._clock()).calls += 1

    async def carry(
        self,
        call: Call,
        step: Coroutine[Any, Any, Exchange],
        again: Callable[[Call], Coroutine[Any, Any, Exchange]],
    ) -> Exchange:
        """The answer of the first attempt, which is `step`, or of a later one. Raises what the last
        one raised."""
        while True:
            try:
                exchange = await step
            except errors.PilotlightError as e:
                wait_s = await self._pause_s(call, e)
                if wait_s is None:
                    raise
            else:
                wait_s = await self._pause_raised_s(call, exchange)
                if wait_s is None:
                    return exchange
                _close(exchange)
                note_answer(exchange, str(exchange.answer.status))
            call.attempt += 1
            call.retries += 1
            await self._sleep(wait_s)
            step = again(call)

    async def _pause_raised_s(self, call: Call, exchange: Exchange) -> float | None:
        """The same for an answer. A caller that leaves meanwhile leaves nothing taken."""
        if not _is_raised(exchange):
            return None
        try:
            return await self._pause_s(call, _RAISED)
        except BaseException:
            _close(exchange)
            raise

    async def _pause_s(self, call: Call, error: errors.PilotlightError) -> float | None:
        """How long to wait before one attempt more; None when there is none. Where there is, it is
        paid for."""
        if not may_retry(error, call):
            return None
        wait_s = pause_s(call, left_s=call.remaining_s(math.inf), rng=self._rng)
        if wait_s is None or not self.budgets.take(call.key_id, self._clock()):
            return None
        if call.admission is not None:
            try:
                await call.admission.count_retry()
            except (errors.OverQuota, errors.Unavailable):
                return None  # the caller is told what failed, not that it cannot be tried again
        return wait_s


_RAISED = errors.FunctionRaised("user code raised")


def _close(exchange: Exchange) -> None:
    exchange.close(
        status=exchange.answer.status, outcome="error", bytes_out=len(exchange.answer.body or b"")
    )


def _is_raised(exchange: Exchange) -> bool:
    """Whether user code failed before its caller saw anything of the answer."""
    answer = exchange.answer
    return (
        answer.status >= 500
        and answer.body is not None
        and answer.header(b"pilotlight-outcome") == b"raised"
    )
