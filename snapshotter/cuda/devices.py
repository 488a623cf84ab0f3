"""The seam between checkpoints and devices: what happens to a process tree before CRIU dumps it,
and after CRIU has restored it.

    suspension = await devices.before_dump(pids)        # CudaRefused, CudaFailed: the tree runs; CudaLost: it was killed
    try:
        … CRIU dump …                                    # keep suspension.record in the manifest
    except CriuFailed:
        await devices.rollback(suspension, "why")       # CudaLost when nothing leads back
    …
    devices.check_restore(record)                        # before CRIU starts: CudaRefused
    … CRIU restore …
    phases_ms = await devices.after_restore(pids, record)

Pids are those of our own PID namespace, of the whole tree.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from snapshotter.cuda.errors import CudaRefused, Refusal
from snapshotter.cuda.gpu_mapping import DeviceRecord
from snapshotter.cuda.gpu_usage import nvidia_leftovers
from snapshotter.cuda.host import ProcessHandle
from snapshotter.cuda.preconditions import left_over


class Suspension:
    """A tree whose GPU side has been taken off the device. Owned by the checkpoint that asked for
    it, on the agent's event loop.

    Attributes:
        record: for the manifest. phases_ms: `cuda_lock` (the look at the process included),
        `cuda_checkpoint` (the check that it let go included).
    """

    def __init__(
        self,
        *,
        victims: Sequence[ProcessHandle] = (),
        cuda_pids: Sequence[int] = (),
        record: DeviceRecord | None = None,
    ) -> None:
        self.victims = tuple(victims)
        self.cuda_pids = tuple(cuda_pids)
        self.record = record or DeviceRecord()
        self.phases_ms: dict[str, float] = {}
        self._over = False

    def __repr__(self) -> str:
        return (
            f"<Suspension {'over' if self._over else 'open'} of "
            f"{', '.join(map(str, self.cuda_pids)) or 'nothing'}>"
        )

    @property
    def first_pid(self) -> int:
        """For messages; 0 without a CUDA process."""
        return self.cuda_pids[0] if self.cuda_pids else 0

    def end(self) -> bool:
        """True for the first caller: its is the way back."""
        first, self._over = not self._over, True
        return first


class Devices(Protocol):
    """What checkpoints and restores ask of devices."""

    async def before_dump(self, pids: Sequence[int]) -> Suspension:
        """Take the tree off the GPU. Cancelled, it leads the tree back first."""
        ...

    async def rollback(self, suspension: Suspension, reason: str) -> None:
        """The dump failed: lead the tree back to running, once (a second call does nothing). Raises
        CudaLost when that fails."""
        ...

    def check_restore(self, record: DeviceRecord, *, target: str | None = None) -> None:
        """Raises CudaRefused when `record` cannot come back on this node (onto GPU `target`). Ask
        before CRIU restores."""
        ...

    async def after_restore(
        self, pids: Sequence[int], record: DeviceRecord, *, target: str | None = None
    ) -> Mapping[str, float]:
        """Put the tree back onto a GPU; gives `cuda_restore` and `cuda_unlock` in ms. Raises
        CudaLost: the tree was killed."""
        ...


class NoDevices:
    """Devices of a function without a GPU: acts on nothing, but refuses a process that holds a
    device all the same."""

    def __init__(self, *, leftovers: Callable[[int], tuple[str, ...]] = nvidia_leftovers) -> None:
        self._leftovers = leftovers

    async def before_dump(self, pids: Sequence[int]) -> Suspension:
        """Nothing to take off; CudaRefused names what a process holds."""
        refused = []
        for pid in pids:
            # gone: the dump will say so
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if what := self._leftovers(pid):
                    refused.append(left_over(pid, what))
        if refused:
            raise CudaRefused(refused)
        return Suspension()

    async def rollback(self, suspension: Suspension, reason: str) -> None:
        """Nothing to lead back."""
        suspension.end()

    def check_restore(self, record: DeviceRecord, *, target: str | None = None) -> None:
        """A snapshot with a GPU side is not for here."""
        if record.processes:
            message = (
                f"the snapshot holds the GPU state of {record.processes} processes, and "
                f"this node has no way to restore it"
            )
            raise CudaRefused([Refusal(kind="cuda_driver", what="none", message=message)])

    async def after_restore(
        self, pids: Sequence[int], record: DeviceRecord, *, target: str | None = None
    ) -> Mapping[str, float]:
        """Nothing to put back."""
        self.check_restore(record, target=target)
        return {}
