"""A process's use of NVIDIA devices, and the node's devices: read from proc(5) and the driver's own
files below /proc/driver/nvidia.

An ordinary CUDA context maps 2 MiB of `/dev/nvidia-uvm` and opens `/dev/nvidia-caps/nvidia-cap1`
and `…2`, which configure and monitor MIG (observed with driver 580 on an H200). Managed memory
(cudaMallocManaged) is mapped in addition, and a MIG instance has its own capability. CUDA IPC is
visible as a mapping of `/dev/shm/cuda.shm.*`. A checkpointed process has none of these."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_DEVICE = "/dev/nvidia"
_UVM = "/dev/nvidia-uvm"
_CONTEXT_UVM_BYTES = 2 * 2**20
_CAPABILITY = "/dev/nvidia-caps/nvidia-cap"
_CAPABILITY_MINOR = re.compile(r"^DeviceFileMinor:\s*(\d+)", re.MULTILINE)
_IPC = "/dev/shm/cuda.shm."
_GONE = " (deleted)"
_RELEASE = re.compile(r"\b(\d{3,})\.\d+(?:\.\d+)?\b")
_MPS_NAMES = ("nvidia-cuda-mps", "nvidia-cuda-mps-server", "nvidia-cuda-mps-control")
"""The kernel keeps 15 bytes of a process name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU: UUID (`GPU-…`), model name, number of its device file, and whether it is partitioned
    (MIG instances exist)."""

    uuid: str
    name: str
    minor: int
    mig: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaNode:
    """The driver and GPUs of this machine.

    Attributes:
        release: the first number of the display driver's `version`; None without a driver.
        mig_instances: numbers of the device files (`/dev/nvidia-caps/nvidia-cap…`) of MIG
            instances.
    """

    release: int | None
    version: str
    gpus: tuple[Gpu, ...]
    mps: bool
    mig_instances: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUsage:
    """The devices and CUDA IPC files that one process has open (`descriptors`: number → path) and
    mapped (path → bytes)."""

    pid: int
    descriptors: tuple[tuple[int, str], ...]
    mapped: tuple[tuple[str, int], ...]

    @property
    def devices(self) -> tuple[str, ...]:
        """The distinct device paths."""
        return tuple(
            sorted(
                {p for _, p in self.descriptors if _is_device(p)}
                | {p for p, _ in self.mapped if _is_device(p)}
            )
        )

    @property
    def leftovers(self) -> tuple[str, ...]:
        """Descriptions of what a dump would encounter: `fd 7 → /dev/nvidiactl`, `mapping of
        /dev/nvidia0 (2097152 bytes)`."""
        open_ones = [
            f"fd {number} → {path}" for number, path in self.descriptors if _is_device(path)
        ]
        return (
            *open_ones,
            *(
                f"mapping of {path} ({size} bytes)"
                for path, size in self.mapped
                if _is_device(path)
            ),
        )

    @property
    def minors(self) -> frozenset[int]:
        """Numbers of the GPUs that it uses: mapped ones, otherwise open ones (the driver opens
        every visible GPU)."""
        mapped = frozenset(
            int(p.removeprefix(_DEVICE))
            for p, _ in self.mapped
            if p.removeprefix(_DEVICE).isdigit()
        )
        return mapped or frozenset(
            int(p.removeprefix(_DEVICE)) for p in self.devices if p.removeprefix(_DEVICE).isdigit()
        )

    @property
    def managed_bytes(self) -> int:
        """Estimated bytes of managed memory: mappings in addition to those of a context."""
        return max(0, sum(size for path, size in self.mapped if path == _UVM) - _CONTEXT_UVM_BYTES)

    @property
    def capabilities(self) -> frozenset[int]:
        """Numbers of the capability devices that it has open."""
        numbers = (p.removeprefix(_CAPABILITY) for p in self.devices)
        return frozenset(int(number) for number in numbers if number.isdigit())

    @property
    def has_ipc(self) -> bool:
        """Whether it shares device memory with another process."""
        return any(path.startswith(_IPC) for path, _ in self.mapped)


def holdings_of(pid: int, *, proc: Path = _PROC) -> GpuUsage:
    """Read the usage of a process. Raises OSError if it has exited (FileNotFoundError, or
    ProcessLookupError from the read)."""
    maps = (proc / str(pid) / "maps").read_text()
    return GpuUsage(
        pid=pid,
        descriptors=tuple(_descriptors(proc / str(pid) / "fd")),
        mapped=tuple(_mappings(maps)),
    )


def nvidia_leftovers(pid: int, *, proc: Path = _PROC) -> tuple[str, ...]:
    """Descriptions of devices that CRIU's dump of this process would encounter; normally empty.
    Raises OSError if it has exited."""
    return holdings_of(pid, proc=proc).leftovers


def cuda_node(*, proc: Path = _PROC) -> CudaNode:
    """Read the machine's state; walks over the names of its processes (to detect MPS)."""
    driver = proc / "driver" / "nvidia"
    version = _version(driver)
    release = int(version.split(".")[0]) if version else None
    return CudaNode(
        release=release,
        version=version,
        gpus=tuple(_gpus(driver)),
        mps=_mps(proc),
        mig_instances=_mig_instances(driver),
    )


def _is_device(path: str) -> bool:
    return path.startswith(_DEVICE)


def _descriptors(folder: Path) -> Iterator[tuple[int, str]]:
    for number in sorted(int(name) for name in os.listdir(folder)):
        try:
            path = os.readlink(folder / str(number)).removesuffix(_GONE)
        except FileNotFoundError:
            continue  # closed since
        if _is_device(path):
            yield number, path


def _mappings(maps: str) -> Iterator[tuple[str, int]]:
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) < 6:
            continue
        path = fields[5].removesuffix(_GONE)
        if _is_device(path) or path.startswith(_IPC):
            start, _, end = fields[0].partition("-")
            yield path, int(end, 16) - int(start, 16)


def _version(driver: Path) -> str:
    """The version in `NVRM version: NVIDIA UNIX … Kernel Module  570.86.10  …`; "" without a
    driver."""
    try:
        line = (driver / "version").read_text().partition("\n")[0]
    except OSError:
        return ""
    found = _RELEASE.search(line)
    return found.group(0) if found else ""


def _gpus(driver: Path) -> Iterator[Gpu]:
    for information in sorted((driver / "gpus").glob("*/information")):
        said = {
            key.strip(): value.strip()
            for key, _, value in (
                line.partition(":") for line in information.read_text().splitlines()
            )
        }
        minor, uuid = said.get("Device Minor", ""), said.get("GPU UUID", "")
        if minor.isdigit() and uuid:
            cut_up = any((driver / "capabilities" / f"gpu{minor}" / "mig").glob("gi*"))
            yield Gpu(uuid=uuid, name=said.get("Model", ""), minor=int(minor), mig=cut_up)


def _mig_instances(driver: Path) -> frozenset[int]:
    """Device numbers of `capabilities/gpu0/mig/gi1/access` and the compute instances below it."""
    texts = (
        access.read_text() for access in (driver / "capabilities").glob("gpu*/mig/gi*/**/access")
    )
    return frozenset(
        int(found.group(1)) for text in texts if (found := _CAPABILITY_MINOR.search(text))
    )


def _mps(proc: Path) -> bool:
    for comm in proc.glob("[0-9]*/comm"):
        try:
            if comm.read_text().strip() in _MPS_NAMES:
                return True
        except OSError:
            continue  # exited since
    return False
