"""The GPUs of a node: read from the driver's management library (NVML) by a helper process, or from
/proc/driver/nvidia where that fails.

The helper (`python -m snapshotter.gpus.nvml`) prints a `GpuInventory` as JSON. Loading the library
can hang on a broken driver: then the helper is killed, and the agent starts without it. GPUs are
read once, when the agent starts: after a change of MIG instances, restart it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from snapshotter.cuda.gpu_usage import CudaNode, cuda_node
from snapshotter.gpus.kinds import kind_of_model
from snapshotter.types import GpuDevice

_log = logging.getLogger(__name__)
HELPER: Final = (sys.executable, "-m", "snapshotter.gpus.nvml")
_TIMEOUT_S = 60.0
"""The library wakes a sleeping driver, which takes seconds for each GPU."""

_KILLED_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGpu:
    """One GPU of the node.

    Attributes:
        uuid: `GPU-…`.
        numa_node: the NUMA node that it is attached to; -1 if not known.
        links: UUIDs of the GPUs that it is connected to by NVLink.
        devices: what can be granted of it: itself, or its MIG instances.
    """

    uuid: str
    numa_node: int = -1
    links: frozenset[str] = frozenset()
    devices: tuple[GpuDevice, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "uuid": self.uuid,
            "numa_node": self.numa_node,
            "links": sorted(self.links),
            "devices": [device.to_json() for device in self.devices],
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`."""
        return cls(
            uuid=body["uuid"],
            numa_node=body.get("numa_node", -1),
            links=frozenset(body.get("links", ())),
            devices=tuple(GpuDevice.from_json(device) for device in body["devices"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuInventory:
    """The GPUs of a node, in the order of their device numbers.

    Attributes:
        driver: version of the display driver; "" without.
    """

    gpus: tuple[NodeGpu, ...] = ()
    driver: str = ""
    _parents: Mapping[str, NodeGpu] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        parents = {device.uuid: gpu for gpu in self.gpus for device in gpu.devices}
        object.__setattr__(self, "_parents", parents)

    @property
    def devices(self) -> tuple[GpuDevice, ...]:
        """Everything that can be granted."""
        return tuple(device for gpu in self.gpus for device in gpu.devices)

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the devices, as the driver reports them; of MIG instances their kind."""
        return tuple(d.kind if d.is_mig else d.model for d in self.devices)

    def gpu_of(self, device: GpuDevice) -> NodeGpu:
        """The GPU that the device is, or is part of."""
        return self._parents[device.uuid]

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {"driver": self.driver, "gpus": [gpu.to_json() for gpu in self.gpus]}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`."""
        return cls(
            driver=body["driver"], gpus=tuple(NodeGpu.from_json(gpu) for gpu in body["gpus"])
        )


async def read_inventory(
    environ: Mapping[str, str],
    *,
    helper: Sequence[str] = HELPER,
    proc: Path = Path("/proc"),
    timeout_s: float = _TIMEOUT_S,
) -> GpuInventory:
    """The GPUs of this node; without NVML those of /proc, of which memory and connections are not
    known, and MIG instances are missing. `environ`: of this process; its PATH is searched."""
    node = cuda_node(proc=proc)
    if node.release is None and shutil.which("nvidia-smi", path=environ.get("PATH")) is None:
        return GpuInventory()
    try:
        status, line = await _last_line(helper, timeout_s)
        if status == 0:
            return GpuInventory.from_json(json.loads(line))
        reason = line[-200:] or f"status {status}"
    except TimeoutError:
        reason = f"no answer within {timeout_s:g} s"
    except (OSError, ValueError, LookupError) as e:
        reason = f"{type(e).__name__}: {e}"
    _log.warning("gpus.no_nvml reason=%s fallback=/proc/driver/nvidia", reason)
    return from_proc(node)


async def _last_line(helper: Sequence[str], timeout_s: float) -> tuple[int | None, str]:
    """Exit status and last line of the helper's output. Raises OSError, TimeoutError."""
    child = await asyncio.create_subprocess_exec(
        *helper,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(timeout_s):
            out, _ = await child.communicate()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        # one that is stuck in the driver does not die: it is not waited for
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(child.wait(), _KILLED_S)
        raise
    return child.returncode, out.decode(errors="replace").strip().rpartition("\n")[2]


def from_proc(node: CudaNode) -> GpuInventory:
    """The whole GPUs that the driver lists in /proc; those with MIG instances, whose UUIDs are not
    there, have nothing to grant."""
    return GpuInventory(
        driver=node.version,
        gpus=tuple(
            NodeGpu(
                uuid=gpu.uuid,
                devices=()
                if gpu.mig
                else (
                    GpuDevice(
                        uuid=gpu.uuid,
                        kind=kind_of_model(gpu.name),
                        model=gpu.name,
                        minor=gpu.minor,
                    ),
                ),
            )
            for gpu in sorted(node.gpus, key=lambda gpu: gpu.minor)
        ),
    )
