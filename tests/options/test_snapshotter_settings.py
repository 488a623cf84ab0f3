"""Proofs of section `snapshotter` of platform.yaml: what a node agent with slots of its own reads, and
what one on a node of a cluster reads or refuses."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pilotlight.controller.settings import ControllerConfig
from pilotlight.core.disk_floor import no_floor
from pilotlight.core.metrics_server import MetricsAddress, MetricsServer
from pilotlight.core.settings import Paths, PlatformSettings, SettingsInvalid
from snapshotter.__main__ import container_images_of
from snapshotter.agent.components import assemble
from snapshotter.agent.dependencies import AgentDependencies
from snapshotter.agent.snapshotting import has_imports, restore_modes, upload_target
from snapshotter.checkpointing.startup import (
    SnapshotsDisabled,
    _copies,
    open_components,
    remote_copies,
)
from snapshotter.cuda.devices import NoDevices
from snapshotter.engines import Engines
from snapshotter.errors import BundleUnavailable, NoCapacity
from snapshotter.gpus.inventory import GpuInventory
from snapshotter.gpus.view import GpuView
from snapshotter.images.build_network import BuildNetwork, BuildNetworkPolicy
from snapshotter.images.images import Images
from snapshotter.linux.cgroups import Cgroups
from snapshotter.linux.slot_network import Network
from snapshotter.pods import serving
from snapshotter.pods.pod_calls import PodCalls
from snapshotter.pods.restoring import PodRestores
from snapshotter.settings import SnapshotterSettings
from snapshotter.slots.allocator import SlotAllocator
from snapshotter.slots.log_pruning import LogPruner
from snapshotter.slots.logs import Logs
from snapshotter.slots.pool import SlotPool
from snapshotter.snapshots.catalog import Catalog
from snapshotter.starts.node_capacity import NodeCapacity
from snapshotter.starts.prefork_pool import PreforkPool
from snapshotter.types import TenantShare
from tests.fakes.agent_home import AgentHome
from tests.fakes.authority import Authority
from tests.options.contract import CLUSTER, LOCAL, proves
from tests.options.world import made_with, parts_of
from weight_cache.peers.bandwidth_limit import BandwidthLimiter

MIB = 1024**2
CHANGED: dict[str, Any] = {
    "parked_per_template": 3,
    "parked_idle_s": 7.0,
    "build_network": "host",
    "egress_on_request": ["10.1.0.0/16"],
    "log_refused_calls": True,
    "dedicated_to": "acme",
    "template_memory_bytes": 1,
    "snapshots": False,
    "snapshot_max_bytes": 1,
    "snapshot_store": "/elsewhere",
    "snapshot_uploads": False,
    "snapshot_upload_bytes_per_s": 7,
    "snapshot_pages": "lazy",
    "snapshot_builds_per_hour": 3,
    "environment_snapshots": 3,
    "memory_bytes": 1,
    "log_max_bytes": 5000,
    "log_keep_s": 7.0,
    "log_total_bytes": 7,
    "engines": {"vllm": "/opt/vllm"},
    "function_network": "none",
    "egress_denied": ["10.0.0.0/8"],
    "egress_allowed": ["10.0.0.7"],
}


@proves(*(f"SnapshotterSettings.{name}" for name in CHANGED), fleets=(CLUSTER,))
@pytest.mark.parametrize(
    "key",
    [
        "parked_per_template",
        "parked_idle_s",
        "build_network",
        "egress_on_request",
        "log_refused_calls",
        "dedicated_to",
        "template_memory_bytes",
        "snapshots",
        "snapshot_max_bytes",
        "snapshot_store",
        "snapshot_uploads",
        "snapshot_upload_bytes_per_s",
        "snapshot_pages",
        "snapshot_builds_per_hour",
        "environment_snapshots",
        "memory_bytes",
        "log_max_bytes",
        "log_keep_s",
        "log_total_bytes",
        "engines",
        "function_network",
        "egress_denied",
        "egress_allowed",
    ],
)
def test_what_only_slots_have_is_refused_on_a_cluster(fleet: str, key: str) -> None:
    settings = SnapshotterSettings(**{key: CHANGED[key]})
    settings.check_fleet(PlatformSettings())
    with pytest.raises(SettingsInvalid, match=rf"snapshotter\.{key} = .*run in pods"):
        settings.check_fleet(PlatformSettings(fleet="knative"))


@proves(
    "SnapshotterSettings.pods",
    "SnapshotterSettings.restore_into_pods",
    "SnapshotterSettings.activators",
    "SnapshotterSettings.container_images_max_bytes",
    "SnapshotterSettings.registry_login",
    fleets=(LOCAL,),
)
@pytest.mark.parametrize(
    "changed",
    [
        {"pods": "/srv/node"},
        {"restore_into_pods": True},
        {"activators": "https://a:1"},
        {"container_images_max_bytes": 7, "restore_into_pods": True},
        {"registry_login": "/etc/login", "restore_into_pods": True},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_what_only_pods_have_is_refused_on_one_machine(fleet: str, changed: dict[str, Any]) -> None:
    settings = SnapshotterSettings(**changed)
    settings.check_fleet(PlatformSettings(fleet="knative"))
    key = next(iter(changed))
    alone = SnapshotterSettings(**{key: changed[key]})
    with pytest.raises(SettingsInvalid, match=rf"snapshotter\.{key} = .*there are pods only"):
        alone.check_fleet(PlatformSettings())


@proves(
    "SnapshotterSettings.container_images_max_bytes",
    "SnapshotterSettings.registry_login",
    fleets=(CLUSTER,),
)
async def test_container_images_are_pulled_with_that_login_and_within_that_limit(
    fleet: str, tmp_path: Path
) -> None:
    (login := tmp_path / "config.json").write_text("no JSON")
    given: dict[str, Any] = {"restore_into_pods": True, "registry_login": str(login)}
    paths, floor = Paths(home=tmp_path, run=tmp_path), no_floor()
    assert container_images_of(paths, SnapshotterSettings(), floor) is None
    with pytest.raises(SettingsInvalid, match="run in pods"):
        replace(SnapshotterSettings(**given), restore_into_pods=False).check_fleet(
            PlatformSettings(fleet="knative")
        )
    for limit, said in ((1, "registry_login: .* is not JSON"), (0, "max_bytes is 0")):
        settings = SnapshotterSettings(**given, container_images_max_bytes=limit)
        settings.check_fleet(PlatformSettings(fleet="knative"))
        images = container_images_of(paths, settings, floor)
        assert images is not None
        with pytest.raises(BundleUnavailable, match=said):
            await images.ensure(f"127.0.0.1:1/fn/t@sha256:{'0' * 64}", tenant="t-1")


@proves("SnapshotterSettings.metrics_listen")
async def test_metrics_are_served_there(fleet: str, short_tmp: Path) -> None:
    settings = SnapshotterSettings(metrics_listen="127.0.0.1:0")
    address = MetricsAddress(
        socket_path=short_tmp / "m.sock",
        listen=settings.metrics_listen,
        token_file=short_tmp / "t",
        setting="snapshotter.metrics_listen",
    )
    servers = await MetricsServer(registry=CollectorRegistry()).serve(address)
    assert len(servers) == 2
    for server in servers:
        server.close()


@proves("SnapshotterSettings.uid_base")
def test_tenants_uids_start_there(fleet: str, tmp_path: Path) -> None:
    name = "knative" if fleet == CLUSTER else "local"
    file = tmp_path / "platform.yaml"
    file.write_text(f"platform: {{fleet: {name}}}\nsnapshotter: {{uid_base: 50000}}\n")
    is_given = fleet == CLUSTER or os.geteuid() == 0
    assert ControllerConfig.read(file).uid_base == (50_000 if is_given else None)


def dependencies(home: AgentHome, **given: Any) -> AgentDependencies:
    """What an agent without namespaces depends on."""
    return AgentDependencies(
        bundles=home.bundles,
        images=Images(home.paths.home, environ=os.environ, requirements=()),
        weights=home.weights,
        runtime=home.runtime,
        probe=lambda _: {},  # type: ignore[arg-type, return-value]
        namespaces=False,
        **given,
    )


@contextlib.asynccontextmanager
async def node_of(directory: Path, **settings: Any) -> AsyncIterator[Any]:
    """The components of a node agent with these settings, without snapshots; nothing runs."""
    home = AgentHome(directory)
    cgroups, parts = Cgroups.find(home.paths.run), dependencies(home)
    given = SnapshotterSettings(**settings)
    yield assemble(
        home.paths,
        given,
        parts,
        cgroups=cgroups,
        network=Network(given.function_network),
        stock=None,
        why_not="in this test",
    )


@proves(
    "SnapshotterSettings.template_memory_bytes",
    "SnapshotterSettings.parked_per_template",
    "SnapshotterSettings.parked_idle_s",
    "SnapshotterSettings.snapshot_builds_per_hour",
    "SnapshotterSettings.log_max_bytes",
    "SnapshotterSettings.log_refused_calls",
    fleets=(LOCAL,),
)
async def test_a_node_keeps_as_much_as_it_says(fleet: str, short_tmp: Path) -> None:
    given: dict[str, Any] = {
        "template_memory_bytes": 12 * MIB,
        "parked_per_template": 3,
        "parked_idle_s": 7.0,
        "snapshot_builds_per_hour": 5,
        "log_max_bytes": 5000,
        "log_refused_calls": True,
    }
    async with node_of(short_tmp, **given) as node:
        assert node.templates.budget_bytes == 12 * MIB
        pool = made_with(node, PreforkPool)
        assert (pool["per_template"], pool["idle_s"]) == (3, 7.0)
        assert "5 left this hour" in repr(node.builder)
        assert made_with(node, SlotPool)["log_max_bytes"] == 5000
        assert True in made_with(node, SlotAllocator).values()


@proves("SnapshotterSettings.environment_snapshots", fleets=(LOCAL,))
@pytest.mark.parametrize("count", [0, 3])
def test_there_are_environment_snapshots_as_it_says(
    fleet: str, short_tmp: Path, count: int
) -> None:
    parts = dependencies(AgentHome(short_tmp))
    assert has_imports(SnapshotterSettings(environment_snapshots=count), parts) is (count > 0)


@proves("SnapshotterSettings.memory_bytes", "SnapshotterSettings.dedicated_to", fleets=(LOCAL,))
async def test_a_node_admits_what_it_says(fleet: str, short_tmp: Path) -> None:
    async with node_of(short_tmp, memory_bytes=5 * MIB, dedicated_to="acme") as node:
        (room,) = parts_of(node.starter, NodeCapacity)
        assert room.memory_bytes == 5 * MIB
        assert room.dedicated_to == "acme"
        with pytest.raises(NoCapacity, match=r"snapshotter\.dedicated_to"):
            room.require_tenant_allowed(TenantShare(tenant="t", name="other"))


@proves(
    "SnapshotterSettings.snapshots",
    "SnapshotterSettings.snapshot_max_bytes",
    "SnapshotterSettings.snapshot_store",
    fleets=(LOCAL,),
)
async def test_snapshots_are_made_and_kept_as_it_says(fleet: str, short_tmp: Path) -> None:
    paths = Paths(home=short_tmp, run=short_tmp)
    nothing: Any = None
    with pytest.raises(SnapshotsDisabled, match=r"snapshotter\.snapshots: false"):
        await open_components(paths, SnapshotterSettings(snapshots=False), nothing)
    given = SnapshotterSettings(snapshot_max_bytes=4096, snapshot_store=str(short_tmp / "copies"))
    catalogue = Catalog(short_tmp / "s", key=bytes(32), max_bytes=given.snapshot_max_bytes)
    assert catalogue.max_bytes == 4096
    await catalogue.aclose()
    copies = _copies(given.snapshot_store, "auto")
    assert copies is not None
    assert str(short_tmp / "copies") in repr(copies)
    await copies.aclose()
    assert _copies(None, "auto") is None


@proves(
    "SnapshotterSettings.snapshot_uploads",
    "SnapshotterSettings.snapshot_upload_bytes_per_s",
    fleets=(LOCAL,),
)
async def test_snapshots_are_uploaded_as_it_says(fleet: str, short_tmp: Path) -> None:
    given = SnapshotterSettings(snapshot_upload_bytes_per_s=7)
    catalogue = Catalog(short_tmp / "s", key=bytes(32), max_bytes=4096)
    parts = dependencies(AgentHome(short_tmp), copies_at=str(short_tmp / "store"))
    copies = remote_copies(given, parts, catalogue)
    assert copies is not None
    assert made_with(copies, BandwidthLimiter)["bytes_per_s"] == 7
    assert upload_target(given, copies) is copies
    assert upload_target(SnapshotterSettings(snapshot_uploads=False), copies) is None
    await copies.aclose()
    await catalogue.aclose()


@proves("SnapshotterSettings.snapshot_pages", fleets=(LOCAL,))
def test_memory_comes_back_as_it_says(fleet: str) -> None:
    assert restore_modes(SnapshotterSettings(snapshot_pages="lazy")) == ("lazy",)
    assert restore_modes(SnapshotterSettings()) == ("eager", "lazy")


@proves("SnapshotterSettings.log_keep_s", "SnapshotterSettings.log_total_bytes", fleets=(LOCAL,))
def test_logs_are_kept_as_it_says(fleet: str, tmp_path: Path) -> None:
    given = SnapshotterSettings(log_keep_s=60.0, log_total_bytes=150)
    now = time.time()
    logs = Logs(tmp_path)
    for name, age_s in (("old", 100), ("one", 20), ("two", 10)):
        logs.register(name, labels={"tenant": "t"}, revision="r", now=now - age_s)
        (tmp_path / f"{name}.log").write_bytes(b"x" * 100)
        os.utime(tmp_path / f"{name}.log", (now - age_s, now - age_s))
    LogPruner(tmp_path).prune(
        alive=set(), keep_s=given.log_keep_s, total_bytes=given.log_total_bytes, now=now
    )
    assert sorted(path.name for path in tmp_path.glob("*.log")) == ["two.log"]


@proves("SnapshotterSettings.engines", fleets=(LOCAL,))
def test_engines_are_found_where_it_says(fleet: str, tmp_path: Path) -> None:
    from tests.snapshotter.test_engines import environment

    environment(tmp_path / "opt")
    given = SnapshotterSettings(engines={"mine": str(tmp_path / "opt")})
    assert Engines(tmp_path, given.engines).get("mine").name == "mine"


@proves(
    "SnapshotterSettings.build_network",
    "SnapshotterSettings.function_network",
    "SnapshotterSettings.egress_denied",
    "SnapshotterSettings.egress_allowed",
    "SnapshotterSettings.egress_on_request",
    fleets=(LOCAL,),
)
async def test_networks_are_what_it_says(fleet: str, short_tmp: Path) -> None:
    given = SnapshotterSettings(
        build_network="host",
        function_network="none",
        egress_denied=["10.0.0.0/8"],
        egress_allowed=["10.0.0.7"],
        egress_on_request=["10.1.0.0/16"],
    )
    policy = given.egress()
    assert policy.requested(("10.1.2.0/24",))
    with pytest.raises(ValueError, match=r"10\.2\.0\.0"):
        policy.requested(("10.2.0.0/16",))
    assert "10.0.0.0/8" in str(policy)
    assert "10.0.0.7" in str(policy)
    network = BuildNetworkPolicy(kind=BuildNetwork(given.build_network))
    images = Images(short_tmp, environ={}, requirements=(), network=network)
    (kept,) = parts_of(images, BuildNetworkPolicy)
    assert kept.kind is BuildNetwork.HOST
    (short_tmp / "n").mkdir()
    async with node_of(short_tmp / "n", function_network="none") as node:
        assert Network.NONE in vars(node.slot_allocator).values()


@proves(
    "SnapshotterSettings.pods",
    "SnapshotterSettings.restore_into_pods",
    "SnapshotterSettings.activators",
    fleets=(CLUSTER,),
)
async def test_pods_of_a_cluster_are_served(fleet: str, short_tmp: Path) -> None:
    home = AgentHome(short_tmp)
    files = Authority().issue(short_tmp / "tls", "127.0.0.1")
    given = SnapshotterSettings(
        pods=str(short_tmp / "home/pods"),
        restore_into_pods=True,
        activators="https://127.0.0.1:1",
    )
    platform = PlatformSettings(
        fleet="knative",
        home=str(home.paths.home),
        tls_cert=str(files.cert),
        tls_key=str(files.key),
        tls_ca=str(files.ca),
    )
    nothing: Any = None
    async with serving.open_services(
        given.pods,
        platform,
        home.paths,
        bundles=home.bundles,
        weights=home.weights,  # type: ignore[arg-type]
        snapshots=nothing,
        runtime=home.runtime,
        gpus=GpuView(inventory=GpuInventory(), holders=tuple, models=home.weights),
        devices=NoDevices(),
        restores=given.restore_into_pods,
        activators=given.activators,
        environ={"NODE_NAME": "node-1"},
    ) as tenants:
        assert (short_tmp / "home/pods").is_dir()
        assert any(parts_of(tenants, PodCalls))
        assert any(parts_of(tenants, PodRestores))
