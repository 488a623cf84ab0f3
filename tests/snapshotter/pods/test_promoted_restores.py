"""Warm pods that receive a restored worker when they are promoted: real CRIU, real snapshots, the
real launcher in namespaces of its own."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pilotlight.spec.record_json import to_json
from snapshotter.agent.agent import Agent
from snapshotter.agent.app import own_runtime
from snapshotter.agent.launch_signature import LaunchSigner
from snapshotter.cuda.devices import Devices, Suspension
from snapshotter.cuda.gpu_mapping import DeviceRecord, gpu_mapping, record_of
from snapshotter.cuda.gpu_usage import CudaNode, Gpu
from snapshotter.images.oci.container_images import ContainerImages
from snapshotter.pods.entry.processes import EntryProcesses
from snapshotter.pods.restoring import PodRestores
from snapshotter.types import CONTAINER_IMAGE_LABEL, LaunchSpec, StartKind
from tests.fakes.agent_home import AgentHome
from tests.fakes.bundle import pack
from tests.fakes.fake_nvml import H100, L4, FakeGpu, gpus, inventory_of
from tests.fakes.fake_shim import function_spec
from tests.fakes.image_registry import ImageRegistry
from tests.fakes.pods_agent import serving
from tests.fakes.pushed_image import TENANT, images_of_node
from tests.fakes.trees import remove_tree
from tests.fakes.warm_pod import TARGET, UID, WarmPod, warm_pod

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,  # boots, dumps, proves and restores a worker
    pytest.mark.usefixtures("criu", "patient_restores"),
    pytest.mark.timeout(120),
]

SIGNER = LaunchSigner(b"the key of nodes")
CODE = b"""
import os, time
BORN = os.urandom(8).hex()
def f(x=1): return [x + 1, BORN, os.environ["TOKEN"], os.environ["PILOTLIGHT_CALLS"]]
"""


class Node:
    """A node with snapshots, and its warm pods."""

    def __init__(self, home: AgentHome) -> None:
        self.home = home
        home.runtime = dict(own_runtime())
        self.root = home.paths.home.parent
        self.warm = self.root / "node" / "warm"
        self.warm.mkdir(parents=True)

    def launch(self, code: bytes = CODE, **changes: Any) -> LaunchSpec:
        """What snapshots are made of."""
        values: dict[str, Any] = {
            "labels": {"tenant": "t-1"},
            "uid": UID,
            "bundle": pack(self.home.paths.home, {"app.py": code}),
            "entry": to_json(function_spec()),
            "secret_variables": ("TOKEN",),
            "startup_timeout_s": 60.0,
            **changes,
        }
        return self.home.launch(**values)

    @contextlib.asynccontextmanager
    async def agent(
        self,
        *,
        gpus: Sequence[FakeGpu] = (),
        devices: Devices | None = None,
        container_images: ContainerImages | None = None,
    ) -> AsyncIterator[Agent]:
        """Makes snapshots, and promotes."""
        async with (
            contextlib.aclosing(EntryProcesses()) as processes,
            self.home.agent(
                snapshots=True,
                pods=str(self.root / "node"),
                gpus=gpus,
                devices=devices,
                container_images=container_images,
            ) as agent,
        ):
            await processes.begin()
            restores = PodRestores(
                agent.snapshots,
                processes=processes,
                runtime=self.home.runtime,
                directory=self.home.paths.home / "node" / "pods",
                devices=devices,
                gpus=inventory_of(*gpus).devices,
                container_images=container_images,
                node_directory=TARGET,
            )
            target = TARGET
            async with (
                contextlib.aclosing(restores),
                serving(self.root, target, SIGNER, processes=processes, restores=restores),
            ):
                yield agent


@pytest.fixture
def node(home: AgentHome) -> Node:
    return Node(home)


@pytest.fixture
def warm(node: Node) -> Iterator[WarmPod]:
    with warm_pod(node.warm) as made:
        if made is None:
            pytest.skip("no control groups can be made on this machine")
        yield made


@pytest.fixture(scope="module")
def image_home() -> Iterator[Path]:
    """Where container images are unpacked: the one of these tests takes seconds."""
    directory = Path(tempfile.mkdtemp(prefix="pl"))
    directory.chmod(0o755)
    yield directory
    remove_tree(directory)


async def promoted(warm: WarmPod, launch: LaunchSpec) -> str:
    """The launcher's last line about the start."""
    warm.pod.begin()
    await asyncio.to_thread(warm.wait_warm)
    mine = SIGNER.signed(replace(launch, labels={**launch.labels, "pod": warm.uid}))
    status, _ = await asyncio.to_thread(warm.promote, mine, {"TOKEN": "s3cret"})
    assert status == 202
    return await asyncio.to_thread(warm.pod.wait_said, "launcher.(ready|timeout|refused|exit)")


