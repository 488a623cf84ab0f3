"""Starts the agent's services for a cluster: serving function pods and passing on their calls, and
reporting the node to the controller."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from pilotlight.core.background_tasks import cancel_all
from pilotlight.core.settings import Paths, PlatformSettings, SettingsInvalid
from pilotlight.core.transport.endpoint import Endpoint, TlsCredentials, controller_endpoint
from snapshotter.agent import node_report
from snapshotter.agent.launch_signature import LaunchSigner
from snapshotter.checkpointing.api import SnapshotApi
from snapshotter.checkpointing.controller_orders import ControllerOrders
from snapshotter.cuda.devices import Devices
from snapshotter.cuda.gpu_usage import cuda_node
from snapshotter.cuda.memory import NvidiaSmi
from snapshotter.engines import Engines
from snapshotter.gpus.view import GpuView
from snapshotter.images.oci.container_images import ContainerImages, images_of
from snapshotter.pods import tenant_listeners
from snapshotter.pods.activator_search import ActivatorSearch
from snapshotter.pods.entry.processes import EntryProcesses, PodMounts
from snapshotter.pods.pod_calls import PodCalls
from snapshotter.pods.promotions import Promotions
from snapshotter.pods.restoring import PodRestores
from snapshotter.pods.tenant_listeners import Tenants
from snapshotter.slots.launch_plan import BundleStore
from weight_cache.client import WeightCacheClient


@contextlib.asynccontextmanager
async def open_services(
    root: str | None,
    platform: PlatformSettings,
    paths: Paths,
    *,
    bundles: BundleStore,
    weights: WeightCacheClient,
    snapshots: SnapshotApi,
    gpus: GpuView,
    devices: Devices,
    runtime: Mapping[str, Path],
    environ: Mapping[str, str],
    restores: bool = False,
    container_images: ContainerImages | None = None,
    engines: Engines | None = None,
    activators: str | None = None,
) -> AsyncIterator[Tenants | None]:
    """Serve while the context lasts; yields None without a cluster (`root`, `snapshotter.pods`, is
    None). `activators`: `snapshotter.activators`. Raises SettingsInvalid, OSError."""
    if root is None:
        yield None
        return
    key_file = Path(platform.key_file) if platform.key_file else paths.home / "platform.key"
    token = node_report.platform_token(key_file)
    grants = LaunchSigner.of_raw(node_report.raw_key(key_file))
    controller = controller_endpoint(platform, paths)
    processes = EntryProcesses()
    into_pods: PodRestores | None = None
    if restores:
        into_pods = PodRestores(
            snapshots,
            processes=processes,
            runtime=runtime,
            directory=paths.home / "node" / "pods",
            devices=devices,
            gpus=gpus.inventory.devices,
            container_images=container_images,
        )
    async with (
        contextlib.aclosing(processes),
        _closing(container_images, into_pods),  # which waits for a pull
        contextlib.aclosing(NvidiaSmi(environ)) as memory,
        _calls(activators, platform) as calls,
        contextlib.aclosing(ControllerOrders(snapshots)) as orders,
        tenant_listeners.open_tenants(
            Path(root),
            bundles=bundles,
            weights=weights,
            memory=memory,
            restores=into_pods,
            grants=grants,
            calls=calls,
            promotions=Promotions(paths.home / "node" / "promoted"),
            mounts=PodMounts(processes),
        ) as serving,
    ):
        if container_images is not None:
            container_images.needed_by(lambda: images_of(serving.launches()))
        reporter = node_report.Reporter(
            controller,
            token,
            node=node_report.node_name(environ),
            version=importlib.metadata.version("pilotlight"),
            weights=weights,
            snapshots=orders,
            pods=lambda: _pods(serving, container_images, engines if restores else None),
            gpus=node_report.GpuReaders(memory=memory if cuda_node().gpus else None, uses=gpus.now),
        )
        gpus.pods = lambda: [
            holder for session in serving.sessions() if (holder := session.gpu_holder()) is not None
        ]
        await processes.begin()  # an interpreter's start that no pod waits for
        async with contextlib.aclosing(reporter):
            reporting = asyncio.create_task(reporter.run(), name="report this node")
            try:
                yield serving
            finally:
                await cancel_all([reporting])


def _pods(
    serving: Tenants, container_images: ContainerImages | None, engines: Engines | None
) -> node_report.NodePods:
    """What the node says of its pods, and of what it can show them."""
    return node_report.NodePods(
        count=len(serving.sessions()),
        tenants=serving.tenants(),
        images=container_images.present() if container_images is not None else (),
        engines=engines.usable() if engines is not None else (),
    )


@contextlib.asynccontextmanager
async def _closing(*held: PodRestores | ContainerImages | None) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for one in held:
            if one is not None:
                await one.aclose()


@contextlib.asynccontextmanager
async def _calls(
    activators: str | None, platform: PlatformSettings
) -> AsyncIterator[PodCalls | None]:
    """Connections for calls of functions in pods. Raises SettingsInvalid."""
    if activators is None:
        yield None
        return
    try:
        endpoint = Endpoint.parse(activators, TlsCredentials.of(platform))
    except ValueError as e:
        raise SettingsInvalid(f"snapshotter.activators = {e}") from e
    async with contextlib.aclosing(PodCalls(ActivatorSearch(endpoint))) as calls:
        yield calls
