"""A node agent for tests: a home with one bundle, the small worker as runtime, and the agent in
this process or in one of its own."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import io
import os
import secrets
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pilotlight.core.settings import Paths
from snapshotter.agent.agent import Agent
from snapshotter.agent.app import own_runtime, running_agent
from snapshotter.agent.dependencies import AgentDependencies
from snapshotter.client import AgentClient
from snapshotter.cuda.devices import Devices, NoDevices
from snapshotter.images.code_bundles import Bundles
from snapshotter.images.images import Images
from snapshotter.images.oci.container_images import ContainerImages
from snapshotter.linux.cgroups import Cgroups
from snapshotter.settings import SnapshotterSettings
from snapshotter.slots.launch_plan import ImageStore
from snapshotter.slots.slot_devices import DeviceLayout
from snapshotter.types import InstanceId, InstanceInfo, LaunchSpec, RevisionKey
from tests.fakes.fake_nvml import FakeGpu, FakeNvml, inventory_of
from tests.fakes.gpu_nodes import make_nodes_of
from weight_cache.errors import WeightCacheError
from weight_cache.types import Lease, ModelInfo, OpenedLease, Prediction, Tier, WeightsLease

WORKER = Path(__file__).with_name("slot_worker.py")
REPOSITORY = WORKER.parent.parent.parent
MIB = 1024**2
CRIU_CACHE = Path(tempfile.gettempdir()) / f"pilotlight-criu-{os.geteuid()}"
"""Where the proof of CRIU is kept that all tests share."""


class FakeWeights:
    """Every manifest is the same empty directory; remembers who holds what.

    Attributes:
        tier: where models are. Those at the origin arrive when `arrival` is set.
        failures: what `open` and `wait` raise, one after the other, before they work.
        held: lease → holder; pids: lease → process.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.tier = Tier.NVME
        self.arrival = asyncio.Event()
        self.failures: dict[str, list[WeightCacheError]] = {"open": [], "wait": []}
        self.held: dict[str, str] = {}
        self.pids: dict[str, int | None] = {}
        self.expected_s: float | None = None

    async def open(self, manifest: str, *, holder: str, pid: int | None = None) -> OpenedLease:
        """A lease at once."""
        if self.failures["open"]:
            raise self.failures["open"].pop(0)
        lease_id = Lease.id_of(manifest, holder)
        self.held[lease_id], self.pids[lease_id] = holder, pid
        ready = self.tier is not Tier.ORIGIN or self.arrival.is_set()
        path = self._directory if ready else None
        return OpenedLease(
            lease_id=lease_id,
            manifest=manifest,
            ready=ready,
            tier=self.tier,
            path=path,
            expected_s=self.expected_s,
        )

    async def wait(self, lease_id: str) -> WeightsLease:
        """When they have arrived."""
        await self.arrival.wait()
        if self.failures["wait"]:
            raise self.failures["wait"].pop(0)
        return WeightsLease(lease_id=lease_id, manifest="", path=self._directory, tier=self.tier)

    async def close(self, lease_id: str) -> bool:
        """Given back."""
        return self.held.pop(lease_id, None) is not None

    async def predict(self, manifest: str) -> Prediction:
        """As long as the test says."""
        return Prediction(tier=self.tier, seconds=self.expected_s, missing={})

    async def models(self) -> list[ModelInfo]:
        """None of which the size is known."""
        return []


