"""The operations that a fleet of pods does not support: sleep, templates, and its own snapshots."""

from __future__ import annotations

from activator.routing.route_table import CallTarget
from snapshotter import errors
from snapshotter.types import InstanceId, InstanceInfo, RevisionKey, SnapshotInfo, TemplateInfo


class PodFleetLimits:
    """The part of `activator.balancing.fleet.Fleet` that only a node agent supports."""

    has_templates = False
    can_sleep = False

    async def leased(self) -> list[InstanceInfo]:
        """Return nothing: the pods of a removed activator become free, and other activators claim
        them."""
        return []

    async def sleep(self, instance_id: InstanceId) -> InstanceInfo:
        """Raises Unsupported."""
        raise errors.Unsupported(
            "pods do not sleep: the autoscaler removes those that are not needed"
        )

    async def wake(self, instance_id: InstanceId) -> InstanceInfo:
        """Raises Unsupported."""
        raise errors.Unsupported("pods do not sleep, so none can be resumed")

    async def prepare(self, target: CallTarget) -> TemplateInfo:
        """Raises Unsupported."""
        raise errors.Unsupported(
            "a cluster has no templates: the agent of each node decides how a pod starts"
        )

    async def checkpoint(self, target: CallTarget) -> SnapshotInfo:
        """Raises Unsupported."""
        raise errors.Unsupported(
            "snapshots are made by the agents of the nodes, for pods that start there"
        )

    async def templates(self) -> list[TemplateInfo]:
        """Return nothing."""
        return []

    async def drop_template(self, revision: RevisionKey) -> None:
        """Do nothing."""
