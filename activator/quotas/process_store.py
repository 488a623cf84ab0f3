"""Quotas counted in this process: a decision takes a few microseconds and never waits."""

from __future__ import annotations

import time
from collections.abc import Callable

from activator.quotas import token_bucket
from activator.quotas.meters import Meters
from activator.quotas.ratelimit_headers import RateLimitHeaders
from activator.quotas.rules import Rules, counted
from activator.quotas.store_protocol import QuotaStatistics
from activator.quotas.token_bucket import Meter, Refusal


class ProcessQuotaCheck:
    """`QuotaCheck` in this process."""

    __slots__ = ("_clock", "_count_refusal", "_meters", "_rules", "head")

    is_immediate = True

    def __init__(
        self,
        rules: Rules,
        meters: tuple[Meter, ...],
        *,
        clock: Callable[[], float],
        count_refusal: Callable[[Refusal], Refusal],
    ) -> None:
        self._rules = rules
        self._meters = meters
        self._clock = clock
        self._count_refusal = count_refusal
        self.head = RateLimitHeaders(rules, meters).lines

    def __repr__(self) -> str:
        return f"<ProcessQuotaCheck {', '.join(f'{r.id} {m!r}' for r, m in zip(self._rules, self._meters, strict=True))}>"

    def try_acquire_nowait(self, requests: int, holds: int, tokens: int) -> Refusal | None:
        """Acquire all amounts, or nothing and return why."""
        refusal = token_bucket.acquire(
            self._meters, self._rules, self._clock(), requests, holds, tokens
        )
        return None if refusal is None else self._count_refusal(refusal)

    async def try_acquire(self, requests: int, holds: int, tokens: int) -> Refusal | None:
        """Like `try_acquire_nowait`; it never waits."""
        return self.try_acquire_nowait(requests, holds, tokens)

    def refund(self, requests: int, holds: int, tokens: int) -> None:
        """Refund what was acquired."""
        token_bucket.refund(self._meters, requests, holds, tokens)

    def charge(self, requests: int) -> None:
        """Acquire requests that were made already, whatever is left."""
        token_bucket.refund(self._meters, -requests, 0, 0)

    def release(self) -> None:
        """Release one concurrent call."""
        for meter in self._meters:
            if meter.held:
                meter.held -= 1

    def settle(self, reserved: int, used: int) -> None:
        """Settle reserved tokens with those used."""
        token_bucket.settle(self._meters, reserved, used)


class ProcessQuotas:
    """`QuotaStore` of a single activator. Owner: the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._meters = Meters()

    def __repr__(self) -> str:
        return (
            f"<ProcessQuotas {len(self._meters)} subjects, {self._meters.refused.total()} refused>"
        )

    def quota_check(self, rules: Rules) -> ProcessQuotaCheck | None:
        """Return the check of these rules. None when they require no counting."""
        rules = counted(rules)
        if not rules:
            return None
        now = self._clock()
        meters = tuple(self._meters.get_or_create(rule, now) for rule in rules)
        return ProcessQuotaCheck(
            rules, meters, clock=self._clock, count_refusal=self._meters.count_refusal
        )

    def held(self, rule_id: str) -> int:
        """Number of running calls of a subject."""
        meter = self._meters.get(rule_id)
        return meter.held if meter is not None else 0

    def statistics(self) -> QuotaStatistics:
        """Statistics for metrics."""
        return QuotaStatistics(subjects=len(self._meters), refused=dict(self._meters.refused))

    async def aclose(self) -> None:
        """Do nothing: there are no connections."""
