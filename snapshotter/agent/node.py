"""The components of one node, and what its slots and instances use of GPUs and volumes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pilotlight.core.background_tasks import BackgroundTasks
from snapshotter.agent.agent import Agent
from snapshotter.checkpointing.api import SnapshotApi
from snapshotter.checkpointing.uploads import SnapshotUploads
from snapshotter.events import Events
from snapshotter.gpus.grants import GpuGrants
from snapshotter.gpus.view import GpuHolder, GpuView
from snapshotter.linux.cgroups import Cgroups
from snapshotter.metrics import Metrics
from snapshotter.slots.allocator import SlotAllocator
from snapshotter.slots.instances import Instances
from snapshotter.slots.logs import Logs
from snapshotter.slots.pool import SlotPool
from snapshotter.snapshots.background_builder import BackgroundBuilder
from snapshotter.starts.prefork_pool import PreforkPool
from snapshotter.starts.starter import InstanceStarter
from snapshotter.starts.teardown import Teardown
from snapshotter.starts.template_boot import TemplateBooter
from snapshotter.starts.templates import Templates
from snapshotter.types import GpuGrant, InstanceState
from snapshotter.volumes.node_volumes import NodeVolumes, VolumeKey, volume_keys

_LIVE = (InstanceState.READY, InstanceState.ASLEEP, InstanceState.DRAINING)


@dataclass(frozen=True, kw_only=True)
class NodeBase:
    """Components that the others depend on."""

    cgroups: Cgroups
    logs: Logs
    slot_pool: SlotPool
    instances: Instances
    templates: Templates
    events: Events
    metrics: Metrics
    background_tasks: BackgroundTasks
    slot_allocator: SlotAllocator
    prefork_pool: PreforkPool
    ends: Teardown
    gpus: GpuGrants


@dataclass(frozen=True, kw_only=True)
class Node(NodeBase):
    """The components that are opened, called and closed by name."""

    template_booter: TemplateBooter
    starter: InstanceStarter
    builder: BackgroundBuilder
    snapshots: SnapshotApi
    uploads: SnapshotUploads
    gpu_view: GpuView
    agent: Agent
    volumes: NodeVolumes | None

    def end_users_of_volume(self, key: VolumeKey) -> int:
        """End all processes that have a volume mounted; returns the number of slots and
        instances."""
        groups = [
            instance.group
            for instance in self.instances
            if instance.group is not None
            and instance.occupied is not None
            and key in volume_keys(instance.occupied.launch)
        ]
        groups += [
            occupied.group
            for occupied in self.slot_allocator.occupied_slots.values()
            if key in volume_keys(occupied.launch)
        ]
        for group in groups:
            group.kill()
        return len(groups)

    def refresh_metrics(self) -> None:
        """Set the gauges to the current state."""
        self.metrics.observe(
            by_state=self.instances.by_state(),
            templates=len(list(self.templates)),
            template_pss_bytes=self.templates.pss_bytes(),
            parked=self.templates.parked(),
        )
        self.metrics.gpus.observe(self.gpus.count_by_kind(), self.gpus.fragmentation())
        self.metrics.gpus.observe_use(self.gpu_view.now())
        self.snapshots.observe()


def gpu_grants(instances: Instances, slot_allocator: SlotAllocator) -> Iterator[GpuGrant | None]:
    """GPUs of instances and of slots; None for those without."""
    yield from (instance.info.gpus for instance in instances)
    yield from (occupied.gpus for occupied in slot_allocator.occupied_slots.values())


def volumes_in_slots(slot_allocator: SlotAllocator) -> set[VolumeKey]:
    """Volumes of slots, except those that boot and have mounted none yet."""
    return {
        key
        for occupied in slot_allocator.occupied_slots.values()
        if occupied.volumes or not occupied.is_booting
        for key in volume_keys(occupied.launch)
    }


def volumes_in_instances(instances: Instances) -> set[VolumeKey]:
    """Volumes of instances that serve or may serve again."""
    return {
        key
        for instance in instances
        if instance.occupied is not None and instance.info.state in _LIVE
        for key in volume_keys(instance.occupied.launch)
    }


def gpu_holders(instances: Instances) -> Iterator[GpuHolder]:
    """Instances that have GPUs."""
    for instance in instances:
        if instance.info.gpus is not None:
            launch = instance.occupied.launch if instance.occupied is not None else None
            yield GpuHolder(
                instance=instance.info.id,
                labels=instance.info.labels,
                state=instance.info.state,
                grant=instance.info.gpus,
                manifests=tuple(w.manifest for w in launch.weights) if launch is not None else (),
            )
