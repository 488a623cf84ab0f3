"""Quotas counted in this process: a decision takes a few microseconds and never waits."""

from __future__ import annotations

import time
from collections.abc import Callable

from activator.quotas import decision
from activator.quotas.decision import Meter, Refusal
from activator.quotas.meters import Meters
from activator.quotas.ratelimit_headers import RateLimitHeaders
from activator.quotas.rules import Rules, counted
from activator.quotas.store import QuotaStatistics


class ProcessGate:
    """See `Gate`."""

    __slots__ = ("_clock", "_meters", "_note", "_rules", "head")

    is_immediate = True

    def __init__(
        self,
        rules: Rules,
        meters: tuple[Meter, ...],
        *,
        clock: Callable[[], float],
        note: Callable[[Refusal], Refusal],
    ) -> None:
        self._rules = rules
        self._meters = meters
        self._clock = clock
        self._note = note
        self.head = RateLimitHeaders(rules, meters).lines

    def __repr__(self) -> str:
        return f"<ProcessGate {', '.join(f'{r.id} {m!r}' for r, m in zip(self._rules, self._meters, strict=True))}>"

    def take_nowait(self, requests: int, holds: int, tokens: int) -> Refusal | None:
        """See Gate."""
        refusal = decision.take(self._meters, self._rules, self._clock(), requests, holds, tokens)
        return None if refusal is None else self._note(refusal)

    async def take(self, requests: int, holds: int, tokens: int) -> Refusal | None:
        """See Gate; it never waits."""
        return self.take_nowait(requests, holds, tokens)

    def give_back(self, requests: int, holds: int, tokens: int) -> None:
        """See Gate."""
        decision.give_back(self._meters, requests, holds, tokens)

    def leave(self) -> None:
        """See Gate."""
        for meter in self._meters:
            if meter.held:
                meter.held -= 1

    def settle(self, reserved: int, used: int) -> None:
        """See Gate."""
        decision.settle(self._meters, reserved, used)


class ProcessQuotas:
    """`QuotaStore` of a lone activator. Owner: the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._meters = Meters()

    def __repr__(self) -> str:
        return (
            f"<ProcessQuotas {len(self._meters)} subjects, {self._meters.refused.total()} refused>"
        )

    def gate(self, rules: Rules) -> ProcessGate | None:
        """See QuotaStore."""
        rules = counted(rules)
        if not rules:
            return None
        now = self._clock()
        meters = tuple(self._meters.of(rule, now) for rule in rules)
        return ProcessGate(rules, meters, clock=self._clock, note=self._meters.note)

    def held(self, rule_id: str) -> int:
        """See QuotaStore."""
        meter = self._meters.get(rule_id)
        return meter.held if meter is not None else 0

    def statistics(self) -> QuotaStatistics:
        """See QuotaStore."""
        return QuotaStatistics(subjects=len(self._meters), refused=dict(self._meters.refused))

    async def aclose(self) -> None:
        """Nothing to close."""
