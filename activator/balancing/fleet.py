"""Where instances come from: the `Fleet` protocol, and the local one behind the node agent."""

from __future__ import annotations

import os
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
    Share,
    SnapshotInfo,
    TemplateInfo,
)


class Fleet(Protocol):
    """Starts, stops, lists and watches instances. Errors are `snapshotter.errors`.

    Attributes:
        has_templates: `prepare` is of use.
        can_sleep: `sleep` and `wake` are.
    """

    has_templates: bool
    can_sleep: bool

    async def start(
        self, target: CallTarget, instance_id: InstanceId, secret_env: Mapping[str, str]
    ) -> InstanceInfo:
        """Bring one instance up; cancelling abandons it."""
        ...

    async def stop(self, instance_id: InstanceId, *, grace_s: float) -> None:
        """Drain and end one instance; idempotent."""
        ...

    async def sleep(self, instance_id: InstanceId) -> InstanceInfo:
        """Have an idle instance stand still; idempotent."""
        ...

    async def wake(self, instance_id: InstanceId) -> InstanceInfo:
        """Let one that sleeps go on; idempotent."""
        ...

    async def prepare(self, target: CallTarget) -> TemplateInfo:
        """Make the next start fast, without an instance."""
        ...

    async def checkpoint(self, target: CallTarget) -> SnapshotInfo:
        """Make sure that a proven snapshot is on the node; raises SnapshotRefused, Unsupported, and
        what `prepare` raises."""
        ...

    async def templates(self) -> list[TemplateInfo]:
        """What makes starts fast now, whoever asked for it."""
        ...

    async def drop_template(self, revision: RevisionKey) -> None:
        """Nobody routes to this revision any more: give up what makes its starts fast;
        idempotent."""
        ...

    async def adopt(self) -> list[InstanceInfo]:
        """Instances that were this activator's before its restart."""
        ...

    def most_of(self, key: str) -> int | None:
        """Instances of a revision that all activators together can have now, where somebody else
        decides on that; None = they decide."""
        ...

    def watch(self) -> AsyncIterator[AgentEvent]:
        """What happens to instances unasked."""
        ...


def _nobodys(_tenant: str) -> Share | None:
    """Tenants are not told apart."""
    return None


class NodeFleet:
    """Instances on this machine. `lessee` names this activator to the agent, `share_of` whose a
    start is (by tenant id).

    `guard` keeps starts from an agent that is away or fails them.
    """

    has_templates = True
    can_sleep = True

    def __init__(
        self,
        *,
        socket: Path,
        lessee: str,
        share_of: Callable[[str], Share | None] = _nobodys,
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
        """See Fleet. Raises CircuitOpen too."""
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
        """See Fleet."""
        await self._agent.stop(instance_id, grace_s=grace_s)

    async def sleep(self, instance_id: InstanceId) -> InstanceInfo:
        """See Fleet."""
        return await self._agent.sleep(instance_id)

    async def wake(self, instance_id: InstanceId) -> InstanceInfo:
        """See Fleet."""
        return await self._agent.wake(instance_id)

    async def prepare(self, target: CallTarget) -> TemplateInfo:
        """See Fleet."""
        return await self._agent.prepare(target.launch, share=self._share_of(target.tenant))

    async def checkpoint(self, target: CallTarget) -> SnapshotInfo:
        """See Fleet."""
        return await self._agent.checkpoint(target.launch)

    async def templates(self) -> list[TemplateInfo]:
        """See Fleet."""
        return await self._agent.templates()

    async def drop_template(self, revision: RevisionKey) -> None:
        """See Fleet."""
        await self._agent.drop_template(revision)

    async def adopt(self) -> list[InstanceInfo]:
        """See Fleet."""
        return await self._agent.adopt(lessee=self._lessee)

    def most_of(self, key: str) -> int | None:
        """See Fleet."""
        return None

    async def leased(self) -> list[InstanceInfo]:
        """All live instances of the node, whichever activator leases them."""
        return await self._agent.instances()

    def watch(self) -> AsyncIterator[AgentEvent]:
        """See Fleet."""
        return self._watcher.watch()

    async def usage(self, instance_id: InstanceId) -> Mapping[str, Any]:
        """CPU time and memory of one instance."""
        return await self._agent.usage(instance_id)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._agent.aclose()
        await self._watcher.aclose()


def new_instance_id() -> InstanceId:
    """`i-` and 16 hex digits."""
    return InstanceId("i-" + os.urandom(8).hex())
