"""Errors of the control plane and the SDK, in one hierarchy; `type` is the machine-readable problem
type (RFC 9457)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEBUG_VARIABLE = "PILOTLIGHT_DEBUG"
"""Environment variable that makes the command line and the SDK show where an error was raised."""


class PilotlightError(Exception):
    """Base of all errors that pilotlight raises deliberately.

    Attributes:
        type: last segment of the problem's `type` URI, stable for programs.
        status: its HTTP status.
        retry_after_s: seconds after which a retry may succeed, or None.
        detail: additional members of the problem document.
    """

    type = "internal"
    status = 500

    def __init__(self, message: str, *, retry_after_s: float | None = None, **detail: Any) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.detail: Mapping[str, Any] = detail


class InvalidInput(PilotlightError):
    """Raised when a request, a spec or an argument is invalid; `detail` may have `parameter` and
    `errors`."""

    type = "invalid-input"
    status = 400


class Unauthenticated(PilotlightError):
    """Raised when a request has no valid API key."""

    type = "unauthenticated"
    status = 401


class Forbidden(PilotlightError):
    """Raised when the key is valid but its scope does not permit the request."""

    type = "forbidden"
    status = 403


class NotFound(PilotlightError):
    """Raised when an object does not exist for this tenant (other tenants' objects do not exist
    either)."""

    type = "not-found"
    status = 404


class MethodNotAllowed(PilotlightError):
    """Raised when a path is not served for the request's HTTP method; `detail` has `allowed`, the
    methods that are (the header `Allow`)."""

    type = "method-not-allowed"
    status = 405


class Conflict(PilotlightError):
    """Raised when a change conflicts with the current state (a name in use, a stale version,
    another idempotent call)."""

    type = "conflict"
    status = 409


class TooLarge(PilotlightError):
    """Raised when a body, an archive or an argument exceeds its limit; `detail` has
    `limit_bytes`."""

    type = "too-large"
    status = 413


class UnsupportedMediaType(PilotlightError):
    """Raised when the content type of a body is not accepted, such as a pickle for another tenant's
    function."""

    type = "unsupported-media-type"
    status = 415


class TooManyRequests(PilotlightError):
    """Raised when a quota is exceeded or a queue is full; always with `retry_after_s`."""

    type = "too-many-requests"
    status = 429


class OverQuota(TooManyRequests):
    """Raised when a quota is exceeded; `detail` has `quota` (its name), `of` (tenant, key or
    function) and `limit`."""

    type = "over-quota"


class Shed(TooManyRequests):
    """Raised when a waiting or new call is shed in favor of others; `detail` has `priority` and
    `tenant`."""

    type = "shed"


class OverBudget(PilotlightError):
    """Raised when a budget is exhausted; `detail` has `budget`, `period`, `amount`, `spent` and
    `until` (the beginning of the next period)."""

    type = "over-budget"
    status = 402


class InsufficientCredit(OverBudget):
    """Raised when the prepaid credit of a customer does not cover a call; `detail` has `credit`,
    `customer`, `balance`, `currency` and `needed`."""

    type = "insufficient-credit"


class BudgetReserved(TooManyRequests):
    """Raised when running calls have reserved the rest of a budget; `detail` as in OverBudget, and
    `reserved`."""

    type = "budget-reserved"


class ClientClosedRequest(PilotlightError):
    """Raised when the caller disconnected before the response."""

    type = "client-closed-request"
    status = 499


class WorkerCrashed(PilotlightError):
    """Raised when the instance died during the call; `detail` has `reason` (`out_of_memory`,
    `killed`, …)."""

    type = "worker-crashed"
    status = 502


class StartFailed(PilotlightError):
    """Raised when no instance could be started; `detail` has `error` and `log_tail`."""

    type = "start-failed"
    status = 502


class Unavailable(PilotlightError):
    """Raised when no instance can accept the call now, with the reason; always with
    `retry_after_s`."""

    type = "unavailable"
    status = 503


class CircuitOpen(Unavailable):
    """Raised when the circuit breaker of a failing revision is open; `detail` has `revision` and
    `error_ratio`."""

    type = "circuit-open"


class Incompatible(Conflict):
    """Raised when a new revision's schema would break callers of the current one; `detail` has
    `breaks`, a list of texts."""

    type = "incompatible-schema"


class GateFailed(Conflict):
    """Raised when an offline evaluation does not meet the function's requirements; `detail` has
    `failed`, a list of texts."""

    type = "gate-failed"


class ApprovalRequired(Conflict):
    """Raised when a revision must be approved before it gets traffic; `detail` has `revision` and
    `approvals`."""

    type = "approval-required"


class ReleaseFrozen(Conflict):
    """Raised when releases are frozen because an error budget is exhausted; `detail` has `function`
    and `until`."""

    type = "release-frozen"


class DeadlineExceeded(PilotlightError):
    """Raised when a deadline passed; `detail` has `clock`: `queue`, `startup` or `execution`."""

    type = "deadline-exceeded"
    status = 504


class StorageFull(PilotlightError):
    """Raised when a disk has no room for the data of a request; nothing was changed."""

    type = "storage-full"
    status = 507


class StorageQuotaExceeded(StorageFull):
    """Raised when a tenant's storage quota is exceeded; `detail` has `quota`, `limit`, `used` and
    `hint`."""

    type = "storage-quota"


class FunctionRaised(PilotlightError):
    """Raised when user code raised an exception. Over HTTP: status 500 with `error` = {type,
    message}, without internals.

    The SDK re-raises the original exception if it can be unpickled in the caller's process.
    """

    type = "function-raised"
    status = 500


class RemoteError(PilotlightError):
    """Raised by the SDK when the remote exception's class cannot be loaded locally; has the remote
    traceback as text."""

    type = "function-raised"
    status = 500
