"""Admission of a launch against GPU memory (HBM): weights, KV cache and engine must fit. Pure.

The need is estimated at deploy (`EngineSpec.gpu_bytes`); functions that load models by themselves
state none. A granted device has no other tenant, so all of its memory counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from snapshotter.types import GpuDevice, LaunchSpec

_GIB = 1024**3


def too_small(devices: Iterable[GpuDevice], launch: LaunchSpec, count: int) -> frozenset[str]:
    """UUIDs of the devices of which `count` have too little memory for the launch. One whose memory
    is not known, as without NVML, is not left out."""
    needed = launch.gpu_memory_bytes
    return frozenset(
        device.uuid
        for device in devices
        if device.memory_bytes and device.memory_bytes * count < needed
    )


def shortage(devices: Sequence[GpuDevice], launch: LaunchSpec, count: int) -> str:
    """What is missing on devices that are all too small, with the largest of them."""
    largest = max(devices, key=lambda device: device.memory_bytes)
    have = largest.memory_bytes * count / _GIB
    place = f"{count} {largest.kind}" if count > 1 else f"one {largest.kind}"
    return (
        f"weights, KV cache and engine need {launch.gpu_memory_bytes / _GIB:.1f} GiB of GPU "
        f"memory, and {place} of this node has {have:.1f} GiB: deploy with a smaller "
        f"max_model_len or max_num_seqs, more GPUs, or a GPU with more memory"
    )
