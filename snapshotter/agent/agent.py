"""The node agent's operations: RPC requests of `snapshotter.client`, delegated to the
components."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pilotlight.core.rpc import RpcOperation, SendPart
from snapshotter.agent.launch_signature import verify_launch
from snapshotter.checkpointing.api import SnapshotApi
from snapshotter.errors import InstanceUnknown, SnapshotterError
from snapshotter.events import Events, WatcherTooSlow
from snapshotter.gpus.view import GpuView
from snapshotter.linux import proc
from snapshotter.slots.instances import Instance, Instances
from snapshotter.slots.launch_plan import ImageStore
from snapshotter.slots.logs import LogQuery, Logs
from snapshotter.slots.replies import SlotConnectionLost
from snapshotter.starts.launcher import StartRequest
from snapshotter.starts.starter import InstanceStarter
from snapshotter.starts.suspend import InstanceSuspender
from snapshotter.starts.templates import Templates
from snapshotter.types import InstanceId, InstanceState, LaunchSpec, RevisionKey, TenantShare
from snapshotter.volumes.api import VolumeApi
from snapshotter.volumes.node_volumes import NodeVolumes
from weight_cache.errors import WeightCacheError

_MAX_TEXT_BYTES = 64 * 1024
_MOST_REASON = 1000
"""Characters of the reason for a quarantine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What the agent reports of its node: what it is capable of, and the use of its GPUs; and its
    volumes (None: it has none)."""

    capabilities: Callable[[], Awaitable[Mapping[str, Any]]]
    gpus: GpuView
    volumes: NodeVolumes | None = None


class Agent:
    """Translates RPC messages to calls and back. Owner: the event loop; stateless."""

    def __init__(
        self,
        *,
        starter: InstanceStarter,
        instances: Instances,
        templates: Templates,
        images: ImageStore,
        logs: Logs,
        events: Events,
        snapshots: SnapshotApi,
        node: NodeFacts,
    ) -> None:
        self._starter = starter
        self._instances = instances
        self._suspender = InstanceSuspender(instances)
        self._templates = templates
        self._images = images
        self._logs = logs
        self._events = events
        self._snapshots = snapshots
        self._node = node

    def __repr__(self) -> str:
        return f"<Agent {self._starter!r}>"

    @property
    def snapshots(self) -> SnapshotApi:
        """Snapshots of this node."""
        return self._snapshots

    @property
    def gpus(self) -> GpuView:
        """Use of the node's GPUs."""
        return self._node.gpus

    def operations(self) -> Mapping[str, RpcOperation]:
        """Operations by name, for `pilotlight.core.rpc.serve_rpc`."""
        return {
            "start": self._start,
            "prepare": self._prepare,
            "stop": self._stop,
            "sleep": self._sleep,
            "wake": self._wake,
            "adopt": self._adopt,
            "instances": self._list_instances,
            "templates": self._list_templates,
            "drop_template": self._drop_template,
            "checkpoint": self._checkpoint,
            "snapshots": self._list_snapshots,
            "prove_snapshot": self._prove_snapshot,
            "quarantine_snapshot": self._quarantine_snapshot,
            "delete_snapshots": self._delete_snapshots,
            "capabilities": self._capabilities,
            "usage": self._usage,
            "gpus": self._list_gpus,
            "watch": self._watch,
            "logs": self._read_logs,
            "exec": self._exec,
            "build_image": self._build_image,
            "delete_image": self._delete_image,
            **VolumeApi(self._node.volumes).operations(),
        }

    async def _start(self, args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        request = StartRequest(
            launch=_launch(args),
            instance_id=InstanceId(args["instance_id"]),
            lessee=args["lessee"],
            secret_env=args["secret_env"],
            share=_share(args),
        )
        if request.launch.volumes and self._node.volumes is not None:
            await self._node.volumes.refresh(request.launch)
        return (await self._starter.start(request)).to_json()

    async def _prepare(self, args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        return (await self._starter.prepare(_launch(args), _share(args))).to_json()

    async def _stop(self, args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        await self._starter.stop(InstanceId(args["instance_id"]), float(args["grace_s"]))
        return {}

    async def _sleep(self, args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        return self._suspender.sleep(InstanceId(args["instance_id"])).to_json()

    async def _wake(self, args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        return self._suspender.wake(InstanceId(args["instance_id"])).to_json()

    async def _adopt(self, args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        live = [
            i.info
            for i in self._instances
            if i.info.state in (InstanceState.READY, InstanceState.ASLEEP)
        ]
        return {"instances": [info.to_json() for info in live if info.lessee == args["lessee"]]}

    async def _list_instances(self, args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        return {"instances": [info.to_json() for info in self._instances.matching(args["labels"])]}

    async def _list_templates(self, args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        for template in self._templates:
            template.pss_bytes = await asyncio.to_thread(
                proc.pss_bytes, template.occupied.slot.worker_pid
            )
        return {"templates": [template.info().to_json() for template in self._templates]}

    async def _drop_template(self, args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        revision = RevisionKey(args["revision"])
        self._snapshots.cancel(revision)
        self._starter.drop_template(revision)
        return {}

    async def _checkpoint(self, args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        return (await self._snapshots.checkpoint(_launch(args))).to_json()

    async def _list_snapshots(self, args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        return {"snapshots": [info.to_json() for info in self._snapshots.infos(args["labels"])]}

    async def _prove_snapshot(self, args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        async def report(proof: str, cpu_ns: int) -> None:
            await part({"build": proof, "cpu_ns": cpu_ns})

        return (await self._snapshots.prove(args["snapshot_id"], report)).to_json()

    async def _quarantine_snapshot(
        self, args: Mapping[str, Any], part: SendPart
    ) -> Mapping[str, Any]:
        reason = str(args["reason"])[:_MOST_REASON]
        return (await self._snapshots.quarantine(args["snapshot_id"], reason)).to_json()

    async def _delete_snapshots(self, args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        filters = {key: args[key] for key in ("snapshot_id", "revision", "function")}
        return {"deleted": await self._snapshots.delete(**filters)}

    async def _capabilities(self, args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        found = await self._node.capabilities()
        return {**found, "node": {**found["node"], "snapshots": self._snapshots.describe()}}

    async def _usage(self, args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        instance = self._known(args["instance_id"])
        pid, group = instance.info.pid, instance.group
        memory_bytes = group.memory_bytes() if group is not None else None
        return {
            "cpu_ns": instance.cpu_ns(),
            "memory_bytes": proc.rss_bytes(pid) if memory_bytes is None else memory_bytes,
            "pss_bytes": await asyncio.to_thread(proc.pss_bytes, pid),
            "gpus": [use.to_json() for use in self._node.gpus.of_instance(instance.info.id)],
        }

    async def _list_gpus(self, args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        await self._node.gpus.refresh()
        return {"gpus": [use.to_json() for use in self._node.gpus.now()]}

    async def _watch(self, args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        with self._events.watching() as watcher:
            await part({})  # no event is missed from here on
            while True:
                try:
                    await part((await watcher.next()).to_json())
                except WatcherTooSlow as e:
                    raise SnapshotterError(str(e)) from e

    async def _read_logs(self, args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        query = LogQuery(
            labels=args["labels"],
            instance_id=args["instance_id"],
            since=args["since"],
            tail=args["tail"],
            call_id=args["call_id"],
        )
        read = self._logs.follow if args["follow"] else self._logs.read
        lines = read(query, on_begun=lambda: part({}))  # no refusal after this point
        async with contextlib.aclosing(lines):
            async for line in lines:
                await part(line)
        return {}

    async def _exec(self, args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        instance = self._known(args["instance_id"])
        assert instance.occupied is not None
        pipes = {"stdout": os.pipe2(os.O_CLOEXEC), "stderr": os.pipe2(os.O_CLOEXEC)}
        run = instance.occupied.slot.execute(
            instance.info.id, list(args["argv"]), pipes["stdout"][1], pipes["stderr"][1]
        )
        try:
            async with asyncio.TaskGroup() as group:
                running = group.create_task(run, name=f"exec beside {instance.info.id}")
                for stream, (readable, _) in pipes.items():
                    group.create_task(_pump(readable, stream, part), name=f"exec {stream}")
        except ExceptionGroup as e:
            if lost := e.subgroup(SlotConnectionLost):
                raise InstanceUnknown(
                    f"instance {instance.info.id} exited during the command"
                ) from lost
            raise
        status = running.result()
        if status is None:
            raise InstanceUnknown(f"instance {instance.info.id} exited during the command")
        return {"exit_status": os.waitstatus_to_exitcode(status)}

    async def _build_image(self, args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        digest = await self._images.build(args["spec"], uid=args["uid"], part=part)
        return {
            "image": digest,
            "size_bytes": await asyncio.to_thread(self._images.size_bytes, digest, uid=args["uid"]),
        }

    async def _delete_image(self, args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        return {
            "size_bytes": await asyncio.to_thread(
                self._images.delete, args["digest"], uid=args["uid"]
            )
        }

    def _known(self, instance_id: str) -> Instance:
        instance = self._instances.get(InstanceId(instance_id))
        if instance is None or not instance.was_ready:
            raise InstanceUnknown(
                f"no instance {instance_id} on this node: `instance list` shows the live ones"
            )
        return instance


def _launch(args: Mapping[str, Any]) -> LaunchSpec:
    """The launch document without the signature, which `snapshotter.agent.activator_api`
    verifies."""
    return verify_launch(LaunchSpec.from_json(args["launch"]))


def _share(args: Mapping[str, Any]) -> TenantShare | None:
    return TenantShare.from_json(args["share"]) if "share" in args else None


def describe(error: Exception) -> tuple[str, str, Mapping[str, Any]] | None:
    """RPC representation of an operation's exception: our errors and those of the weight cache
    under their own codes."""
    if isinstance(error, SnapshotterError):
        return error.code, str(error), error.detail
    if isinstance(error, WeightCacheError):
        return error.code, str(error), {}
    return None


async def _pump(fd: int, stream: str, part: SendPart) -> None:
    """Forward text from a pipe to the caller at the caller's pace."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_MAX_TEXT_BYTES)
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", buffering=0)
    )
    try:
        while data := await reader.read(_MAX_TEXT_BYTES):
            await part({"stream": stream, "text": data.decode(errors="replace")})
    finally:
        transport.close()
