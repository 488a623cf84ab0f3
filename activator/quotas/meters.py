"""The meters of one activator by subject. Each subject has one meter, for as long as it is needed.

A meter that is full and has no running calls can be dropped when there are many, unless a quota
check still refers to it: no subject ever has two meters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from weakref import WeakValueDictionary

from activator.quotas.rules import Rule
from activator.quotas.store_protocol import Refused
from activator.quotas.token_bucket import Meter, Refusal

SWEEP_AT = 4096
"""Number of meters above which idle ones are dropped, and again each time the number has
doubled."""
MAX_REFUSED = 10_000
"""Maximum number of distinct refusals counted; further ones are counted for tenant ""."""


class Meters:
    """The meters of all subjects. Owner: the event loop."""

    def __init__(self) -> None:
        self._kept: dict[str, Meter] = {}
        self._alive: WeakValueDictionary[str, Meter] = WeakValueDictionary()
        self._sweep_at = SWEEP_AT
        self.refused: Counter[Refused] = Counter()

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[tuple[str, Meter]]:
        return iter(list(self._kept.items()))

    def get(self, rule_id: str) -> Meter | None:
        """The meter of a known subject."""
        return self._kept.get(rule_id)

    def get_or_create(self, rule: Rule, now: float) -> Meter:
        """Return the meter of a rule's subject with the rule's limits. Creates it if needed."""
        meter = self._kept.get(rule.id)
        if meter is None:
            if len(self._kept) >= self._sweep_at:
                self._sweep(now)
            meter = self._kept[rule.id] = self._alive[rule.id] = Meter(rule.quotas, now)
        if meter.quotas != rule.quotas:
            meter.set_limits(rule.quotas)
        return meter

    def _sweep(self, now: float) -> None:
        for name in [name for name, meter in self._kept.items() if meter.is_idle(now)]:
            del self._kept[name]
            if (pointed_at := self._alive.get(name)) is not None:
                self._kept[name] = pointed_at
        self._sweep_at = max(SWEEP_AT, 2 * len(self._kept))

    def count_refusal(self, refusal: Refusal) -> Refusal:
        """Count a refusal."""
        rule = refusal.rule
        counted = Refused(rule.tenant, rule.of, refusal.quota)
        if counted not in self.refused and len(self.refused) >= MAX_REFUSED:
            counted = Refused("", rule.of, refusal.quota)
        self.refused[counted] += 1
        return refusal
