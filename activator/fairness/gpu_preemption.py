"""Selects the instances to release for a start that lacks GPUs: a pure choice.

Idle instances go first, in this order:
1. of tenants over their share of the GPUs, of the tenant furthest over, and for a start that would
   take its own tenant over its share only of tenants further over;
2. of functions with a lower priority than the start;
3. of the start's own tenant, and those without a call for SPARE_S.
Within each, sleeping instances go first, then those that are worth the least per byte of GPU
memory, and among equals the longest idle.

Busy instances are drained for a start only if its tenant stays within its share, it has waited for
TURN_S, and they are of another tenant that is over its share, or of a function with a lower
priority.

Instances kept by `min_instances` are never taken, nor are other tenants' instances below their
floor: all of a tenant with a reservation.

Only the end of an instance frees its GPUs. A sleeping engine keeps them, at each level. Sleep
level 2 instead of 1 would free the weights' copy in the node's memory, but an instance is counted
with its memory limit, asleep or not, so no start would fit in after that: it is not a step here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from activator.fairness.preemption import SPARE_S, TURN_S, PreemptionCandidate, TenantUsage
from pilotlight.spec.identifiers import Priority


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuShortfall:
    """The GPUs of one kind that are missing for a start.

    Attributes:
        tenant: its tenant.
        kind: the kind, one of those that it accepts.
        asked: number of GPUs that it needs.
        lacking: number that must become free for that.
        priority: the start's priority.
        waited_s: how long it has waited.
        may_take_busy: False while busy instances are draining for GPUs that it accepts."""

    tenant: str
    kind: str
    asked: int
    lacking: int
    priority: Priority = Priority.STANDARD
    waited_s: float = 0.0
    may_take_busy: bool = True


def gpu_victims(
    tenures: Iterable[PreemptionCandidate], need: GpuShortfall, balance: TenantUsage
) -> list[PreemptionCandidate]:
    """The instances to release for the shortfall.

    `balance`: in GPUs of the kinds that the start accepts. Shares are rounded up, because GPUs are
    whole. Busy instances are chosen only if they and the idle ones are enough. Idle ones are
    returned even if they are not: the rest may become free elsewhere."""
    choice = _Choice(need, balance)
    usable = [one for one in tenures if one.is_spare and one.gpus_of([need.kind])]
    idle = choice.take([one for one in usable if one.idle_s is not None], choice.rank_of_idle)
    if choice.lacking <= 0 or not choice.may_take_busy:
        return idle
    busy = choice.take([one for one in usable if one.idle_s is None], choice.rank_of_busy)
    return idle + busy if choice.lacking <= 0 else idle


_Rank = tuple[float, ...]


class _Choice:
    """One choice in progress: the usage that is left after what it has taken.

    Attributes:
        lacking: GPUs that are still missing.
        may_take_busy: whether the start may have busy instances drained."""

    def __init__(self, need: GpuShortfall, balance: TenantUsage) -> None:
        self._need = need
        self._floors = balance.floors
        self._shares = {
            tenant: max(1, math.ceil(share))
            for tenant, share in balance.shares(need.tenant).items()
        }
        self._use = Counter(balance.use)
        self._own_excess = (self._use[need.tenant] + need.asked) / self._shares[need.tenant]
        self.lacking = need.lacking
        self.may_take_busy = (
            need.may_take_busy and need.waited_s >= TURN_S and self._own_excess <= 1
        )

    def take(
        self,
        left: list[PreemptionCandidate],
        rank: Callable[[PreemptionCandidate], _Rank | None],
    ) -> list[PreemptionCandidate]:
        """Take the instances of the lowest ranks until nothing is missing. Ranks change with each
        one taken, because its tenant uses less; None: it may not be taken."""
        out: list[PreemptionCandidate] = []
        while self.lacking > 0:
            ranks = {
                n: place
                for n, one in enumerate(left)
                if not self._is_protected(one) and (place := rank(one)) is not None
            }
            if not ranks:
                break
            best = left.pop(min(ranks, key=ranks.__getitem__))
            self._use[best.tenant] -= self._size(best)
            self.lacking -= self._size(best)
            out.append(best)
        return out

    def rank_of_idle(self, one: PreemptionCandidate) -> _Rank | None:
        """An idle instance's place in the order."""
        idle_s, over = one.idle_s or 0.0, self._excess(one)
        worth = (float(not one.is_asleep), one.value, -idle_s)
        if over > max(1.0, self._own_excess):
            return 0, -over, *worth
        if self._is_lower(one):
            return 1, 0, *worth
        if one.tenant == self._need.tenant or idle_s >= SPARE_S:
            return 2, 0, *worth
        return None

    def rank_of_busy(self, one: PreemptionCandidate) -> _Rank | None:
        """A busy instance's place in the order."""
        over = self._excess(one)
        if over > 1:
            return 0, -over, one.in_flight, one.value
        return (1, 0, one.in_flight, one.value) if self._is_lower(one) else None

    def _excess(self, one: PreemptionCandidate) -> float:
        """What its tenant uses of its share. The start's own tenant is not over its share if the
        start may take busy instances, and otherwise not further over than the start would be."""
        return self._use[one.tenant] / self._shares.get(one.tenant, math.inf)

    def _is_lower(self, one: PreemptionCandidate) -> bool:
        return one.priority.rank > self._need.priority.rank

    def _is_protected(self, one: PreemptionCandidate) -> bool:
        left = self._use[one.tenant] - self._size(one)
        return one.tenant != self._need.tenant and left < self._floors.get(one.tenant, 0)

    def _size(self, one: PreemptionCandidate) -> int:
        return one.gpus_of([self._need.kind])
