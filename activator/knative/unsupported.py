"""What a fleet of pods cannot do, and says so: sleep, keep templates, make snapshots by itself."""

from __future__ import annotations

from activator.routing.route_table import CallTarget
from snapshotter import errors
from snapshotter.types import InstanceId, InstanceInfo, RevisionKey, SnapshotInfo, TemplateInfo


class PodFleetLimits:
    """The part of `activator.balancing.fleet.Fleet` that only a node's own agent has."""

    has_templates = False
    can_sleep = False

    async def leased(self) -> list[InstanceInfo]:
        """Nobody ends the instances of an activator that is gone: its pods are free, and found by
        whoever needs one."""
        return []

    async def sleep(self, instance_id: InstanceId) -> InstanceInfo:
        """Raises Unsupported."""
        raise errors.Unsupported("pods do not sleep: the autoscaler ends those that nobody needs")

    async def wake(self, instance_id: InstanceId) -> InstanceInfo:
        """Raises Unsupported."""
        raise errors.Unsupported("pods do not sleep, so none can be woken")

    async def prepare(self, target: CallTarget) -> TemplateInfo:
        """Raises Unsupported."""
        raise errors.Unsupported(
            "a cluster keeps no templates: on each node its own agent decides how a pod starts"
        )

    async def checkpoint(self, target: CallTarget) -> SnapshotInfo:
        """Raises Unsupported."""
        raise errors.Unsupported(
            "snapshots are made by the agents of the nodes, for pods that start there"
        )

    async def templates(self) -> list[TemplateInfo]:
        """There are none."""
        return []

    async def drop_template(self, revision: RevisionKey) -> None:
        """There is none to drop."""
