"""Selects the instances to release for a start that lacks memory: a pure choice (for GPUs:
`gpu_preemption`).

Idle instances of tenants over their share go first, of the tenant furthest over its share and among
those the longest idle. A start that would take its own tenant over its share gets them only from
tenants further over. Next are idle instances of any tenant that had no call for SPARE_S. A tenant
may always use its own idle instances. Instances kept by `min_instances`, and memory that a tenant
has reserved, are never taken. Busy instances go only to a tenant within its share that has waited
for TURN_S, and only from tenants over theirs: they finish their calls and accept no more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pilotlight.spec.identifiers import Priority
from snapshotter.gpus.kinds import satisfies_any
from snapshotter.types import GpuDevice

SPARE_S = 5.0
"""Time without a call after which an instance may be released for any tenant, although its
scaledown_window is not over."""
TURN_S = 2.0
"""How long a start waits for idle instances of other tenants before busy ones are drained: long
compared to a FORK, short for a caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionCandidate:
    """An instance that accepts calls, as a candidate for release.

    Attributes:
        key: its revision's key.
        function: its function's name, `<tenant>/<environment>/<app>/<function>`.
        idle_s: time without a call; None while it has one.
        in_flight: number of running calls.
        is_spare: it is one of those that its revision has beyond `min_instances`, which go
            first.
        devices: the GPUs that the node granted it.
        is_asleep: it is suspended.
        value: what a second without it loses for each byte of its GPUs (`value_per_byte`).
        priority: its function's default priority."""

    id: str
    tenant: str
    key: str
    function: str
    memory_bytes: int
    gpus: int
    idle_s: float | None
    in_flight: int
    is_spare: bool
    devices: tuple[GpuDevice, ...] = ()
    is_asleep: bool = False
    value: float = 0.0
    priority: Priority = Priority.STANDARD

    def gpus_of(self, kinds: Sequence[str]) -> int:
        """How many of its GPUs are of one of these kinds."""
        return sum(satisfies_any(device, kinds) for device in self.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceShortfall:
    """What is missing for a start.

    Attributes:
        tenant: its tenant.
        asked_bytes: memory that it needs.
        lacking_bytes: memory that must become free for that.
        waited_s: how long it has waited.
        may_take_busy: False while busy instances are draining for it."""

    tenant: str
    asked_bytes: int
    lacking_bytes: int
    waited_s: float
    may_take_busy: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantUsage:
    """What tenants use of a resource (bytes of memory, or GPUs), and what they may use.

    Attributes:
        use: by tenant, including starting and ending instances.
        weights: by tenant; default 1.
        floors: what is reserved, by tenant.
        total: what there is to share."""

    use: Mapping[str, int]
    weights: Mapping[str, int]
    floors: Mapping[str, int]
    total: int

    def shares(self, *asking: str) -> dict[str, float]:
        """Fair share of each tenant that uses or requests some."""
        tenants = {tenant for tenant, held in self.use.items() if held} | set(asking)
        weight = sum(self.weights.get(tenant, 1) for tenant in tenants)
        return {tenant: self.total * self.weights.get(tenant, 1) / weight for tenant in tenants}


def victims(
    tenures: Iterable[PreemptionCandidate], need: ResourceShortfall, balance: TenantUsage
) -> list[PreemptionCandidate]:
    """The instances to release for the shortfall; empty when there are not enough."""
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
    """Select the instance of the same tenant to release for one more of revision `key`, when the
    tenant's quota is used up.

    The longest idle one. A busy one only for a revision that has no instance and has waited for
    TURN_S: of the revision that has most."""
    usable = [tenure for tenure in tenures if tenure.is_spare and (tenure.gpus or not needs_gpu)]
    idle = [tenure for tenure in usable if tenure.idle_s is not None]
    if idle:
        return max(idle, key=lambda tenure: tenure.idle_s or 0.0)
    counts = Counter(tenure.key for tenure in usable)
    if counts[key] or waited_s < TURN_S:
        return None
    return max(usable, key=lambda tenure: (counts[tenure.key], -tenure.in_flight), default=None)


def value_per_byte(
    devices: Iterable[GpuDevice], *, calls: int, lived_s: float, start_s: float | None
) -> float:
    """Return what the release of an instance is expected to lose, for each byte of GPU memory that
    it frees: its calls per second, each of which would wait `start_s` for a start. 0 where that is
    not known.

    Source of the measure: GreedyDual-Size-Frequency (Cherkasova, HPL-98-69R1, 1998), which divides
    frequency times cost by size."""
    size_bytes = sum(device.memory_bytes for device in devices)
    if not size_bytes or start_s is None or lived_s <= 0:
        return 0.0
    return calls / lived_s * start_s / size_bytes
