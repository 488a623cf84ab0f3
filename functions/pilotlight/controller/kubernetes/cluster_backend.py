"""The node agent's interface on a cluster: its pods are the instances.

Labels of the pods separate tenants; only this platform sets them. Every query carries the tenant's
id, and objects of other tenants are not found. Templates are local to each node and are not listed
here; snapshots are listed and deleted by way of the nodes' reports (`register`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from pilotlight.controller.kubernetes import pod_logs, pods
from pilotlight.controller.node_snapshots.register import SnapshotRegister
from pilotlight.kubernetes import names
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.errors import ClusterError, NotFound
from pilotlight.kubernetes.kinds import POD
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.kubernetes.watch_events import Object
from snapshotter.client import Hear
from snapshotter.errors import (
    AgentUnavailable,
    InstanceUnknown,
    SnapshotterError,
    SnapshotUnknown,
    Unsupported,
    VolumeUnknown,
)
from snapshotter.types import InstanceId, InstanceInfo, RevisionKey, SnapshotInfo, TemplateInfo

log = logging.getLogger(__name__)

_STOP_MARGIN_S = 60.0
"""Time beyond the grace period in which the kubelet and Knative's queue-proxy finish."""
_NO_VOLUMES = "pods mount no volumes"
_FEATURES = (
    ("COLD", True, "a pod boots its worker with what its node has cached"),
    ("FORK", False, "a pod is one instance"),
    ("WAKE", False, "a pod is one instance"),
)


