"""Chooses which waiting call is shed when the queue is full: a pure choice over an index of all
waiting calls.

Places are shared by weight: a tenant's share of `limit` places is its weight over the weights of
all waiting tenants, at least one place. Order of shedding: batch calls (of tenants over their share
before others), then standard calls of tenants over their share, then their realtime ones, then
standard calls, realtime ones last. An arriving call replaces the newest call of the first class in
this order, if that class comes strictly before its own; otherwise it is rejected. So a tenant never
sheds its own calls for equal ones, and a tenant within its share never loses a place to one over
its share."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Protocol

from activator.fairness.queue_priority import QueuePriority
from pilotlight.spec.identifiers import Priority

_LEVELS = {
    (Priority.BATCH, True): 0,
    (Priority.BATCH, False): 1,
    (Priority.STANDARD, True): 2,
    (Priority.REALTIME, True): 3,
    (Priority.STANDARD, False): 4,
    (Priority.REALTIME, False): 5,
}


def level(priority: Priority, *, is_over: bool) -> int:
    """Shedding order: the lowest level is shed first. `is_over`: its tenant has more places than
    its share."""
    return _LEVELS[priority, is_over]


class Prioritized(Protocol):
    """An object with a rank, compared by identity."""

    @property
    def rank(self) -> QueuePriority:
        """Its rank in the queue."""
        ...


class SheddingIndex:
    """All waiting calls, by tenant and priority. Owner: the event loop. Adding and removing is
    O(1), a choice O(waiting tenants)."""

    def __init__(self) -> None:
        self._lines: dict[str, dict[Priority, OrderedDict[Prioritized, None]]] = {}
        self._sizes: Counter[str] = Counter()
        self._weights: dict[str, int] = {}
        self._weight = 0

    def __len__(self) -> int:
        return self._sizes.total()

    def __contains__(self, waiting: Prioritized) -> bool:
        return waiting in self._lines.get(waiting.rank.tenant, {}).get(waiting.rank.priority, ())

    def __repr__(self) -> str:
        return f"<SheddingIndex {len(self)} of {len(self._sizes)} tenants>"

    def add(self, waiting: Prioritized) -> None:
        """Add a waiting call."""
        rank = waiting.rank
        self._lines.setdefault(rank.tenant, {}).setdefault(rank.priority, OrderedDict())[
            waiting
        ] = None
        self._sizes[rank.tenant] += 1
        self._weight += rank.weight - self._weights.get(rank.tenant, 0)
        self._weights[rank.tenant] = rank.weight

    def remove(self, waiting: Prioritized) -> bool:
        """Remove a call. Returns False when it is not in the index."""
        if waiting not in self:
            return False
        tenant, priority = waiting.rank.tenant, waiting.rank.priority
        lines = self._lines[tenant]
        del lines[priority][waiting]
        if not lines[priority]:
            del lines[priority]
        self._sizes[tenant] -= 1
        if not self._sizes[tenant]:
            del self._sizes[tenant], self._lines[tenant]
            self._weight -= self._weights.pop(tenant)
        return True

    def of_tenant(self, tenant: str) -> int:
        """Number of waiting calls of one tenant."""
        return self._sizes[tenant]

    def counts(self) -> dict[tuple[str, str], int]:
        """Number of waiting calls by tenant and priority. May be called from another thread, which
        may see the queues at slightly different times."""
        lines = [
            (tenant, priority, line)
            for tenant, found in list(self._lines.items())
            for priority, line in list(found.items())
        ]
        return {(tenant, priority.value): len(line) for tenant, priority, line in lines}

    def victim(self, arriving: QueuePriority, limit: int) -> Prioritized | None:
        """The waiting call to replace by `arriving` when all `limit` places are taken; None:
        `arriving` is rejected."""
        total = self._weight if arriving.tenant in self._weights else self._weight + arriving.weight
        per_weight = limit / max(1, total)
        own_share = max(1.0, arriving.weight * per_weight)
        own = level(arriving.priority, is_over=self._sizes[arriving.tenant] + 1 > own_share)
        best: tuple[int, float] | None = None
        line: OrderedDict[Prioritized, None] | None = None
        for tenant, lines in self._lines.items():
            places = self._sizes[tenant] + (tenant == arriving.tenant)
            excess = places / max(1.0, self._weights[tenant] * per_weight)
            for priority in lines:
                candidate = level(priority, is_over=excess > 1), -excess
                if candidate[0] < own and (best is None or candidate < best):
                    best, line = candidate, lines[priority]
        return next(reversed(line)) if line else None
