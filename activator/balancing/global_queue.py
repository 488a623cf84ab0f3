"""The limits of waiting calls, for the process, for each function, and by every `queued` quota that
applies to them, and which call is shed when one is reached.

Places are shared by weight: a tenant's share of `limit` places is its weight over the weights of
all waiting tenants, at least one place. Order of shedding: batch calls (of tenants over their share
before others), then standard calls of tenants over their share, then their realtime ones, then
standard calls, realtime ones last. An arriving call replaces the newest call of the first class in
this order, if that class comes strictly before its own; otherwise it is rejected. So a tenant never
sheds its own calls for equal ones, and a tenant within its share never loses a place to one over
its share."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Protocol, cast

from activator.fairness.queue_priority import QueueBound, QueuePriority
from pilotlight import errors
from pilotlight.spec.identifiers import Priority

MAX_QUEUED = "max_queued"
"""`QueueBound.of` for the limit in a function's own scaling settings."""
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


class QueuedItem(Prioritized, Protocol):
    """A waiting call."""

    @property
    def bounds(self) -> Sequence[QueueBound]:
        """The queue limits that apply to it besides the process's."""

    @property
    def patience_s(self) -> float:
        """Seconds after which a retry makes sense."""

    def shed(self, error: errors.TooManyRequests) -> None:
        """Remove it for a call of higher rank, and answer it with `error`."""


class GlobalQueue:
    """All waiting calls of this process, with its limit and those of `queued` quotas.

    Where a limit is reached, another call is dropped, or the new one refused. Owner: the event
    loop.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._all = SheddingIndex()
        self._bounded: dict[tuple[str, str], SheddingIndex] = {}

    def __repr__(self) -> str:
        return f"<GlobalQueue {self.waiting}/{self.limit} waiting>"

    @property
    def waiting(self) -> int:
        """Number of waiting calls."""
        return len(self._all)

    def counts(self) -> dict[tuple[str, str], int]:
        """Return waiting calls by (tenant, priority), for metrics. Thread-safe."""
        return self._all.counts()

    def enter(self, call: QueuedItem) -> None:
        """Add a waiting call, dropping another where a limit is reached. Raises OverQuota,
        TooManyRequests or Shed when no other call can be dropped."""
        victims = [self._victim(call, bound) for bound in call.bounds if self._is_full(bound)]
        if self.waiting >= self.limit:
            victims.append(self._victim_of_all(call))
        for victim in victims:
            self._shed(victim)
        self._all.add(call)
        for bound in call.bounds:
            self._bounded.setdefault(bound[:2], SheddingIndex()).add(call)

    def leave(self, call: QueuedItem) -> None:
        """Remove a call. Idempotent."""
        if self._all.remove(call):
            for bound in call.bounds:
                crowd = self._bounded[bound[:2]]
                crowd.remove(call)
                if not len(crowd):
                    del self._bounded[bound[:2]]

    def _is_full(self, bound: QueueBound) -> bool:
        crowd = self._bounded.get(bound[:2])
        return (len(crowd) if crowd is not None else 0) >= bound.limit

    def _victim(self, call: QueuedItem, bound: QueueBound) -> QueuedItem:
        crowd = self._bounded.get(bound[:2])
        victim = crowd.victim(call.rank, bound.limit) if crowd is not None else None
        if victim is None:
            raise _over(bound, call)
        return cast(QueuedItem, victim)

    def _victim_of_all(self, call: QueuedItem) -> QueuedItem:
        victim = self._all.victim(call.rank, self.limit)
        if victim is None:
            message = (
                f"this activator already has {self.waiting} waiting calls, its limit "
                f"(activator.max_queued)"
            )
            raise errors.Shed(
                message,
                retry_after_s=call.patience_s,
                priority=str(call.rank.priority),
                tenant=call.rank.tenant,
            )
        return cast(QueuedItem, victim)

    def _shed(self, victim: QueuedItem) -> None:
        """Drop a waiting call. A call chosen for two limits is dropped once."""
        if victim in self._all:
            self.leave(victim)
            message = (
                f"a waiting call of priority {victim.rank.priority} was dropped for one of higher "
                f"rank: retry later"
            )
            victim.shed(
                errors.Shed(
                    message,
                    retry_after_s=victim.patience_s,
                    priority=str(victim.rank.priority),
                    tenant=victim.rank.tenant,
                )
            )


def _over(bound: QueueBound, call: QueuedItem) -> errors.TooManyRequests:
    if bound.of == MAX_QUEUED:
        return errors.TooManyRequests(
            f"this function already has {bound.limit} calls waiting, its limit (max_queued)",
            retry_after_s=call.patience_s,
        )
    return errors.OverQuota(
        f"the {bound.of} already has {bound.limit} calls waiting, its quota (queued)",
        retry_after_s=call.patience_s,
        quota="queued",
        of=bound.of,
        limit=bound.limit,
    )
