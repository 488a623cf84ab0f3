"""Refusals of the API server become errors that say what to do."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pilotlight.kubernetes.api_errors import ApiResponse, error_from_response
from pilotlight.kubernetes.api_request import ApiRequest
from pilotlight.kubernetes.errors import (
    AlreadyExists,
    BadCredentials,
    ClusterError,
    Conflict,
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
from pilotlight.kubernetes.kinds import CONFIG_MAP, NAMESPACE, NODE, POD, SERVICE
from pilotlight.kubernetes.retry_policy import is_retryable

APPLY = ApiRequest(verb="patch", kind=SERVICE, namespace="fn-acme", name="embed")


def status(code: int, reason: str, message: str, **details: Any) -> ApiResponse:
    body = {
        "kind": "Status",
        "code": code,
        "reason": reason,
        "message": message,
        "details": details,
    }
    return ApiResponse(status=code, body=json.dumps(body).encode())


def webhook(why: str) -> ApiResponse:
    return status(
        400,
        "BadRequest",
        f'admission webhook "validation.webhook.serving.knative.dev" denied the request: '
        f"validation failed: {why}",
    )


def test_a_missing_right_names_verb_object_and_the_rule_that_grants_it() -> None:
    deed = ApiRequest(verb="list", kind=SERVICE)
    error = error_from_response(
        deed,
        status(
            403,
            "Forbidden",
            'services.serving.knative.dev is forbidden: User "x" cannot list resource',
        ),
    )
    assert isinstance(error, Forbidden)
    assert (
        error.rule
        == '{apiGroups: ["serving.knative.dev"], resources: ["services"], verbs: ["list"]}'
    )
    assert error.rule in str(error)
    assert "in all namespaces" in str(error)


def test_the_rule_of_a_subresource_names_it() -> None:
    deed = ApiRequest(verb="get", kind=POD, namespace="fn-acme", name="a", subresource="log")
    assert deed.rule == '{apiGroups: [""], resources: ["pods/log"], verbs: ["get"]}'
    assert deed.path == "/api/v1/namespaces/fn-acme/pods/a/log"


def test_a_kind_that_the_cluster_lacks_says_what_to_install() -> None:
    for answer in (
        ApiResponse(status=404, body=b"404 page not found\n"),
        status(404, "NotFound", "the server could not find the requested resource"),
    ):
        error = error_from_response(APPLY, answer)
        assert isinstance(error, KindMissing)
        assert "services.serving.knative.dev" in str(error)
        assert "install Knative Serving" in str(error)


def test_an_absent_object_and_an_absent_namespace_are_told_apart() -> None:
    assert isinstance(
        error_from_response(
            APPLY,
            status(404, "NotFound", 'services "embed" not found', name="embed", kind="services"),
        ),
        NotFound,
    )
    error = error_from_response(
        APPLY,
        status(
            404, "NotFound", 'namespaces "fn-acme" not found', name="fn-acme", kind="namespaces"
        ),
    )
    assert isinstance(error, NotFound)
    assert "the namespace fn-acme does not exist" in str(error)


def test_a_namespace_on_its_way_out_is_its_own_error() -> None:
    message = (
        'pods "a" is forbidden: unable to create new content in namespace fn-acme because '
        "it is being terminated"
    )
    error = error_from_response(
        APPLY,
        status(
            403,
            "Forbidden",
            message,
            causes=[{"reason": "NamespaceTerminating", "message": message}],
        ),
    )
    assert isinstance(error, NamespaceEnding)
    assert "kubectl get namespace fn-acme" in str(error)


def test_a_full_quota_is_its_own_error() -> None:
    error = error_from_response(
        APPLY,
        status(
            403,
            "Forbidden",
            'pods "a" is forbidden: exceeded quota: plan, requested: pods=1, used: pods=2, '
            "limited: pods=2",
        ),
    )
    assert isinstance(error, QuotaExceeded)
    assert "kubectl describe resourcequota -n fn-acme" in str(error)


@pytest.mark.parametrize(
    "code, reason, expected",
    [
        (401, "Unauthorized", BadCredentials),
        (409, "AlreadyExists", AlreadyExists),
        (409, "Conflict", Conflict),
        (410, "Expired", Gone),
        (429, "TooManyRequests", Overloaded),
        (503, "ServiceUnavailable", Overloaded),
        (500, "InternalError", ClusterError),
    ],
)
def test_each_status_has_its_error(code: int, reason: str, expected: type[ClusterError]) -> None:
    error = error_from_response(APPLY, status(code, reason, "as it is"))
    assert type(error) is expected
    assert (error.status, error.reason, error.deed) == (code, reason, APPLY)
    assert "patch Service fn-acme/embed" in str(error)


def test_a_webhook_that_is_away_says_so() -> None:
    message = (
        'Internal error occurred: failed calling webhook "webhook.serving.knative.dev": no '
        'endpoints available for service "webhook"'
    )
    error = error_from_response(APPLY, status(500, "InternalError", message))
    assert isinstance(error, WebhookDown)
    assert "kubectl get pods -n knative-serving -l app=webhook" in str(error)


def test_a_page_of_a_proxy_is_no_riddle() -> None:
    error = error_from_response(
        APPLY, ApiResponse(status=502, body=b"<html>bad gateway \xff</html>")
    )
    assert error.status == 502
    assert "bad gateway" in str(error)


def test_strict_validation_names_each_unknown_field() -> None:
    error = error_from_response(
        APPLY,
        status(
            400,
            "BadRequest",
            'strict decoding error: unknown field "spec.foo", unknown field "spec.bar"',
        ),
    )
    assert isinstance(error, Invalid)
    assert [problem.field for problem in error.problems] == ["spec.foo", "spec.bar"]


@pytest.mark.parametrize(
    "why, fields",
    [
        (".spec.foo: field not declared in schema", ["spec.foo"]),
        (
            'errors:\n  .a: field not declared in schema\n  .b[name="u"].c: field not declared in schema',
            ["a", 'b[name="u"].c'],
        ),
        (".spec.replicas: expected numeric (int or float), got string", [""]),
    ],
)
def test_an_apply_that_does_not_fit_the_schema_is_invalid_whatever_its_status(
    why: str, fields: list[str]
) -> None:
    message = f"failed to create typed patch object (fn-acme/x; apps/v1, Kind=Deployment): {why}"
    error = error_from_response(APPLY, status(500, "", message))
    assert isinstance(error, Invalid)
    assert [problem.field for problem in error.problems] == fields
    assert not is_retryable(error, verb="patch", is_conditional=False)


def test_the_schemas_refusals_keep_their_fields() -> None:
    causes = [
        {"field": "spec.replicas", "message": "must be at least 0", "reason": "FieldValueInvalid"}
    ]
    error = error_from_response(
        APPLY, status(422, "Invalid", "Deployment is invalid", causes=causes)
    )
    assert isinstance(error, Invalid)
    assert str(error.problems[0]) == "spec.replicas: must be at least 0"


@pytest.mark.parametrize(
    "why, field, helps",
    [
        (
            "must not set the field(s): spec.template.spec.nodeSelector",
            "spec.template.spec.nodeSelector",
            (
                "kubectl patch configmap/config-features -n knative-serving --type merge -p "
                """'{"data":{"kubernetes.podspec-nodeselector":"enabled"}}'"""
            ),
        ),
        (
            (
                "must not set the field(s): "
                "spec.template.spec.containers[0].securityContext.capabilities.add"
            ),
            "spec.template.spec.containers[0].securityContext.capabilities.add",
            "kubernetes.containerspec-addcapabilities",
        ),
        (
            "HostPath volume support is disabled, but found HostPath volume node",
            "spec.template.spec.volumes",
            "kubernetes.podspec-volumes-hostpath",
        ),
        (
            "pod spec support for init-containers is off, but found 1 init containers",
            "spec.template.spec.initContainers",
            "kubernetes.podspec-init-containers",
        ),
        (
            "Traffic targets sum to 90, want 100: spec.traffic",
            "spec.traffic",
            "pilotlight traffic set",
        ),
        (
            'autoscaling annotations must be put under "spec.template.metadata.annotations" to work',
            "metadata.annotations",
            "spec.template.metadata.annotations",
        ),
        (
            "expected 0 <= 700 <= 600: spec.template.spec.timeoutSeconds",
            "spec.template.spec.timeoutSeconds",
            """configmap/config-defaults -n knative-serving --type merge -p '{"data":{"max-revision-timeout-seconds":"700"}}'""",
        ),
        (
            "invalid value: autoscaling.knative.dev/initial-scale=0 not allowed by cluster",
            "spec.template.metadata.annotations.autoscaling.knative.dev/initial-scale",
            "allow-zero-initial-scale",
        ),
        (
            "volume mount should be readOnly for this type of volume: x.readOnly",
            "spec.template.spec.containers[0].volumeMounts",
            "readOnly: true",
        ),
        (
            "Saw the following changes without a name change (-old +new)",
            "spec.template.metadata.name",
            "deploy again",
        ),
    ],
)
def test_the_webhooks_words_become_a_field_and_a_remedy(why: str, field: str, helps: str) -> None:
    error = error_from_response(APPLY, webhook(why))
    assert isinstance(error, Invalid)
    assert [problem.field for problem in error.problems] == [field]
    assert helps in error.problems[0].fix
    assert helps in str(error)


def test_several_masked_fields_are_several_problems() -> None:
    error = error_from_response(
        APPLY,
        webhook(
            "must not set the field(s): spec.template.spec.tolerations, "
            "spec.template.spec.containers[0].lifecycle"
        ),
    )
    assert isinstance(error, Invalid)
    assert [(p.field.rpartition(".")[2], bool(p.fix)) for p in error.problems] == [
        ("tolerations", True),
        ("lifecycle", False),
    ]


def test_a_refusal_that_nobody_foresaw_is_passed_on() -> None:
    error = error_from_response(APPLY, webhook("something new: spec.template.spec.shape"))
    assert isinstance(error, Invalid)
    assert (error.problems[0].field, error.problems[0].message) == (
        "spec.template.spec.shape",
        "something new",
    )


def test_words_of_other_webhooks_stay_as_they_are() -> None:
    error = error_from_response(APPLY, webhook("exceeded quota: gpus"))
    assert isinstance(error, Invalid)
    assert (error.problems[0].field, error.problems[0].message) == ("", "exceeded quota: gpus")


def test_paths_of_kinds() -> None:
    assert ApiRequest(verb="get", kind=NODE, name="n1").path == "/api/v1/nodes/n1"
    assert ApiRequest(verb="list", kind=CONFIG_MAP).path == "/api/v1/configmaps"
    assert APPLY.path == "/apis/serving.knative.dev/v1/namespaces/fn-acme/services/embed"
    assert ApiRequest(verb="get", kind=NAMESPACE, name="a/b").path == "/api/v1/namespaces/a%2Fb"
