"""Opens and closes the agent's components in the required order."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from pilotlight.core.disk_floor import DiskFloor
from pilotlight.core.metrics_server import MetricsAddress, MetricsServer, metrics_socket
from pilotlight.core.rpc import grant_group_access, serve_rpc
from pilotlight.core.settings import Paths
from snapshotter.agent import activator_api, controller_api
from snapshotter.agent.agent import Agent, describe
from snapshotter.agent.components import assemble
from snapshotter.agent.dependencies import AgentDependencies
from snapshotter.agent.node import Node
from snapshotter.checkpointing.startup import SnapshotsDisabled, open_components
from snapshotter.images.oci.container_images import images_of
from snapshotter.linux.cgroups import Cgroups
from snapshotter.linux.seccomp_log import FindLabels, SeccompLog
from snapshotter.linux.slot_network import Network, of_functions
from snapshotter.settings import SnapshotterSettings
from snapshotter.slots.launch_plan import RUNTIME_PACKAGES, BundleStore, ImageStore
from snapshotter.slots.log_pruning import LogPruner
from snapshotter.snapshots.components import SnapshotComponents
from snapshotter.starts import group_claims
from snapshotter.starts.group_claims import GroupClaim
from snapshotter.starts.recovery import reattach, sweep_groups
from snapshotter.volumes.disk_guard import VolumeDiskGuard

_log = logging.getLogger(__name__)
STOP_GRACE_S = 10.0
"""How long instances have to finish their calls when the agent shuts down."""
_PRUNE_INTERVAL_S = 60.0
"""Logs are few files of bounded size; a tenant with many instances writes some 100 MB in this
interval."""


def own_runtime() -> dict[str, Path]:
    """Directories of our own packages, found without importing them (`pilotlight` is above us).
    Raises ModuleNotFoundError."""
    found = {}
    for name in RUNTIME_PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError(
                f"package {name} is not installed beside the agent: install it, workers need it"
            )
        found[name] = Path(spec.submodule_search_locations[0]).resolve()
    return found


@contextlib.asynccontextmanager
async def running_agent(
    paths: Paths, settings: SnapshotterSettings, parts: AgentDependencies
) -> AsyncIterator[Agent]:
    """A serving agent. On a regular exit everything that it started is stopped; when it is killed
    everything keeps running.

    Startup order: the spawner before any thread; recovery of an earlier agent's slots before new
    work; the socket last. Shutdown is the reverse.
    """
    claim = await asyncio.to_thread(group_claims.claim, paths.run)
    try:
        async with _running_agent(paths, settings, parts, claim) as agent:
            yield agent
    finally:
        if claim is not None:
            claim.release()


@contextlib.asynccontextmanager
async def _running_agent(
    paths: Paths,
    settings: SnapshotterSettings,
    parts: AgentDependencies,
    claim: GroupClaim | None,
) -> AsyncIterator[Agent]:
    cgroups = await asyncio.to_thread(Cgroups.find, paths.run, reader=paths.activator_uid)
    if claim is not None:
        claim.record(cgroups.bases.values())
        removed = await asyncio.to_thread(group_claims.remove_abandoned)
        if removed:
            _log.info("cgroups.removed platforms=%d reason=their agents were killed", removed)
    if cgroups.why_not is not None:
        _log.warning("cgroups.off reason=%s fallback=RLIMIT_DATA", cgroups.why_not)
    (paths.run / "slots").mkdir(exist_ok=True, mode=0o700)
    grant_group_access(paths.run / "slots")
    async with _snapshot_components(paths, settings, parts) as (stock, why_not):
        requested = Network(settings.function_network) if parts.namespaces else Network.HOST
        network = await of_functions(requested)
        node = assemble(
            paths, settings, parts, cgroups=cgroups, network=network, stock=stock, why_not=why_not
        )
        await _recover(node, paths, parts, cgroups)
        await node.slot_pool.open()
        exposed = await _expose_metrics(node, paths, settings, parts)
        background = _start_background(node, paths, settings, parts)
        servers = await _serve(node.agent, paths, settings, key_file=parts.key_file)
        try:
            yield node.agent
        finally:
            for path, server in servers.items():
                server.close()
                path.unlink(missing_ok=True)
            for task in background:
                task.cancel()
            await asyncio.wait(background)
            await _close(node)
            # what background tasks of the parts had not removed yet, on a busy machine
            await asyncio.gather(*(cgroups.group(name).remove() for name in cgroups.names()))
            cgroups.remove_empty()
            for listening in exposed:
                listening.close()
            metrics_socket(paths, "snapshotter").unlink(missing_ok=True)


async def _recover(node: Node, paths: Paths, parts: AgentDependencies, cgroups: Cgroups) -> None:
    """Take over the slots of an earlier agent, and remove what is left of others."""
    await reattach(
        slot_pool=node.slot_pool,
        slot_allocator=node.slot_allocator,
        template_booter=node.template_booter,
        ends=node.ends,
        instances=node.instances,
    )
    occupied_slots = node.slot_allocator.occupied_slots
    parts.bundles.needed_by(
        lambda: {occupied.launch.bundle for occupied in occupied_slots.values()}
    )
    if parts.container_images is not None:
        parts.container_images.needed_by(
            lambda: images_of(occupied.launch for occupied in occupied_slots.values())
        )
    slots = [occupied.slot for occupied in occupied_slots.values()]
    await sweep_groups(cgroups, paths.run, slots, node.instances)


async def _expose_metrics(
    node: Node, paths: Paths, settings: SnapshotterSettings, parts: AgentDependencies
) -> list[asyncio.Server]:
    address = MetricsAddress(
        socket_path=metrics_socket(paths, "snapshotter"),
        listen=settings.metrics_listen,
        token_file=parts.metrics_token_file or paths.home / "metrics.token",
        setting="snapshotter.metrics_listen",
    )
    server = MetricsServer(registry=node.metrics.registry, refresh=node.refresh_metrics)
    return await server.serve(address)


def _start_background(
    node: Node, paths: Paths, settings: SnapshotterSettings, parts: AgentDependencies
) -> list[asyncio.Task[None]]:
    floor = DiskFloor(paths.home, parts.disk_floor_bytes)
    pruning = _prune_periodically(node, settings, parts.bundles, parts.images, floor)
    background = [
        asyncio.create_task(pruning, name="prune bundles and logs"),
        asyncio.create_task(node.snapshots.verify_all(), name="verify snapshots"),
        asyncio.create_task(node.uploads.run(), name="upload snapshots"),
        asyncio.create_task(node.gpu_view.run(), name="use of GPUs"),
    ]
    if node.volumes is not None:
        guard = VolumeDiskGuard(node.volumes, floor, end_users=node.end_users_of_volume)
        background.append(asyncio.create_task(guard.run(), name="disk of volumes"))
    if settings.log_refused_calls:
        watching = SeccompLog(_labels_by_group(node)).watch()
        background.append(asyncio.create_task(watching, name="refused system calls"))
    return background


def _labels_by_group(node: Node) -> FindLabels:
    """Finds the labels of a cgroup path: groups are named after slots and instances."""

    def find(groups: str) -> Mapping[str, str] | None:
        names = set(re.split(r"[/\n]", groups))
        instance = next((i for i in node.instances if i.info.id in names), None)
        occupied = next(
            (h for name, h in node.slot_allocator.occupied_slots.items() if name in names), None
        )
        if instance is not None:
            return instance.info.labels
        return None if occupied is None else occupied.launch.labels

    return find


async def _serve(
    agent: Agent, paths: Paths, settings: SnapshotterSettings, *, key_file: Path | None
) -> dict[Path, asyncio.Server]:
    """Open the sockets of root and activators, and of a controller with its own uid."""
    operations, uid_base = agent.operations(), settings.uid_base
    guests = {
        paths.socket("snapshotter"): activator_api.guest(
            agent, paths, key_file=key_file, uid_base=uid_base
        )
    }
    if (controller := controller_api.guest(operations, paths, uid_base=uid_base)) is not None:
        guests[paths.socket_for_controller("snapshotter")] = controller
    return {
        path: await serve_rpc(path, operations, describe, guest=guest)
        for path, guest in guests.items()
    }


async def _close(node: Node) -> None:
    """Close the components: snapshot builds first, because they use Templates and slots; then
    instances; then pending cleanup."""
    await node.snapshots.aclose()
    await node.builder.aclose()
    await node.starter.aclose(STOP_GRACE_S)
    await node.background_tasks.aclose()
    await node.slot_pool.aclose()


@contextlib.asynccontextmanager
async def _snapshot_components(
    paths: Paths, settings: SnapshotterSettings, parts: AgentDependencies
) -> AsyncIterator[tuple[SnapshotComponents | None, str]]:
    """The snapshot components, or None and the reason, which is logged once."""
    try:
        stock = await open_components(paths, settings, parts)
    except SnapshotsDisabled as e:
        _log.warning("snapshots.off reason=%s fallback=FORK,COLD", e)
        yield None, str(e)
        return
    try:
        yield stock, ""
    finally:
        if stock.remote is not None:
            await stock.remote.aclose()
        await stock.catalogue.aclose()


async def _prune_periodically(
    node: Node,
    settings: SnapshotterSettings,
    bundles: BundleStore,
    images: ImageStore,
    floor: DiskFloor,
) -> None:
    """Prune periodically. Data that can be rebuilt is deleted first."""
    while True:
        await bundles.make_room()
        alive = {*node.slot_allocator.occupied_slots, *(i.info.id for i in node.instances)}
        now = time.time()
        await asyncio.to_thread(
            images.prune_logs, keep_s=settings.log_keep_s, now=now, missing=floor.missing()
        )
        await asyncio.to_thread(
            LogPruner(node.logs.directory).prune,
            alive=alive,
            keep_s=settings.log_keep_s,
            total_bytes=settings.log_total_bytes,
            now=now,
            missing=floor.missing(),
        )
        await node.snapshots.expire(now)
        await asyncio.sleep(_PRUNE_INTERVAL_S)


def is_root() -> bool:
    """Whether slots may have namespaces and uids; the slot pool tests whether the machine allows
    it."""
    return os.geteuid() == 0
