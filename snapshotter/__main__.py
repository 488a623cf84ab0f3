"""Entry point of the node agent: `python -m snapshotter --config platform.yaml --ready-fd N`."""

from __future__ import annotations

from pilotlight.core.startup import import_gc

# isort: split
import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from pilotlight.core import logging_config, pid_file
from pilotlight.core.disk_floor import DiskFloor
from pilotlight.core.metrics_server import metrics_token_file
from pilotlight.core.object_store import ObjectStore, blob_store
from pilotlight.core.settings import Paths, PlatformSettings, SettingsInvalid, load_section
from pilotlight.core.transport.endpoint import Endpoint
from snapshotter.agent import capabilities
from snapshotter.agent.app import is_root, own_runtime, running_agent
from snapshotter.agent.dependencies import AgentDependencies
from snapshotter.agent.node_report import platform_token
from snapshotter.cuda.checkpoint_sequence import CudaDevices
from snapshotter.cuda.devices import NoDevices
from snapshotter.cuda.driver import CudaDriver
from snapshotter.cuda.driver_discovery import find_driver
from snapshotter.cuda.gpu_usage import cuda_node
from snapshotter.cuda.host import ThisMachine
from snapshotter.engines import Engines
from snapshotter.errors import SnapshotterError
from snapshotter.gpus.inventory import GpuInventory, read_inventory
from snapshotter.images.build_limits import BuildLimits
from snapshotter.images.build_network import BuildNetwork, BuildNetworkPolicy
from snapshotter.images.code_bundles import Bundles
from snapshotter.images.images import Images, runtime_requirements
from snapshotter.images.oci.container_images import ContainerImages
from snapshotter.linux.cgroups import Cgroups
from snapshotter.linux.dns_servers import DnsServers, NetworkAccess
from snapshotter.linux.slot_network import Network
from snapshotter.pods import serving
from snapshotter.settings import SnapshotterSettings
from snapshotter.slots.slot_devices import DeviceLayout
from snapshotter.volumes.heads import VolumeHeads
from snapshotter.volumes.node_volumes import NodeVolumes, StoreAddress
from weight_cache.client import WeightCacheClient

import_gc.imported()


def main() -> int:
    """Run until SIGTERM or SIGINT. Returns 2 for invalid settings, 1 for another failure."""
    os.umask(0o077)  # files are private unless a mode is set explicitly
    arguments = _arguments()
    logging_config.configure_logging("%(asctime)s snapshotter %(levelname)s %(message)s")
    # httpx logs every node report at INFO
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        platform = load_section(PlatformSettings, "platform", arguments.config)
        settings = load_section(SnapshotterSettings, "snapshotter", arguments.config)
        settings.check_uids(platform)
        settings.check_fleet(platform)
        paths = Paths.of(platform, os.environ).make()
        blobs = blob_store(platform, paths)
    except SettingsInvalid as e:
        print(e, file=sys.stderr)
        return 2
    recorded = paths.run / "snapshotter.pid"
    pid_file.write(recorded, os.getpid())
    try:
        asyncio.run(_serve(paths, settings, blobs, arguments, platform=platform))
    except (SnapshotterError, SettingsInvalid, OSError) as e:
        print(f"snapshotter: {e}", file=sys.stderr)
        return 2 if isinstance(e, SettingsInvalid) else 1
    finally:
        recorded.unlink(missing_ok=True)
    return 0


async def _serve(
    paths: Paths,
    settings: SnapshotterSettings,
    blobs: ObjectStore,
    arguments: argparse.Namespace,
    *,
    platform: PlatformSettings,
) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    gpus = await read_inventory(os.environ)
    found = await find_driver(node=cuda_node(), environ=os.environ)
    weights, name_servers = WeightCacheClient(paths.socket("weight_cache")), DnsServers()
    parts = _components(
        paths,
        settings,
        platform,
        blobs=blobs,
        weights=weights,
        name_servers=name_servers,
        gpus=gpus,
        driver=found.driver,
        runtime={
            **own_runtime(),
            **({"pilotlight": arguments.pilotlight} if arguments.pilotlight else {}),
        },
        namespaces=is_root() and not arguments.plain,
        device_layout=DeviceLayout()
        if arguments.devices is None
        else DeviceLayout(dev=arguments.devices / "dev", driver=arguments.devices / "driver"),
    )
    async with (
        contextlib.aclosing(name_servers),
        contextlib.aclosing(blobs),
        contextlib.aclosing(weights),
        _closing(found.driver),
        running_agent(paths, settings, parts) as agent,
        serving.open_services(
            settings.pods,
            platform,
            paths,
            bundles=parts.bundles,
            weights=weights,
            snapshots=agent.snapshots,
            gpus=agent.gpus,
            devices=parts.devices,
            runtime=parts.runtime,
            restores=settings.restore_into_pods,
            container_images=parts.container_images,
            engines=engines_of(paths, settings),
            activators=settings.activators,
            environ=os.environ,
        ),
    ):
        if arguments.ready_fd is not None:
            with open(arguments.ready_fd, "wb") as ready:  # noqa: ASYNC230 - one byte to a pipe that somebody waits on
                ready.write(b"\n")
        await stop.wait()