class ClusterBackend:
    """Implementation of `server.node_backend.NodeBackend` for a cluster. Owner: one event loop; it
    connects on first use.

    Attributes:
        register: the snapshots of the nodes; None: none are known.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        *,
        connect: Callable[[ClusterSettings], Awaitable[Cluster]] = Cluster.connect,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock`: of the nodes' reports, seconds since the epoch."""
        self.register: SnapshotRegister | None = None
        self._clock = clock
        self._settings = settings
        self._connect = connect
        self._cluster: Cluster | None = None
        self._opening = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<ClusterBackend {self._cluster or 'not connected'}>"

    async def instances(self, labels: Mapping[str, str] | None = None) -> list[InstanceInfo]:
        """Return the pods that have not ended. Raises AgentUnavailable."""
        found = (
            pods.pod_to_instance(pod, self._settings) for pod in await self._pods(labels or {})
        )
        return [one for one in found if one is not None]

    async def stop(self, instance_id: InstanceId, *, grace_s: float) -> None:
        """Delete the pod and wait until it is gone. The autoscaler starts another if it needs one.
        Raises InstanceUnknown."""
        pod = await self._pod(instance_id)
        meta = pod["metadata"]
        try:
            cluster = await self._connected()
            if await cluster.delete(
                POD, meta["name"], meta["namespace"], uid=meta["uid"], grace_s=grace_s
            ):
                async with asyncio.timeout(grace_s + _STOP_MARGIN_S):
                    await _wait_deleted(cluster, meta["name"], meta["namespace"])
        except TimeoutError as e:
            raise AgentUnavailable(
                f"instance {instance_id} did not stop in time: kubectl describe pod {meta['name']} "
                f"-n {meta['namespace']}"
            ) from e
        except ClusterError as e:
            raise _translated(e) from e

    async def _logs(
        self,
        labels: Mapping[str, str],
        instance_id: str | None,
        query: pod_logs.LogQuery,
        *,
        follow: bool,
    ) -> AsyncGenerator[Any, None]:
        """Yield an empty line once the cluster has answered, then lines."""

        def belongs(pod: Object) -> bool:
            return _has(pod, labels) and (
                instance_id is None or pod["metadata"]["name"] == instance_id
            )

        try:
            cluster = await self._connected()
            found = [pod for pod in await self._pods(labels) if belongs(pod)]
            yield {}  # the cluster has answered
            seen: dict[str, float] = {}
            async with contextlib.aclosing(pod_logs.history(cluster, found, query)) as past:
                async for line in past:
                    seen[line["instance"]] = line["time"]
                    yield line
            if follow:
                lines = pod_logs.follow_logs(
                    cluster, self._selector(labels), belongs, query, seen=seen
                )
                async with contextlib.aclosing(lines) as coming:
                    async for line in coming:
                        yield line
        except ClusterError as e:
            raise _translated(e) from e

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
        """Return the log lines of existing pods, oldest first."""
        lines = self._logs(
            labels,
            instance_id,
            pod_logs.LogQuery(since=since, tail=tail, call_id=call_id),
            follow=follow,
        )
        await anext(lines)
        return lines

    async def exec(
        self, instance_id: InstanceId, argv: list[str]
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        """Run a command in the pod's container: `{"stream", "text"}` parts, then `{"exit_status"}`.
        Raises InstanceUnknown."""
        pod = await self._pod(instance_id)
        meta = pod["metadata"]
        try:
            cluster = await self._connected()
            async with contextlib.aclosing(
                cluster.exec(meta["name"], meta["namespace"], argv, container=pods.CONTAINER)
            ) as parts:
                async for part in parts:
                    yield part
        except ClusterError as e:
            raise _translated(e) from e

    async def templates(self) -> list[TemplateInfo]:
        """Return an empty list: a pod is one instance."""
        return []

    async def drop_template(self, revision: RevisionKey) -> None:
        """Do nothing: there are no templates."""

    async def snapshots(self, labels: Mapping[str, str] | None = None) -> list[SnapshotInfo]:
        """Return the snapshots on all nodes and in the object store, as last reported."""
        if self.register is None:
            return []
        return await self.register.infos(labels or {}, now=self._clock())

    async def prove_snapshot(self, snapshot_id: str, hear: Hear | None = None) -> SnapshotInfo:
        """Raise Unsupported."""
        raise Unsupported(
            f"snapshot {snapshot_id} was proven by the node that made it, and cannot be proven "
            f"again on a cluster: quarantine it, and the next cold start makes another"
        )

    async def quarantine_snapshot(self, snapshot_id: str, *, reason: str) -> SnapshotInfo:
        """Quarantine it on each node with its next report, and remove its copy. Raises
        SnapshotUnknown."""
        if self.register is None:
            raise SnapshotUnknown(f"snapshot {snapshot_id} is on no node")
        return await self.register.quarantine(snapshot_id, reason, now=self._clock())

    async def delete_snapshots(
        self,
        *,
        snapshot_id: str | None = None,
        revision: str | None = None,
        function: str | None = None,
    ) -> int:
        """Delete snapshots on each node with its next report, and their copies; return how many."""
        if self.register is None:
            return 0
        return await self.register.delete(
            snapshot_id=snapshot_id, revision=revision, function=function, now=self._clock()
        )

    async def has_pod(self, function: str, tenant: str, node: str) -> bool:
        """Whether a pod of a function (id) of a tenant (id) is on a node, also one that has ended.
        Raises AgentUnavailable."""
        selector = f"{self._selector({'tenant': tenant})},{names.FUNCTION_ID}={function}"
        try:
            cluster = await self._connected()
            found = await cluster.list(POD, None, selector, fields=f"spec.nodeName={node}")
        except ClusterError as e:
            raise _translated(e) from e
        return bool(found.items)

    async def capabilities(self) -> Mapping[str, Any]:
        """Return the cluster's features. Raises AgentUnavailable if it does not answer."""
        try:
            version = await (await self._connected()).version()
        except ClusterError as e:
            raise _translated(e) from e
        restores = self._settings.restore_into_pods
        why = (
            "restored workers are handed to waiting pods"
            if restores
            else "cluster.restore_into_pods is false"
        )
        features = [*_FEATURES, ("RESTORE", restores, why)]
        return {
            "features": [{"name": name, "on": on, "why": said} for name, on, said in features],
            "node": {"fleet": "knative", "kubernetes": str(version.get("gitVersion") or "")},
        }

    async def usage(self, instance_id: InstanceId) -> Mapping[str, Any]:
        """Return nothing: a monitoring system measures the usage of pods."""
        return {}

    async def gpus(self) -> list[Mapping[str, Any]]:
        """Return nothing: the reports of nodes have their GPUs, and no tenant's weights."""
        return []

    async def build_image(
        self, spec: Mapping[str, Any], *, uid: int | None
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        """Raise Unsupported: a cluster does not build images."""
        raise Unsupported(
            "images are not built in a cluster: `pilotlight deploy` makes them on your machine and "
            "pushes them to its registry"
        )
        yield {}

    async def delete_image(self, digest: str, *, uid: int | None) -> int:
        """Delete nothing; return 0. Images of a cluster are in its registry."""
        return 0

    async def scan_volume(
        self, volume: str, *, max_entries: int
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        """Raise VolumeUnknown: pods mount no volumes."""
        raise VolumeUnknown(_NO_VOLUMES)
        yield {}

    async def upload_volume(self, volume: str, digests: Sequence[str]) -> None:
        """Raise VolumeUnknown: pods mount no volumes."""
        raise VolumeUnknown(_NO_VOLUMES)

    async def commit_volume(self, volume: str, *, version: int) -> None:
        """Raise VolumeUnknown: pods mount no volumes."""
        raise VolumeUnknown(_NO_VOLUMES)

    async def reload_volume(self, volume: str) -> Mapping[str, Any]:
        """Raise VolumeUnknown: pods mount no volumes."""
        raise VolumeUnknown(_NO_VOLUMES)

    async def drop_volume(self, volume: str) -> None:
        """Do nothing: no node has its files."""

    async def aclose(self) -> None:
        """Close connections."""
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            await cluster.aclose()

    # -- requests ----------------------------------------------------------------------------------

    async def _connected(self) -> Cluster:
        async with self._opening:
            if self._cluster is None:
                self._cluster = await self._connect(self._settings)
            return self._cluster

    def _selector(self, labels: Mapping[str, str]) -> str:
        """Select our pods, of the tenant if `labels` name one; other labels are compared here."""
        ours = names.function_selector(self._settings)
        return f"{ours},{names.TENANT}={labels['tenant']}" if "tenant" in labels else ours

    async def _pods(self, labels: Mapping[str, str]) -> list[Object]:
        try:
            listing = await (await self._connected()).list(POD, None, self._selector(labels))
        except ClusterError as e:
            raise _translated(e) from e
        return [pod for pod in listing.items if _has(pod, labels)]

    async def _pod(self, name: str) -> Object:
        """Return the pod of that name in any namespace. Raises InstanceUnknown, also if two pods
        have the name."""
        try:
            cluster = await self._connected()
            listing = await cluster.list(
                POD, None, names.function_selector(self._settings), fields=f"metadata.name={name}"
            )
        except ClusterError as e:
            raise _translated(e) from e
        if len(listing.items) != 1:
            raise InstanceUnknown(
                f"there is no instance {name}"
                if not listing.items
                else f"two pods are called {name}"
            )
        return listing.items[0]


def _has(pod: Object, labels: Mapping[str, str]) -> bool:
    return labels.items() <= pods.labels_of(pod).items()


async def _wait_deleted(cluster: Cluster, name: str, namespace: str) -> None:
    async with contextlib.aclosing(
        cluster.watch(POD, namespace, fields=f"metadata.name={name}")
    ) as changes:
        there = False
        async for change in changes:
            there = change.type in ("ADDED", "MODIFIED") or (there and change.type == "SYNCED")
            if not there:
                return


def _translated(error: ClusterError) -> SnapshotterError:
    """Convert for the API's caller; the log has the details for the platform's operator."""
    if isinstance(error, NotFound):
        return InstanceUnknown("the instance does not exist")
    log.error("event=cluster_refused error=%s", error)
    return AgentUnavailable(
        f"the cluster does not answer ({error.reason or error.status}): see the controller's log"
    )
