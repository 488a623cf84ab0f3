"""Devices of a slot: the nodes in its /dev, the files in its /proc/driver, and the rules of its
control group, all from its grant of GPUs.

Of an NVIDIA GPU a process needs `/dev/nvidia<minor>`, the nodes that all GPUs share
(`nvidiactl`, `nvidia-uvm`), and for a MIG instance the capabilities that open it
(`nvidia-caps/nvidia-cap<n>`). Nodes for displays (`nvidia-modeset`, `dri`), for the fabric between
GPUs, and the capabilities that configure and monitor MIG are in no slot. Of /proc/driver it gets
the driver's version and parameters, and what belongs to its own GPUs and MIG instances; a slot
without a grant gets none of it. `shim.sandbox.root_directory.finish` binds the nodes;
`linux.device_control` refuses all others.

Sources: NVIDIA driver's README, "NVIDIA Linux Device Files"; MIG User Guide, "Device Nodes and
Capabilities"; libnvidia-container, `nvc_mount.c`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from snapshotter.errors import Unsupported
from snapshotter.linux.device_control import DeviceRule
from snapshotter.types import VISIBLE_DEVICES, GpuDevice, GpuGrant

_CONTROL: Final = "nvidiactl"
_SHARED: Final = ("nvidia-uvm", "nvidia-uvm-tools")
"""Absent from /dev until the driver's module for unified memory is loaded; CUDA cannot start
without the first."""
_DRIVER_FILES: Final = ("version", "params")
_MINOR: Final = re.compile(r"^Device Minor:\s*(\d+)\s*$", re.MULTILINE)
_CAPABILITY: Final = re.compile(r"^DeviceFileMinor:\s*(\d+)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotDevices:
    """What one slot has of devices, besides the standard ones.

    Attributes:
        nodes: host path of each device node, and its name in the slot's /dev.
        driver_files: host path of each file or directory of the driver, and its name in the slot's
            /proc/driver.
        rules: what the slot's control group may open.
        visible_devices: value of CUDA_VISIBLE_DEVICES.
    """

    nodes: tuple[tuple[str, str], ...] = ()
    driver_files: tuple[tuple[str, str], ...] = ()
    rules: tuple[DeviceRule, ...] = ()
    visible_devices: str = ""


NO_DEVICES: Final = SlotDevices()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLayout:
    """Where this machine has its device nodes and its driver's files.

    Attributes:
        dev: directory of the device nodes.
        driver: the driver's directory in /proc.
    """

    dev: Path = Path("/dev")
    driver: Path = Path("/proc/driver/nvidia")

    def devices_of(self, grant: GpuGrant | None) -> SlotDevices:
        """The devices of a slot with this grant. Raises Unsupported that names a node that is
        missing or belongs to another GPU."""
        if grant is None:
            return NO_DEVICES
        names = list(dict.fromkeys(self._names(grant)))
        nodes = [(self.dev / name, name) for name in names]
        return SlotDevices(
            nodes=tuple((str(path), name) for path, name in nodes),
            driver_files=tuple(
                (str(self.driver / name), f"nvidia/{name}") for name in self._files(grant)
            ),
            rules=tuple(self._rule(path) for path, _ in nodes),
            visible_devices=grant.visible_devices,
        )

    def _names(self, grant: GpuGrant) -> Iterator[str]:
        yield _CONTROL
        for name in _SHARED:
            if (self.dev / name).exists():
                yield name
        for device in grant.devices:
            if device.minor < 0 or not device.uuid:
                raise Unsupported(
                    f"the grant does not say which {device.kind or 'GPU'} of this machine it is: "
                    f"its UUID and its device number are needed"
                )
            if device.is_mig and not device.capabilities:
                raise Unsupported(f"MIG instance {device.uuid} has no capability devices")
            self._require_own_number(device)
            yield f"nvidia{device.minor}"
            for number in device.capabilities:
                yield f"nvidia-caps/nvidia-cap{number}"

    def _require_own_number(self, device: GpuDevice) -> None:
        """The node of that name must be the GPU's: rules are made of what it opens."""
        path = self.dev / f"nvidia{device.minor}"
        if (rule := self._rule(path)).minor != device.minor:
            raise Unsupported(
                f"{path} opens device {rule.major}:{rule.minor}, not GPU {device.uuid} (number "
                f"{device.minor}): make it again with nvidia-modprobe"
            )

    def _rule(self, path: Path) -> DeviceRule:
        try:
            return DeviceRule.of_node(path)
        except (OSError, ValueError) as e:
            raise Unsupported(
                f"the device node {path} cannot be given to a slot: {e}; the driver's "
                f"nvidia-modprobe makes it"
            ) from e

    def _files(self, grant: GpuGrant) -> Iterator[str]:
        """Names below the driver's directory that a grant shows."""
        minors = {device.minor for device in grant.devices}
        capabilities = {number for device in grant.devices for number in device.capabilities}
        for name in _DRIVER_FILES:
            if (self.driver / name).is_file():
                yield name
        for path in sorted(self.driver.glob("gpus/*/information")):
            if _number(path, _MINOR) in minors:
                yield str(path.parent.relative_to(self.driver))
        for path in sorted(self.driver.glob("capabilities/gpu*/mig/gi*/**/access")):
            if _number(path, _CAPABILITY) in capabilities:
                yield str(path.relative_to(self.driver))


def environment_of(grant: GpuGrant | None) -> dict[str, str]:
    """The variable that names the granted GPUs to CUDA.

    A worker gets it when it is booted, and each instance again when it begins to serve, because a
    restored worker has that of the slot in which its snapshot was made. CUDA reads it once: what
    was initialised before the snapshot keeps its numbering, and the driver maps its GPUs to the
    granted ones; what is initialised later, and new processes, find the new UUIDs.
    """
    return {VISIBLE_DEVICES: "" if grant is None else grant.visible_devices}


def _number(path: Path, line: re.Pattern[str]) -> int | None:
    try:
        found = line.search(path.read_text())
    except OSError:
        return None
    return int(found.group(1)) if found else None
