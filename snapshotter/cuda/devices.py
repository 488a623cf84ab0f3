"""The interface between checkpoints and devices: actions on a process tree before CRIU dumps it,
and after CRIU has restored it.

    suspension = await devices.before_dump(pids)
        # CudaRefused, CudaFailed: the tree runs; CudaLost: it was killed
    try:
        … CRIU dump …                                    # keep suspension.record in the manifest
    except CriuFailed:
        await devices.rollback(suspension, "why")       # CudaLost if it cannot be rolled back
    …
    devices.check_restore(record)                        # before CRIU starts: CudaRefused
    … CRIU restore …
    phases_ms = await devices.after_restore(pids, record)

Pids are those of the agent's PID namespace, of the whole tree."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from snapshotter.cuda.errors import CudaRefused, Refusal
from snapshotter.cuda.gpu_blockers import left_over
from snapshotter.cuda.gpu_mapping import DeviceRecord
from snapshotter.cuda.gpu_usage import nvidia_leftovers
from snapshotter.cuda.host import ProcessHandle


class Suspension:
    """A tree whose GPU state has been moved off the device. Owner: the checkpoint that created it,
    on the agent's event loop.

    Attributes:
        record: for the manifest.
        phases_ms: `cuda_lock` (including the examination), `cuda_checkpoint` (including the check
            for leftovers).
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
        """A pid for messages; 0 without a CUDA process."""
        return self.cuda_pids[0] if self.cuda_pids else 0

    def end(self) -> bool:
        """True for the first caller, which rolls back."""
        first, self._over = not self._over, True
        return first


class Devices(Protocol):
    """Device operations of checkpoints and restores."""

    async def before_dump(self, pids: Sequence[int], *, granted: Sequence[str] = ()) -> Suspension:
        """Move the tree off its GPUs. If cancelled, it is rolled back first. `granted`: UUIDs of
        the slot's GPUs, in CUDA's order; () if not known."""

    async def rollback(self, suspension: Suspension, reason: str) -> None:
        """Roll back to running after a failed dump, once (a second call does nothing). Raises
        CudaLost if that fails."""

    def check_restore(self, record: DeviceRecord, *, target: Sequence[str] = ()) -> None:
        """Raises CudaRefused if `record` cannot be restored on this node (onto the GPUs `target`).
        Call before CRIU restores."""

    async def after_restore(
        self, pids: Sequence[int], record: DeviceRecord, *, target: Sequence[str] = ()
    ) -> Mapping[str, float]:
        """Move the tree back to GPUs; returns `cuda_restore` and `cuda_unlock` in ms. Raises
        CudaLost: the tree was killed."""


class NoDevices:
    """Devices of a function without a GPU: does nothing, but refuses a process that has a device
    open."""

    def __init__(self, *, leftovers: Callable[[int], tuple[str, ...]] = nvidia_leftovers) -> None:
        self._leftovers = leftovers

    async def before_dump(self, pids: Sequence[int], *, granted: Sequence[str] = ()) -> Suspension:
        """An empty suspension. Raises CudaRefused with the devices that a process has open."""
        refused = []
        for pid in pids:
            # it has exited: the dump will report it
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if what := self._leftovers(pid):
                    refused.append(left_over(pid, what))
        if refused:
            raise CudaRefused(refused)
        return Suspension()

    async def rollback(self, suspension: Suspension, reason: str) -> None:
        """End the suspension; there is nothing to roll back."""
        suspension.end()

    def check_restore(self, record: DeviceRecord, *, target: Sequence[str] = ()) -> None:
        """Raises CudaRefused for a snapshot with GPU state."""
        if record.processes:
            message = (
                f"the snapshot has the GPU state of {record.processes} processes, which this "
                f"node cannot restore"
            )
            raise CudaRefused([Refusal(kind="cuda_driver", what="none", message=message)])

    async def after_restore(
        self, pids: Sequence[int], record: DeviceRecord, *, target: Sequence[str] = ()
    ) -> Mapping[str, float]:
        """Check that there is no GPU state to restore."""
        self.check_restore(record, target=target)
        return {}
