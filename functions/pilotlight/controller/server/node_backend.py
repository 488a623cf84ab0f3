"""The interface to what runs instances: this machine's node agent, or a cluster."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from snapshotter.client import Hear
from snapshotter.types import InstanceId, InstanceInfo, RevisionKey, SnapshotInfo, TemplateInfo


class NodeBackend(Protocol):
    """A node agent or a cluster; `snapshotter.client.AgentClient` is the former. All methods raise
    SnapshotterError: AgentUnavailable when there is no answer."""

    async def instances(self, labels: Mapping[str, str] | None = None) -> list[InstanceInfo]:
        """Return the live instances that have all these labels (`tenant` is an id)."""

    async def stop(self, instance_id: InstanceId, *, grace_s: float) -> None:
        """Stop an instance and return once it has exited. Raises InstanceUnknown."""

    async def templates(self) -> list[TemplateInfo]:
        """Return the resident Templates."""

    async def drop_template(self, revision: RevisionKey) -> None:
        """Drop a revision's Template; having none is not an error."""

    async def snapshots(self, labels: Mapping[str, str] | None = None) -> list[SnapshotInfo]:
        """Return the snapshots on disk that have all these labels."""

    async def prove_snapshot(self, snapshot_id: str, hear: Hear | None = None) -> SnapshotInfo:
        """Verify a snapshot by restoring it once; `hear` is called with its cost. Raises
        SnapshotUnknown, SnapshotRefused, ProofsBusy, NoCapacity."""

    async def quarantine_snapshot(self, snapshot_id: str, *, reason: str) -> SnapshotInfo:
        """Quarantine a snapshot: it is never restored again. Raises SnapshotUnknown."""

    async def delete_snapshots(
        self,
        *,
        snapshot_id: str | None = None,
        revision: str | None = None,
        function: str | None = None,
    ) -> int:
        """Delete the matching snapshots and return their number."""

    async def capabilities(self) -> Mapping[str, Any]:
        """Return `{"features": [{"name", "on", "why"}], "node": {…}}`."""

    async def usage(self, instance_id: InstanceId) -> Mapping[str, Any]:
        """Return an instance's current resource usage, as far as known: `{"memory_bytes": …}`."""

    async def gpus(self) -> list[Mapping[str, Any]]:
        """Return the GPUs of the node, who has them, and the weights in their memory
        (`snapshotter.gpus.view.GpuUse` as JSON); [] without any, and where they are not known."""

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
        """Return log lines `{"time", "instance", "stream", "call", "text"}`, oldest first. Raises
        before the first line when the request is refused, for example LogsBusy."""

    def exec(self, instance_id: InstanceId, argv: list[str]) -> AsyncIterator[Mapping[str, Any]]:
        """Run a command beside an instance: yields `{"stream", "text"}` parts, then
        `{"exit_status"}`."""

    def build_image(
        self, spec: Mapping[str, Any], *, uid: int | None
    ) -> AsyncIterator[Mapping[str, Any]]:
        """Build an image: yields `{"step", "text"}` parts, then `{"image": digest,
        "size_bytes"}`."""

    async def delete_image(self, digest: str, *, uid: int | None) -> int:
        """Delete an image that `uid` built and return its size in bytes, 0 if there was none. An
        image that is being built is kept."""

    def scan_volume(self, volume: str, *, max_entries: int) -> AsyncIterator[Mapping[str, Any]]:
        """Yield what a volume's directory has that is not committed: `{"put": [entries]}`,
        `{"remove": [paths]}`, then `{"done"}`. Raises VolumeUnknown, VolumeFailed."""

    async def upload_volume(self, volume: str, digests: Sequence[str]) -> None:
        """Upload chunks that the last scan found. Raises VolumeUnknown, VolumeFailed."""

    async def commit_volume(self, volume: str, *, version: int) -> None:
        """Tell that what the last scan found was committed. Raises VolumeUnknown."""

    async def reload_volume(self, volume: str) -> Mapping[str, Any]:
        """Merge the newest manifest into a volume's directory. Raises VolumeUnknown,
        VolumeFailed."""

    async def drop_volume(self, volume: str) -> None:
        """Remove a deleted volume's directory once no slot uses it."""

    async def aclose(self) -> None:
        """Close connections."""
