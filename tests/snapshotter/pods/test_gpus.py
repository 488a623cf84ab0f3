"""Which GPUs are in the way."""

from __future__ import annotations

import pytest

from snapshotter.cuda.memory import GpuMemory
from snapshotter.pods.gpus import in_the_way, wait_free
from tests.fakes.gpu_memory import FakeGpuMemory, gpu

BUSY = gpu(0, used_gib=40.0)
FREE = gpu(1, used_gib=0.6)


@pytest.mark.parametrize(
    "gpus, wanted, count, words",
    [
        ((BUSY, FREE), ("GPU-0001",), 1, ""),
        ((BUSY, FREE), ("1",), 1, ""),
        (
            (BUSY, FREE),
            ("GPU-0000",),
            1,
            (
                "GPU 0 (GPU-0000) has 40.0 GiB of 80.0 GiB in use by a process that this node's "
                "agent cannot see"
            ),
        ),
        ((BUSY, FREE), (), 1, ""),
        ((BUSY, FREE), (), 2, "GPU 0"),
        ((BUSY,), ("MIG-1234",), 1, ""),
        ((gpu(0, holders=["x (pid 1)"]),), (), 1, "x (pid 1)"),
        ((), (), 0, ""),
    ],
)
def test_what_is_in_the_way_is_said(
    gpus: tuple[GpuMemory, ...], wanted: tuple[str, ...], count: int, words: str
) -> None:
    found = in_the_way(gpus, wanted=wanted, count=count)

    assert found.startswith(words) if words.startswith("GPU") else words in found
    assert bool(found) == bool(words)


async def test_without_the_drivers_tool_nobody_waits() -> None:
    reader = FakeGpuMemory()
    reader.gpus = None

    left = await wait_free(reader, wanted=(), count=1, within_s=60.0, report=lambda _: None)

    assert left == "the memory of GPUs is unknown: nvidia-smi is not on the PATH"
