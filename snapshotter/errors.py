"""What can go wrong when a process is started, watched or stopped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class SnapshotterError(Exception):
    """Base of every error that leaves this package. `code` travels over the wire and picks the
    class again."""

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
    """Raised when somebody stopped the instance while it started: nothing is wrong with it, and
    another may be started."""

    code = "start_stopped"


class NoCapacity(SnapshotterError):
    """Raised when this node cannot hold one more instance; `detail` carries `resource`.

    `memory`: also `asked`, `free` (for this tenant), `claimed` (by all) and `total`; `dedicated`:
    the node is not for this tenant."""

    code = "no_capacity"


class InstanceUnknown(SnapshotterError):
    """Raised when no instance of that id is on this node."""

    code = "instance_unknown"


class OrderRefused(SnapshotterError):
    """Raised when an activator asks for what the controller has not sealed, or names what is no
    name."""

    code = "order_refused"


class LogsBusy(SnapshotterError):
    """Raised when a tenant reads as many logs at once as it may; `detail` carries `limit`,
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
    """Raised when a source archive or a blob that a launch names is not in the blob store, or does
    not match its hash."""

    code = "bundle_unavailable"


class Unsupported(SnapshotterError):
    """Raised when this machine cannot do what was asked (no root, no such interpreter, no GPU);
    says what would help."""

    code = "unsupported"


class SnapshotRefused(SnapshotterError):
    """Raised when a revision cannot be snapshotted; `detail["reasons"]` lists what stands in the
    way (`kind, what, where, message`)."""

    code = "snapshot_refused"


class ProofsBusy(SnapshotterError):
    """Raised when a tenant asks for more proofs of snapshots than it may have; `detail` carries
    `retry_after_s`."""

    code = "proofs_busy"


class SnapshotUnknown(SnapshotterError):
    """Raised when no snapshot of that id is on this node."""

    code = "snapshot_unknown"


class AgentUnavailable(SnapshotterError):
    """Raised when the node agent does not answer on its socket."""

    code = "agent_unavailable"
