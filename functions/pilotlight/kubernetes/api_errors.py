"""Converts responses of the API server to our errors. The only place that interprets `Status`
documents."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pilotlight.kubernetes.api_request import ApiRequest
from pilotlight.kubernetes.errors import (
    AlreadyExists,
    BadCredentials,
    ClusterError,
    Conflict,
    FieldProblem,
    Forbidden,
    Gone,
    Invalid,
    KindMissing,
    NamespaceEnding,
    NotFound,
    Overloaded,
    QuotaExceeded,
    WebhookDown,
)
from pilotlight.kubernetes.webhook_errors import webhook_problems

_DENIED = re.compile(
    r'admission webhook "(?P<webhook>[^"]+)" denied the request: (?P<why>.*)', re.DOTALL
)
_UNREACHABLE = re.compile(r'failed calling webhook "(?P<webhook>[^"]+)"')
_STRICT = re.compile(r'unknown field "(?P<field>[^"]+)"')
_TYPED = re.compile(r"failed to create typed patch object \([^)]*\): (?P<why>.*)", re.DOTALL)
"""Server-side apply of what the schema does not have: status 500, without a reason
(structured-merge-diff, typed/helpers.go)."""
_UNDECLARED = re.compile(r"\.(?P<field>\S+): field not declared in schema")
_UNKNOWN_FIELD = "the cluster does not know this field: upgrade Knative or Kubernetes, or remove it"
_INSTALL = {
    "serving.knative.dev": "install Knative Serving (its serving-crds.yaml, then "
    "serving-core.yaml)",
    "autoscaling.internal.knative.dev": "install Knative Serving (its serving-crds.yaml, then "
    "serving-core.yaml)",
    "networking.internal.knative.dev": "install Knative Serving (its serving-crds.yaml, then "
    "serving-core.yaml)",
    "caching.internal.knative.dev": "install Knative Serving (its serving-crds.yaml, then "
    "serving-core.yaml)",
    "cert-manager.io": "install cert-manager, or give the chart your own TLS secrets "
    "(tls.existingSecret)",
    "monitoring.coreos.com": "install the Prometheus operator, or disable monitoring.podMonitors",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiResponse:
    """A response of the API server.

    Attributes:
        status: HTTP status.
        warnings: texts of its Warning headers.
        retry_after_s: value of its Retry-After header, or None.
    """

    status: int
    body: bytes
    warnings: tuple[str, ...] = ()
    retry_after_s: float | None = None
    knative_namespace: str = field(default="knative-serving")

    def document(self) -> dict[str, Any]:
        """The body's JSON object; empty if it has none (a proxy's page)."""
        try:
            value = json.loads(self.body)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


def install_hint(group: str) -> str:
    """What to install to get the kinds of an API group."""
    return _INSTALL.get(group, f"install the component that has the API group {group or 'core'}")


def error_from_response(deed: ApiRequest, answer: ApiResponse) -> ClusterError:
    """The error for a response that is not a success."""
    status = answer.document()
    if status.get("kind") != "Status":
        return _without_status(deed, answer)
    return from_status(
        deed, status, retry_after_s=answer.retry_after_s, knative_namespace=answer.knative_namespace
    )


def from_status(
    deed: ApiRequest,
    status: Mapping[str, Any],
    *,
    retry_after_s: float | None = None,
    knative_namespace: str = "knative-serving",
) -> ClusterError:
    """The error for a `Status` document: a response's body, or an ERROR event of a watch."""
    code = int(status.get("code") or 0)
    message = str(status.get("message") or "")
    details = status.get("details") or {}
    wait_s = retry_after_s if retry_after_s is not None else details.get("retryAfterSeconds")
    rest: dict[str, Any] = {
        "status": code,
        "reason": str(status.get("reason") or ""),
        "retry_after_s": wait_s,
        "deed": deed,
    }
    if _UNREACHABLE.search(message):
        return _webhook_down(deed, message, rest)
    if (denied := _DENIED.search(message)) is not None:
        return _denied(deed, denied, rest, knative_namespace)
    if code == 403:
        return _forbidden(deed, message, details, rest)
    if code in (400, 422):
        return _invalid(deed, message, details, rest)
    if code == 500 and (typed := _TYPED.search(message)) is not None:
        return _invalid(deed, typed.group("why"), details, rest)
    if code == 404:
        return _not_found(deed, details, rest)
    return _plain(deed, message, rest)


def _without_status(deed: ApiRequest, answer: ApiResponse) -> ClusterError:
    text = answer.body[:200].decode("utf-8", "replace").strip()
    rest: dict[str, Any] = {
        "status": answer.status,
        "retry_after_s": answer.retry_after_s,
        "deed": deed,
    }
    if answer.status == 404:
        return _kind_missing(deed, rest)
    return _plain(deed, text or "the response has no body", rest)


