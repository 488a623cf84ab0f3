"""The meters of one activator by their subject: each exists once, for as long as it says anything.

A meter that is full and held by nobody says nothing, and is dropped when there are many, unless a
gate still points at it: no subject ever has two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from weakref import WeakValueDictionary

from activator.quotas.decision import Meter, Refusal
from activator.quotas.rules import Rule
from activator.quotas.store import Refused

SWEEP_AT = 4096
"""Meters above which idle ones are dropped; then again whenever they have doubled."""
MAX_REFUSED = 10_000
"""Different refusals that are told apart; the rest is counted for tenant ""."""


class Meters:
    """Owner: the event loop."""

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
        """The meter of a subject that is known."""
        return self._kept.get(rule_id)

    def of(self, rule: Rule, now: float) -> Meter:
        """The meter of a rule's subject, with the rule's bounds."""
        meter = self._kept.get(rule.id)
        if meter is None:
            if len(self._kept) >= self._sweep_at:
                self._sweep(now)
            meter = self._kept[rule.id] = self._alive[rule.id] = Meter(rule.quotas, now)
        if meter.quotas != rule.quotas:
            meter.limit(rule.quotas)
        return meter

    def _sweep(self, now: float) -> None:
        for name in [name for name, meter in self._kept.items() if meter.is_idle(now)]:
            del self._kept[name]
            if (pointed_at := self._alive.get(name)) is not None:
                self._kept[name] = pointed_at
        self._sweep_at = max(SWEEP_AT, 2 * len(self._kept))

    def note(self, refusal: Refusal) -> Refusal:
        """Count a refusal."""
        rule = refusal.rule
        counted = Refused(rule.tenant, rule.of, refusal.quota)
        if counted not in self.refused and len(self.refused) >= MAX_REFUSED:
            counted = Refused("", rule.of, refusal.quota)
        self.refused[counted] += 1
        return refusal
