"""Errors of operations on a process's GPU state. None of them leaves a process locked or
checkpointed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from snapshotter.errors import SnapshotRefused, SnapshotterError


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One obstacle: its `kind`, `what` it is, and a `message` that names it and the remedy."""

    kind: str
    what: str
    message: str

    def to_json(self) -> dict[str, str | None]:
        """As an item of `SnapshotRefused.detail["reasons"]`."""
        return {"kind": self.kind, "what": self.what, "where": None, "message": self.message}


class CudaRefused(SnapshotRefused):
    """Raised when a GPU process cannot be snapshotted: it continues to run. `detail["reasons"]` as
    in SnapshotRefused."""

    def __init__(self, refusals: Sequence[Refusal]) -> None:
        super().__init__(
            "; ".join(r.message for r in refusals), {"reasons": [r.to_json() for r in refusals]}
        )
        self.refusals = tuple(refusals)


class DriverFailed(SnapshotterError):
    """Raised by a CudaDriver when a call failed, or the driver died. `detail` has `asked`,
    `pid`."""

    code = "cuda_driver_failed"

    def __init__(self, asked: str, pid: int, message: str) -> None:
        super().__init__(f"CUDA {asked} of process {pid}: {message}", {"asked": asked, "pid": pid})
        self.asked = asked
        self.pid = pid


class CudaFailed(SnapshotterError):
    """Raised when a step failed and every process of the tree is running again. `detail` has
    `step`, `pid`, `edges`."""

    code = "cuda_failed"


class CudaLost(SnapshotterError):
    """Raised when a step failed and the tree was killed, because it cannot be rolled back. `detail`
    has `step`, `pid`, `edges`."""

    code = "cuda_lost"
