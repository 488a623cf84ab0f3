"""Device nodes and driver files of GPUs that do not exist: opening one shows who may open it.

The nodes have numbers of majors that no driver of this machine has, so that open(2) says

    ENXIO   allowed: only the driver is missing
    EPERM   refused by the control group
    ENOENT  not there

Needs root, and a directory on a file system where device nodes work."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from snapshotter.slots.slot_devices import DeviceLayout
from snapshotter.types import GpuDevice, GpuGrant

LOCAL = range(240, 255)
"""Majors for local use (kernel, admin-guide/devices.txt)."""
MODEL = "NVIDIA H100 80GB HBM3"
PARAMETERS = "ResmanDebugLevel: 4294967295\nModifyDeviceFiles: 1\nDeviceFileMode: 438\n"
CONFIGURE, MONITOR = 1, 2
"""Capabilities that configure and monitor MIG."""


@dataclass(kw_only=True)
class GpuNodes:
    """A machine's nodes and files.

    Attributes:
        directory: where they are.
        majors: of GPUs, of unified memory, of capabilities.
        capabilities: name of a MIG instance → numbers of its two capabilities.
    """

    directory: Path
    majors: tuple[int, int, int] = (0, 0, 0)
    capabilities: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def layout(self) -> DeviceLayout:
        """Where they are, for the agent."""
        return DeviceLayout(dev=self.directory / "dev", driver=self.directory / "driver")

    @property
    def names(self) -> Mapping[str, tuple[int, int]]:
        """Name of each node → major and minor."""
        found = {}
        for path in sorted((self.directory / "dev").rglob("*")):
            if not path.is_dir():
                number = path.lstat().st_rdev
                name = str(path.relative_to(self.directory / "dev"))
                found[name] = (os.major(number), os.minor(number))
        return found

    def gpu(self, minor: int) -> GpuDevice:
        """The whole GPU of that number."""
        return GpuDevice(
            uuid=f"GPU-{minor:08x}-0000-0000-0000-000000000000",
            kind="H100",
            model=MODEL,
            minor=minor,
            memory_bytes=80 * 1024**3,
        )

    def mig(self, name: str) -> GpuDevice:
        """The MIG instance `gpu1/gi2`."""
        minor = int(name.partition("/")[0].removeprefix("gpu"))
        return GpuDevice(
            uuid=f"MIG-{self.capabilities[name][0]:08x}-0000-0000-0000-000000000000",
            kind="H100-MIG-3g.40gb",
            model=MODEL,
            minor=minor,
            capabilities=self.capabilities[name],
            memory_bytes=40 * 1024**3,
        )

    def grant(self, *devices: GpuDevice) -> GpuGrant:
        """A grant of these."""
        return GpuGrant(kind=devices[0].kind, devices=devices)


def make_gpu_nodes(directory: Path, *, gpus: int, mig: Mapping[int, int] | None = None) -> GpuNodes:
    """Make world-writable nodes of `gpus` GPUs; `mig`: GPU → number of its MIG instances."""
    made = GpuNodes(directory=directory, majors=unassigned_majors())
    whole, unified, _ = made.majors
    _node(directory / "dev/nvidiactl", whole, 255)
    _node(directory / "dev/nvidia-modeset", whole, 254)
    _node(directory / "dev/nvidia-uvm", unified, 0)
    _node(directory / "dev/nvidia-uvm-tools", unified, 1)
    driver = directory / "driver"
    _file(driver / "version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06\n")
    _file(driver / "params", PARAMETERS)
    _file(driver / "registry", 'Binary: ""\n')
    for number in (CONFIGURE, MONITOR):
        name = "config" if number == CONFIGURE else "monitor"
        _capability(made, f"mig/{name}", number)
    for minor in range(gpus):
        _node(directory / f"dev/nvidia{minor}", whole, minor)
        _file(
            driver / f"gpus/0000:{minor + 1:02x}:00.0/information",
            f"Model: \t\t {MODEL}\nGPU UUID: \t {made.gpu(minor).uuid}\n"
            f"Bus Location: \t 0000:{minor + 1:02x}:00.0\nDevice Minor: \t {minor}\n",
        )
        for i in range((mig or {}).get(minor, 0)):
            first = 100 * (minor + 1) + 10 * i
            at = f"gpu{minor}/mig/gi{i + 1}"
            _capability(made, at, first)
            _capability(made, f"{at}/ci0", first + 1)
            made.capabilities[f"gpu{minor}/gi{i + 1}"] = (first, first + 1)
    return made


def unassigned_majors() -> tuple[int, int, int]:
    """Three majors for local use that no driver of this machine has."""
    text = Path("/proc/devices").read_text()
    taken = {int(line.split()[0]) for line in text.splitlines() if line[:3].strip().isdigit()}
    first, second, third, *_ = (major for major in LOCAL if major not in taken)
    return first, second, third


def _capability(made: GpuNodes, name: str, number: int) -> None:
    _node(made.directory / f"dev/nvidia-caps/nvidia-cap{number}", made.majors[2], number)
    text = f"DeviceFileMinor: {number}\nDeviceFileMode: 292\nDeviceFileModify: 1\n"
    is_leaf = name in ("mig/config", "mig/monitor")
    file = made.directory / "driver/capabilities" / name
    _file(file if is_leaf else file / "access", text)


def _node(path: Path, major: int, minor: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mknod(path, 0o20666, os.makedev(major, minor))
    path.chmod(0o666)


def _file(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