async def test_a_promoted_pod_receives_a_restored_worker(node: Node, warm: WarmPod) -> None:
    launch = node.launch()
    async with node.agent() as agent:
        await agent.snapshots.checkpoint(launch)
        ready = await promoted(warm, launch)
        print(ready)
        assert "start=RESTORE" in ready
        answer = await asyncio.to_thread(warm.call, x=41)
        assert (answer[0], answer[2]) == (42, "s3cret")
        assert answer[3] == str(warm.target / "calls.sock")
        (info,) = agent.snapshots.infos({})
        assert info.restores == 1


async def test_a_pod_that_booted_makes_the_next_one_receive_a_restored_worker(node: Node) -> None:
    launch = node.launch()
    started = []
    async with node.agent() as agent:
        for _ in range(2):
            with warm_pod(node.warm) as warm:
                if warm is None:
                    pytest.skip("no control groups can be made on this machine")
                started.append(await promoted(warm, launch))
                async with asyncio.timeout(60):
                    while not agent.snapshots.describe()["ready"]:
                        await asyncio.sleep(0.05)
        (info,) = agent.snapshots.infos({})

    assert ["start=COLD" in started[0], "start=RESTORE" in started[1]] == [True, True]
    assert dict(info.labels) == {"tenant": "t-1"}


async def test_a_start_that_is_expected_to_be_slower_than_a_boot_is_not_tried(
    node: Node, warm: WarmPod
) -> None:
    launch = node.launch()
    async with node.agent() as agent:
        await agent.snapshots.checkpoint(launch)
        agent.snapshots.selector.took(launch, StartKind.RESTORE, 90_000.0)
        agent.snapshots.selector.took(launch, StartKind.COLD, 40_000.0)
        assert "start=COLD" in await promoted(warm, launch)


SERVER = b"""
import socket, threading
try:
    own = socket.create_server(("169.254.77.2", 0))
except OSError:
    own = socket.create_server(("127.0.0.1", 0))
listeners = [own, socket.create_server(("127.0.0.1", 0))]
held = [(socket.create_connection(one.getsockname()), one.accept()[0]) for one in listeners]

def f(x=1):
    said = []
    for one in listeners:
        client = socket.create_connection(one.getsockname())
        server, address = one.accept()
        client.sendall(b"new")
        said.append(server.recv(3).decode() + address[0])
    for client, server in held:
        client.sendall(b"old")
        said.append(server.recv(3).decode())
    return said
"""


async def test_a_server_finds_the_addresses_and_connections_that_it_had(
    node: Node, warm: WarmPod
) -> None:
    launch = node.launch(SERVER)
    async with node.agent() as agent:
        await agent.snapshots.checkpoint(launch)
        assert "start=RESTORE" in await promoted(warm, launch)
        answer = await asyncio.to_thread(warm.call)

    assert answer[1:] == ["new127.0.0.1", "old", "old"]
    assert answer[0] in ("new169.254.77.2", "new127.0.0.1")


class RecordingDevices:
    """Devices of functions with GPUs, without a driver: what it was told, by the real rules of which
    GPU may replace which."""

    def __init__(self, gpus: Sequence[FakeGpu]) -> None:
        known = tuple(
            Gpu(uuid=gpu.uuid, name=gpu.model, minor=gpu.minor)
            for gpu in inventory_of(*gpus).devices
        )
        self._node = CudaNode(release=580, version="580.1.1", gpus=known, mps=False)
        self.restored: list[Mapping[str, str]] = []
        self.hangs = False
        self.hanging = asyncio.Event()

    async def before_dump(self, pids: Sequence[int], *, granted: Sequence[str] = ()) -> Suspension:
        return Suspension(record=record_of(self._node, granted, len(pids), granted=granted))

    async def rollback(self, suspension: Suspension, reason: str) -> None:
        suspension.end()

    def check_restore(self, record: DeviceRecord, *, target: Sequence[str] = ()) -> None:
        gpu_mapping(record, self._node, target=target)

    async def after_restore(
        self, pids: Sequence[int], record: DeviceRecord, *, target: Sequence[str] = ()
    ) -> Mapping[str, float]:
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        if self.hangs:
            self.hanging.set()
            await asyncio.Event().wait()
        self.restored.append(gpu_mapping(record, self._node, target=target))
        return {"cuda_restore": 1.0, "cuda_unlock": 1.0}


