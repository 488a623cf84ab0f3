"""Errors of the cluster. Every message says what happened, to which object, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pilotlight.kubernetes.api_request import ApiRequest


class ClusterError(Exception):
    """Base of all errors of the cluster.

    Attributes:
        status: HTTP status of the API server's response; 0 = there was none.
        reason: its machine-readable reason (`AlreadyExists`), or "".
        retry_after_s: the requested delay before a retry, or None.
        deed: the request, or None if no object was concerned.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        reason: str = "",
        retry_after_s: float | None = None,
        deed: ApiRequest | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.deed = deed


class ClusterUnreachable(ClusterError):
    """Raised when the API server did not answer, or not in time. `sent`: whether the request may
    have reached it."""

    def __init__(self, message: str, *, sent: bool = True, deed: ApiRequest | None = None) -> None:
        super().__init__(message, reason="Unreachable", deed=deed)
        self.sent = sent


class BadCredentials(ClusterError):
    """Raised when the kubeconfig or the pod's token cannot be used, or the API server does not
    accept it (401)."""


class Forbidden(ClusterError):
    """Raised when our role lacks a right, which `rule` would grant."""

    @property
    def rule(self) -> str:
        """The RBAC rule that grants it, as YAML of one line."""
        return self.deed.rule if self.deed is not None else ""


class NotFound(ClusterError):
    """Raised when a required object does not exist."""


class KindMissing(ClusterError):
    """Raised when the cluster does not serve this kind: its CustomResourceDefinition is missing."""


class Conflict(ClusterError):
    """Raised when the object changed in between (stale resourceVersion), or another field manager
    owns a field."""


class AlreadyExists(Conflict):
    """Raised when an object with this name exists."""


class Gone(ClusterError):
    """Raised when a resourceVersion or a page's token has expired: list again."""


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """One reason for a refusal: the field (or ""), the problem, and its fix (or "")."""

    field: str
    message: str
    fix: str = ""

    def __str__(self) -> str:
        text = f"{self.field}: {self.message}" if self.field else self.message
        return f"{text}\n    {self.fix}" if self.fix else text


class Invalid(ClusterError):
    """Raised when a manifest is refused by the schema, by Knative's webhook or by pod security.
    `problems`: the problems of each field."""

    def __init__(self, message: str, *, problems: Sequence[FieldProblem] = (), **rest: Any) -> None:
        super().__init__(message, **rest)
        self.problems = tuple(problems)


class QuotaExceeded(ClusterError):
    """Raised when a ResourceQuota of the namespace is exceeded."""


class NamespaceEnding(ClusterError):
    """Raised when the namespace is being deleted: no objects can be created in it."""


class WebhookDown(ClusterError):
    """Raised when the API server cannot reach an admission webhook: objects of its kinds cannot be
    written until it is available again."""


class Overloaded(ClusterError):
    """Raised when the API server sheds load (429, 503) for longer than our deadline."""


class ManifestWarned(ClusterError):
    """Raised when a write returned Warning headers that are not tolerated. Unless it was a dry run,
    the write was carried out: `result`."""

    def __init__(
        self, message: str, *, warnings: Sequence[str], result: Mapping[str, Any], **rest: Any
    ) -> None:
        super().__init__(message, **rest)
        self.warnings = tuple(warnings)
        self.result = result
