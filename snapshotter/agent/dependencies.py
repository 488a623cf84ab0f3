"""What the agent gets from outside: stores, devices, directories and delays."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snapshotter.cuda.devices import Devices, NoDevices
from snapshotter.gpus.inventory import GpuInventory
from snapshotter.images.oci.container_images import ContainerImages
from snapshotter.linux.cgroups import Cgroups
from snapshotter.linux.dns_servers import DnsServers
from snapshotter.node_reports import ApprovedCopy
from snapshotter.slots.launch_plan import BundleStore, ImageStore, WeightSource
from snapshotter.slots.slot_devices import DeviceLayout
from snapshotter.snapshots.background_builder import DELAY_S
from snapshotter.volumes.node_volumes import NodeVolumes


@dataclass(frozen=True, kw_only=True)
class AgentDependencies:
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
