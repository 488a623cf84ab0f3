"""Instances that sleep: every process of theirs stands still, so that they cost no processor; their
memory stays where it is.

SIGSTOP and SIGCONT (signal(7)) work with either kind of cgroup and without any. A process that
forks while its tree is walked would leave a child running, so the tree is walked until a round
finds nobody new. Who left the tree, because its parent ended, is found in the instance's cgroup
where there are any: work that goes on while an instance sleeps would be nobody's to pay. Whoever is
asleep cannot end in good order: ending wakes it first."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from snapshotter.errors import InstanceUnknown
from snapshotter.linux import proc
from snapshotter.slots.instances import Instance, Instances
from snapshotter.types import InstanceId, InstanceInfo, InstanceState, StartKind


class InstanceSuspender:
    """Puts instances to sleep and wakes them. Owner: the event loop; no awaits, so nobody sees one
    half asleep."""

    def __init__(self, instances: Instances) -> None:
        self._instances = instances

    def __repr__(self) -> str:
        return (
            f"<InstanceSuspender "
            f"{sum(i.info.state is InstanceState.ASLEEP for i in self._instances)} asleep>"
        )

    def sleep(self, instance_id: InstanceId) -> InstanceInfo:
        """Have it stand still. One that sleeps already is left alone. Raises InstanceUnknown for
        one that is not ready."""
        instance = self._known(instance_id)
        if instance.info.state is InstanceState.READY:
            instance.become(InstanceState.ASLEEP)
            self._note(instance)
            proc.stop_tree(instance.info.pid, _beside(instance))
        return instance.info

    def wake(self, instance_id: InstanceId) -> InstanceInfo:
        """Let it go on: it is ready, by WAKE. One that is ready already is left alone. Raises
        InstanceUnknown."""
        instance = self._known(instance_id)
        if instance.info.state is InstanceState.ASLEEP:
            began = time.perf_counter()
            proc.continue_tree(instance.info.pid, _beside(instance))
            phases = {"wake": round((time.perf_counter() - began) * 1000, 3)}
            instance.become(
                InstanceState.READY,
                start_kind=StartKind.WAKE,
                phases_ms=phases,
                cpu_from_ns=instance.cpu_ns(),
            )
            self._note(instance)
        return instance.info

    def _known(self, instance_id: InstanceId) -> Instance:
        instance = self._instances.get(instance_id)
        if instance is None or instance.info.state not in (
            InstanceState.READY,
            InstanceState.ASLEEP,
        ):
            raise InstanceUnknown(f"no instance {instance_id} that is ready or asleep on this node")
        return instance

    @staticmethod
    def _note(instance: Instance) -> None:
        """A restarted agent finds it as it is."""
        if instance.occupied is not None:
            instance.occupied.slot.note(instance.info.id, instance.note())


def _beside(instance: Instance) -> Callable[[], Collection[int]]:
    return instance.group.members if instance.group is not None else proc.no_processes
