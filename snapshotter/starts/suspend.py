"""Suspends instances: all their processes are stopped, so that they use no CPU; their memory
remains resident.

SIGSTOP and SIGCONT (signal(7)) work with both cgroup versions and without cgroups. A process that
forks during the walk of its tree would leave a running child, so the walk is repeated until it
finds no new process. Processes that left the tree because their parent exited are found in the
instance's cgroup, if there is one: CPU time of a suspended instance is not billed. A suspended
process cannot shut down gracefully: a stop resumes it first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from snapshotter.errors import InstanceUnknown
from snapshotter.linux import proc
from snapshotter.slots.instances import Instance, Instances
from snapshotter.types import InstanceId, InstanceInfo, InstanceState, StartKind


class InstanceSuspender:
    """Suspends and resumes instances. Owner: the event loop; no awaits, so that no partially
    suspended instance is visible."""

    def __init__(self, instances: Instances) -> None:
        self._instances = instances

    def __repr__(self) -> str:
        return (
            f"<InstanceSuspender "
            f"{sum(i.info.state is InstanceState.ASLEEP for i in self._instances)} asleep>"
        )

    def sleep(self, instance_id: InstanceId) -> InstanceInfo:
        """Suspend a ready instance; no effect if it is suspended. Raises InstanceUnknown if it is
        neither."""
        instance = self._known(instance_id)
        if instance.info.state is InstanceState.READY:
            instance.transition_to(InstanceState.ASLEEP)
            self._note(instance)
            proc.stop_tree(instance.info.pid, _beside(instance))
        return instance.info

    def wake(self, instance_id: InstanceId) -> InstanceInfo:
        """Resume a suspended instance, with start kind WAKE; no effect if it is ready. Raises
        InstanceUnknown."""
        instance = self._known(instance_id)
        if instance.info.state is InstanceState.ASLEEP:
            began = time.perf_counter()
            proc.continue_tree(instance.info.pid, _beside(instance))
            phases = {"wake": round((time.perf_counter() - began) * 1000, 3)}
            instance.transition_to(
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
        """Store the state for a restarted agent."""
        if instance.occupied is not None:
            instance.occupied.slot.store_note(instance.info.id, instance.to_note())


def _beside(instance: Instance) -> Callable[[], Collection[int]]:
    return instance.group.members if instance.group is not None else proc.no_processes
