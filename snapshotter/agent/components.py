"""Constructs the agent's components and connects them. No other logic."""

from __future__ import annotations

from pathlib import Path

from pilotlight.core.background_tasks import BackgroundTasks
from pilotlight.core.disk_floor import DiskFloor
from pilotlight.core.settings import Paths
from snapshotter.agent import snapshotting
from snapshotter.agent.agent import Agent, NodeFacts
from snapshotter.agent.dependencies import AgentDependencies
from snapshotter.agent.node import (
    Node,
    NodeBase,
    gpu_grants,
    gpu_holders,
    volumes_in_instances,
    volumes_in_slots,
)
from snapshotter.checkpointing.api import SnapshotApi
from snapshotter.checkpointing.uploads import SnapshotUploads
from snapshotter.events import Events
from snapshotter.gpus.grants import GpuGrants
from snapshotter.gpus.view import GpuView
from snapshotter.linux.cgroups import Cgroups
from snapshotter.linux.dns_servers import NetworkAccess
from snapshotter.linux.egress_policy import EVERYWHERE
from snapshotter.linux.slot_network import Network
from snapshotter.metrics import Metrics
from snapshotter.settings import SnapshotterSettings
from snapshotter.slots.allocator import SlotAllocator
from snapshotter.slots.instances import Instances
from snapshotter.slots.launch_plan import NodeFiles
from snapshotter.slots.logs import Logs
from snapshotter.slots.pool import SlotPool
from snapshotter.slots.weights import Weights
from snapshotter.snapshots.background_builder import BackgroundBuilder
from snapshotter.snapshots.components import SnapshotComponents
from snapshotter.snapshots.selector import SnapshotSelector
from snapshotter.starts.launcher import InstanceLauncher
from snapshotter.starts.node_capacity import NodeCapacity
from snapshotter.starts.prefork_pool import PreforkPool
from snapshotter.starts.starter import InstanceStarter
from snapshotter.starts.strategy import StartStrategy
from snapshotter.starts.teardown import Teardown
from snapshotter.starts.template_boot import TemplateBooter
from snapshotter.starts.templates import Templates
from snapshotter.starts.worker_boot import WorkerBooter


def assemble(
    paths: Paths,
    settings: SnapshotterSettings,
    parts: AgentDependencies,
    *,
    cgroups: Cgroups,
    network: Network,
    stock: SnapshotComponents | None,
    why_not: str,
) -> Node:
    """Construct all components. `network`: of functions. `stock`: None disables snapshots, for the
    reason `why_not`."""
    criu = None if stock is None else stock.kit.directory
    base = _base(paths, settings, parts, cgroups, network, criu=criu)
    restores = snapshotting.restores(base, settings, parts, stock) if stock is not None else None
    uploads = SnapshotUploads(
        snapshotting.upload_target(settings, stock.remote if stock is not None else None)
    )
    selector = snapshotting.selector(base, stock, restores, why_not, on_ready=uploads.want)
    environments = None
    if stock is not None and restores is not None and snapshotting.has_imports(settings, parts):
        environments = snapshotting.environment_starts(base, paths, stock, restores)
    workers = WorkerBooter(slots=base.slot_allocator, ends=base.ends, environments=environments)
    template_booter = _template_booter(base, workers, selector)
    room = NodeCapacity(
        memory_bytes=settings.node_memory_bytes(),
        dedicated_to=settings.dedicated_to,
        gpus=base.gpus,
    )
    checkpoints = dumps = None
    if stock is not None and restores is not None:
        dumps = snapshotting.dumps(base, settings, parts, stock, template_booter)
        checkpoints = snapshotting.checkpoints(
            base, stock, selector, dumps, snapshotting.validator(base, settings, restores)
        )
    builder = BackgroundBuilder(
        checkpoints,
        background_tasks=base.background_tasks,
        per_hour=settings.snapshot_builds_per_hour,
        delay_s=parts.build_delay_s,
    )
    imports = None
    if environments is not None and checkpoints is not None and dumps is not None:
        budget = snapshotting.import_budget(base, settings, parts, builder, room)
        imports = snapshotting.environment_builder(
            base, environments, checkpoints, selector, budget
        )
        workers.on_booted = dumps.on_booted = imports.on_booted
    snapshots = snapshotting.api(
        base, stock, checkpoints, selector=selector, builder=builder, room=room, imports=imports
    )
    strategy = _strategy(base, parts, template_booter, selector, builder)
    starter = _starter(base, template_booter=template_booter, strategy=strategy, room=room)
    gpu_view = GpuView(
        inventory=parts.gpus, holders=lambda: gpu_holders(base.instances), models=parts.weights
    )
    facts = NodeFacts(
        capabilities=lambda: parts.probe(cgroups), gpus=gpu_view, volumes=parts.volumes
    )
    _attach_volumes(base, parts)
    return Node(
        **vars(base),
        template_booter=template_booter,
        starter=starter,
        builder=builder,
        snapshots=snapshots,
        uploads=uploads,
        gpu_view=gpu_view,
        agent=_agent(base, parts, starter=starter, snapshots=snapshots, facts=facts),
        volumes=parts.volumes,
    )


