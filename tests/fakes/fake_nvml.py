"""NVML of a node that a test describes: the functions of `pynvml` that are used, over `FakeGpu`s,
with the errors of the library (uninitialised, unsupported, not found, lost).

A description is JSON (`FakeNvml.to_json`), so that another process can load it: put
`tests/fakes/nvml` first on its PYTHONPATH, where `pynvml` is this fake, and the file's path into
FAKE_NVML."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from snapshotter.gpus import nvml
from snapshotter.gpus.inventory import GpuInventory

GIB = 1024**3
H100, L4, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA L4", "NVIDIA A100-SXM4-40GB"
GPUS: Mapping[str, tuple[int, str]] = {
    H100: (80 * GIB, "H100"),
    L4: (23 * GIB, "L4"),
    A100: (40 * GIB, "A100"),
}


class NVMLError(Exception):
    """As pynvml's: `value` is the library's code."""

    def __init__(self, value: int, message: str) -> None:
        super().__init__(message)
        self.value = value


class Uninitialized(NVMLError):
    """nvmlInit was not called, or nvmlShutdown was."""


class InvalidArgument(NVMLError):
    """An index or handle that does not exist."""


class NotSupported(NVMLError):
    """The GPU does not have this."""


class NotFound(NVMLError):
    """There is none at this index."""


class GpuIsLost(NVMLError):
    """The GPU has fallen off the bus."""


@dataclass(frozen=True, kw_only=True)
class FakeMig:
    """A MIG instance: its GPU instance and compute instance by number, and the numbers of its
    capability devices."""

    uuid: str
    profile: str
    gi: int
    ci: int = 0
    memory_bytes: int = 5 * GIB
    capabilities: tuple[int, int] = (0, 0)
    used_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class FakeGpu:
    """A GPU. `mig`: None = it cannot be partitioned, or is not. `nvlink`: UUIDs of the GPUs that it
    is connected to. `numa_node`: -1 = the library does not support the query."""

    uuid: str
    name: str
    minor: int
    memory_bytes: int
    numa_node: int = -1
    nvlink: tuple[str, ...] = ()
    mig: tuple[FakeMig, ...] | None = None
    is_lost: bool = False
    used_bytes: int = 0
    sm_percent: int | None = 0


@dataclass(eq=False)
class FakeNvml:
    """The library. Owned by one test or process; handles are the descriptions."""

    gpus: Sequence[FakeGpu]
    driver: str = "580.65.06"
    initialised: int = field(default=0, init=False)

    NVMLError = NVMLError
    NVMLError_NotSupported = NotSupported
    NVMLError_NotFound = NotFound
    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0
    NVML_P2P_STATUS_NOT_SUPPORTED = 5
    NVML_AFFINITY_SCOPE_NODE = 0

    # -- the description ---------------------------------------------------------------------------

    @classmethod
    def load(cls, path: Path) -> FakeNvml:
        """From a file that `save` wrote."""
        body = json.loads(path.read_text())
        gpus = [
            FakeGpu(
                **{
                    **gpu,
                    "nvlink": tuple(gpu["nvlink"]),
                    "mig": gpu["mig"]
                    and tuple(
                        FakeMig(**{**mig, "capabilities": tuple(mig["capabilities"])})
                        for mig in gpu["mig"]
                    ),
                }
            )
            for gpu in body["gpus"]
        ]
        return cls(gpus, driver=body["driver"])

    def save(self, path: Path) -> None:
        """For another process."""
        body = {"driver": self.driver, "gpus": [asdict(gpu) for gpu in self.gpus]}
        path.write_text(json.dumps(body))

    def write_proc(self, proc: Path) -> None:
        """The driver's files below `<proc>/driver/nvidia`, as driver 580 writes them."""
        driver = proc / "driver" / "nvidia"
        driver.mkdir(parents=True)
        (driver / "version").write_text(
            f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {self.driver}  Release Build\n"
        )
        for gpu in self.gpus:
            directory = driver / "gpus" / f"0000:{gpu.minor + 1:02x}:00.0"
            directory.mkdir(parents=True)
            (directory / "information").write_text(
                f"Model: \t\t {gpu.name}\nGPU UUID: \t {gpu.uuid}\nDevice Minor: \t {gpu.minor}\n"
            )
            for mig in gpu.mig or ():
                below = driver / "capabilities" / f"gpu{gpu.minor}" / "mig" / f"gi{mig.gi}"
                (below / f"ci{mig.ci}").mkdir(parents=True)
                for place, minor in zip(
                    (below, below / f"ci{mig.ci}"), mig.capabilities, strict=True
                ):
                    (place / "access").write_text(
                        f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\n"
                    )

    # -- the library -------------------------------------------------------------------------------

    def nvmlInit(self) -> None:
        self.initialised += 1

    def nvmlShutdown(self) -> None:
        self._require_initialised()
        self.initialised -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        self._require_initialised()
        return self.driver

    def nvmlDeviceGetCount(self) -> int:
        self._require_initialised()
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        self._require_initialised()
        if not 0 <= index < len(self.gpus):
            raise InvalidArgument(2, "Invalid Argument")
        return self._whole(self.gpus[index])

    def nvmlDeviceGetUUID(self, handle: FakeGpu | FakeMig) -> str:
        self._require_known(handle)
        return handle.uuid

    def nvmlDeviceGetName(self, handle: FakeGpu | FakeMig) -> str:
        self._require_known(handle)
        if isinstance(handle, FakeGpu):
            return handle.name
        return f"{self._parent(handle).name} MIG {handle.profile}"

    def nvmlDeviceGetMinorNumber(self, handle: FakeGpu) -> int:
        return self._whole(handle).minor

    def nvmlDeviceGetMemoryInfo(self, handle: FakeGpu | FakeMig) -> SimpleNamespace:
        self._require_known(handle)
        total, used = handle.memory_bytes, handle.used_bytes
        return SimpleNamespace(total=total, used=used, free=total - used)

    def nvmlDeviceGetUtilizationRates(self, handle: FakeGpu | FakeMig) -> SimpleNamespace:
        self._require_known(handle)
        if not isinstance(handle, FakeGpu) or handle.sm_percent is None:
            raise NotSupported(3, "Not Supported")
        return SimpleNamespace(gpu=handle.sm_percent, memory=0)

    def nvmlDeviceGetMemoryAffinity(
        self,
        handle: FakeGpu,
        nodeSetSize: int,
        scope: int,
    ) -> list[int]:
        gpu = self._whole(handle)
        if gpu.numa_node < 0:
            raise NotSupported(3, "Not Supported")
        if scope != self.NVML_AFFINITY_SCOPE_NODE or gpu.numa_node >= 64 * nodeSetSize:
            raise InvalidArgument(2, "Invalid Argument")
        return [
            1 << gpu.numa_node % 64 if n == gpu.numa_node // 64 else 0 for n in range(nodeSetSize)
        ]

    def nvmlDeviceGetP2PStatus(
        self,
        device1: FakeGpu,
        device2: FakeGpu,
        p2pIndex: int,
    ) -> int:
        one, other = self._whole(device1), self._whole(device2)
        if p2pIndex != self.NVML_P2P_CAPS_INDEX_NVLINK or one is other:
            raise InvalidArgument(2, "Invalid Argument")
        linked = other.uuid in one.nvlink and one.uuid in other.nvlink
        return self.NVML_P2P_STATUS_OK if linked else self.NVML_P2P_STATUS_NOT_SUPPORTED

    def nvmlDeviceGetMigMode(self, device: FakeGpu) -> list[int]:
        if "A100" not in self._whole(device).name and "H100" not in device.name:
            raise NotSupported(3, "Not Supported")
        return [int(device.mig is not None)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, device: FakeGpu) -> int:
        self.nvmlDeviceGetMigMode(device)
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: FakeGpu, index: int) -> FakeMig:
        if index >= self.nvmlDeviceGetMaxMigDeviceCount(device):
            raise InvalidArgument(2, "Invalid Argument")
        if index >= len(device.mig or ()):
            raise NotFound(6, "Not Found")
        return (device.mig or ())[index]

    def nvmlDeviceGetGpuInstanceId(self, device: FakeMig) -> int:
        self._parent(device)
        return device.gi

    def nvmlDeviceGetComputeInstanceId(self, device: FakeMig) -> int:
        self._parent(device)
        return device.ci

    # -- inside ------------------------------------------------------------------------------------

    def _require_initialised(self) -> None:
        if not self.initialised:
            raise Uninitialized(1, "Uninitialized")

    def _require_known(self, handle: Any) -> None:
        self._require_initialised()
        gpu = handle if isinstance(handle, FakeGpu) else self._parent(handle)
        if gpu not in self.gpus:
            raise InvalidArgument(2, "Invalid Argument")
        if gpu.is_lost:
            raise GpuIsLost(15, "GPU is lost")

    def _whole(self, handle: Any) -> FakeGpu:
        if not isinstance(handle, FakeGpu):
            raise InvalidArgument(2, "Invalid Argument")
        self._require_known(handle)
        return handle

    def _parent(self, mig: Any) -> FakeGpu:
        self._require_initialised()
        for gpu in self.gpus:
            if any(mig is one for one in gpu.mig or ()):
                return gpu
        raise InvalidArgument(2, "Invalid Argument")


