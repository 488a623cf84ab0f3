"""Constructs the agent's components and connects them. No other logic."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pilotlight.core.background_tasks import BackgroundTasks
from pilotlight.core.disk_floor import DiskFloor
from pilotlight.core.settings import Paths
from snapshotter.agent.agent import Agent, NodeFacts
from snapshotter.checkpointing.api import SnapshotApi
from snapshotter.checkpointing.checkpoints import Checkpoints
from snapshotter.checkpointing.dumps import Dumps
from snapshotter.checkpointing.environment_builder import EnvironmentBuilder
from snapshotter.checkpointing.import_budget import DELAY_S as IMPORT_DELAY_S
from snapshotter.checkpointing.import_budget import ImportBudget
from snapshotter.checkpointing.import_comparison import ImportComparison
from snapshotter.checkpointing.requested_validation import RequestedValidations
from snapshotter.checkpointing.trial_restore import SnapshotValidator
from snapshotter.checkpointing.uploads import SnapshotUploads
from snapshotter.cuda.devices import Devices, NoDevices
from snapshotter.environments.records import ImportRecords
from snapshotter.environments.starts import EnvironmentStarts
from snapshotter.events import Events
from snapshotter.gpus.grants import GpuGrants
from snapshotter.gpus.inventory import GpuInventory
from snapshotter.gpus.view import GpuHolder, GpuView
from snapshotter.images.oci.container_images import ContainerImages
from snapshotter.linux.cgroups import Cgroups
from snapshotter.linux.dns_servers import DnsServers, NetworkAccess
from snapshotter.linux.egress_policy import EVERYWHERE
from snapshotter.linux.slot_network import Network
from snapshotter.metrics import Metrics
from snapshotter.node_reports import ApprovedCopy
from snapshotter.settings import SnapshotterSettings
from snapshotter.slots.allocator import SlotAllocator
from snapshotter.slots.instances import Instances
from snapshotter.slots.launch_plan import BundleStore, ImageStore, NodeFiles, WeightSource
from snapshotter.slots.logs import Logs
from snapshotter.slots.pool import SlotPool
from snapshotter.slots.slot_devices import DeviceLayout
from snapshotter.slots.weights import Weights
from snapshotter.snapshots.background_builder import DELAY_S, BackgroundBuilder
from snapshotter.snapshots.components import SnapshotComponents
from snapshotter.snapshots.predictions import Predictions
from snapshotter.snapshots.remote_copies import RemoteCopies
from snapshotter.snapshots.restores import Restores
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
from snapshotter.types import GpuGrant, InstanceState
from snapshotter.volumes.node_volumes import NodeVolumes, VolumeKey, volume_keys

_PROOF_S = 30.0
"""Deadline of a snapshot validation on a loaded node; a function that starts slowly has its own
startup timeout."""
_LIVE = (InstanceState.READY, InstanceState.ASLEEP, InstanceState.DRAINING)


@dataclass(frozen=True, kw_only=True)
class AgentComponents:
    """External dependencies of the agent.

    Attributes:
        runtime: package name → directory, for the slots' `runtime/`.
        volumes: None: this node has none, as in a cluster.
        probe: body of `capabilities`, given the detected cgroups.
        namespaces: False forces slots without namespaces, as for an agent without root.
        criu_cache: directory of the cached self-test result; None: below the home.
        gpus: the node's GPUs.
        devices: saves and restores device state of processes.
        build_delay_s: delay between a COLD start and the snapshot that it causes.
        s3_client: S3 client for copies of snapshots; values as in PlatformSettings.
        key_file: the platform's key; None: <home>/platform.key.
        metrics_token_file: bearer token of metrics over TCP; None: <home>/metrics.token.
        disk_floor_bytes: free disk reserved for journals; as `platform.disk_floor_bytes`.
        name_servers: of slots with their own network.
        device_layout: where the device nodes and driver files of GPUs are.
        copies_at: where copies of snapshots are unless `snapshotter.snapshot_store` says so; None:
            nowhere.
        container_images: of functions of a cluster; None: this node pulls none.
        approved_copies: of a cluster: the copies that its controller recorded, by identity; None:
            there is no such controller (`RemoteCopies.approved`).
    """

    bundles: BundleStore
    images: ImageStore
    weights: WeightSource
    runtime: Mapping[str, Path]
    probe: Callable[[Cgroups], Awaitable[Mapping[str, Any]]]
    namespaces: bool
    volumes: NodeVolumes | None = None
    criu_cache: Path | None = None
    gpus: GpuInventory = field(default_factory=GpuInventory)
    devices: Devices = field(default_factory=NoDevices)
    build_delay_s: float = DELAY_S
    s3_client: str = "auto"
    key_file: Path | None = None
    metrics_token_file: Path | None = None
    disk_floor_bytes: int | None = 0
    name_servers: DnsServers = field(default_factory=DnsServers)
    device_layout: DeviceLayout = field(default_factory=DeviceLayout)
    copies_at: str | None = None
    approved_copies: dict[str, ApprovedCopy] | None = None
    container_images: ContainerImages | None = None


@dataclass(frozen=True, kw_only=True)
class _Base:
    """Components that the others depend on."""

    cgroups: Cgroups
    logs: Logs
    slot_pool: SlotPool
    instances: Instances
    templates: Templates
    events: Events
    metrics: Metrics
    background_tasks: BackgroundTasks
    slot_allocator: SlotAllocator
    prefork_pool: PreforkPool
    ends: Teardown
    gpus: GpuGrants


@dataclass(frozen=True, kw_only=True)
class Node(_Base):
    """The components that are opened, called and closed by name."""

    template_booter: TemplateBooter
    starter: InstanceStarter
    builder: BackgroundBuilder
    snapshots: SnapshotApi
    uploads: SnapshotUploads
    gpu_view: GpuView
    agent: Agent
    volumes: NodeVolumes | None

    def end_users_of_volume(self, key: VolumeKey) -> int:
        """End all processes that have a volume mounted; returns the number of slots and
        instances."""
        groups = [
            instance.group
            for instance in self.instances
            if instance.group is not None
            and instance.occupied is not None
            and key in volume_keys(instance.occupied.launch)
        ]
        groups += [
            occupied.group
            for occupied in self.slot_allocator.occupied_slots.values()
            if key in volume_keys(occupied.launch)
        ]
        for group in groups:
            group.kill()
        return len(groups)

    def refresh_metrics(self) -> None:
        """Set the gauges to the current state."""
        self.metrics.observe(
            by_state=self.instances.by_state(),
            templates=len(list(self.templates)),
            template_pss_bytes=self.templates.pss_bytes(),
            parked=self.templates.parked(),
        )
        self.metrics.gpus.observe(self.gpus.count_by_kind(), self.gpus.fragmentation())
        self.metrics.gpus.observe_use(self.gpu_view.now())
        self.snapshots.observe()


def assemble(
    paths: Paths,
    settings: SnapshotterSettings,
    parts: AgentComponents,
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
    restores = _restores(base, settings, parts, stock) if stock is not None else None
    uploads = SnapshotUploads(upload_target(settings, stock.remote if stock is not None else None))
    selector = _selector(base, stock, restores, why_not, on_ready=uploads.want)
    environments = None
    if stock is not None and restores is not None and has_imports(settings, parts):
        environments = _environment_starts(base, paths, stock, restores)
    workers = WorkerBooter(slots=base.slot_allocator, ends=base.ends, environments=environments)
    template_booter = _template_booter(base, workers, selector)
    room = NodeCapacity(
        memory_bytes=settings.node_memory_bytes(),
        dedicated_to=settings.dedicated_to,
        gpus=base.gpus,
    )
    checkpoints = dumps = None
    if stock is not None and restores is not None:
        dumps = _dumps(base, settings, parts, stock, template_booter)
        checkpoints = _checkpoints(base, stock, selector, dumps, _proofs(base, settings, restores))
    builder = BackgroundBuilder(
        checkpoints,
        background_tasks=base.background_tasks,
        per_hour=settings.snapshot_builds_per_hour,
        delay_s=parts.build_delay_s,
    )
    imports = None
    if environments is not None and checkpoints is not None and dumps is not None:
        budget = _import_budget(base, settings, parts, builder, room)
        imports = _environment_builder(base, environments, checkpoints, selector, budget)
        workers.on_booted = dumps.on_booted = imports.on_booted
    snapshots = _snapshots(
        base, stock, checkpoints, selector=selector, builder=builder, room=room, imports=imports
    )
    strategy = _strategy(base, parts, template_booter, selector, builder)
    starter = _starter(base, template_booter=template_booter, strategy=strategy, room=room)
    gpu_view = GpuView(
        inventory=parts.gpus, holders=lambda: _gpu_users(base.instances), models=parts.weights
    )
    facts = NodeFacts(
        capabilities=lambda: parts.probe(cgroups), gpus=gpu_view, volumes=parts.volumes
    )
    if parts.volumes is not None:
        parts.volumes.attach(
            cgroups,
            in_slots=lambda: _volumes_in_slots(base.slot_allocator),
            in_instances=lambda: _volumes_in_instances(base.instances),
        )
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


def _strategy(
    base: _Base,
    parts: AgentComponents,
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
    base: _Base, workers: WorkerBooter, selector: SnapshotSelector
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


def _checkpoints(
    base: _Base,
    stock: SnapshotComponents,
    selector: SnapshotSelector,
    dumps: Dumps,
    proofs: SnapshotValidator,
) -> Checkpoints:
    return Checkpoints(
        stock=stock,
        selector=selector,
        dumps=dumps,
        proofs=proofs,
        metrics=base.metrics,
        gpus=base.gpus,
    )


def _environment_starts(
    base: _Base, paths: Paths, stock: SnapshotComponents, restores: Restores
) -> EnvironmentStarts:
    return EnvironmentStarts(
        stock=stock,
        restores=restores,
        records=ImportRecords(paths.home / "node" / "imports.json"),
        metrics=base.metrics,
        limits_memory=base.cgroups.limits_memory,
    )


def _import_budget(
    base: _Base,
    settings: SnapshotterSettings,
    parts: AgentComponents,
    builder: BackgroundBuilder,
    room: NodeCapacity,
) -> ImportBudget:
    return ImportBudget(
        snapshots=settings.environment_snapshots,
        delay_s=min(IMPORT_DELAY_S, 2 * parts.build_delay_s),
        builder=builder,
        room=room,
        instances=base.instances,
        templates=base.templates,
    )


def _environment_builder(
    base: _Base,
    environments: EnvironmentStarts,
    checkpoints: Checkpoints,
    selector: SnapshotSelector,
    budget: ImportBudget,
) -> EnvironmentBuilder:
    return EnvironmentBuilder(
        environments=environments,
        checkpoints=checkpoints,
        selector=selector,
        comparison=ImportComparison(
            environments=environments, slots=base.slot_allocator, ends=base.ends
        ),
        ends=base.ends,
        budget=budget,
        events=base.events,
    )


def _agent(
    base: _Base,
    parts: AgentComponents,
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


def _snapshots(
    base: _Base,
    stock: SnapshotComponents | None,
    checkpoints: Checkpoints | None,
    *,
    selector: SnapshotSelector,
    builder: BackgroundBuilder,
    room: NodeCapacity,
    imports: EnvironmentBuilder | None,
) -> SnapshotApi:
    asked = None
    if checkpoints is not None:
        asked = RequestedValidations(checkpoints, instances=base.instances, room=room)
    return SnapshotApi(
        stock=stock,
        checkpoints=checkpoints,
        asked=asked,
        selector=selector,
        background_tasks=base.background_tasks,
        metrics=base.metrics,
        builder=builder,
        environments=imports,
    )


def has_imports(settings: SnapshotterSettings, parts: AgentComponents) -> bool:
    """Whether there is IMPORT where snapshots are: unless it is switched off, but not in a cluster,
    whose functions run in pods."""
    is_cluster = settings.pods is not None or parts.approved_copies is not None
    return settings.environment_snapshots > 0 and not is_cluster


def _selector(
    base: _Base,
    stock: SnapshotComponents | None,
    restores: Restores | None,
    why_not: str,
    *,
    on_ready: Callable[[str], None],
) -> SnapshotSelector:
    return SnapshotSelector(
        stock,
        restores,
        why_not=why_not,
        events=base.events,
        metrics=base.metrics,
        predictions=Predictions(),
        on_ready=on_ready,
    )


def _starter(
    base: _Base,
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


def _dumps(
    base: _Base,
    settings: SnapshotterSettings,
    parts: AgentComponents,
    stock: SnapshotComponents,
    template_booter: TemplateBooter,
) -> Dumps:
    return Dumps(
        stock=stock,
        template_booter=template_booter,
        templates=base.templates,
        slot_allocator=base.slot_allocator,
        ends=base.ends,
        devices=parts.devices,
        has_templates=settings.pods is None and parts.approved_copies is None,
    )


def _base(
    paths: Paths,
    settings: SnapshotterSettings,
    parts: AgentComponents,
    cgroups: Cgroups,
    network: Network,
    *,
    criu: Path | None,
) -> _Base:
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
        records_imports=has_imports(settings, parts),
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
    return _Base(
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
        gpus=GpuGrants(parts.gpus, lambda: _gpu_holders(instances, slot_allocator)),
    )


def _gpu_holders(instances: Instances, slot_allocator: SlotAllocator) -> Iterator[GpuGrant | None]:
    yield from (instance.info.gpus for instance in instances)
    yield from (occupied.gpus for occupied in slot_allocator.occupied_slots.values())


def _volumes_in_slots(slot_allocator: SlotAllocator) -> set[VolumeKey]:
    return {
        key
        for occupied in slot_allocator.occupied_slots.values()
        if occupied.volumes or not occupied.is_booting
        for key in volume_keys(occupied.launch)
    }


def _volumes_in_instances(instances: Instances) -> set[VolumeKey]:
    return {
        key
        for instance in instances
        if instance.occupied is not None and instance.info.state in _LIVE
        for key in volume_keys(instance.occupied.launch)
    }


def _gpu_users(instances: Instances) -> Iterator[GpuHolder]:
    for instance in instances:
        if instance.info.gpus is not None:
            launch = instance.occupied.launch if instance.occupied is not None else None
            yield GpuHolder(
                instance=instance.info.id,
                labels=instance.info.labels,
                state=instance.info.state,
                grant=instance.info.gpus,
                manifests=tuple(w.manifest for w in launch.weights) if launch is not None else (),
            )


def _node_files(paths: Paths, parts: AgentComponents, criu: Path | None) -> NodeFiles:
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


def _restores(
    base: _Base, settings: SnapshotterSettings, parts: AgentComponents, stock: SnapshotComponents
) -> Restores:
    pages = settings.snapshot_pages
    return Restores(
        stock=stock,
        slot_allocator=base.slot_allocator,
        devices=parts.devices,
        background_tasks=base.background_tasks,
        pages=pages,
    )


def _proofs(base: _Base, settings: SnapshotterSettings, restores: Restores) -> SnapshotValidator:
    return SnapshotValidator(
        restores=restores,
        slot_allocator=base.slot_allocator,
        ends=base.ends,
        ways=restore_modes(settings),
        deadline_s=_PROOF_S,
    )


def upload_target(
    settings: SnapshotterSettings, remote: RemoteCopies | None
) -> RemoteCopies | None:
    """Where snapshots of this node are uploaded (`snapshotter.snapshot_uploads`)."""
    return remote if settings.snapshot_uploads else None


def restore_modes(settings: SnapshotterSettings) -> tuple[str, ...]:
    """The ways to restore memory that a validation tries (`snapshotter.snapshot_pages`)."""
    return ("eager", "lazy") if settings.snapshot_pages == "auto" else (settings.snapshot_pages,)
