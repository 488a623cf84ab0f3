"""What a process holds of NVIDIA's devices, and what the node has of them: proc(5) and the driver's
own files below /proc/driver/nvidia.

An ordinary CUDA context maps 2 MiB of `/dev/nvidia-uvm` and opens `/dev/nvidia-caps/nvidia-cap1`
and `…2`, which configure and watch MIG (seen with driver 580 on an H200); managed memory
(cudaMallocManaged) is what is mapped beyond, a MIG instance a capability of its own. CUDA IPC shows
as a mapping of `/dev/shm/cuda.shm.*`. Once a process is checkpointed, nothing of all that is left.
"""

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
"""The kernel keeps 15 bytes of a process's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU: UUID (`GPU-…`), model name, number of its device file, and whether it is cut up (MIG
    instances exist)."""

    uuid: str
    name: str
    minor: int
    mig: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaNode:
    """What this machine has.

    Attributes:
        release: the first number of the display driver's `version`; None without a driver.
        mig_instances: numbers of the device files (`/dev/nvidia-caps/nvidia-cap…`) that open MIG
        instances.
    """

    release: int | None
    version: str
    gpus: tuple[Gpu, ...]
    mps: bool
    mig_instances: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUsage:
    """What one process has open (`descriptors`: number → path) and mapped (path → bytes) of devices
    and CUDA IPC."""

    pid: int
    descriptors: tuple[tuple[int, str], ...]
    mapped: tuple[tuple[str, int], ...]

    @property
    def devices(self) -> tuple[str, ...]:
        """Each device path once."""
        return tuple(
            sorted(
                {p for _, p in self.descriptors if _is_device(p)}
                | {p for p, _ in self.mapped if _is_device(p)}
            )
        )

    @property
    def leftovers(self) -> tuple[str, ...]:
        """What would reach a dump: `fd 7 → /dev/nvidiactl`, `mapping of /dev/nvidia0 (2097152
        bytes)`."""
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
        """Numbers of the GPUs that it uses: those mapped, else those open (the driver opens every
        GPU that it can see)."""
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
        """Bytes of managed memory, by all that can be seen: what is mapped beyond a context's
        own."""
        return max(0, sum(size for path, size in self.mapped if path == _UVM) - _CONTEXT_UVM_BYTES)

    @property
    def capabilities(self) -> frozenset[int]:
        """Numbers of the capability devices that it opened."""
        numbers = (p.removeprefix(_CAPABILITY) for p in self.devices)
        return frozenset(int(number) for number in numbers if number.isdigit())

    @property
    def has_ipc(self) -> bool:
        """Whether it shares device memory with another process."""
        return any(path.startswith(_IPC) for path, _ in self.mapped)


def holdings_of(pid: int, *, proc: Path = _PROC) -> GpuUsage:
    """Read them; a process that is gone raises OSError (FileNotFoundError, or ProcessLookupError
    from the read)."""
    maps = (proc / str(pid) / "maps").read_text()
    return GpuUsage(
        pid=pid,
        descriptors=tuple(_descriptors(proc / str(pid) / "fd")),
        mapped=tuple(_mappings(maps)),
    )


def nvidia_leftovers(pid: int, *, proc: Path = _PROC) -> tuple[str, ...]:
    """Devices that would reach CRIU's dump of this process, in words; empty is right. OSError when
    it is gone."""
    return holdings_of(pid, proc=proc).leftovers


def cuda_node(*, proc: Path = _PROC) -> CudaNode:
    """Look at the machine; takes a walk over the names of its processes (for MPS)."""
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
    """Of `NVRM version: NVIDIA UNIX … Kernel Module  570.86.10  …`; "" without a driver."""
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
    """Of `capabilities/gpu0/mig/gi1/access` and the compute instances below it."""
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
            continue  # gone since
    return False