VISIBLE = b"""
import os
def f(x=1): return os.environ["CUDA_VISIBLE_DEVICES"]
"""


async def test_gpus_are_those_that_the_device_plugin_gave_the_pod(
    node: Node, warm: WarmPod
) -> None:
    here = gpus(H100, H100, H100)
    first, *_, last = (gpu.uuid for gpu in inventory_of(*here).devices)
    devices = RecordingDevices(here)
    warm.pod.variables["NVIDIA_VISIBLE_DEVICES"] = last
    launch = node.launch(VISIBLE, gpu=("H100",), gpu_count=1)
    async with node.agent(gpus=here, devices=devices) as agent:
        await agent.snapshots.checkpoint(launch)
        ready = await promoted(warm, launch)
        answer = await asyncio.to_thread(warm.call)

    assert "start=RESTORE" in ready
    assert "cuda_restore_ms=1.0" in ready
    assert devices.restored[-1][first] == last
    assert answer == last


async def test_an_agent_that_ends_in_the_middle_of_a_restore_leaves_a_pod_that_waits(
    node: Node, warm: WarmPod
) -> None:
    here = gpus(H100)
    devices = RecordingDevices(here)
    warm.pod.variables["NVIDIA_VISIBLE_DEVICES"] = inventory_of(*here).devices[0].uuid
    launch = node.launch(VISIBLE, gpu=("H100",), gpu_count=1)
    async with node.agent(gpus=here, devices=devices) as agent:
        await agent.snapshots.checkpoint(launch)
        devices.hangs = True
        starting = asyncio.create_task(promoted(warm, launch))
        await devices.hanging.wait()
    devices.hangs = False
    async with node.agent(gpus=here, devices=devices):
        assert "start=RESTORE" in await starting
        assert await asyncio.to_thread(warm.call)


async def test_a_pod_whose_gpus_are_not_known_boots(node: Node) -> None:
    here = gpus(H100, L4)
    launch = node.launch(gpu=("H100",), gpu_count=1)
    async with node.agent(gpus=here, devices=RecordingDevices(here)) as agent:
        await agent.snapshots.checkpoint(launch)
        for visible in ("", "all", "GPU-unknown"):
            with warm_pod(node.warm) as warm:
                if warm is None:
                    pytest.skip("no control groups can be made on this machine")
                warm.pod.variables["NVIDIA_VISIBLE_DEVICES"] = visible
                assert "start=COLD" in await promoted(warm, launch), visible


def install_engine(node: Node) -> None:
    """An environment that an operator installed on the node, with a package of its own."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    site = node.home.paths.home / "engines" / "small" / "lib" / version / "site-packages"
    (site / "vllm" / "entrypoints" / "openai").mkdir(parents=True)
    (site / "vllm" / "entrypoints" / "openai" / "api_server.py").touch()
    (site / "only_here.py").write_text("VALUE = 7\n")
    for package in ("uvicorn", "h11", "click", "httptools", "uvloop", "cloudpickle"):
        found = importlib.util.find_spec(package)
        assert found is not None
        assert found.origin is not None
        origin = Path(found.origin)
        if found.submodule_search_locations:
            shutil.copytree(origin.parent, site / package)
        else:
            shutil.copy(origin, site)
    (site.parents[2] / "pyvenv.cfg").write_text(
        f"home = {sys.base_prefix}/bin\nversion = {version.removeprefix('python')}.0\n"
    )


async def test_an_engines_environment_is_shown_to_a_pod_that_boots_and_to_one_that_is_restored(
    node: Node,
) -> None:
    install_engine(node)
    launch = node.launch(b"import only_here\ndef f(x=1): return only_here.VALUE\n", engine="small")
    started = []
    async with node.agent() as agent:
        for _ in range(2):
            with warm_pod(node.warm) as warm:
                if warm is None:
                    pytest.skip("no control groups can be made on this machine")
                started.append(await promoted(warm, launch))
                assert await asyncio.to_thread(warm.call) == 7
                async with asyncio.timeout(60):
                    while not agent.snapshots.describe()["ready"]:
                        await asyncio.sleep(0.05)

    assert ["start=COLD" in started[0], "start=RESTORE" in started[1]] == [True, True]


IN_ITS_IMAGE = b"""
import os
import only_here
try:
    import fastapi