def _components(
    paths: Paths,
    settings: SnapshotterSettings,
    platform: PlatformSettings,
    *,
    blobs: ObjectStore,
    weights: WeightCacheClient,
    name_servers: DnsServers,
    gpus: GpuInventory,
    driver: CudaDriver | None,
    runtime: Mapping[str, Path],
    namespaces: bool,
    device_layout: DeviceLayout,
) -> AgentDependencies:
    """What the agent of this machine depends on."""
    engines = engines_of(paths, settings)

    async def probe(cgroups: Cgroups) -> Mapping[str, Any]:
        return await capabilities.probe(
            home=paths.home,
            environ=os.environ,
            cgroups=cgroups,
            uid_base=settings.uid_base,
            engines=engines,
            function_network=Network(settings.function_network),
        )

    floor = DiskFloor(paths.home, platform.disk_floor_bytes)
    container_images = container_images_of(paths, settings, floor)
    images = Images(
        paths.home,
        blobs=blobs,
        environ=os.environ,
        requirements=runtime_requirements(),
        cgroups=Cgroups.find(paths.run, reader=paths.activator_uid),
        engines=engines,
        bounds=BuildLimits(floor=floor),
        network=BuildNetworkPolicy(
            kind=BuildNetwork(settings.build_network),
            access=NetworkAccess(egress=settings.egress(), name_servers=name_servers),
        ),
    )
    images.container_images = container_images
    is_local = platform.fleet == "local"
    return AgentDependencies(
        volumes=_volumes(paths, platform, floor) if namespaces and is_local else None,
        bundles=Bundles(paths.home, blobs=blobs, floor=floor),
        images=images,
        weights=weights,
        runtime=runtime,
        probe=probe,
        namespaces=namespaces,
        gpus=gpus,
        devices=NoDevices() if driver is None else CudaDevices(driver, ThisMachine()),
        s3_client=platform.s3_client,
        disk_floor_bytes=platform.disk_floor_bytes,
        key_file=Path(platform.key_file) if platform.key_file is not None else None,
        metrics_token_file=metrics_token_file(platform, paths),
        name_servers=name_servers,
        device_layout=device_layout,
        copies_at=platform.blobs if platform.fleet == "knative" else None,
        container_images=container_images,
        approved_copies={} if platform.fleet == "knative" else None,
    )


def _volumes(paths: Paths, platform: PlatformSettings, floor: DiskFloor) -> NodeVolumes:
    key_file = Path(platform.key_file) if platform.key_file else paths.home / "platform.key"
    return NodeVolumes(
        paths.home,
        heads=VolumeHeads(
            Endpoint.at(paths.socket("controller")), lambda: platform_token(key_file)
        ),
        store=StoreAddress(
            where=platform.blobs or str(paths.home / "blobs"),
            client=platform.s3_client,
            uid=paths.controller_uid,
        ),
        floor=floor,
    )


def engines_of(paths: Paths, settings: SnapshotterSettings) -> Engines:
    """The engines' environments of this node."""
    return Engines(paths.home, settings.engines)


def container_images_of(
    paths: Paths, settings: SnapshotterSettings, floor: DiskFloor
) -> ContainerImages | None:
    """The container images of this node; None where no worker is put into a pod."""
    if not settings.restore_into_pods:
        return None
    login = settings.registry_login
    return ContainerImages(
        paths.home,
        login_file=Path(login) if login is not None else None,
        max_bytes=settings.container_images_max_bytes,
        floor=floor,
    )


@contextlib.asynccontextmanager
async def _closing(driver: CudaDriver | None) -> AsyncIterator[None]:
    try:
        yield
    finally:
        if driver is not None:
            await driver.aclose()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m snapshotter", description="pilotlight's node agent"
    )
    parser.add_argument(
        "--config", type=Path, help="platform.yaml; without it every key has its default"
    )
    parser.add_argument(
        "--ready-fd", type=int, help="write one newline to this descriptor once serving"
    )
    parser.add_argument(
        "--plain", action="store_true", help="no namespaces and no uids, as without root"
    )
    parser.add_argument(
        "--pilotlight",
        type=Path,
        help="directory of the package whose worker/boot.py runs in slots; default: our own",
    )
    parser.add_argument(
        "--devices",
        type=Path,
        help="directory with the GPUs' nodes in dev/ and the driver's files in driver/; default: "
        "/dev and /proc/driver/nvidia",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
