"""The interface of a CUDA driver for operations on another process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from snapshotter.cuda.transitions import CudaState


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Timeouts of calls, in seconds. `checkpoint` and `restore` copy device memory over PCIe: at 12
    GB/s (half of a x16 slot of the fourth generation) 80 GB take 7 s, and a cold driver some
    seconds more; the rest is for nodes under load."""

    ask_s: float = 15.0
    lock_s: float = 30.0
    checkpoint_s: float = 120.0
    restore_s: float = 120.0
    unlock_s: float = 15.0

    def __post_init__(self) -> None:
        for name in ("ask_s", "lock_s", "checkpoint_s", "restore_s", "unlock_s"):
            if getattr(self, name) <= 0:
                raise ValueError(
                    f"{name} is {getattr(self, name):g}; a deadline must be more than 0 seconds"
                )


class CudaDriver(Protocol):
    """Operations on the CUDA state of a process, given by its pid in our PID namespace.

    Every call may be cancelled at any time (such as by a deadline) and then returns at once, with
    its worker process killed; the operation may or may not have been carried out, which only
    `state` tells. A failure raises DriverFailed."""

    @property
    def name(self) -> str:
        """A name for logs and `doctor`: `cuda.core 1.0`, `cuda-checkpoint 570.86.10`."""

    @property
    def minimum_release(self) -> int:
        """The oldest supported release of the display driver."""

    async def restore_thread(self, pid: int) -> int | None:
        """The thread that restores CUDA in this process; None: the process does not use CUDA."""

    async def state(self, pid: int) -> CudaState:
        """The CUDA state of the process."""

    async def lock(self, pid: int, *, timeout_s: float) -> None:
        """Block its CUDA calls, and wait up to `timeout_s` for submitted work."""

    async def checkpoint(self, pid: int) -> None:
        """Copy device memory to the host and release the GPU."""

    async def restore(self, pid: int, *, gpu_mapping: Mapping[str, str]) -> None:
        """Acquire the GPU and copy the memory back; `gpu_mapping` maps the old to the new UUID
        (`GPU-…`) of every GPU, empty if unchanged."""

    async def unlock(self, pid: int) -> None:
        """Unblock its CUDA calls."""

    async def aclose(self) -> None:
        """Stop its helper process, if any."""