class AgentHome:
    """Directories of one agent. `paths.run` is short enough for Unix sockets.

    Attributes:
        python_path: directories that come first in `agent_process`.
    """

    def __init__(self, root: Path) -> None:
        self.paths = Paths(home=root / "home", run=root / "run").make()
        self.runtime = {**own_runtime(), "pilotlight": root / "pilotlight"}
        (root / "pilotlight/worker").mkdir(parents=True)
        shutil.copy(WORKER, root / "pilotlight/worker/boot.py")
        (root / "weights").mkdir()
        self.weights = FakeWeights(root / "weights")
        (self.paths.home / "platform.key").write_bytes(base64.urlsafe_b64encode(bytes(32)))
        self.bundle = self._make_bundle()
        self.python_path: tuple[Path, ...] = ()
        self.bundles = Bundles(self.paths.home)

    def launch(self, revision: str = "f-1@v1-abc", **changes: Any) -> LaunchSpec:
        """A launch of the small worker; `boot` and `wake` are its steps."""
        entry = {"boot": changes.pop("boot", []), "wake": changes.pop("wake", [])}
        values: dict[str, Any] = {
            "revision": RevisionKey(revision),
            "trust_domain": "t",
            "uid": 20001 if os.geteuid() == 0 else None,
            "bundle": self.bundle,
            "image": None,
            "entry": entry,
            "memory_bytes": 256 * MIB,
            "cpu": 1.0,
            "startup_timeout_s": 20.0,
            "labels": {"app": "a", "function": "f"},
        }
        return LaunchSpec(**{**values, **changes})

    @contextlib.asynccontextmanager
    async def agent(
        self,
        *,
        namespaces: bool | None = None,
        devices: Devices | None = None,
        gpus: Sequence[FakeGpu] = (),
        is_cluster: bool = False,
        container_images: ContainerImages | None = None,
        images: ImageStore | None = None,
        **settings: Any,
    ) -> AsyncIterator[Agent]:
        """The agent in this event loop; it parks nothing, and makes and restores no snapshots,
        unless told to.

        What it makes unasked it makes at once. `devices`: of functions with a GPU, `gpus`: what
        there is, as root with device nodes (`gpu_nodes`). `is_cluster`: copies are restored when a
        controller has recorded them. `images`: others than the platform's own environment, without
        `container_images`."""
        if images is None:
            images = own = Images(self.paths.home, environ=os.environ, requirements=())
            own.container_images = container_images
        proc = self.paths.home / "gpus" / "proc"
        if gpus and not proc.exists():
            FakeNvml(gpus).write_proc(proc)
        inventory, layout = inventory_of(*gpus, proc=proc), DeviceLayout()
        if gpus and os.geteuid() == 0:
            layout = make_nodes_of(self.paths.home / "gpus", inventory.devices)

        async def probe(cgroups: Cgroups) -> Mapping[str, Any]:
            return {"features": [], "node": {"cgroup": cgroups.version}}

        parts = AgentDependencies(
            bundles=self.bundles,
            images=images,
            weights=self.weights,
            runtime=self.runtime,
            probe=probe,
            namespaces=os.geteuid() == 0 if namespaces is None else namespaces,
            gpus=inventory,
            device_layout=layout,
            devices=devices or NoDevices(),
            build_delay_s=0.0,
            approved_copies={} if is_cluster else None,
            container_images=container_images,
            criu_cache=CRIU_CACHE,
        )
        values = {
            "snapshots": False,
            "metrics_listen": None,
            "memory_bytes": 4096 * MIB,
            "parked_per_template": 0,
            **settings,
        }
        async with running_agent(self.paths, SnapshotterSettings(**values), parts) as agent:
            yield agent

    @contextlib.contextmanager
    def agent_process(
        self, *arguments: str, snapshots: bool = False, **settings: int
    ) -> Iterator[subprocess.Popen[bytes]]:
        """`python -m snapshotter` in a process of its own, serving; ended (SIGTERM) on the way out
        unless it is dead already."""
        config = self.paths.home.parent / "platform.yaml"
        section = f"snapshotter:\n  metrics_listen: null\n  snapshots: {str(snapshots).lower()}\n"
        section += "".join(f"  {name}: {value}\n" for name, value in settings.items())
        config.write_text(
            f"platform:\n  home: {self.paths.home}\n  run: {self.paths.run}\n{section}"
        )
        readable, writable = os.pipe()
        argv = [
            sys.executable,
            "-m",
            "snapshotter",
            "--config",
            str(config),
            "--ready-fd",
            str(writable),
        ]
        argv += ["--pilotlight", str(self.runtime["pilotlight"]), *arguments]
        path = ":".join(map(str, (*self.python_path, REPOSITORY, REPOSITORY / "functions")))
        environ = {**os.environ, "PYTHONPATH": path}
        process = subprocess.Popen(argv, pass_fds=[writable], env=environ, cwd=REPOSITORY)
        os.close(writable)
        try:
            with os.fdopen(readable, "rb") as ready:
                if ready.read(1) != b"\n":
                    raise RuntimeError(f"the agent ended with {process.wait()}")
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(30)

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[AgentClient]:
        """The door."""
        client = AgentClient(self.paths.socket("snapshotter"))
        try:
            yield client
        finally:
            await client.aclose()

    def _make_bundle(self) -> str:
        raw = io.BytesIO()
        with tarfile.open(fileobj=raw, mode="w:gz") as archive:
            info = tarfile.TarInfo("app.py")
            info.size = 4
            archive.addfile(info, io.BytesIO(b"x=1\n"))
        digest = hashlib.sha256(raw.getvalue()).hexdigest()
        blob = self.paths.home / "blobs" / digest[:2] / digest
        blob.parent.mkdir(parents=True)
        blob.write_bytes(raw.getvalue())
        return digest


def instance_id() -> InstanceId:
    """A new one."""
    return InstanceId(f"i-{secrets.token_hex(8)}")


def get(socket_path: str, path: str) -> Any:
    """GET over an instance's Unix socket; the JSON of its answer. Raises OSError when nobody is
    there."""
    import http.client
    import json
    import socket

    connection = http.client.HTTPConnection("instance")
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.sock.settimeout(20)
        connection.sock.connect(socket_path)
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


async def begin(client: AgentClient, launch: LaunchSpec, **changes: Any) -> InstanceInfo:
    """Start an instance."""
    values = {"instance_id": instance_id(), "lessee": "act-1", "secret_env": {}, **changes}
    return await client.start(launch, **values)


async def ask(info: InstanceInfo, path: str) -> Any:
    """What an instance answers to a GET."""
    return await asyncio.to_thread(get, info.socket, path)


async def settled_descriptors() -> int:
    """How many this process has open, once that stays the same: a spare slot is made 0.2 s after
    the last one was taken, and the end of a fork is on its way for a moment."""
    count, since = 0, time.monotonic()
    while time.monotonic() < since + 0.6:
        now = len(os.listdir("/proc/self/fd"))
        if now != count:
            count, since = now, time.monotonic()
        await asyncio.sleep(0.02)
    return count
