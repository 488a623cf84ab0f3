"""What the controller asks about what runs: of this machine's node agent, or of a cluster. The same
questions, the same answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, Protocol

from pilotlight.controller.settings import ControllerConfig
from snapshotter.client import AgentClient, Hear
from snapshotter.types import InstanceId, InstanceInfo, RevisionKey, SnapshotInfo, TemplateInfo


def agent_of(config: ControllerConfig) -> Agent:
    """Whom to ask on this platform. Nothing is connected yet."""
    if config.platform.fleet == "knative":
        # a second of imports, which one machine does without
        from pilotlight.controller.cluster.node import ClusterNode

        return ClusterNode(config.cluster)
    return AgentClient(config.paths.socket_for_controller("snapshotter"))


class Agent(Protocol):
    """See `snapshotter.client.AgentClient`, which is one. All raise SnapshotterError:
    AgentUnavailable where nobody answers."""

    async def instances(self, labels: Mapping[str, str] | None = None) -> list[InstanceInfo]:
        """Live instances that have all these labels (`tenant` is an id)."""
        ...

    async def stop(self, instance_id: InstanceId, *, grace_s: float) -> None:
        """Stop one; answers when it is gone. Raises InstanceUnknown."""
        ...

    async def templates(self) -> list[TemplateInfo]:
        """Resident Templates."""
        ...

    async def drop_template(self, revision: RevisionKey) -> None:
        """Give one up; none there is no error."""
        ...

    async def snapshots(self, labels: Mapping[str, str] | None = None) -> list[SnapshotInfo]:
        """Snapshots on disk that have all these labels."""
        ...

    async def prove_snapshot(self, snapshot_id: str, hear: Hear | None = None) -> SnapshotInfo:
        """Restore it once; `hear` is told what it cost. Raises SnapshotUnknown, SnapshotRefused,
        ProofsBusy, NoCapacity."""
        ...

    async def delete_snapshots(
        self,
        *,
        snapshot_id: str | None = None,
        revision: str | None = None,
        function: str | None = None,
    ) -> int:
        """Delete those; how many there were."""
        ...

    async def capabilities(self) -> Mapping[str, Any]:
        """`{"features": [{"name", "on", "why"}], "node": {…}}`."""
        ...

    async def usage(self, instance_id: InstanceId) -> Mapping[str, Any]:
        """What an instance uses now: `{"memory_bytes": …}`, as far as it is known."""
        ...

    async def logs(
        self,
        *,
        labels: Mapping[str, str],
        instance_id: str | None = None,
        since: float | None = None,
        tail: int | None = None,
        call_id: str | None = None,
        follow: bool = False,
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        """Lines `{"time", "instance", "stream", "call", "text"}`, oldest first. What is refused is
        raised at once, LogsBusy among it."""
        ...

    def exec(self, instance_id: InstanceId, argv: list[str]) -> AsyncIterator[Mapping[str, Any]]:
        """Run a command beside an instance: `{"stream", "text"}` parts, then `{"exit_status"}`."""
        ...

    def build_image(
        self, spec: Mapping[str, Any], *, uid: int | None
    ) -> AsyncIterator[Mapping[str, Any]]:
        """Build an environment: `{"step", "text"}` parts, then `{"image": digest,
        "size_bytes"}`."""
        ...

    async def delete_image(self, digest: str, *, uid: int | None) -> int:
        """Delete an environment that `uid` built; its bytes, 0 where there was none. One that is
        being built stays."""
        ...

    async def aclose(self) -> None:
        """Close connections."""
        ...