def _attach_volumes(base: NodeBase, parts: AgentDependencies) -> None:
    if parts.volumes is not None:
        parts.volumes.attach(
            base.cgroups,
            in_slots=lambda: volumes_in_slots(base.slot_allocator),
            in_instances=lambda: volumes_in_instances(base.instances),
        )


def _strategy(
    base: NodeBase,
    parts: AgentDependencies,
    template_booter: TemplateBooter,
    selector: SnapshotSelector,
    builder: BackgroundBuilder,
) -> StartStrategy:
    return StartStrategy(
        template_booter=template_booter,
        templates=base.templates,
        selector=selector,
        builder=builder,
        ends=base.ends,
        weights=Weights(parts.weights),
    )


def _template_booter(
    base: NodeBase, workers: WorkerBooter, selector: SnapshotSelector
) -> TemplateBooter:
    return TemplateBooter(
        workers=workers,
        templates=base.templates,
        ends=base.ends,
        logs=base.logs,
        events=base.events,
        background_tasks=base.background_tasks,
        selector=selector,
        gpus=base.gpus,
    )


def _agent(
    base: NodeBase,
    parts: AgentDependencies,
    *,
    starter: InstanceStarter,
    snapshots: SnapshotApi,
    facts: NodeFacts,
) -> Agent:
    return Agent(
        starter=starter,
        instances=base.instances,
        templates=base.templates,
        images=parts.images,
        logs=base.logs,
        events=base.events,
        snapshots=snapshots,
        node=facts,
    )


def _starter(
    base: NodeBase,
    *,
    template_booter: TemplateBooter,
    strategy: StartStrategy,
    room: NodeCapacity,
) -> InstanceStarter:
    return InstanceStarter(
        slot_allocator=base.slot_allocator,
        template_booter=template_booter,
        ends=base.ends,
        instances=base.instances,
        strategy=strategy,
        starts=InstanceLauncher(
            ends=base.ends, prefork_pool=base.prefork_pool, cgroups=base.cgroups, logs=base.logs
        ),
        metrics=base.metrics,
        room=room,
    )


def _base(
    paths: Paths,
    settings: SnapshotterSettings,
    parts: AgentDependencies,
    cgroups: Cgroups,
    network: Network,
    *,
    criu: Path | None,
) -> NodeBase:
    logs = Logs(paths.home / "node" / "logs")
    slot_pool = SlotPool(
        paths.run / "slots",
        logs.directory,
        log_max_bytes=settings.log_max_bytes,
        groups=set(cgroups.bases.values()),
        namespaced=parts.namespaces,
        disk_floor_bytes=DiskFloor(logs.directory, parts.disk_floor_bytes).floor_bytes,
        usual=network,
        access=NetworkAccess(
            egress=EVERYWHERE if network is Network.HOST else settings.egress(),
            name_servers=parts.name_servers,
        ),
    )
    instances, events = Instances(), Events()
    templates = Templates(settings.template_memory_bytes, frozen_idle_s=settings.parked_idle_s)
    metrics, background_tasks = Metrics(), BackgroundTasks()
    slot_allocator = SlotAllocator(
        slot_pool=slot_pool,
        files=_node_files(paths, parts, criu),
        cgroups=cgroups,
        logs=logs,
        network=network,
        log_refused=settings.log_refused_calls,
        records_imports=snapshotting.has_imports(settings, parts),
    )
    prefork_pool = PreforkPool(
        cgroups=cgroups,
        templates=templates,
        background_tasks=background_tasks,
        per_template=settings.parked_per_template,
        idle_s=settings.parked_idle_s,
        budget_bytes=settings.template_memory_bytes,
    )
    ends = Teardown(
        slot_allocator=slot_allocator,
        instances=instances,
        templates=templates,
        prefork_pool=prefork_pool,
        logs=logs,
        events=events,
        metrics=metrics,
        background_tasks=background_tasks,
    )
    return NodeBase(
        cgroups=cgroups,
        logs=logs,
        slot_pool=slot_pool,
        instances=instances,
        templates=templates,
        events=events,
        metrics=metrics,
        background_tasks=background_tasks,
        slot_allocator=slot_allocator,
        prefork_pool=prefork_pool,
        ends=ends,
        gpus=GpuGrants(parts.gpus, lambda: gpu_grants(instances, slot_allocator)),
    )


def _node_files(paths: Paths, parts: AgentDependencies, criu: Path | None) -> NodeFiles:
    return NodeFiles(
        bundles=parts.bundles,
        images=parts.images,
        weights=parts.weights,
        runtime=parts.runtime,
        volumes=parts.volumes,
        platform=paths.for_functions,
        criu=criu,
        gpus=parts.device_layout,
    )
