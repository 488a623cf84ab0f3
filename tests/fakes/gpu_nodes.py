"""Device nodes and driver files of GPUs that do not exist: opening one shows who may open it.

The nodes have numbers of majors that no driver of this machine has, so that open(2) says

    ENXIO   allowed: only the driver is missing
    EPERM   refused by the control group
    ENOENT  not there

Needs root, and a directory on a file system where device nodes work."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
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
        capabilities: name of a MIG instance → numbers of its two capabilities.
    """

    directory: Path
    capabilities: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def layout(self) -> DeviceLayout:
        """Where they are, for the agent."""
        return _layout(self.directory)

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
    """Make nodes and files of `gpus` GPUs; `mig`: GPU → number of its MIG instances."""
    made = GpuNodes(directory=directory)
    for minor in range(gpus):
        for i in range((mig or {}).get(minor, 0)):
            first = 100 * (minor + 1) + 10 * i
            made.capabilities[f"gpu{minor}/gi{i + 1}"] = (first, first + 1)
    parts = [made.mig(name) for name in made.capabilities]
    make_nodes_of(directory, [*(made.gpu(minor) for minor in range(gpus)), *parts])
    return made


def make_nodes_of(directory: Path, devices: Iterable[GpuDevice]) -> DeviceLayout:
    """Make world-writable nodes of these GPUs and MIG instances, those that all share, and the
    driver's files; what exists is left alone."""
    layout, (whole, unified, capability) = _layout(directory), unassigned_majors()
    for name, major, minor in (
        ("nvidiactl", whole, 255),
        ("nvidia-modeset", whole, 254),
        ("nvidia-uvm", unified, 0),
        ("nvidia-uvm-tools", unified, 1),
    ):
        _node(layout.dev / name, major, minor)
    _file(layout.driver / "version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06\n")
    _file(layout.driver / "params", PARAMETERS)
    _file(layout.driver / "registry", 'Binary: ""\n')
    files = {"mig/config": CONFIGURE, "mig/monitor": MONITOR}
    instances: Counter[int] = Counter()
    for device in devices:
        _node(layout.dev / f"nvidia{device.minor}", whole, device.minor)
        bus = f"0000:{device.minor + 1:02x}:00.0"
        if not device.is_mig:
            _file(
                layout.driver / f"gpus/{bus}/information",
                f"Model: \t\t {device.model}\nGPU UUID: \t {device.uuid}\n"
                f"Bus Location: \t {bus}\nDevice Minor: \t {device.minor}\n",
            )
        for number, part in zip(device.capabilities, ("access", "ci0/access"), strict=False):
            instances[device.minor] += part == "access"
            at = f"gpu{device.minor}/mig/gi{instances[device.minor]}"
            files[f"{at}/{part}"] = number
    for name, number in files.items():
        _node(layout.dev / f"nvidia-caps/nvidia-cap{number}", capability, number)
        text = f"DeviceFileMinor: {number}\nDeviceFileMode: 292\nDeviceFileModify: 1\n"
        _file(layout.driver / "capabilities" / name, text)
    return layout


def _layout(directory: Path) -> DeviceLayout:
    return DeviceLayout(dev=directory / "dev", driver=directory / "driver")


def unassigned_majors() -> tuple[int, int, int]:
    """Three majors for local use that no driver of this machine has: of GPUs, of unified memory, of
    capabilities."""
    text = Path("/proc/devices").read_text()
    taken = {int(line.split()[0]) for line in text.splitlines() if line[:3].strip().isdigit()}
    first, second, third, *_ = (major for major in LOCAL if major not in taken)
    return first, second, third


def _node(path: Path, major: int, minor: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        return
    os.mknod(path, 0o20666, os.makedev(major, minor))
    path.chmod(0o666)


def _file(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
