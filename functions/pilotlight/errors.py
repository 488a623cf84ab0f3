"""Errors of the control plane and the SDK. One tree; `type` is the machine-readable problem type
(RFC 9457)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class PilotlightError(Exception):
    """Base of everything that pilotlight raises on purpose.

    Attributes:
        type: last segment of the problem's `type` URI, stable for programs.
        status: the HTTP status it is mapped to.
        retry_after_s: seconds after which a retry makes sense, or None.
        detail: further members of the problem document.
    """

    type = "internal"
    status = 500

    def __init__(self, message: str, *, retry_after_s: float | None = None, **detail: Any) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.detail: Mapping[str, Any] = detail


class InvalidInput(PilotlightError):
    """Raised when a request, a spec or an argument is wrong; `detail` may carry `parameter` and
    `errors`."""

    type = "invalid-input"
    status = 400


class Unauthenticated(PilotlightError):
    """Raised when no valid API key was given."""

    type = "unauthenticated"
    status = 401


class Forbidden(PilotlightError):
    """Raised when the key is valid but its scope does not reach this far."""

    type = "forbidden"
    status = 403


class NotFound(PilotlightError):
    """Raised when the thing does not exist for this tenant (another tenant's things do not exist
    either)."""

    type = "not-found"
    status = 404


class Conflict(PilotlightError):
    """Raised when the change collides with what is there (a name in use, a stale version, another
    idempotent call)."""

    type = "conflict"
    status = 409


class TooLarge(PilotlightError):
    """Raised when a body, an archive or an argument exceeds its bound; `detail` carries
    `limit_bytes`."""

    type = "too-large"
    status = 413


class UnsupportedMediaType(PilotlightError):
    """Raised when a body has a content type that is not accepted here: a pickle for another
    tenant's function."""

    type = "unsupported-media-type"
    status = 415


class TooManyRequests(PilotlightError):
    """Raised when a quota is used up or a queue is full; always with `retry_after_s`."""

    type = "too-many-requests"
    status = 429


class OverQuota(TooManyRequests):
    """Raised when a quota is used up; `detail` carries `quota` (its name), `of` (tenant, key or
    function) and `limit`."""

    type = "over-quota"


class Shed(TooManyRequests):
    """Raised when a call that waited, or would have, gives its place to others; `detail` carries
    `priority` and `tenant`."""

    type = "shed"


class OverBudget(PilotlightError):
    """Raised when a budget is spent; `detail` carries `budget`, `period`, `amount`, `spent` and
    `until` (when the next period begins)."""

    type = "over-budget"
    status = 402


class BudgetReserved(TooManyRequests):
    """Raised when what is left of a budget is reserved by calls that still run; `detail` as
    OverBudget's, and `reserved`."""

    type = "budget-reserved"


class ClientClosedRequest(PilotlightError):
    """Raised when the caller left before the answer."""

    type = "client-closed-request"
    status = 499


class WorkerCrashed(PilotlightError):
    """Raised when the instance died under the call; `detail` carries `reason` (`out_of_memory`,
    `killed`, …)."""

    type = "worker-crashed"
    status = 502


class StartFailed(PilotlightError):
    """Raised when no instance could be brought up; `detail` carries `error` and `log_tail`."""

    type = "start-failed"
    status = 502


class Unavailable(PilotlightError):
    """Raised when nobody can take the call now, with the reason; always with `retry_after_s`."""

    type = "unavailable"
    status = 503


class CircuitOpen(Unavailable):
    """Raised when calls are kept from a revision that failed lately; `detail` carries `revision`
    and `error_ratio`."""

    type = "circuit-open"


class Incompatible(Conflict):
    """Raised when a new revision's schema would break callers of the one that serves; `detail`
    carries `breaks`, a list of texts."""

    type = "incompatible-schema"


class GateFailed(Conflict):
    """Raised when an offline evaluation does not reach what the function requires; `detail` carries
    `failed`, a list of texts."""

    type = "gate-failed"


class ApprovalRequired(Conflict):
    """Raised when a revision must be approved before it takes traffic; `detail` carries `revision`
    and `approvals`."""

    type = "approval-required"


class ReleaseFrozen(Conflict):
    """Raised when nothing is released because an error budget is spent; `detail` carries `function`
    and `until`."""

    type = "release-frozen"


class DeadlineExceeded(PilotlightError):
    """Raised when a clock ran out; `detail` carries `clock`: `queue`, `startup` or `execution`."""

    type = "deadline-exceeded"
    status = 504


class StorageFull(PilotlightError):
    """Raised when a disk has no room for what was sent; nothing was changed."""

    type = "storage-full"
    status = 507


class StorageQuotaExceeded(StorageFull):
    """Raised when a tenant keeps as much as its plan allows; `detail` carries `quota`, `limit`,
    `used` and `hint`."""

    type = "storage-quota"


class FunctionRaised(PilotlightError):
    """Raised when user code raised. Over HTTP: status 500 with `error` = {type, message}, no
    internals.

    The SDK re-raises the original exception where it can be unpickled in the caller's process.
    """

    type = "function-raised"
    status = 500


class RemoteError(PilotlightError):
    """Raised by the SDK when the remote exception's class cannot be loaded here; carries the remote
    traceback as text."""

    type = "function-raised"
    status = 500
