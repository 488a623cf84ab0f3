"""The agent's parts put together. Nothing here does anything: who is given whom."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snapshotter.agent import Agent
from snapshotter.boots import Boots
from snapshotter.cgroups import Cgroups
from snapshotter.cuda.devices import Devices, NoDevices
from snapshotter.egress import EVERYWHERE
from snapshotter.ends import Ends
from snapshotter.errands import Errands
from snapshotter.events import Events
from snapshotter.housing import Housekeeper
from snapshotter.instances import Instances
from snapshotter.ladder import Ladder
from snapshotter.launch import BundleStore, ImageStore, WeightSource
from snapshotter.logs import Logs
from snapshotter.metrics import Metrics
from snapshotter.name_servers import NameServers
from snapshotter.network import Network
from snapshotter.nursery import Nursery
from snapshotter.parking import Parking
from snapshotter.room import Room
from snapshotter.rungs import Rungs
from snapshotter.settings import SnapshotterSettings
from snapshotter.snapshots.asked import AskedProofs
from snapshotter.snapshots.builder import DELAY_S, Builder
from snapshotter.snapshots.checkpoints import Checkpoints
from snapshotter.snapshots.desk import Snapshots
from snapshotter.snapshots.dumps import Dumps
from snapshotter.snapshots.predictions import Predictions
from snapshotter.snapshots.proofs import Proofs
from snapshotter.snapshots.restores import Restores
from snapshotter.snapshots.shelf import Shelf
from snapshotter.snapshots.stock import Stock
from snapshotter.starts import Starts
from snapshotter.templates import Templates
from snapshotter.weights import Weights
from weight_cache.disk import DiskFloor
from weight_cache.settings import Paths

_PROOF_S = 30.0
"""A proof on a node under load; a function that starts slowly has its own startup timeout."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the agent is made of that others write.

    Attributes:
        runtime: package name → directory, for the slots' `runtime/`.
        probe: body of `capabilities`, given the cgroups that were found.
        namespaces: False forces plain slots, as for an agent without root.
        criu_cache: where the self test's answer is kept; None: below the home.
        gpus: rows of `capabilities()`.
        devices: saves and brings back what processes hold on them.
        build_delay_s: between a COLD start and the snapshot that is made because of it.
        s3_client: who speaks S3 where copies of snapshots go there; see PlatformSettings.
        key_file: the platform's key; None: <home>/platform.key.
        metrics_token_file: bearer token of metrics over TCP; None: <home>/metrics.token.
        disk_floor_bytes: free disk that only journals may use; as `platform.disk_floor_bytes`.
        name_servers: of slots with a network of their own.
    """

    bundles: BundleStore
    images: ImageStore
    weights: WeightSource
    runtime: Mapping[str, Path]
    probe: Callable[[Cgroups], Awaitable[Mapping[str, Any]]]
    namespaces: bool
    criu_cache: Path | None = None
    gpus: tuple[Mapping[str, Any], ...] = ()
    devices: Devices = field(default_factory=NoDevices)
    build_delay_s: float = DELAY_S
    s3_client: str = "auto"
    key_file: Path | None = None
    metrics_token_file: Path | None = None
    disk_floor_bytes: int | None = 0
    name_servers: NameServers = field(default_factory=NameServers)


@dataclass(frozen=True, kw_only=True)
class Node:
    """What has to be opened, asked and closed."""

    nursery: Nursery
    logs: Logs
    housekeeper: Housekeeper
    instances: Instances
    templates: Templates
    boots: Boots
    ends: Ends
    ladder: Ladder
    errands: Errands
    metrics: Metrics
    builder: Builder
    snapshots: Snapshots
    agent: Agent

    def refresh_metrics(self) -> None:
        """Set the gauges to what there is now."""
        self.metrics.observe(
            by_state=self.instances.by_state(),
            templates=len(list(self.templates)),
            template_pss_bytes=self.templates.pss_bytes(),
            parked=self.templates.parked(),
        )
        self.snapshots.observe()


@dataclass(frozen=True, kw_only=True)
class _Base:
    """What everything else stands on."""

    cgroups: Cgroups
    logs: Logs
    nursery: Nursery
    instances: Instances
    templates: Templates
    events: Events
    metrics: Metrics
    errands: Errands
    housekeeper: Housekeeper
    parking: Parking
    ends: Ends


def assemble(
    paths: Paths, settings: SnapshotterSettings, parts: Parts, *, cgroups: Cgroups, network: Network, stock: Stock | None, why_not: str
) -> Node:
    """All of it; `network`: of functions; `stock` None: without snapshots, for the reason `why_not`."""
    base = _base(paths, settings, parts, cgroups, network, criu=None if stock is None else stock.kit.directory)
    restores = _restores(base, settings, parts, stock) if stock is not None else None
    shelf = Shelf(stock, restores, why_not=why_not, events=base.events, metrics=base.metrics, predictions=Predictions())
    boots = Boots(
        housekeeper=base.housekeeper,
        templates=base.templates,
        ends=base.ends,
        logs=base.logs,
        events=base.events,
        errands=base.errands,
        shelf=shelf,
        budget_bytes=settings.template_memory_bytes,
    )
    room = Room(
        memory_bytes=settings.node_memory_bytes(),
        dedicated_to=settings.dedicated_to,
        gpus=tuple(str(row["name"]) for row in parts.gpus),
    )
    checkpoints = asked = None
    if stock is not None and restores is not None:
        dumps = _dumps(base, parts, stock, boots)
        proofs = _proofs(base, settings, restores)
        checkpoints = Checkpoints(stock=stock, shelf=shelf, dumps=dumps, proofs=proofs, metrics=base.metrics)
        asked = AskedProofs(checkpoints, instances=base.instances, room=room)
    builder = Builder(checkpoints, errands=base.errands, per_hour=settings.snapshot_builds_per_hour, delay_s=parts.build_delay_s)
    snapshots = Snapshots(
        stock=stock, checkpoints=checkpoints, asked=asked, shelf=shelf, errands=base.errands, metrics=base.metrics, want=builder.want
    )
    ladder = Ladder(
        housekeeper=base.housekeeper,
        boots=boots,
        ends=base.ends,
        instances=base.instances,
        templates=base.templates,
        rungs=Rungs(boots=boots, templates=base.templates, shelf=shelf, builder=builder, ends=base.ends, weights=Weights(parts.weights)),
        starts=Starts(ends=base.ends, parking=base.parking, cgroups=cgroups, logs=base.logs),
        logs=base.logs,
        metrics=base.metrics,
        room=room,
    )
    agent = Agent(
        ladder=ladder,
        instances=base.instances,
        templates=base.templates,
        images=parts.images,
        logs=base.logs,
        events=base.events,
        snapshots=snapshots,
        probe=lambda: parts.probe(cgroups),
    )
    return Node(
        nursery=base.nursery,
        logs=base.logs,
        housekeeper=base.housekeeper,
        instances=base.instances,
        templates=base.templates,
        boots=boots,
        ends=base.ends,
        ladder=ladder,
        errands=base.errands,
        metrics=base.metrics,
        builder=builder,
        snapshots=snapshots,
        agent=agent,
    )


def _dumps(base: _Base, parts: Parts, stock: Stock, boots: Boots) -> Dumps:
    return Dumps(stock=stock, boots=boots, templates=base.templates, housekeeper=base.housekeeper, ends=base.ends, devices=parts.devices)


def _base(paths: Paths, settings: SnapshotterSettings, parts: Parts, cgroups: Cgroups, network: Network, *, criu: Path | None) -> _Base:
    logs = Logs(paths.home / "node" / "logs")
    nursery = Nursery(
        paths.run / "slots",
        logs.directory,
        log_max_bytes=settings.log_max_bytes,
        groups=set(cgroups.bases.values()),
        namespaced=parts.namespaces,
        disk_floor_bytes=DiskFloor(logs.directory, parts.disk_floor_bytes).floor_bytes,
        egress=EVERYWHERE if network is Network.HOST else settings.egress(),
        usual=network,
        servers=parts.name_servers,
    )
    instances, templates, events, metrics, errands = Instances(), Templates(), Events(), Metrics(), Errands()
    housekeeper = Housekeeper(
        nursery=nursery,
        bundles=parts.bundles,
        images=parts.images,
        weights=parts.weights,
        cgroups=cgroups,
        logs=logs,
        runtime=parts.runtime,
        network=network,
        platform=paths.for_functions,
        log_refused=settings.log_refused_calls,
        criu=criu,
    )
    parking = Parking(
        cgroups=cgroups,
        templates=templates,
        errands=errands,
        per_template=settings.parked_per_template,
        idle_s=settings.parked_idle_s,
        budget_bytes=settings.template_memory_bytes,
    )
    ends = Ends(
        housekeeper=housekeeper,
        instances=instances,
        templates=templates,
        parking=parking,
        logs=logs,
        events=events,
        metrics=metrics,
        errands=errands,
    )
    return _Base(
        cgroups=cgroups,
        logs=logs,
        nursery=nursery,
        instances=instances,
        templates=templates,
        events=events,
        metrics=metrics,
        errands=errands,
        housekeeper=housekeeper,
        parking=parking,
        ends=ends,
    )


def _restores(base: _Base, settings: SnapshotterSettings, parts: Parts, stock: Stock) -> Restores:
    pages = settings.snapshot_pages
    return Restores(stock=stock, housekeeper=base.housekeeper, devices=parts.devices, errands=base.errands, pages=pages)


def _proofs(base: _Base, settings: SnapshotterSettings, restores: Restores) -> Proofs:
    ways = ("eager", "lazy") if settings.snapshot_pages == "auto" else (settings.snapshot_pages,)
    return Proofs(restores=restores, housekeeper=base.housekeeper, ends=base.ends, ways=ways, deadline_s=_PROOF_S)
