"""On a real GPU: a tensor leaves the device and comes back, byte for byte, and nothing of the
device is left in between."""

from __future__ import annotations

import pytest

from snapshotter.cuda.checkpoint_sequence import CudaDevices
from snapshotter.cuda.gpu_usage import holdings_of, nvidia_leftovers
from snapshotter.cuda.host import ThisMachine
from snapshotter.cuda.transitions import CudaState
from tests.snapshotter.cuda.gpu_process import answer, gpu_process

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


async def test_a_tensor_leaves_the_gpu_and_comes_back_the_same() -> None:
    async with gpu_process() as (driver, child):
        before = await answer(child)
        assert holdings_of(child.pid).devices
        seam = CudaDevices(driver, ThisMachine())
        suspension = await seam.before_dump([child.pid])
        assert nvidia_leftovers(child.pid) == ()
        assert await driver.state(child.pid) is CudaState.CHECKPOINTED
        phases = await seam.after_restore([child.pid], suspension.record)
        assert await answer(child) == before
        assert {*suspension.phases_ms, *phases} == {
            "cuda_lock",
            "cuda_checkpoint",
            "cuda_restore",
            "cuda_unlock",
        }


async def test_a_dump_that_failed_leaves_the_function_running() -> None:
    async with gpu_process() as (driver, child):
        before = await answer(child)
        seam = CudaDevices(driver, ThisMachine())
        suspension = await seam.before_dump([child.pid])
        await seam.rollback(suspension, "the disk is full")
        assert await answer(child) == before
        assert await driver.state(child.pid) is CudaState.RUNNING
