"""Admission of instances by memory and GPUs of this node: current claims by tenant, and
reservations.

Reserved memory that a tenant does not use is unavailable to others. The activators send the
reservations with every start; the agent, which alone knows all claims, applies the latest ones.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from snapshotter.errors import NoCapacity
from snapshotter.gpus.grants import GpuGrants
from snapshotter.types import GpuGrant, InstanceInfo, LaunchSpec, TenantShare

_MIB = 1024**2


@dataclass(kw_only=True)
class NodeCapacity:
    """Capacity of the node. Owner: the event loop.

    Attributes:
        memory_bytes: total memory that instances may claim.
        dedicated_to: name of the only tenant that runs here; None = all tenants without dedicated
            nodes.
        gpus: the node's GPUs and their holders; None = a launch with GPUs is admitted without any.
        reserved: memory (bytes) reserved for tenants, by id, from the latest start.
    """

    memory_bytes: int
    dedicated_to: str | None = None
    gpus: GpuGrants | None = None
    reserved: Mapping[str, int] = field(default_factory=dict)

    def require_tenant_allowed(self, share: TenantShare | None) -> None:
        """Raises NoCapacity if this node does not accept this tenant."""
        if self.dedicated_to is not None and (share is None or share.name != self.dedicated_to):
            caller = (
                repr(share.name) if share is not None and share.name else "a tenant without a name"
            )
            message = (
                f"this node is dedicated to tenant {self.dedicated_to!r}, not to {caller} "
                f"(snapshotter.dedicated_to)"
            )
            raise NoCapacity(message, {"resource": "dedicated"})
        if self.dedicated_to is None and share is not None and share.is_dedicated:
            message = (
                f"tenant {share.name!r} runs on nodes dedicated to it only, and this one is "
                f"shared (snapshotter.dedicated_to)"
            )
            raise NoCapacity(message, {"resource": "dedicated"})

    def free_bytes(self, instances: Iterable[InstanceInfo], share: TenantShare | None) -> int:
        """Memory available to this tenant; negative if others' reservations were made after the
        claims."""
        claimed = reservation_of(instances)
        return self.memory_bytes - claimed.total() - kept_bytes(claimed, share)

    def check(
        self,
        launch: LaunchSpec,
        instances: Collection[InstanceInfo],
        share: TenantShare | None,
        *,
        has: GpuGrant | None = None,
    ) -> GpuGrant | None:
        """The GPUs for the launch, None if it needs none; the caller records them before its next
        await. `has`: GPUs that it takes over, of the worker that becomes its instance.

        Raises NoCapacity when the launch does not fit, Unsupported when it never can because the
        node lacks GPUs."""
        self.require_tenant_allowed(share)
        if share is not None:
            self.reserved = share.reserved
        return self._check(launch, instances, share, has)

    def check_claim(
        self, launch: LaunchSpec, instances: Collection[InstanceInfo], *, tenant: str
    ) -> GpuGrant | None:
        """As `check`, for an instance that already exists on this node: uses the latest start's
        reservations. Raises NoCapacity, Unsupported."""
        return self._check(launch, instances, TenantShare(tenant=tenant, reserved=self.reserved))

    @contextlib.contextmanager
    def reserved_gpus(
        self, launch: LaunchSpec, grant: GpuGrant | None = None
    ) -> Iterator[GpuGrant | None]:
        """As `GpuGrants.reserved`."""
        if self.gpus is None:
            yield grant
            return
        with self.gpus.reserved(launch, grant) as reserved:
            yield reserved

    def _check(
        self,
        launch: LaunchSpec,
        instances: Collection[InstanceInfo],
        share: TenantShare | None,
        has: GpuGrant | None = None,
    ) -> GpuGrant | None:
        grant = has
        if grant is None and self.gpus is not None:
            grant = self.gpus.allocate(launch)
        free = self.free_bytes(instances, share)
        if launch.memory_bytes > free:
            free = max(0, free)
            claimed = sum(info.memory_bytes for info in instances)
            detail = {
                "resource": "memory",
                "asked": launch.memory_bytes,
                "free": free,
                "claimed": claimed,
                "total": self.memory_bytes,
            }
            shortfall = (
                f"{launch.memory_bytes // _MIB} MiB wanted, {free // _MIB} MiB of "
                f"{self.memory_bytes // _MIB} MiB free"
            )
            raise NoCapacity(f"{shortfall} on this node", detail)
        return grant


def reservation_of(instances: Iterable[InstanceInfo]) -> Counter[str]:
    """Claimed bytes by tenant."""
    claimed: Counter[str] = Counter()
    for info in instances:
        claimed[info.labels.get("tenant", "")] += info.memory_bytes
    return claimed


def kept_bytes(claimed: Mapping[str, int], share: TenantShare | None) -> int:
    """Unused reservations of other tenants than this one."""
    if share is None:
        return 0
    return sum(
        max(0, floor - claimed.get(tenant, 0))
        for tenant, floor in share.reserved.items()
        if tenant != share.tenant
    )
