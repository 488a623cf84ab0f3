"""Whose instances make room for a start: a pure choice.

Idle ones of tenants over their share go first, the furthest over before others, and among those the
ones idle longest; a tenant that the start would take beyond its own share gets them only from
tenants further beyond. Then idle ones of anybody, once nobody has called them for SPARE_S. A
tenant's own idle ones are always open to it. What `min_instances` keeps, and what a tenant has
reserved, is never taken from it. Busy instances go only to a tenant within its share that has
waited for TURN_S, and only from tenants over theirs: they finish their calls and take no more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SPARE_S = 5.0
"""Time without a call after which an instance may go to anybody, though its scaledown_window is not
over."""
TURN_S = 2.0
"""How long a start waits for others' idle instances before busy ones have to finish: long against a
FORK, short against patience."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionCandidate:
    """An instance that takes calls, as far as giving it up goes.

    Attributes:
        key: its revision's.
        function: its function's name, `<tenant>/<environment>/<app>/<function>`.
        idle_s: time without a call; None while it has one.
        in_flight: calls in it.
        is_spare: one of those that its revision has beyond `min_instances`: the first to go.
    """

    id: str
    tenant: str
    key: str
    function: str
    memory_bytes: int
    gpus: int
    idle_s: float | None
    in_flight: int
    is_spare: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceShortfall:
    """What a start lacks.

    Attributes:
        tenant: whose it is.
        asked_bytes: what it will take.
        lacking_bytes: what has to become free for that.
        waited_s: for how long it has been held up.
        may_take_busy: False while busy instances are on their way out for it.
    """

    tenant: str
    asked_bytes: int
    lacking_bytes: int
    waited_s: float
    may_take_busy: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantUsage:
    """Who holds how much, and may.

    Attributes:
        use: bytes by tenant, what is starting and ending included.
        weights: by tenant; 1 where it says nothing.
        floors: bytes that are reserved, by tenant.
        total_bytes: what there is to share.
    """

    use: Mapping[str, int]
    weights: Mapping[str, int]
    floors: Mapping[str, int]
    total_bytes: int

    def shares(self, *asking: str) -> dict[str, float]:
        """Bytes that each tenant who holds or asks for some may hold."""
        tenants = {tenant for tenant, held in self.use.items() if held} | set(asking)
        weight = sum(self.weights.get(tenant, 1) for tenant in tenants)
        return {
            tenant: self.total_bytes * self.weights.get(tenant, 1) / weight for tenant in tenants
        }


def victims(
    tenures: Iterable[PreemptionCandidate], need: ResourceShortfall, balance: TenantUsage
) -> list[PreemptionCandidate]:
    """The instances to give up, enough for the need; none where there are not enough."""
    shares = balance.shares(need.tenant)
    use = Counter(balance.use)
    own_excess = (use[need.tenant] + need.asked_bytes) / shares[need.tenant]
    spare = [tenure for tenure in tenures if tenure.is_spare]
    chosen: list[PreemptionCandidate] = []
    lacking = need.lacking_bytes

    def excess(tenant: str) -> float:
        return use[tenant] / shares[tenant] if tenant in shares else 0.0

    def is_protected(tenure: PreemptionCandidate) -> bool:
        return tenure.tenant != need.tenant and use[
            tenure.tenant
        ] - tenure.memory_bytes < balance.floors.get(tenure.tenant, 0)

    def may_take(tenure: PreemptionCandidate) -> bool:
        if is_protected(tenure):
            return False
        if tenure.idle_s is None:
            return excess(tenure.tenant) > 1 and tenure.tenant != need.tenant
        if tenure.tenant == need.tenant or tenure.idle_s >= SPARE_S:
            return True
        return excess(tenure.tenant) > max(1.0, own_excess)

    def take_from(left: list[PreemptionCandidate]) -> None:
        nonlocal lacking
        while lacking > 0 and (open_to := [tenure for tenure in left if may_take(tenure)]):
            best = max(
                open_to, key=lambda t: (max(1.0, excess(t.tenant)), t.idle_s or 0.0, -t.in_flight)
            )
            left.remove(best)
            chosen.append(best)
            use[best.tenant] -= best.memory_bytes
            lacking -= best.memory_bytes

    take_from([tenure for tenure in spare if tenure.idle_s is not None])
    if need.may_take_busy and need.waited_s >= TURN_S and own_excess <= 1:
        take_from([tenure for tenure in spare if tenure.idle_s is None])
    return chosen if lacking <= 0 else []


def pick_within_quota(
    tenures: Iterable[PreemptionCandidate], key: str, *, waited_s: float, needs_gpu: bool
) -> PreemptionCandidate | None:
    """Within one tenant, whose quota is used up: the instance that makes room for one more of
    revision `key`.

    The one idle longest; a busy one only for a revision that has none and has waited for TURN_S: of
    the revision that has most."""
    usable = [tenure for tenure in tenures if tenure.is_spare and (tenure.gpus or not needs_gpu)]
    idle = [tenure for tenure in usable if tenure.idle_s is not None]
    if idle:
        return max(idle, key=lambda tenure: tenure.idle_s or 0.0)
    counts = Counter(tenure.key for tenure in usable)
    if counts[key] or waited_s < TURN_S:
        return None
    return max(usable, key=lambda tenure: (counts[tenure.key], -tenure.in_flight), default=None)


def spare_gpus(
    tenures: Iterable[PreemptionCandidate], *, tenant: str, lacking: int
) -> list[PreemptionCandidate]:
    """Idle instances to give up for `lacking` GPUs: the tenant's own, and those that nobody has
    called for SPARE_S; longest idle first.

    What `min_instances` keeps is never taken. All that there is, should it not be enough: the rest
    may come free elsewhere."""
    idle = [
        one
        for one in tenures
        if one.gpus
        and one.is_spare
        and one.idle_s is not None
        and (one.tenant == tenant or one.idle_s >= SPARE_S)
    ]
    chosen: list[PreemptionCandidate] = []
    for one in sorted(idle, key=lambda one: -(one.idle_s or 0.0)):
        if lacking <= 0:
            break
        chosen.append(one)
        lacking -= one.gpus
    return chosen
