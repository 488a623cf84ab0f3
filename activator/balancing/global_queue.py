"""The limits of waiting calls: for the process, for each function, and by every `queued` quota that
applies to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

from activator.fairness.load_shedding import Prioritized, SheddingIndex
from activator.fairness.queue_priority import QueueBound
from pilotlight import errors


class QueuedItem(Prioritized, Protocol):
    """A waiting call."""

    @property
    def bounds(self) -> Sequence[QueueBound]:
        """The queue limits that apply to it besides the process's."""
        ...

    @property
    def patience_s(self) -> float:
        """Seconds after which a retry makes sense."""
        ...

    def shed(self, error: errors.TooManyRequests) -> None:
        """Remove it for a call of higher rank, and answer it with `error`."""
        ...


class GlobalQueue:
    """All waiting calls of this process, with its limit and those of `queued` quotas.

    Where a limit is reached, `load_shedding` chooses the call to drop. Owner: the event loop.
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


MAX_QUEUED = "max_queued"
"""`QueueBound.of` for the limit in a function's own scaling settings."""


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
