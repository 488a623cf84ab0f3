"""A fleet whose instances are FakeWorkers in the test's own event loop; how starts go is the test's
to say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from activator.routing.route_table import CallTarget
from snapshotter import errors
from snapshotter.types import (
    AgentEvent,
    GpuGrant,
    InstanceId,
    InstanceInfo,
    InstanceState,
    LaunchSpec,
    RevisionKey,
    SnapshotInfo,
    SnapshotState,
    StartKind,
    TemplateInfo,
)
from tests.fakes.engine.served import ServedEngine
from tests.fakes.fake_worker import Behaviour, FakeWorker, echo


class FakeFleet:
    """Starts FakeWorkers.

    Attributes:
        gate: starts wait for it; set by default. failures: errors that the next starts raise, first
        in, first out; waits_after_failures: the gate is cleared with the last one. broken: functions
        that do not start, and why. behaviours: of functions that
        behave in their own way. engines: instances of functions that are engines; `engine_options`:
        of the next ones. sockets: of functions whose instances are served by somebody else, and
        where. prepared: revisions with a Template: their starts are FORK, others RESTORE from
        `snapshots`, else COLD. refusal: what the next checkpoints raise, if anything. launched:
        launches of starts, in order. naps: (`ASLEEP` or `READY`, instance) of those that were put
        to sleep or woken, in order. nap_failures: what the next of these raise. cpu_file,
        cpu_from_ns: of the instances that start from now on. gpus: what the next starts of a function
        are granted. dropped: revisions whose Template was
        asked to go, in order.
    """

    has_templates = True
    can_sleep = True

    def __init__(self, directory: Path, behaviour: Behaviour = echo) -> None:
        self.directory = directory
        self.behaviour = behaviour
        self.gate = asyncio.Event()
        self.gate.set()
        self.failures: list[errors.SnapshotterError] = []
        self.waits_after_failures = False
        self.broken: dict[str, errors.SnapshotterError] = {}
        self.behaviours: dict[str, Behaviour] = {}
        self.workers: dict[str, FakeWorker] = {}
        self.engines: dict[str, ServedEngine] = {}
        self.engine_options: dict[str, Any] = {}
        self.sockets: dict[str, Path] = {}
        self.started: list[str] = []
        self.stopped: list[tuple[str, float]] = []
        self.prepared: set[str] = set()
        self.snapshots: dict[str, SnapshotInfo] = {}
        self.refusal: errors.SnapshotterError | None = None
        self.checkpoint_gate = asyncio.Event()
        self.checkpoint_gate.set()
        self.launched: list[LaunchSpec] = []
        self.dropped: list[str] = []
        self._labels: dict[str, Mapping[str, str]] = {}
        self.infos: dict[str, InstanceInfo] = {}
        self.secrets: list[Mapping[str, str]] = []
        self.naps: list[tuple[str, str]] = []
        self.nap_failures: list[errors.SnapshotterError] = []
        self.cpu_file = ""
        self.cpu_from_ns = 0
        self.gpus: dict[str, GpuGrant] = {}
        self._events: asyncio.Queue[AgentEvent] = asyncio.Queue()

    async def start(
        self, target: CallTarget, instance_id: InstanceId, secret_env: Mapping[str, str]
    ) -> InstanceInfo:
        """See Fleet."""
        self.started.append(instance_id)
        self.secrets.append(secret_env)
        self.launched.append(target.launch)
        await self.gate.wait()
        if self.failures:
            failure = self.failures.pop(0)
            if self.waits_after_failures and not self.failures:
                self.gate.clear()
            raise failure
        if target.function in self.broken:
            raise self.broken[target.function]
        path = self.directory / f"{instance_id}.sock"
        if target.function in self.sockets:
            path.symlink_to(self.sockets[target.function])
        elif target.spec.engine is None or target.function in self.behaviours:
            self.workers[instance_id] = await FakeWorker(
                path, self.behaviours.get(target.function, self.behaviour)
            ).start()
        else:
            self.engines[instance_id] = await ServedEngine(path, **self._engine_of(target)).start()
        kind = (
            StartKind.FORK
            if target.key in self.prepared
            else StartKind.RESTORE
            if target.key in self.snapshots
            else StartKind.COLD
        )
        self.prepared.add(target.key)
        self._labels[target.key] = target.launch.labels
        self.infos[instance_id] = replace(
            info_of(target, instance_id, str(path), kind),
            cpu_file=self.cpu_file,
            cpu_from_ns=self.cpu_from_ns,
            gpus=self.gpus.get(target.function),
        )
        return self.infos[instance_id]

    def _engine_of(self, target: CallTarget) -> dict[str, Any]:
        spec, engine = target.spec, target.spec.engine
        assert engine is not None
        return {
            "model": spec.name,
            "adapters": tuple(engine.lora),
            "max_model_len": engine.max_model_len,
            "max_num_seqs": engine.max_num_seqs,
            **self.engine_options,
        }

    def _pop(self, instance_id: str) -> FakeWorker | ServedEngine | None:
        return self.workers.pop(instance_id, None) or self.engines.pop(instance_id, None)

    async def stop(self, instance_id: InstanceId, *, grace_s: float) -> None:
        """See Fleet."""
        self.stopped.append((instance_id, grace_s))
        self.infos.pop(instance_id, None)
        worker = self._pop(instance_id)
        if worker is not None:
            await worker.die()

    async def sleep(self, instance_id: InstanceId) -> InstanceInfo:
        """See Fleet."""
        return self._become(instance_id, InstanceState.ASLEEP)

    async def wake(self, instance_id: InstanceId) -> InstanceInfo:
        """See Fleet."""
        return self._become(
            instance_id,
            InstanceState.READY,
            start_kind=StartKind.WAKE,
            phases_ms={"wake": 1.0},
            cpu_from_ns=self.cpu_from_ns,
        )

    def _become(
        self, instance_id: InstanceId, state: InstanceState, **changes: Any
    ) -> InstanceInfo:
        self.naps.append((state.value, instance_id))
        if self.nap_failures:
            raise self.nap_failures.pop(0)
        if instance_id not in self.infos:
            raise errors.InstanceUnknown(f"no instance {instance_id}")
        self.infos[instance_id] = replace(self.infos[instance_id], state=state, **changes)
        return self.infos[instance_id]

    async def prepare(self, target: CallTarget) -> TemplateInfo:
        """See Fleet."""
        self.prepared.add(target.key)
        self._labels[target.key] = target.launch.labels
        return self._template(target.key)

    async def checkpoint(self, target: CallTarget) -> SnapshotInfo:
        """See Fleet."""
        await self.checkpoint_gate.wait()
        if self.refusal is not None:
            raise self.refusal
        return self.snapshots.setdefault(target.key, snapshot_of(target))

    async def templates(self) -> list[TemplateInfo]:
        """See Fleet."""
        return [self._template(key) for key in sorted(self.prepared)]

    def _template(self, key: str) -> TemplateInfo:
        labels = self._labels[key]
        return TemplateInfo(
            revision=RevisionKey(key),
            pid=1,
            pss_bytes=1,
            threads=(),
            phases_ms={"boot": 1.0},
            forks=0,
            last_used_at=0.0,
            labels=labels,
        )

    async def drop_template(self, revision: RevisionKey) -> None:
        """See Fleet."""
        self.dropped.append(revision)
        self.prepared.discard(revision)

    def max_instances_of(self, key: str) -> int | None:
        """See Fleet."""
        return None

    async def adopt(self) -> list[InstanceInfo]:
        """See Fleet."""
        return list(self.infos.values())

    async def watch(self) -> AsyncIterator[AgentEvent]:
        """See Fleet."""
        while True:
            yield await self._events.get()

    async def kill(self, instance_id: str, reason: str, *, tell: bool = True) -> None:
        """The instance's process dies; the agent tells unless asked not to."""
        self.infos.pop(instance_id, None)
        worker = self._pop(instance_id)
        assert worker is not None
        await worker.die()
        if tell:
            self._events.put_nowait(
                AgentEvent(kind="instance_gone", subject=instance_id, reason=reason, message=reason)
            )

    def tell(self, kind: str, subject: str, **detail: object) -> None:
        """The agent tells of something."""
        self._events.put_nowait(
            AgentEvent(kind=kind, subject=subject, reason="", message="", detail=detail)
        )

    async def aclose(self) -> None:
        """Stop every worker."""
        for worker in self.workers.values():
            await worker.aclose()
        for engine in self.engines.values():
            await engine.aclose()


