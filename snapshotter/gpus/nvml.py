"""Reads the node's GPUs through NVML and prints them as JSON: `python -m snapshotter.gpus.nvml`.

A process of its own, because the library can hang. Sources: NVML API Reference Guide (device
queries, multi-instance GPU management); MIG User Guide, "Device nodes and capabilities" (numbers of
`/dev/nvidia-caps`)."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from snapshotter.gpus.inventory import GpuInventory, NodeGpu
from snapshotter.gpus.kinds import kind_of_model, mig_kind
from snapshotter.types import GpuDevice

_PROC = Path("/proc")
_PROFILE = re.compile(r"\bMIG (\S+)")
_MINOR = re.compile(r"^DeviceFileMinor:\s*(\d+)", re.MULTILINE)
_MASK_BITS = 64
_NUMA_WORDS = 16
"""Space for 1,024 NUMA nodes, the kernel's limit (CONFIG_NODES_SHIFT)."""


class Nvml(Protocol):
    """The functions of `pynvml` (package nvidia-ml-py) that are used. All raise `NVMLError`; a
    query that a GPU does not support raises `NVMLError_NotSupported`. Handles are opaque."""

    @property
    def NVMLError(self) -> type[Exception]: ...
    @property
    def NVMLError_NotSupported(self) -> type[Exception]: ...
    @property
    def NVMLError_NotFound(self) -> type[Exception]: ...

    NVML_P2P_CAPS_INDEX_NVLINK: int
    NVML_P2P_STATUS_OK: int
    NVML_AFFINITY_SCOPE_NODE: int

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlSystemGetDriverVersion(self) -> str: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...
    def nvmlDeviceGetUUID(self, handle: Any) -> str: ...
    def nvmlDeviceGetName(self, handle: Any) -> str: ...
    def nvmlDeviceGetMinorNumber(self, handle: Any) -> int: ...
    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any: ...
    def nvmlDeviceGetMemoryAffinity(
        self,
        handle: Any,
        nodeSetSize: int,
        scope: int,
    ) -> Sequence[int]: ...
    def nvmlDeviceGetP2PStatus(
        self,
        device1: Any,
        device2: Any,
        p2pIndex: int,
    ) -> int: ...
    def nvmlDeviceGetMigMode(self, device: Any) -> Sequence[int]: ...
    def nvmlDeviceGetMaxMigDeviceCount(self, device: Any) -> int: ...
    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Any, index: int) -> Any: ...
    def nvmlDeviceGetGpuInstanceId(self, device: Any) -> int: ...
    def nvmlDeviceGetComputeInstanceId(self, device: Any) -> int: ...


def inventory(nvml: Nvml, *, proc: Path = _PROC) -> GpuInventory:
    """The GPUs of this node. Raises `nvml.NVMLError`."""
    nvml.nvmlInit()
    try:
        handles = [
            nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())
        ]
        handles.sort(key=nvml.nvmlDeviceGetMinorNumber)
        return GpuInventory(
            driver=nvml.nvmlSystemGetDriverVersion(),
            gpus=tuple(_gpu(nvml, handle, handles, proc) for handle in handles),
        )
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Nvml, handle: Any, handles: Sequence[Any], proc: Path) -> NodeGpu:
    uuid, model = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
    if _is_partitioned(nvml, handle):
        devices = tuple(_mig_instances(nvml, handle, model, proc))
    else:
        whole = GpuDevice(
            uuid=uuid,
            kind=kind_of_model(model),
            model=model,
            minor=nvml.nvmlDeviceGetMinorNumber(handle),
            memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        )
        devices = (whole,)
    return NodeGpu(
        uuid=uuid,
        numa_node=_numa_node(nvml, handle),
        links=frozenset(
            nvml.nvmlDeviceGetUUID(other)
            for other in handles
            if other is not handle and _is_linked(nvml, handle, other)
        ),
        devices=devices,
    )


def _is_partitioned(nvml: Nvml, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    except nvml.NVMLError_NotSupported:
        return False


def _mig_instances(nvml: Nvml, handle: Any, model: str, proc: Path) -> Iterator[GpuDevice]:
    minor = nvml.nvmlDeviceGetMinorNumber(handle)
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except nvml.NVMLError_NotFound:
            continue
        profile = _PROFILE.search(nvml.nvmlDeviceGetName(instance))
        yield GpuDevice(
            uuid=nvml.nvmlDeviceGetUUID(instance),
            kind=mig_kind(model, profile[1] if profile else "unknown"),
            model=model,
            minor=minor,
            capabilities=_capabilities(
                proc / "driver/nvidia/capabilities" / f"gpu{minor}" / "mig",
                nvml.nvmlDeviceGetGpuInstanceId(instance),
                nvml.nvmlDeviceGetComputeInstanceId(instance),
            ),
            memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(instance).total),
        )


def _capabilities(directory: Path, gpu_instance: int, compute_instance: int) -> tuple[int, ...]:
    """Numbers of the two capability devices that open a MIG instance."""
    below = directory / f"gi{gpu_instance}"
    numbers = []
    for path in (below / "access", below / f"ci{compute_instance}" / "access"):
        try:
            found = _MINOR.search(path.read_text())
        except OSError:  # a driver without capabilities in /proc, or a container without them
            continue
        if found:
            numbers.append(int(found[1]))
    return tuple(numbers)


def _numa_node(nvml: Nvml, handle: Any) -> int:
    try:
        words = nvml.nvmlDeviceGetMemoryAffinity(handle, _NUMA_WORDS, nvml.NVML_AFFINITY_SCOPE_NODE)
    except nvml.NVMLError:  # not supported by all drivers, nor in all virtual machines
        return -1
    mask = sum(word << (_MASK_BITS * n) for n, word in enumerate(words))
    return mask.bit_length() - 1 if mask.bit_count() == 1 else -1


def _is_linked(nvml: Nvml, one: Any, other: Any) -> bool:
    try:
        status = nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except nvml.NVMLError:
        return False
    return bool(status == nvml.NVML_P2P_STATUS_OK)


def main() -> int:
    """Print the inventory; 1 and the reason on stderr if NVML does not answer."""
    try:
        import pynvml
    except ImportError as e:
        print(f"{e}: install pilotlight[node]", file=sys.stderr)
        return 1
    nvml = cast(Nvml, pynvml)
    try:
        print(json.dumps(inventory(nvml).to_json()))
    except nvml.NVMLError as e:
        print(f"NVML: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
