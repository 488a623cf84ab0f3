"""Whether one more instance may claim memory and GPUs of this node: by what is claimed now, by
whom, and what is kept free for whom.

What a tenant has reserved and does not use is nobody else's. The activators send the reservations
with every start, so the agent, which alone knows all claims, decides by the newest that it was
told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from snapshotter.errors import NoCapacity, Unsupported
from snapshotter.types import InstanceInfo, LaunchSpec, Share

_MIB = 1024**2


@dataclass(kw_only=True)
class NodeCapacity:
    """The node's own terms. Owner: the event loop.

    Attributes:
        memory_bytes: what instances may claim together. dedicated_to: the one tenant, by name, that
        runs here; None = all that have no nodes of their own. gpus: names of the node's GPUs, as
        its driver says them; None = nobody counts them. reserved: memory (bytes) that is kept free
        for tenants, by id, as the last start said it.
    """

    memory_bytes: int
    dedicated_to: str | None = None
    gpus: tuple[str, ...] | None = None
    reserved: Mapping[str, int] = field(default_factory=dict)

    def welcome(self, share: Share | None) -> None:
        """Raises NoCapacity where this node is not for this tenant."""
        if self.dedicated_to is not None and (share is None or share.name != self.dedicated_to):
            who = (
                repr(share.name) if share is not None and share.name else "a tenant without a name"
            )
            message = (
                f"this node is dedicated to tenant {self.dedicated_to!r}, not to {who} "
                f"(snapshotter.dedicated_to)"
            )
            raise NoCapacity(message, {"resource": "dedicated"})
        if self.dedicated_to is None and share is not None and share.is_dedicated:
            message = (
                f"tenant {share.name!r} runs on nodes dedicated to it only, and this one is "
                f"shared (snapshotter.dedicated_to)"
            )
            raise NoCapacity(message, {"resource": "dedicated"})

    def free_bytes(self, instances: Iterable[InstanceInfo], share: Share | None) -> int:
        """What is left for this tenant; below 0 when others' reservations came after the claims."""
        claimed = reservation_of(instances)
        return self.memory_bytes - claimed.total() - kept_bytes(claimed, share)

    def check(
        self, launch: LaunchSpec, instances: Collection[InstanceInfo], share: Share | None
    ) -> None:
        """Raises NoCapacity when the launch does not fit, Unsupported when it never could for want
        of GPUs."""
        self.welcome(share)
        if share is not None:
            self.reserved = share.reserved
        self._check(launch, instances, share)

    def check_claim(
        self, launch: LaunchSpec, instances: Collection[InstanceInfo], *, tenant: str
    ) -> None:
        """As `check`, for what is here already and was made on this node: the last start's
        reservations count. Raises NoCapacity, Unsupported."""
        self._check(launch, instances, Share(tenant=tenant, reserved=self.reserved))

    def _check(
        self, launch: LaunchSpec, instances: Collection[InstanceInfo], share: Share | None
    ) -> None:
        self._check_gpus(launch, instances)
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
            wanted = (
                f"{launch.memory_bytes // _MIB} MiB wanted, {free // _MIB} MiB of "
                f"{self.memory_bytes // _MIB} MiB free"
            )
            raise NoCapacity(f"{wanted} on this node", detail)

    def _check_gpus(self, launch: LaunchSpec, instances: Collection[InstanceInfo]) -> None:
        """All that it asks for, or none."""
        asked = gpus_of(launch)
        if not asked or self.gpus is None:
            return
        fitting = sum(is_gpu(launch.gpu or "", name) for name in self.gpus)
        if fitting < asked:
            there = ", ".join(self.gpus) or "none"
            wanted = f"{asked} {launch.gpu} GPU{'s' if asked > 1 else ''}"
            raise Unsupported(
                f"{wanted} wanted, and this node has {there}",
                {"resource": "gpu", "asked": asked, "total": fitting},
            )
        claimed = sum(info.gpu_count for info in instances)
        if (free := len(self.gpus) - claimed) < asked:
            detail = {
                "resource": "gpu",
                "asked": asked,
                "free": free,
                "claimed": claimed,
                "total": len(self.gpus),
            }
            raise NoCapacity(
                f"{asked} GPUs wanted, {free} of {len(self.gpus)} free on this node", detail
            )


def gpus_of(launch: LaunchSpec) -> int:
    """How many GPUs an instance of it takes."""
    return (launch.gpu_count or 1) if launch.gpu else 0


def is_gpu(kind: str, name: str) -> bool:
    """Whether a GPU that its driver calls `NVIDIA H100 80GB HBM3` is what somebody means by `H100`,
    `A100-80GB` or `any`."""
    words = [word for word in kind.upper().replace("-", " ").split() if word]
    return kind.upper() == "ANY" or all(word in name.upper() for word in words)


def reservation_of(instances: Iterable[InstanceInfo]) -> Counter[str]:
    """Bytes by tenant."""
    claimed: Counter[str] = Counter()
    for info in instances:
        claimed[info.labels.get("tenant", "")] += info.memory_bytes
    return claimed


def kept_bytes(claimed: Mapping[str, int], share: Share | None) -> int:
    """What is kept free for other tenants than this one."""
    if share is None:
        return 0
    return sum(
        max(0, floor - claimed.get(tenant, 0))
        for tenant, floor in share.reserved.items()
        if tenant != share.tenant
    )
