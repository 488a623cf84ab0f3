"""Before a pod with GPUs boots: their memory is really free, or it is said who still holds it.

The device plugin hands a GPU out the moment its last pod is gone from the API, and the driver may
still be tearing that pod's contexts down: a model that is loaded then runs out of memory. This is
the last step of replacing a revision in place (rollout `swap`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from snapshotter.cuda.memory import GpuMemory, GpuMemoryUnknown, MemoryReader
from snapshotter.pods.tenant_mounts import Say

LOOK_S = 0.5
"""Between two looks: the driver has no event for freed memory."""
PART_OF_CLOCK = 0.5
"""Of the startup clock, after which the pod goes on all the same: a GPU that is shared on purpose
never looks free, and what cannot be had the worker's own error tells best."""


async def wait_free(
    reader: MemoryReader, *, wanted: Sequence[str], count: int, within_s: float, say: Say
) -> str:
    """Return when the GPUs are free: those `wanted` (UUIDs or indices), or where these are not
    known any `count` of the node's.

    Returns what was still in the way when `within_s` was over, "" otherwise.
    """
    deadline = time.monotonic() + within_s
    while True:
        try:
            missing = in_the_way(await reader.read(), wanted=wanted, count=count)
        except GpuMemoryUnknown as e:
            return f"the memory of GPUs is not known: {e}"
        if not missing or time.monotonic() >= deadline:
            return missing
        say(f"waiting for GPU memory: {missing}")
        await asyncio.sleep(min(LOOK_S, max(0.0, deadline - time.monotonic())))


def in_the_way(gpus: Sequence[GpuMemory], *, wanted: Sequence[str], count: int) -> str:
    """What is not free yet, in words; "" when the pod may go on."""
    if wanted:  # parts of a GPU (MIG) are not in the list, and are not waited for
        own = [gpu for gpu in gpus if gpu.uuid in wanted or str(gpu.index) in wanted]
        return "; ".join(gpu.describe() for gpu in own if not gpu.is_free)
    busy = [gpu for gpu in gpus if not gpu.is_free]
    return "; ".join(gpu.describe() for gpu in busy) if len(gpus) - len(busy) < count else ""
