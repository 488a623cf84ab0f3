"""Refusals as Kubernetes words them: the `Status` document behind each HTTP error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

Json = dict[str, Any]

REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    409: "Conflict",
    410: "Expired",
    415: "UnsupportedMediaType",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}


class Refused(Exception):
    """Raised when the API server answers a request with an error: `status` and the `Status`
    document that goes with it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        reason: str | None = None,
        details: Json | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.reason = REASONS.get(status, "Unknown") if reason is None else reason
        self.details = details
        self.retry_after_s = retry_after_s

    def document(self) -> Json:
        """The `Status` object of the answer's body."""
        body: Json = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
        }
        body |= {"code": self.status, **({"reason": self.reason} if self.reason else {})}
        details = dict(self.details or {})
        if self.retry_after_s is not None:
            details["retryAfterSeconds"] = int(self.retry_after_s)
        return body | ({"details": details} if details else {})


def details_of(group: str, kind: str, name: str, causes: Sequence[Json] = ()) -> Json:
    """Field `details` of a Status."""
    found: Json = {"name": name, "kind": kind}
    if group:
        found["group"] = group
    return found | ({"causes": list(causes)} if causes else {})


def qualified(plural: str, group: str) -> str:
    """`deployments.apps`, `pods`."""
    return f"{plural}.{group}" if group else plural


def not_found(plural: str, group: str, name: str) -> Refused:
    """404 of an object that does not exist."""
    return Refused(
        404,
        f'{qualified(plural, group)} "{name}" not found',
        details=details_of(group, plural, name),
    )


def invalid(kind: str, group: str, name: str, faults: Sequence[tuple[str, str]]) -> Refused:
    """422: each fault is (path of the field, what is wrong with it)."""
    causes = [
        {"reason": "FieldValueInvalid", "message": text, "field": path} for path, text in faults
    ]
    joined = ", ".join(f"{path}: {text}" if path else text for path, text in faults)
    joined = f"[{joined}]" if len(faults) > 1 else joined
    shown = f"{kind}.{group}" if group else kind
    return Refused(
        422, f'{shown} "{name}" is invalid: {joined}', details=details_of(group, kind, name, causes)
    )


def webhook_refused(webhook: str, message: str, status: int = 400) -> NoReturn:
    """What a client sees of an admission webhook's refusal. Raises Refused."""
    raise Refused(status, f'admission webhook "{webhook}" denied the request: {message}')