def _plain(deed: ApiRequest, message: str, rest: dict[str, Any]) -> ClusterError:
    code = rest["status"]
    said = f"cannot {deed}: {message}"
    if code == 401:
        return BadCredentials(
            f"{said}. The API server does not accept our credentials: check the service account "
            f"or the kubeconfig",
            **rest,
        )
    if code == 409:
        kind = AlreadyExists if rest["reason"] == "AlreadyExists" else Conflict
        return kind(said, **rest)
    if code == 410:
        return Gone(said, **rest)
    if code in (429, 503):
        return Overloaded(f"{said}. The API server is overloaded or starting: retry later", **rest)
    return ClusterError(f"{said} (status {code})", **rest)


def _webhook_down(deed: ApiRequest, message: str, rest: dict[str, Any]) -> ClusterError:
    found = _UNREACHABLE.search(message)
    name = found.group("webhook") if found else "?"
    where = (
        "kubectl get pods -n knative-serving -l app=webhook"
        if "knative" in name
        else "kubectl get validatingwebhookconfigurations"
    )
    return WebhookDown(
        f"cannot {deed}: the API server cannot reach the webhook {name}: {message}. See: {where}",
        **rest,
    )


def _denied(
    deed: ApiRequest, denied: re.Match[str], rest: dict[str, Any], knative_namespace: str
) -> ClusterError:
    problems = webhook_problems(denied.group("why"), knative_namespace=knative_namespace)
    lines = "\n  ".join(str(problem) for problem in problems)
    return Invalid(
        f"cannot {deed}: refused by the webhook {denied.group('webhook')}:\n  {lines}",
        problems=problems,
        **rest,
    )


def _forbidden(
    deed: ApiRequest, message: str, details: Mapping[str, Any], rest: dict[str, Any]
) -> ClusterError:
    causes = details.get("causes") or ()
    if (
        any(cause.get("reason") == "NamespaceTerminating" for cause in causes)
        or "is being terminated" in message
    ):
        return NamespaceEnding(
            f"cannot {deed}: the namespace {deed.namespace} is being deleted. Wait until it no "
            f"longer exists (kubectl get namespace {deed.namespace}); it is then recreated",
            **rest,
        )
    if "exceeded quota" in message or "failed quota" in message:
        return QuotaExceeded(
            f"cannot {deed}: {message}. Raise the tenant's plan, or see: kubectl describe "
            f"resourcequota -n {deed.namespace}",
            **rest,
        )
    if "violates PodSecurity" in message:
        return Invalid(f"cannot {deed}: {message}", problems=(FieldProblem("", message),), **rest)
    where = (
        f"in namespace {deed.namespace}" if deed.namespace else "in all namespaces (a ClusterRole)"
    )
    return Forbidden(
        f"may not {deed}: {message}. Grant {where}: {deed.rule} (`pilotlight doctor --cluster` "
        f"lists all that is missing)",
        **rest,
    )


def _invalid(
    deed: ApiRequest, message: str, details: Mapping[str, Any], rest: dict[str, Any]
) -> ClusterError:
    if rest["reason"] == "Expired":
        return Gone(f"cannot {deed}: {message}", **rest)
    problems = [
        FieldProblem(str(cause.get("field") or ""), str(cause.get("message") or ""))
        for cause in details.get("causes") or ()
    ]
    problems += [
        FieldProblem(unknown, _UNKNOWN_FIELD)
        for unknown in (*_STRICT.findall(message), *_UNDECLARED.findall(message))
    ]
    if not problems:
        problems = [FieldProblem("", message)]
    lines = "\n  ".join(str(problem) for problem in problems)
    return Invalid(f"cannot {deed}: the manifest is refused:\n  {lines}", problems=problems, **rest)


def _not_found(deed: ApiRequest, details: Mapping[str, Any], rest: dict[str, Any]) -> ClusterError:
    if not details.get("name"):  # for a missing object the details have its name
        return _kind_missing(deed, rest)
    if (
        deed.namespace
        and details.get("kind") == "namespaces"
        and details.get("name") == deed.namespace
    ):
        return NotFound(f"cannot {deed}: the namespace {deed.namespace} does not exist", **rest)
    return NotFound(f"cannot {deed}: it does not exist", **rest)


def _kind_missing(deed: ApiRequest, rest: dict[str, Any]) -> ClusterError:
    if deed.subresource:
        return KindMissing(
            f"cannot {deed}: this version of Kubernetes does not serve "
            f"{deed.kind.plural}/{deed.subresource}",
            **rest,
        )
    return KindMissing(
        f"cannot {deed}: the cluster does not serve {deed.kind.resource} "
        f"({deed.kind.api_version}): {install_hint(deed.kind.group)}",
        **rest,
    )
