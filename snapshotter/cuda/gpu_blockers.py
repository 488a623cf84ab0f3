"""Detection of what the driver cannot checkpoint, before the process is modified: pure decisions
over the result of `holdings`.

Sources: README of cuda-checkpoint (no managed memory; CUDA IPC from 610 on; a failure inside the
driver may leave the process broken, so checking first is safer), README of CRIU's CUDA plugin (no
MIG, no MPS). Across several GPUs a restore can hang in NCCL: its deadline ends it, and its proof
fails. Only managed memory is detected afterwards: every context maps some, in an amount chosen by
the driver, and the driver rejects it cleanly (580: the process stays locked, and unlocks)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from snapshotter.cuda.errors import Refusal
from snapshotter.cuda.gpu_usage import CudaNode, Gpu, GpuUsage

API_RELEASE = 570
"""Has cuCheckpointProcess* in the driver API."""
BINARY_RELEASE = 555
"""Has `cuda-checkpoint --action`; 550 could only toggle, without a timeout for the lock."""
MIGRATION_RELEASE = 580
"""Supports a restore onto another GPU."""
IPC_RELEASE = 610
"""Supports memory shared between processes."""
_OR_NOT = ", or use snapshot=False"


def refusals(
    *, node: CudaNode, held: Sequence[GpuUsage], minimum_release: int
) -> tuple[Refusal, ...]:
    """All obstacles, the node's first; empty: proceed. `minimum_release` is that of the chosen
    driver implementation."""
    return (
        *_of_node(node, minimum_release),
        *_of_tree(held, node),
        *(r for h in held for r in _of_process(h, node)),
    )


def _of_node(node: CudaNode, minimum_release: int) -> Iterator[Refusal]:
    if node.release is None:
        message = (
            "no NVIDIA driver is loaded on this node: install one, or deploy the function "
            "without a GPU"
        )
        yield _refusal("cuda_driver", "none", message)
    elif node.release < minimum_release:
        message = (
            f"the display driver is {node.version}, but checkpointing a GPU requires "
            f"{minimum_release} or later: upgrade it{_OR_NOT}"
        )
        yield _refusal("cuda_driver", node.version, message)
    if node.mps:
        message = (
            "MPS runs on this node, and its clients cannot be checkpointed: stop it (echo "
            "quit | nvidia-cuda-mps-control)"
        )
        yield _refusal("mps", "nvidia-cuda-mps", message)


def _of_tree(held: Sequence[GpuUsage], node: CudaNode) -> Iterator[Refusal]:
    minors = sorted(frozenset[int]().union(*(h.minors for h in held)))
    if len(minors) > 1 and (node.release or 0) < MIGRATION_RELEASE:
        names = ", ".join(f"/dev/nvidia{n}" for n in minors)
        message = (
            f"the function uses {len(minors)} GPUs ({names}), and a snapshot of several requires "
            f"driver {MIGRATION_RELEASE} (this node has {node.version}): request one{_OR_NOT}"
        )
        yield _refusal("multi_gpu", names, message)


def _of_process(held: GpuUsage, node: CudaNode) -> Iterator[Refusal]:
    who = f"process {held.pid}"
    cut_up = [g for g in node.gpus if g.mig and g.minor in held.minors]
    if cut_up or held.capabilities & node.mig_instances:
        gpu = cut_up[0].uuid if cut_up else "a MIG instance"
        message = (
            f"{who} runs on {gpu}, which is partitioned (MIG) and cannot be checkpointed: "
            f"use a whole GPU (nvidia-smi -mig 0){_OR_NOT}"
        )
        yield _refusal("mig", gpu, message)
    if held.has_ipc and (node.release or 0) < IPC_RELEASE:
        needs = f"which requires driver {IPC_RELEASE} (this node has {node.version})"
        message = (
            f"{who} shares GPU memory with another process (CUDA IPC), {needs}: use one "
            f"process{_OR_NOT}"
        )
        yield _refusal("cuda_ipc", who, message)


def without_context(pid: int, devices: Sequence[str]) -> Refusal:
    """The refusal of a process with open device files but no CUDA, from which the driver cannot
    detach it."""
    names = ", ".join(devices)
    way_out = "close it before the snapshot (nvmlShutdown), or open it with snap=False"
    return _refusal(
        "device",
        names,
        f"process {pid} holds {names} without a CUDA context (NVML, a graphics library): {way_out}",
    )


def managed_memory(held: GpuUsage) -> Refusal:
    """The refusal of a process that the driver rejected and that maps more of `/dev/nvidia-uvm`
    than a context does."""
    size = f"{held.managed_bytes / 2**20:.0f} MiB"
    why = (
        f"process {held.pid} uses {size} of managed memory (UVM), which the driver cannot "
        f"checkpoint"
    )
    return _refusal("uvm", size, f"{why}: allocate with cudaMalloc{_OR_NOT}")


def left_over(pid: int, what: Sequence[str]) -> Refusal:
    """The refusal of a process that still has a device open: CRIU would fail, or dump it without
    its GPU."""
    names = ", ".join(what)
    return _refusal(
        "device", names, f"process {pid} holds {names} at the snapshot: close it before{_OR_NOT}"
    )


def unlisted(held: Sequence[GpuUsage]) -> Refusal:
    """The refusal of a process on a GPU that the driver does not list, so that it cannot be
    identified later."""
    names = ", ".join(sorted({d for h in held for d in h.devices}))
    return _refusal(
        "gpu",
        names,
        f"no GPU in /proc/driver/nvidia/gpus belongs to {names}: run the agent where the driver's "
        f"files are visible",
    )


def gpus_in_use(node: CudaNode, held: Sequence[GpuUsage]) -> tuple[Gpu, ...]:
    """The GPUs that the tree uses, in the order of their device numbers; () if it uses none, or one
    that the driver does not list."""
    minors = frozenset[int]().union(*(h.minors for h in held))
    used = [g for g in node.gpus if g.minor in minors]
    return tuple(sorted(used, key=lambda g: g.minor)) if len(used) == len(minors) else ()


def not_granted(uuids: Sequence[str]) -> Refusal:
    """The refusal of a tree on GPUs that it was not granted, as without namespaces it can be: a
    restore would not move it to those that its instance is granted."""
    names = ", ".join(uuids)
    return _refusal(
        "gpu",
        names,
        f"the function uses {names}, which it was not granted: use the GPUs of "
        f"CUDA_VISIBLE_DEVICES",
    )


def _refusal(kind: str, what: str, message: str) -> Refusal:
    return Refusal(kind=kind, what=what, message=message)