def gpus(*names: str, pairs: bool = False, per_numa_node: int = 4) -> list[FakeGpu]:
    """GPUs of these models; `pairs`: the first with the second, the third with the fourth, … are
    connected by NVLink if they are of one model."""
    uuids = [f"GPU-{n:08x}-0000-0000-0000-000000000000" for n in range(len(names))]
    return [
        FakeGpu(
            uuid=uuid,
            name=name,
            minor=n,
            memory_bytes=GPUS[name][0],
            numa_node=n // per_numa_node,
            nvlink=(uuids[n ^ 1],) if pairs and n ^ 1 < len(names) and names[n ^ 1] == name else (),
        )
        for n, (uuid, name) in enumerate(zip(uuids, names, strict=True))
    ]


def partitioned(name: str, minor: int, *profiles: str) -> FakeGpu:
    """A GPU that is split into MIG instances."""
    return FakeGpu(
        uuid=f"GPU-{minor:08x}-0000-0000-0000-000000000000",
        name=name,
        minor=minor,
        memory_bytes=GPUS[name][0],
        numa_node=0,
        mig=tuple(
            FakeMig(
                uuid=f"MIG-{minor:08x}-0000-0000-0000-{n:012x}",
                profile=profile,
                gi=n + 1,
                memory_bytes=int(profile.partition(".")[2].removesuffix("gb")) * GIB,
                capabilities=(100 * (minor + 1) + 10 * n, 100 * (minor + 1) + 10 * n + 1),
            )
            for n, profile in enumerate(profiles)
        ),
    )


def inventory_of(*described: FakeGpu, proc: Path = Path("/nonexistent")) -> GpuInventory:
    """What the agent reads of a node with these GPUs."""
    return nvml.inventory(FakeNvml(described), proc=proc)


def mixed_node() -> list[FakeGpu]:
    """8 H100 in NVLink pairs on two NUMA nodes, 4 L4, and an A100 split by MIG."""
    return [
        *gpus(*(H100,) * 8, *(L4,) * 4, pairs=True),
        partitioned(A100, 12, "3g.20gb", "2g.10gb", "1g.5gb", "1g.5gb"),
    ]
