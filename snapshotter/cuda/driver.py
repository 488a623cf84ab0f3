"""What a CUDA driver is asked about another process, whichever way it is reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from snapshotter.cuda.transitions import CudaState


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """How long each call may take, in seconds. `checkpoint` and `restore` copy device memory over
    PCIe: at 12 GB/s (half of a x16 slot of the fourth generation) 80 GB take 7 s, and a cold driver
    some seconds more; the rest is for nodes under load."""

    ask_s: float = 15.0
    lock_s: float = 30.0
    checkpoint_s: float = 120.0
    restore_s: float = 120.0
    unlock_s: float = 15.0

    def __post_init__(self) -> None:
        for name in ("ask_s", "lock_s", "checkpoint_s", "restore_s", "unlock_s"):
            if getattr(self, name) <= 0:
                raise ValueError(
                    f"{name} is {getattr(self, name):g}; a deadline is more than 0 seconds"
                )


class CudaDriver(Protocol):
    """Acts on the CUDA side of a process, named by its pid in our PID namespace.

    Every call may be cancelled at any moment (that is how a deadline arrives) and then ends at
    once, with whatever process did the work killed; the action itself may or may not have happened,
    so that only `state` tells. A refusal raises DriverFailed."""

    @property
    def name(self) -> str:
        """For logs and `doctor`: `cuda.core 1.0`, `cuda-checkpoint 570.86.10`."""
        ...

    @property
    def minimum_release(self) -> int:
        """The first release of the display driver that this way works with."""
        ...

    async def restore_thread(self, pid: int) -> int | None:
        """The thread that restores CUDA in this process; None: the process holds no CUDA."""
        ...

    async def state(self, pid: int) -> CudaState:
        """Where the process stands."""
        ...

    async def lock(self, pid: int, *, timeout_s: float) -> None:
        """Block its CUDA calls, and wait up to `timeout_s` for what was submitted."""
        ...

    async def checkpoint(self, pid: int) -> None:
        """Copy device memory to the host and let go of the GPU."""
        ...

    async def restore(self, pid: int, *, gpu_mapping: Mapping[str, str]) -> None:
        """Take the GPU again and copy back; `gpu_mapping` is UUID then → UUID now (`GPU-…`) of
        every GPU, empty for the same ones."""
        ...

    async def unlock(self, pid: int) -> None:
        """Let its CUDA calls go on."""
        ...

    async def aclose(self) -> None:
        """End whatever process it keeps."""
        ...
