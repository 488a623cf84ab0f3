"""A typed client of the node agent over its Unix socket.

One connection carries many calls (`pilotlight.core.rpc`). A lost connection fails the open calls
with AgentUnavailable; the next call reconnects.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from pilotlight.core.rpc import RpcClient, RpcRemoteError, RpcTransportError, SharedRpcConnection
from snapshotter import errors
from snapshotter.types import (
    AgentEvent,
    InstanceId,
    InstanceInfo,
    LaunchSpec,
    RevisionKey,
    SnapshotInfo,
    TemplateInfo,
    TenantShare,
)

_BY_CODE: dict[str, type[errors.SnapshotterError]] = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.SnapshotterError)
}

Hear = Callable[[Mapping[str, Any]], Awaitable[object]]
_LINES_WAITING = 100
"""Log lines that have arrived and are not read yet."""


def _translate(failure: RpcRemoteError) -> errors.SnapshotterError:
    return _BY_CODE.get(failure.code, errors.SnapshotterError)(str(failure), failure.detail)


def _named(share: TenantShare | None) -> dict[str, Any]:
    return {"share": share.to_json()} if share is not None else {}


class AgentClient(SharedRpcConnection):
    """Calls the agent at `socket_path`. Owner: one event loop; connects on the first call."""

    async def start(
        self,
        launch: LaunchSpec,
        *,
        instance_id: InstanceId,
        lessee: str,
        secret_env: Mapping[str, str],
        share: TenantShare | None = None,
    ) -> InstanceInfo:
        """Start one instance by the fastest available strategy; returns when it is ready.

        `share`: the tenant's share; tenants take turns and retain their reserved memory. Idempotent
        on `instance_id`. Raises StartFailed, StartTimeout, NoCapacity, BundleUnavailable,
        Unsupported or AgentUnavailable. Cancelling the call cancels the start and stops a
        half-started instance.
        """
        args = {
            "launch": launch.to_json(),
            "instance_id": instance_id,
            "lessee": lessee,
            "secret_env": dict(secret_env),
            **_named(share),
        }
        return InstanceInfo.from_json(await self._call("start", args))

    async def prepare(
        self, launch: LaunchSpec, *, share: TenantShare | None = None
    ) -> TemplateInfo:
        """Ensure that a Template of this revision is resident, without an instance. Raises the
        errors of `start`."""
        return TemplateInfo.from_json(
            await self._call("prepare", {"launch": launch.to_json(), **_named(share)})
        )

    async def stop(self, instance_id: InstanceId, *, grace_s: float) -> None:
        """Run exit hooks, send SIGTERM, and SIGKILL after `grace_s`; returns when the process has
        exited. Idempotent."""
        await self._call("stop", {"instance_id": instance_id, "grace_s": grace_s})

    async def sleep(self, instance_id: InstanceId) -> InstanceInfo:
        """Suspend every process of a ready instance; its memory stays. Idempotent. Raises
        InstanceUnknown."""
        return InstanceInfo.from_json(await self._call("sleep", {"instance_id": instance_id}))

    async def wake(self, instance_id: InstanceId) -> InstanceInfo:
        """Resume a suspended instance; its start kind is WAKE from then on. Idempotent. Raises
        InstanceUnknown."""
        return InstanceInfo.from_json(await self._call("wake", {"instance_id": instance_id}))

    async def adopt(self, *, lessee: str) -> list[InstanceInfo]:
        """The live instances leased to `lessee`, suspended ones included. Called after its
        restart."""
        return [
            InstanceInfo.from_json(i)
            for i in (await self._call("adopt", {"lessee": lessee}))["instances"]
        ]

    async def instances(self, labels: Mapping[str, str] | None = None) -> list[InstanceInfo]:
        """Live instances whose labels include `labels`."""
        body = await self._call("instances", {"labels": dict(labels or {})})
        return [InstanceInfo.from_json(i) for i in body["instances"]]

    async def templates(self) -> list[TemplateInfo]:
        """Resident Templates."""
        return [TemplateInfo.from_json(t) for t in (await self._call("templates", {}))["templates"]]

    async def drop_template(self, revision: RevisionKey) -> None:
        """Stop a Template; its instances continue. Idempotent."""
        await self._call("drop_template", {"revision": revision})

    async def checkpoint(self, launch: LaunchSpec) -> SnapshotInfo:
        """Ensure that a validated snapshot of this revision is on the node; returns once it is.

        Raises SnapshotRefused when it cannot be made (the reasons name the obstacles), and the
        errors of `start`.
        """
        return SnapshotInfo.from_json(await self._call("checkpoint", {"launch": launch.to_json()}))

    async def snapshots(self, labels: Mapping[str, str] | None = None) -> list[SnapshotInfo]:
        """Snapshots on this node whose labels include `labels`."""
        return [
            SnapshotInfo.from_json(s)
            for s in (await self._call("snapshots", {"labels": dict(labels or {})}))["snapshots"]
        ]

    async def prove_snapshot(self, snapshot_id: str, on_cost: Hear | None = None) -> SnapshotInfo:
        """Restore a snapshot once and check its example: READY again, or QUARANTINED with the
        reason.

        on_cost: called with `{"build": id of the validation, "cpu_ns": n}` when the validation has
        ended, whatever its outcome.

        Raises SnapshotUnknown, ProofsBusy (one per tenant at a time), NoCapacity, SnapshotRefused
        when the validation timed out, or when the snapshot does not fit the GPUs that are free.
        """
        answer: Mapping[str, Any] = {}
        async for body in self._stream("prove_snapshot", {"snapshot_id": snapshot_id}):
            if "cpu_ns" in body:
                if on_cost is not None:
                    await on_cost(body)
            else:
                answer = body
        return SnapshotInfo.from_json(answer)

    async def quarantine_snapshot(self, snapshot_id: str, *, reason: str) -> SnapshotInfo:
        """Quarantine a snapshot: it is never restored again. Idempotent. Raises
        SnapshotUnknown."""
        args = {"snapshot_id": snapshot_id, "reason": reason}
        return SnapshotInfo.from_json(await self._call("quarantine_snapshot", args))

    async def delete_snapshots(
        self,
        *,
        snapshot_id: str | None = None,
        revision: str | None = None,
        function: str | None = None,
    ) -> int:
        """Delete one snapshot, those of a revision, or those of all revisions of a function id;
        returns how many were deleted. Idempotent."""
        args = {"snapshot_id": snapshot_id, "revision": revision, "function": function}
        return int((await self._call("delete_snapshots", args))["deleted"])

    async def capabilities(self) -> Mapping[str, Any]:
        """What this machine supports: `{"features": [{"name", "on", "why"}], "node": {…}}`, each
        feature tested, not assumed."""
        return await self._call("capabilities", {})

    async def usage(self, instance_id: InstanceId) -> Mapping[str, Any]:
        """CPU time (`cpu_ns`), memory (`memory_bytes`, `pss_bytes`) and `gpus` (as `gpus()`) of one
        instance."""
        return await self._call("usage", {"instance_id": instance_id})

    async def gpus(self) -> list[Mapping[str, Any]]:
        """The GPUs and MIG instances of the node, who has them, and the weights in their memory
        (`snapshotter.gpus.view.GpuUse` as JSON); [] without any."""
        return list((await self._call("gpus", {}))["gpus"])

    def watch(self) -> AsyncIterator[AgentEvent]:
        """Events from now on, until cancelled or the connection is lost (AgentUnavailable)."""
        return self._events()

    async def _events(self) -> AsyncIterator[AgentEvent]:
        async for body in self._stream("watch", {}):
            if body:
                yield AgentEvent.from_json(body)

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
        """Log lines as `{"time", "instance", "stream", "call", "text"}`, oldest first, those of
        exited instances included.

        Returns once the agent has begun to read; its refusals are raised here, LogsBusy among them.
        The caller closes the returned generator.
        """
        args = {
            "labels": dict(labels),
            "instance_id": instance_id,
            "since": since,
            "tail": tail,
            "call_id": call_id,
            "follow": follow,
        }
        lines = self._lines(args)
        await anext(lines)  # the agent has begun to read
        return lines

    async def _lines(self, args: Mapping[str, Any]) -> AsyncGenerator[Mapping[str, Any], None]:
        """Stream log lines on a separate connection, so that a slow reader delays no other call."""
        try:
            rpc = await RpcClient.open(self._path, max_queued_frames=_LINES_WAITING)
        except RpcTransportError as e:
            raise errors.AgentUnavailable(f"node agent: {e}") from e
        try:
            is_begun = False
            async for body in self._stream("logs", args, rpc):
                if body or not is_begun:
                    yield body
                is_begun = True
        finally:
            await rpc.aclose()

    def exec(self, instance_id: InstanceId, argv: list[str]) -> AsyncIterator[Mapping[str, Any]]:
        """Run a command beside an instance (its namespaces, uid and environment): `{"stream",
        "text"}` parts, then `{"exit_status"}`."""
        return self._stream("exec", {"instance_id": instance_id, "argv": argv})

    def build_image(
        self, spec: Mapping[str, Any], *, uid: int | None
    ) -> AsyncIterator[Mapping[str, Any]]:
        """Build the environment `spec` (JSON of a `pilotlight.spec.function.ImageSpec`): `{"step",
        "text"}` parts, then `{"image": digest, "size_bytes"}`."""
        return self._stream("build_image", {"spec": dict(spec), "uid": uid})

    async def delete_image(self, digest: str, *, uid: int | None) -> int:
        """Delete an image that `uid` built; returns its bytes, 0 if there was none. An image that
        is being built is retained."""
        return int((await self._call("delete_image", {"digest": digest, "uid": uid}))["size_bytes"])

    def scan_volume(self, volume: str, *, max_entries: int) -> AsyncIterator[Mapping[str, Any]]:
        """What a volume's directory has that is not committed: `{"put": [entries]}`, `{"remove":
        [paths]}`, then `{"done"}`. Raises VolumeUnknown, VolumeFailed."""
        return self._stream("scan_volume", {"volume": volume, "max_entries": max_entries})

    async def upload_volume(self, volume: str, digests: Sequence[str]) -> None:
        """Upload chunks that the last scan found. Raises VolumeUnknown, VolumeFailed."""
        await self._call("upload_volume", {"volume": volume, "digests": list(digests)})

    async def commit_volume(self, volume: str, *, version: int) -> None:
        """Tell that what the last scan found was committed. Raises VolumeUnknown."""
        await self._call("commit_volume", {"volume": volume, "version": version})

    async def reload_volume(self, volume: str) -> Mapping[str, Any]:
        """Merge the newest manifest into a volume's directory: `{"version", "changed",
        "fetched_bytes", "kept"}`. Raises VolumeUnknown, VolumeFailed."""
        return await self._call("reload_volume", {"volume": volume})

    async def drop_volume(self, volume: str) -> None:
        """Remove a deleted volume's directory once no slot uses it. Idempotent."""
        await self._call("drop_volume", {"volume": volume})

    async def _call(self, op: str, args: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return await (await self._connection()).call(op, args)
        except RpcRemoteError as e:
            raise _translate(e) from e
        except RpcTransportError as e:
            raise errors.AgentUnavailable(f"node agent: {e}") from e

    async def _stream(
        self, op: str, args: Mapping[str, Any], rpc: RpcClient | None = None
    ) -> AsyncIterator[Mapping[str, Any]]:
        try:
            async for body in (rpc or await self._connection()).stream(op, args):
                yield body
        except RpcRemoteError as e:
            raise _translate(e) from e
        except RpcTransportError as e:
            raise errors.AgentUnavailable(f"node agent: {e}") from e
