"""A fleet whose node is small: memory is claimed as the agent does it, boots take turns at its
places; workers are FakeWorkers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from activator.routing.route_table import CallTarget
from snapshotter.gpus.grants import GpuGrants
from snapshotter.slots.boot_limiter import NO_SHARE, FairSemaphore
from snapshotter.starts.node_capacity import NodeCapacity
from snapshotter.types import InstanceId, InstanceInfo, StartKind, TenantShare
from tests.fakes.fake_fleet import FakeFleet, info_of
from tests.fakes.fake_nvml import gpus, inventory_of
from tests.fakes.fake_worker import Behaviour, echo


class SmallNode(FakeFleet):
    """See the module.

    Attributes:
        room: the node's memory, and whom it is for.
        asked: tenants of starts that the node was asked for, in order; refused ones too.
        booted: tenants of starts that got a place to boot, in order.
        others_bytes: claimed by somebody else.
    """

    def __init__(
        self,
        directory: Path,
        room: NodeCapacity,
        share_of: Callable[[str], TenantShare | None],
        *,
        places: int = 1000,
        behaviour: Behaviour = echo,
    ) -> None:
        super().__init__(directory, behaviour)
        self.room = room
        self.turns = FairSemaphore(places)
        self.asked: list[str] = []
        self.booted: list[str] = []
        self.others_bytes = 0
        self._share_of = share_of
        self._claims: dict[str, InstanceInfo] = {}

    @property
    def claimed_bytes(self) -> int:
        """By instances, those that start and end included."""
        return sum(info.memory_bytes for info in self._claims.values())

    def add_gpus(self, *models: str) -> None:
        """Give it GPUs of these models."""
        self.room.gpus = GpuGrants(
            inventory_of(*gpus(*models)), lambda: (claim.gpus for claim in self._claims.values())
        )

    async def start(
        self, target: CallTarget, instance_id: InstanceId, secret_env: Mapping[str, str]
    ) -> InstanceInfo:
        """See Fleet."""
        self.asked.append(target.tenant)
        share = self._share_of(target.tenant)
        claim = info_of(target, instance_id, "", StartKind.COLD)
        other = replace(claim, memory_bytes=self.others_bytes, labels={})
        grant = self.room.check(target.launch, [*self._claims.values(), other], share)
        self._claims[instance_id] = replace(claim, gpus=grant)
        try:
            await self.turns.acquire(share or NO_SHARE)
            try:
                self.booted.append(target.tenant)
                info = await super().start(target, instance_id, secret_env)
                return replace(info, gpus=grant)
            finally:
                self.turns.release()
        except BaseException:
            del self._claims[instance_id]
            raise

    async def stop(self, instance_id: InstanceId, *, grace_s: float) -> None:
        """See Fleet."""
        await super().stop(instance_id, grace_s=grace_s)
        self._claims.pop(instance_id, None)
