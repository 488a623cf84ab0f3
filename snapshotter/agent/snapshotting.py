"""Constructs the components that make, choose, validate and restore snapshots."""

from __future__ import annotations

from collections.abc import Callable

from pilotlight.core.settings import Paths
from snapshotter.agent.dependencies import AgentDependencies
from snapshotter.agent.node import NodeBase
from snapshotter.checkpointing.api import SnapshotApi
from snapshotter.checkpointing.checkpoints import Checkpoints
from snapshotter.checkpointing.dumps import Dumps
from snapshotter.checkpointing.environment_builder import EnvironmentBuilder
from snapshotter.checkpointing.import_budget import DELAY_S as IMPORT_DELAY_S
from snapshotter.checkpointing.import_budget import ImportBudget
from snapshotter.checkpointing.import_comparison import ImportComparison
from snapshotter.checkpointing.requested_validation import RequestedValidations
from snapshotter.checkpointing.trial_restore import SnapshotValidator
from snapshotter.environments.records import ImportRecords
from snapshotter.environments.starts import EnvironmentStarts
from snapshotter.settings import SnapshotterSettings
from snapshotter.snapshots.background_builder import BackgroundBuilder
from snapshotter.snapshots.components import SnapshotComponents
from snapshotter.snapshots.predictions import Predictions
from snapshotter.snapshots.remote_copies import RemoteCopies
from snapshotter.snapshots.restores import Restores
from snapshotter.snapshots.selector import SnapshotSelector
from snapshotter.starts.node_capacity import NodeCapacity
from snapshotter.starts.template_boot import TemplateBooter

_PROOF_S = 30.0
"""Deadline of a snapshot validation on a loaded node; a function that starts slowly has its own
startup timeout."""


def has_imports(settings: SnapshotterSettings, parts: AgentDependencies) -> bool:
    """Whether there is IMPORT where snapshots are: unless it is switched off, but not in a cluster,
    whose functions run in pods."""
    is_cluster = settings.pods is not None or parts.approved_copies is not None
    return settings.environment_snapshots > 0 and not is_cluster


def selector(
    base: NodeBase,
    stock: SnapshotComponents | None,
    restores: Restores | None,
    why_not: str,
    *,
    on_ready: Callable[[str], None],
) -> SnapshotSelector:
    """Chooses the snapshot of a start."""
    return SnapshotSelector(
        stock,
        restores,
        why_not=why_not,
        events=base.events,
        metrics=base.metrics,
        predictions=Predictions(),
        on_ready=on_ready,
    )


def restores(
    base: NodeBase,
    settings: SnapshotterSettings,
    parts: AgentDependencies,
    stock: SnapshotComponents,
) -> Restores:
    """Restores workers into slots."""
    return Restores(
        stock=stock,
        slot_allocator=base.slot_allocator,
        devices=parts.devices,
        background_tasks=base.background_tasks,
        pages=settings.snapshot_pages,
    )


def environment_starts(
    base: NodeBase, paths: Paths, stock: SnapshotComponents, restores: Restores
) -> EnvironmentStarts:
    """Starts with an environment snapshot (IMPORT)."""
    return EnvironmentStarts(
        stock=stock,
        restores=restores,
        records=ImportRecords(paths.home / "node" / "imports.json"),
        metrics=base.metrics,
        limits_memory=base.cgroups.limits_memory,
    )


def dumps(
    base: NodeBase,
    settings: SnapshotterSettings,
    parts: AgentDependencies,
    stock: SnapshotComponents,
    template_booter: TemplateBooter,
) -> Dumps:
    """Dumps workers."""
    return Dumps(
        stock=stock,
        template_booter=template_booter,
        templates=base.templates,
        slot_allocator=base.slot_allocator,
        ends=base.ends,
        devices=parts.devices,
        has_templates=settings.pods is None and parts.approved_copies is None,
    )


def checkpoints(
    base: NodeBase,
    stock: SnapshotComponents,
    selector: SnapshotSelector,
    dumps: Dumps,
    proofs: SnapshotValidator,
) -> Checkpoints:
    """Makes snapshots and has them validated."""
    return Checkpoints(
        stock=stock,
        selector=selector,
        dumps=dumps,
        proofs=proofs,
        metrics=base.metrics,
        gpus=base.gpus,
    )


def validator(
    base: NodeBase, settings: SnapshotterSettings, restores: Restores
) -> SnapshotValidator:
    """Validates snapshots by restoring them."""
    return SnapshotValidator(
        restores=restores,
        slot_allocator=base.slot_allocator,
        ends=base.ends,
        ways=restore_modes(settings),
        deadline_s=_PROOF_S,
    )


def import_budget(
    base: NodeBase,
    settings: SnapshotterSettings,
    parts: AgentDependencies,
    builder: BackgroundBuilder,
    room: NodeCapacity,
) -> ImportBudget:
    """When environment snapshots may be made."""
    return ImportBudget(
        snapshots=settings.environment_snapshots,
        delay_s=min(IMPORT_DELAY_S, 2 * parts.build_delay_s),
        builder=builder,
        room=room,
        instances=base.instances,
        templates=base.templates,
    )


def environment_builder(
    base: NodeBase,
    environments: EnvironmentStarts,
    checkpoints: Checkpoints,
    selector: SnapshotSelector,
    budget: ImportBudget,
) -> EnvironmentBuilder:
    """Makes environment snapshots."""
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


def api(
    base: NodeBase,
    stock: SnapshotComponents | None,
    checkpoints: Checkpoints | None,
    *,
    selector: SnapshotSelector,
    builder: BackgroundBuilder,
    room: NodeCapacity,
    imports: EnvironmentBuilder | None,
) -> SnapshotApi:
    """The RPC operations of snapshots; None for each part that this node does not have."""
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


def upload_target(
    settings: SnapshotterSettings, remote: RemoteCopies | None
) -> RemoteCopies | None:
    """Where snapshots of this node are uploaded (`snapshotter.snapshot_uploads`)."""
    return remote if settings.snapshot_uploads else None


def restore_modes(settings: SnapshotterSettings) -> tuple[str, ...]:
    """The ways to restore memory that a validation tries (`snapshotter.snapshot_pages`)."""
    return ("eager", "lazy") if settings.snapshot_pages == "auto" else (settings.snapshot_pages,)
