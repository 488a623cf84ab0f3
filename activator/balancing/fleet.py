"""The `Fleet` protocol, which starts and stops instances, and its implementation by the local node
agent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from activator.resilience.node_breaker import NodeBreaker
from activator.routing.route_table import CallTarget
from snapshotter.client import AgentClient
from snapshotter.types import (
    AgentEvent,
    InstanceId,
    InstanceInfo,
    RevisionKey,
    SnapshotInfo,
    TemplateInfo,
    TenantShare,
)


class Fleet(Protocol):
    """Starts, stops, lists and watches instances. Errors are `snapshotter.errors`.

    Attributes:
        has_templates: whether `prepare` has an effect.
        can_sleep: whether `sleep` and `wake` are supported.
    """

    has_templates: bool
    can_sleep: bool

    async def start(
        self, target: CallTarget, instance_id: InstanceId, secret_env: Mapping[str, str]
    ) -> InstanceInfo:
        """Start one instance; cancelling abandons the start."""

    async def stop(self, instance_id: InstanceId, *, grace_s: float) -> None:
        """Drain and stop one instance. Idempotent."""

    async def sleep(self, instance_id: InstanceId) -> InstanceInfo:
        """Freeze the processes of an idle instance. Idempotent."""

    async def wake(self, instance_id: InstanceId) -> InstanceInfo:
        """Resume a frozen instance. Idempotent."""

    async def prepare(self, target: CallTarget) -> TemplateInfo:
        """Prepare a template that makes the next start fast, without an instance."""

    async def checkpoint(self, target: CallTarget) -> SnapshotInfo:
        """Ensure that a verified snapshot is on the node. Raises SnapshotRefused, Unsupported, and
        the errors of `prepare`."""

    async def templates(self) -> list[TemplateInfo]:
        """Return all current templates."""

    async def drop_template(self, revision: RevisionKey) -> None:
        """Drop the template of a revision without routes. Idempotent."""

    async def adopt(self) -> list[InstanceInfo]:
        """Return the instances that this activator leased before its restart."""

    def max_instances_of(self, key: str) -> int | None:
        """Return the number of instances that all activators together can have of a revision, where
        an external autoscaler decides it; None = the activators decide."""

    def watch(self) -> AsyncIterator[AgentEvent]:
        """Yield events of instances that were not requested, such as exits."""


def _nobodys(_tenant: str) -> TenantShare | None:
    """Return None: tenants have no separate shares."""
    return None


class NodeFleet:
    """Instances on this machine. `lessee` names this activator to the agent, `share_of` returns the
    share of a tenant id that a start belongs to.

    `guard` suspends starts while the agent is unavailable or fails them.
    """

    has_templates = True
    can_sleep = True

    def __init__(
        self,
        *,
        socket: Path,
        lessee: str,
        share_of: Callable[[str], TenantShare | None] = _nobodys,
        guard: NodeBreaker | None = None,
    ) -> None:
        self._socket = socket
        self._agent = AgentClient(socket)
        self._watcher = AgentClient(socket)
        self._lessee = lessee
        self._share_of = share_of
        self._guard = guard or NodeBreaker()

    def __repr__(self) -> str:
        return f"<NodeFleet {self._socket} lessee {self._lessee}>"

    async def start(
        self, target: CallTarget, instance_id: InstanceId, secret_env: Mapping[str, str]
    ) -> InstanceInfo:
        """Start one instance; cancelling abandons the start. Raises CircuitOpen too."""
        share = self._share_of(target.tenant)
        self._guard.check()
        try:
            info = await self._agent.start(
                target.launch,
                instance_id=instance_id,
                lessee=self._lessee,
                secret_env=secret_env,
                share=share,
            )
        except BaseException as e:
            self._guard.failed(e)
            raise
        self._guard.started()
        return info

    async def stop(self, instance_id: InstanceId, *, grace_s: float) -> None:
        """Drain and stop one instance. Idempotent."""
        await self._agent.stop(instance_id, grace_s=grace_s)

    async def sleep(self, instance_id: InstanceId) -> InstanceInfo:
        """Freeze the processes of an idle instance. Idempotent."""
        return await self._agent.sleep(instance_id)

    async def wake(self, instance_id: InstanceId) -> InstanceInfo:
        """Resume a frozen instance. Idempotent."""
        return await self._agent.wake(instance_id)

    async def prepare(self, target: CallTarget) -> TemplateInfo:
        """Prepare a template that makes the next start fast."""
        return await self._agent.prepare(target.launch, share=self._share_of(target.tenant))

    async def checkpoint(self, target: CallTarget) -> SnapshotInfo:
        """Ensure that a verified snapshot is on the node."""
        return await self._agent.checkpoint(target.launch)

    async def templates(self) -> list[TemplateInfo]:
        """Return all current templates."""
        return await self._agent.templates()

    async def drop_template(self, revision: RevisionKey) -> None:
        """Drop the template of a revision. Idempotent."""
        await self._agent.drop_template(revision)

    async def adopt(self) -> list[InstanceInfo]:
        """Return the instances that this activator leased before its restart."""
        return await self._agent.adopt(lessee=self._lessee)

    def max_instances_of(self, key: str) -> int | None:
        """Return None: the activators decide on the number of instances."""
        return None

    async def leased(self) -> list[InstanceInfo]:
        """Return all live instances of the node, of all lessees."""
        return await self._agent.instances()

    def watch(self) -> AsyncIterator[AgentEvent]:
        """Yield events of instances that were not requested, such as exits."""
        return self._watcher.watch()

    async def usage(self, instance_id: InstanceId) -> Mapping[str, Any]:
        """Return CPU time and memory of one instance."""
        return await self._agent.usage(instance_id)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._agent.aclose()
        await self._watcher.aclose()