def info_of(target: CallTarget, instance_id: str, socket: str, kind: StartKind) -> InstanceInfo:
    """An InstanceInfo of a target's revision."""
    return InstanceInfo(
        id=InstanceId(instance_id),
        revision=target.launch.revision,
        state=InstanceState.READY,
        socket=socket,
        start_kind=kind,
        phases_ms={"restore": 1.0, "serve": 1.0} if kind is StartKind.RESTORE else {"fork": 1.0},
        lessee="a-0",
        started_at=0.0,
        pid=0,
        memory_bytes=target.launch.memory_bytes,
        cpu=target.launch.cpu,
        weights={
            mount.name: tier
            for mount, tier in zip(target.launch.weights, ("dram", "nvme"), strict=False)
        },
        labels={
            "tenant": target.tenant,
            "environment": target.environment,
            "app": target.app,
            "function": target.function,
        },
    )


def snapshot_of(target: CallTarget) -> SnapshotInfo:
    """A proven snapshot of a target's revision."""
    return SnapshotInfo(
        id="sn-0123456789abcdef",
        revision=target.launch.revision,
        state=SnapshotState.READY,
        in_place=False,
        pages="eager",
        image_bytes=61_000_000,
        reason="",
        phases_ms={"quiesce": 1.0, "dump": 300.0, "publish": 5.0, "prove": 400.0},
        cold_ms=5400.0,
        restore_ms=120.0,
        created_at=1.0,
        last_used_at=1.0,
        restores=0,
        remote=False,
        identity={"kernel": "6"},
        labels=target.launch.labels,
    )
