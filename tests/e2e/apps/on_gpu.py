"""A model on a GPU: for tests on a machine that has one."""

from __future__ import annotations

import os
from typing import Any

import pilotlight

app = pilotlight.App("on-gpu")


@app.cls(
    gpu="any",
    cpu=2,
    memory="32GiB",
    max_instances=1,
    scaledown_window=2,
    env={"MIB": os.environ.get("ON_GPU_MIB", "64")},
)
class Model:
    """Holds MIB of numbers on the GPU, which a snapshot has to bring back."""

    @pilotlight.enter()
    def load(self) -> None:
        """Before the snapshot."""
        import torch

        torch.manual_seed(7)
        self.numbers: Any = torch.randn(int(os.environ["MIB"]) << 18, device="cuda")

    @pilotlight.method(example=[1000])
    def total(self, n: int) -> list[Any]:
        """The sum of the first `n`, computed there."""
        return [round(float(self.numbers[:n].double().sum()), 6), str(self.numbers.device)]


@app.cls(gpu="any", cpu=2, memory="16GiB", max_instances=1, scaledown_window=2)
class Managed:
    """Allocates managed memory, which the driver cannot checkpoint."""

    @pilotlight.enter()
    def load(self) -> None:
        """64 MiB, through the driver API (cuMemAllocManaged)."""
        import ctypes

        import torch

        torch.ones(1, device="cuda")
        address = ctypes.c_uint64()
        if ctypes.CDLL("libcuda.so.1").cuMemAllocManaged(
            ctypes.byref(address), ctypes.c_size_t(64 << 20), 1
        ):
            raise MemoryError("no managed memory")

    @pilotlight.method(example=[])
    def nothing(self) -> None:
        """For a call."""
