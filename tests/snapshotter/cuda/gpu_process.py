"""A process with a tensor on the GPU, for tests on a real one. It answers each line on its input
with the sum and hash of the tensor."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from snapshotter.cuda.driver import CudaDriver
from snapshotter.cuda.driver_discovery import find_driver
from snapshotter.cuda.gpu_usage import cuda_node

_PROGRAM = """
import hashlib, sys, torch
torch.manual_seed(7)
weights = torch.randn(1 << 20, device="cuda")
torch.cuda.synchronize()
print("up", flush=True)
for line in sys.stdin:
    print(hashlib.sha256(weights.cpu().numpy().tobytes()).hexdigest(), (weights * 2).sum().item(), flush=True)
"""
START_S = 60.0
"""Importing torch with CUDA, and its first context."""


@asynccontextmanager
async def gpu_process() -> AsyncIterator[tuple[CudaDriver, Process]]:
    """The machine's driver and such a process; skips where either is missing."""
    found = await find_driver(node=cuda_node(), environ=os.environ)
    if found.driver is None:
        pytest.skip(found.why)
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _PROGRAM, stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    try:
        if await asyncio.wait_for(_line(child), START_S) != "up":
            pytest.skip("torch has no CUDA here")
        yield found.driver, child
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()
        await found.driver.aclose()


async def answer(child: Process) -> str:
    """What the tensor is now."""
    assert child.stdin is not None
    child.stdin.write(b"\n")
    await child.stdin.drain()
    return await asyncio.wait_for(_line(child), START_S)


async def _line(child: Process) -> str:
    assert child.stdout is not None
    return (await child.stdout.readline()).decode().strip()
