"""GPUs whose memory is what the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from snapshotter.cuda.memory import GpuMemory, GpuMemoryUnknown

GIB = 1024**3


def gpu(index: int = 0, *, used_gib: float = 0.0, holders: Sequence[str] = ()) -> GpuMemory:
    """One of 80 GiB."""
    used = int(used_gib * GIB)
    return GpuMemory(
        uuid=f"GPU-{index:04d}",
        index=index,
        name="H100",
        used_bytes=used,
        total_bytes=80 * GIB,
        holders=tuple(holders),
    )


class FakeGpuMemory:
    """MemoryReader; `looked` is set by each read. None: the tool does not answer."""

    def __init__(self, *gpus: GpuMemory) -> None:
        self.gpus: tuple[GpuMemory, ...] | None = gpus
        self.reads = 0
        self.looked = asyncio.Event()

    async def read(self) -> tuple[GpuMemory, ...]:
        """See MemoryReader."""
        self.reads += 1
        self.looked.set()
        if self.gpus is None:
            raise GpuMemoryUnknown("nvidia-smi is not on the PATH")
        return self.gpus
