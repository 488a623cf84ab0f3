"""Waits until the memory of a pod's GPUs is free before it boots, or reports what still uses it.

The device plugin reassigns a GPU as soon as its last pod is deleted from the API, while the driver
may still be tearing down that pod's contexts: a model that is loaded then runs out of memory. This
is the last step of replacing a revision in place (rollout `swap`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from snapshotter.cuda.memory import GpuMemory, GpuMemoryUnknown, MemoryReader
from snapshotter.pods.tenant_mounts import Say

LOOK_S = 0.5
"""Poll interval: the driver has no event for freed memory."""
PART_OF_CLOCK = 0.5
"""Fraction of the startup timeout after which the pod continues anyway: a deliberately shared GPU
is never free, and the worker's own error describes a shortage best."""


async def wait_free(
    reader: MemoryReader, *, wanted: Sequence[str], count: int, within_s: float, report: Say
) -> str:
    """Return when the GPUs are free: those `wanted` (UUIDs or indices), or if these are unknown any
    `count` of the node's.

    Returns what was still in use when `within_s` was over, "" otherwise.
    """
    deadline = time.monotonic() + within_s
    while True:
        try:
            missing = in_the_way(await reader.read(), wanted=wanted, count=count)
        except GpuMemoryUnknown as e:
            return f"the memory of GPUs is unknown: {e}"
        if not missing or time.monotonic() >= deadline:
            return missing
        report(f"waiting for GPU memory: {missing}")
        await asyncio.sleep(min(LOOK_S, max(0.0, deadline - time.monotonic())))


def in_the_way(gpus: Sequence[GpuMemory], *, wanted: Sequence[str], count: int) -> str:
    """Description of the GPUs that are not free yet; "" when the pod may continue."""
    if wanted:  # parts of a GPU (MIG) are not listed, and not waited for
        own = [gpu for gpu in gpus if gpu.uuid in wanted or str(gpu.index) in wanted]
        return "; ".join(gpu.describe() for gpu in own if not gpu.is_free)
    busy = [gpu for gpu in gpus if not gpu.is_free]
    return "; ".join(gpu.describe() for gpu in busy) if len(gpus) - len(busy) < count else ""
