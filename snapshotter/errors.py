"""Errors raised when a process is started, watched or stopped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class SnapshotterError(Exception):
    """Base of every error that leaves this package. `code` is sent over RPC; the client maps it
    back to the class."""

    code = "snapshotter_error"

    def __init__(self, message: str, detail: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.detail: Mapping[str, Any] = detail or {}


class StartFailed(SnapshotterError):
    """Raised when a worker died, or reported an error, before it was ready.

    `detail` carries `log_tail` (list of last lines) and, when user code raised, `error`
    (`{"type", "message", "traceback", "phase"}`: data, never pickles).
    """

    code = "start_failed"


class StartTimeout(SnapshotterError):
    """Raised when a worker did not become ready within its startup timeout. `detail` carries
    `log_tail`, `phase`."""

    code = "start_timeout"


class StartStopped(SnapshotterError):
    """Raised when the instance was stopped by request while it started. The instance is not at
    fault; another may be started."""

    code = "start_stopped"


class NoCapacity(SnapshotterError):
    """Raised when this node cannot run one more instance; `detail` carries `resource`.

    `memory`: also `asked`, `free` (for this tenant), `claimed` (by all) and `total`. `dedicated`:
    the node is dedicated to another tenant.
    """

    code = "no_capacity"


class InstanceUnknown(SnapshotterError):
    """Raised when this node has no instance of that id."""

    code = "instance_unknown"


class OrderRefused(SnapshotterError):
    """Raised when an activator sends a launch document that the controller has not signed, or an
    invalid name."""

    code = "order_refused"


class LogsBusy(SnapshotterError):
    """Raised when a tenant exceeds its limit of concurrent log reads; `detail` carries `limit`,
    `retry_after_s`."""

    code = "logs_busy"


class LeaseHeld(SnapshotterError):
    """Raised when an instance is leased to another activator; `detail` carries `lessee`."""

    code = "lease_held"


class ImageBuildFailed(SnapshotterError):
    """Raised when an image's environment cannot be built; `detail` carries `step` and
    `log_tail`."""

    code = "image_build_failed"


class BundleUnavailable(SnapshotterError):
    """Raised when a source archive or blob of a launch is missing from the blob store, or does not
    match its hash."""

    code = "bundle_unavailable"


class Unsupported(SnapshotterError):
    """Raised when this machine cannot do what was requested (no root, missing interpreter, no GPU);
    the message names the remedy."""

    code = "unsupported"


class SnapshotRefused(SnapshotterError):
    """Raised when a revision cannot be snapshotted; `detail["reasons"]` lists the obstacles (`kind,
    what, where, message`). Raised by `checkpointing.checkpoints`, shown by the command line's
    `start_report` and `doctor`."""

    code = "snapshot_refused"


class ProofsBusy(SnapshotterError):
    """Raised when a tenant exceeds its limit of concurrent snapshot validations; `detail` carries
    `retry_after_s`."""

    code = "proofs_busy"


class SnapshotUnknown(SnapshotterError):
    """Raised when this node has no snapshot of that id."""

    code = "snapshot_unknown"


class VolumeUnknown(SnapshotterError):
    """Raised when a volume does not exist, or is not on this node."""

    code = "volume_unknown"


class VolumeFailed(SnapshotterError):
    """Raised when a volume cannot be read, uploaded or brought up to date. `detail` carries
    `reason`: `refused` (its tree has what a volume cannot have, or changed meanwhile), `disk_full`,
    `store`, `controller`, `killed` or `failed`."""

    code = "volume_failed"


class AgentUnavailable(SnapshotterError):
    """Raised when the node agent does not answer on its socket."""

    code = "agent_unavailable"
