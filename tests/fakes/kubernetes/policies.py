"""ValidatingAdmissionPolicies: their CEL, evaluated by Google's own library on what is written
(Kubernetes, "Validating Admission Policy").

Left out: parameters, audit annotations, match policies, and Warn and Audit as actions.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from cel_expr_python import cel

from tests.fakes.kubernetes.kinds import Resource
from tests.fakes.kubernetes.problems import Refused, details_of
from tests.fakes.kubernetes.selectors import labels_match
from tests.fakes.kubernetes.store import Store
from tests.fakes.kubernetes.writing import Review

Json = dict[str, Any]
GROUP = "admissionregistration.k8s.io"
_ROOTS = ("object", "oldObject", "request", "namespaceObject", "variables")


class CelError(Exception):
    """Raised when an expression fails: a key that is not there, an operator without such
    operands."""


@functools.cache
def _environment() -> cel.Env:
    return cel.NewEnv(variables=dict.fromkeys(_ROOTS, cel.Type.DYN))


@functools.cache
def compiled(expression: str) -> cel.Expression:
    """An expression, parsed and checked. Raises RuntimeError where it is no CEL."""
    return _environment().compile(expression)


def evaluate(expression: str, bindings: Mapping[str, Any]) -> Any:
    """The value of an expression, in Python's own types. Raises CelError; RuntimeError where it is
    no CEL."""
    result = compiled(expression).eval(data={name: bindings.get(name) for name in _ROOTS})
    if result.type() == cel.Type.ERROR:
        raise CelError(f"{expression}: {result.value()}")
    return result.plain_value()


class Policies:
    """An admission check of the API server: the last, behind webhooks. Owner: the server's event
    loop."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __call__(self, review: Review) -> None:
        """Raises Refused 422."""
        for _, stored in self._store.all((GROUP, "validatingadmissionpolicybindings")):
            found = self._store.get(
                (GROUP, "validatingadmissionpolicies"), ("", stored.body["spec"]["policyName"])
            )
            if found is not None and "Deny" in stored.body["spec"]["validationActions"]:
                self._check(found.body, stored.body["metadata"]["name"], review)

    def _check(self, policy: Json, binding: str, review: Review) -> None:
        spec, namespace = policy["spec"], self._namespace(review)
        if not _matches(spec["matchConstraints"], review, namespace):
            return
        bindings = _bindings(review, namespace)
        try:
            if not all(
                evaluate(one["expression"], bindings) is True
                for one in spec.get("matchConditions") or ()
            ):
                return
            refused = _first_refusal(spec, bindings)
        except CelError as e:
            refused = str(e) if spec.get("failurePolicy", "Fail") == "Fail" else None
        if refused is not None:
            name = (review.body or review.before or {})["metadata"]["name"]
            head = (
                f"ValidatingAdmissionPolicy '{policy['metadata']['name']}' with binding "
                f"'{binding}' denied request: {refused}"
            )
            shown = review.resource.qualified
            details = details_of(review.resource.group, review.resource.plural, name)
            raise Refused(
                422, f'{shown} "{name}" is forbidden: {head}', reason="Invalid", details=details
            )

    def _namespace(self, review: Review) -> Json | None:
        metadata = (review.body or review.before or {})["metadata"]
        if not review.resource.namespaced:
            return None
        found = self._store.get(("", "namespaces"), ("", metadata["namespace"]))
        return found.body if found is not None else None


def _first_refusal(spec: Json, bindings: dict[str, Any]) -> str | None:
    """The message of the first validation that does not hold. A variable fails where it is used, as
    the API server evaluates it late."""
    variables: dict[str, Any] = {}
    for one in spec.get("variables") or ():
        try:
            variables[one["name"]] = evaluate(
                one["expression"], {**bindings, "variables": variables}
            )
        except CelError:
            continue
    for one in spec["validations"]:
        if evaluate(one["expression"], {**bindings, "variables": variables}) is not True:
            return str(one.get("message") or one["expression"])
    return None


def _bindings(review: Review, namespace: Json | None) -> dict[str, Any]:
    metadata = (review.body or review.before or {})["metadata"]
    request = {
        "operation": review.operation,
        "name": metadata["name"],
        "namespace": metadata.get("namespace", ""),
        "userInfo": {"username": review.user},
        **({"subResource": review.subresource} if review.subresource else {}),
    }
    return {
        "object": review.body or None,
        "oldObject": review.before,
        "request": request,
        "namespaceObject": namespace,
    }


def _matches(constraints: Json, review: Review, namespace: Json | None) -> bool:
    selector = constraints.get("namespaceSelector")
    if (
        selector
        and namespace is not None
        and not labels_match(selector, namespace["metadata"].get("labels") or {})
    ):
        return False
    return any(
        _fits(rule, review.operation, review.resource, review.subresource)
        for rule in constraints["resourceRules"]
    )


def _fits(rule: Json, operation: str, resource: Resource, subresource: str) -> bool:
    wanted = (
        ("operations", operation),
        ("apiGroups", resource.group),
        ("apiVersions", resource.version),
        ("resources", f"{resource.plural}/{subresource}" if subresource else resource.plural),
    )
    return all("*" in rule[name] or value in rule[name] for name, value in wanted)