except ImportError:
    fastapi = None
def f(x=1):
    return {
        "value": only_here.VALUE,
        "in image": os.environ.get("IN_IMAGE"),
        "of the platform's own image": fastapi,
        "root": sorted(os.listdir("/")),
        "uid": os.getuid(),
        "token": os.environ["TOKEN"],
        "calls": os.environ["PILOTLIGHT_CALLS"],
        "node": sorted(os.listdir(os.path.dirname(os.environ["PILOTLIGHT_CALLS"]))),
        "writable": [path for path in ("/", "/opt", "/etc", "/usr") if os.access(path, os.W_OK)],
        "first process": open("/proc/1/cmdline").read().split(chr(0))[-2],
        "parent": os.getppid() > 0,
    }
"""


@pytest.mark.timeout(600)  # compiles an interpreter's library, once
async def test_a_function_with_an_image_of_its_own_boots_and_is_restored_in_its_root(
    node: Node, image_home: Path, image_registry: ImageRegistry, pushed: str
) -> None:
    images = images_of_node(image_home, image_registry)
    labels = {"tenant": TENANT, CONTAINER_IMAGE_LABEL: pushed}
    launch = node.launch(IN_ITS_IMAGE, image="e" * 64, labels=labels)
    started, answers = [], []
    await images.ensure(pushed, tenant=TENANT)
    async with node.agent(container_images=images) as agent:
        for _ in range(2):
            with warm_pod(node.warm) as warm:
                if warm is None:
                    pytest.skip("no control groups can be made on this machine")
                started.append(await promoted(warm, launch))
                answers.append(await asyncio.to_thread(warm.call))
                async with asyncio.timeout(60):
                    while not agent.snapshots.describe()["ready"]:
                        await asyncio.sleep(0.05)
    assert ["start=COLD" in started[0], "start=RESTORE" in started[1]] == [True, True]
    for found in answers:
        root = set(found.pop("root"))
        assert root >= {"dev", "etc", "opt", "proc", "run", "scratch", "sys", "tmp", "usr", "var"}
        assert not root & {"bin", "home", "root", "boot"}, "the machine's, or the pod's"
        assert found == {
            "value": 7,
            "in image": "yes",
            "of the platform's own image": None,
            "uid": UID,
            "token": "s3cret",
            "calls": str(TARGET / "calls.sock"),
            "node": ["agent.sock", "bundles"],
            "writable": [],
            "first process": "pilotlight.launcher",
            "parent": True,
        }


@pytest.mark.timeout(600)  # compiles an interpreter's library, once
async def test_a_worker_that_fails_in_its_own_root_ends_the_pod_with_its_status(
    node: Node, warm: WarmPod, image_home: Path, image_registry: ImageRegistry, pushed: str
) -> None:
    images = images_of_node(image_home, image_registry)
    labels = {"tenant": TENANT, CONTAINER_IMAGE_LABEL: pushed}
    await images.ensure(pushed, tenant=TENANT)
    async with node.agent(container_images=images):
        launch = node.launch(
            b"import not_there\ndef f(x=1): return x\n", image="e" * 64, labels=labels
        )
        ended = await promoted(warm, launch)

    assert "launcher.failed" in warm.pod.said
    assert "not_there" in warm.pod.said
    assert "status=1" in ended


async def test_a_function_whose_image_is_not_on_the_node_is_refused_in_a_warm_pod(
    node: Node, warm: WarmPod
) -> None:
    async with node.agent():
        refused = await promoted(warm, node.launch(image="e" * 64))

    assert "code=bundle_unavailable" in refused


async def test_pods_that_are_promoted_at_once_take_turns(node: Node) -> None:
    launch = node.launch()
    with contextlib.ExitStack() as held:
        warm = [found for _ in range(3) if (found := held.enter_context(warm_pod(node.warm)))]
        if not warm:
            pytest.skip("no control groups can be made on this machine")
        async with node.agent() as agent:
            await agent.snapshots.checkpoint(launch)
            started = await asyncio.gather(*(promoted(one, launch) for one in warm))
            answers = [(await asyncio.to_thread(one.call))[2] for one in warm]

    assert ["start=RESTORE" in line for line in started] == [True] * 3
    assert answers == ["s3cret"] * 3
