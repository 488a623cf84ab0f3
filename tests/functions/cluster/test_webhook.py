"""What Knative would refuse or lose is found before it is sent, with the field and the way out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from pilotlight.kubernetes.manifests.knative_service import function_manifests
from pilotlight.kubernetes.webhook.knative_config import KnativeConfig
from pilotlight.kubernetes.webhook.services import check
from tests.functions.cluster.test_manifests import EMBEDDER, TENANCY, route

Json = dict[str, Any]
OPEN = KnativeConfig.unknown()
TEMPLATE = "spec.template"


def service() -> Json:
    """A Service as we make it."""
    return copy.deepcopy(function_manifests(route(EMBEDDER), TENANCY)[-1])


def container(made: Json) -> Json:
    """Its container."""
    found: Json = made["spec"]["template"]["spec"]["containers"][0]
    return found


def pod(made: Json) -> Json:
    """Its pod's spec."""
    found: Json = made["spec"]["template"]["spec"]
    return found


def annotate(key: str, value: Any) -> Callable[[Json], None]:
    """Set an annotation of the autoscaler on the template."""
    return lambda made: made["spec"]["template"]["metadata"]["annotations"].update(
        {f"autoscaling.knative.dev/{key}": value}
    )


REFUSED: list[tuple[str, Callable[[Json], Any], str, str]] = [
    ("a capital", lambda made: made["metadata"].update(name="Search"), "metadata.name", "DNS-1035"),
    (
        "a long name",
        lambda made: made["metadata"].update(name="a" * 64),
        "metadata.name",
        "DNS-1035",
    ),
    ("a digit first", lambda made: made["metadata"].update(name="1a"), "metadata.name", "DNS-1035"),
    (
        "a revision of another name",
        lambda made: made["spec"]["template"]["metadata"].update(name="other-v1"),
        "spec.template.metadata.name",
        "must have prefix",
    ),
    (
        "autoscaling on the Service",
        lambda made: made["metadata"]["annotations"].update(
            {"autoscaling.knative.dev/min-scale": "1"}
        ),
        "metadata.annotations[autoscaling.knative.dev/min-scale]",
        "spec.template.metadata.annotations",
    ),
    (
        "percents",
        lambda made: made["spec"]["traffic"][0].update(percent=90),
        "spec.traffic",
        "Traffic targets sum to 90, want 100",
    ),
    (
        "a percent above 100",
        lambda made: made["spec"]["traffic"][0].update(percent=101),
        "spec.traffic[0].percent",
        "0 <= 101 <= 100",
    ),
    (
        "both a revision and the latest",
        lambda made: made["spec"]["traffic"][0].update(latestRevision=True),
        "spec.traffic[0].latestRevision",
        "revisionName",
    ),
    (
        "a tag twice",
        lambda made: made["spec"].update(
            traffic=[
                {"revisionName": "a", "percent": 100, "tag": "x"},
                {"revisionName": "b", "percent": 0, "tag": "x"},
            ]
        ),
        "spec.traffic[1].tag",
        "two entries",
    ),
    (
        "an url",
        lambda made: made["spec"]["traffic"][0].update(url="http://x"),
        "spec.traffic[0].url",
        "must not set",
    ),
    (
        "a long timeout",
        lambda made: pod(made).update(timeoutSeconds=700),
        f"{TEMPLATE}.spec.timeoutSeconds",
        "expected 0 <= 700 <= 600",
    ),
    (
        "a first byte after the end",
        lambda made: pod(made).update(responseStartTimeoutSeconds=601),
        f"{TEMPLATE}.spec.responseStartTimeoutSeconds",
        "601",
    ),
    (
        "much concurrency",
        lambda made: pod(made).update(containerConcurrency=1001),
        f"{TEMPLATE}.spec.containerConcurrency",
        "expected 0 <= 1001 <= 1000",
    ),
    (
        "a tag for an image",
        lambda made: container(made).update(image="registry.example/x:latest"),
        ".image",
        "by digest",
    ),
    (
        "a port of the queue-proxy",
        lambda made: container(made)["ports"][0].update(containerPort=8012),
        ".containerPort",
        "queue-proxy",
    ),
    (
        "a port that is none",
        lambda made: container(made)["ports"][0].update(containerPort=70_000),
        ".containerPort",
        "not a valid port",
    ),
    (
        "a port's name",
        lambda made: container(made)["ports"][0].update(name="web"),
        ".name",
        "http1 or h2c",
    ),
    (
        "two ports",
        lambda made: container(made)["ports"].append({"containerPort": 8081}),
        ".ports",
        "a revision has only one",
    ),
    (
        "a host port",
        lambda made: container(made)["ports"][0].update(hostPort=80),
        ".hostPort",
        "must not set",
    ),
    (
        "a reserved variable",
        lambda made: container(made)["env"].append({"name": "K_SERVICE", "value": "x"}),
        ".name",
        "set by Knative",
    ),
    (
        "no variable's name",
        lambda made: container(made)["env"].append({"name": "A B", "value": "x"}),
        ".name",
        "not a valid variable name",
    ),
    (
        "a reserved container",
        lambda made: container(made).update(name="queue-proxy"),
        ".name",
        "reserved by Knative",
    ),
    (
        "privileges",
        lambda made: container(made)["securityContext"].update(privileged=True),
        ".privileged",
        "unknown field",
    ),
    ("a hook", lambda made: container(made).update(lifecycle={}), ".lifecycle", "preStop"),
    ("a claim", lambda made: pod(made).update(resourceClaims=[]), ".resourceClaims", "limits"),
    (
        "a grace period",
        lambda made: pod(made).update(terminationGracePeriodSeconds=5),
        ".terminationGracePeriodSeconds",
        "timeoutSeconds",
    ),
    ("a node", lambda made: pod(made).update(nodeName="a"), ".nodeName", "nodeSelector"),
    (
        "a token",
        lambda made: pod(made).update(automountServiceAccountToken=True),
        ".automountServiceAccountToken",
        "must be false",
    ),
    (
        "root",
        lambda made: container(made)["securityContext"].update(runAsUser=0),
        ".runAsUser",
        "runAsNonRoot",
    ),
    (
        "drop all",
        lambda made: container(made)["securityContext"]["capabilities"].update(drop=["all"]),
        ".capabilities.drop",
        "drops",
    ),
    (
        "a writable node",
        lambda made: container(made)["volumeMounts"][0].update(readOnly=False),
        ".readOnly",
        "should be readOnly",
    ),
    (
        "the root as a mount",
        lambda made: container(made)["volumeMounts"][2].update(mountPath="/"),
        ".mountPath",
        "cannot be a mount path",
    ),
    (
        "one place twice",
        lambda made: container(made)["volumeMounts"][2].update(mountPath="/pilotlight"),
        ".mountPath",
        "twice",
    ),
    (
        "no volume",
        lambda made: container(made)["volumeMounts"][0].update(name="x"),
        ".name",
        "no volume 'x'",
    ),
    (
        "an idle volume",
        lambda made: pod(made)["volumes"].append({"name": "y", "emptyDir": {}}),
        ".volumes",
        "no container mounts",
    ),
    (
        "a foreign volume",
        lambda made: (
            pod(made)["volumes"][2].update(emptyDir=None, nfs={})
            or pod(made)["volumes"][2].pop("emptyDir")
        ),
        ".nfs",
        "does not support this type",
    ),
    (
        "a period",
        lambda made: container(made)["readinessProbe"].update(periodSeconds=1),
        ".periodSeconds",
        "50 ms",
    ),
    (
        "two handlers",
        lambda made: container(made)["readinessProbe"].update(tcpSocket={"port": 8080}),
        ".readinessProbe",
        "2 handlers",
    ),
    (
        "another port's probe",
        lambda made: container(made)["startupProbe"]["httpGet"].update(port=9),
        ".port",
        "listens on 8080",
    ),
    (
        "no quantity",
        lambda made: container(made)["resources"]["limits"].update(memory="2 GB"),
        ".resources.limits[memory]",
        "not a valid quantity",
    ),
    (
        "a short window",
        annotate("window", "1s"),
        "[autoscaling.knative.dev/window]",
        "between 6s and 3600s",
    ),
    (
        "part of a second",
        annotate("window", "6500ms"),
        "[autoscaling.knative.dev/window]",
        "whole seconds",
    ),
    (
        "a number",
        annotate("max-scale", 4),
        "[autoscaling.knative.dev/max-scale]",
        "must be strings",
    ),
    (
        "min above max",
        annotate("min-scale", "9"),
        "[autoscaling.knative.dev/min-scale]",
        "more than max-scale",
    ),
    (
        "a low panic",
        annotate("panic-threshold-percentage", "100"),
        "[autoscaling.knative.dev/panic-threshold-percentage]",
        "110",
    ),
    (
        "a foreign class",
        annotate("class", "x.autoscaling.knative.dev"),
        "[autoscaling.knative.dev/class]",
        "kpa",
    ),
    (
        "an unknown key",
        annotate("minscale", "1"),
        "[autoscaling.knative.dev/minscale]",
        "no such key",
    ),
    (
        "a metric",
        annotate("metric", "cpu"),
        "[autoscaling.knative.dev/metric]",
        "concurrency and rps",
    ),
]


@pytest.mark.parametrize(
    "change, field, message", [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_a_bad_service_is_refused_by_its_field(
    change: Callable[[Json], Any], field: str, message: str
) -> None:
    made = service()
    assert check(made, OPEN) == []
    change(made)
    # bounds as they are by default
    config = KnativeConfig(features=OPEN.features, autoscaler=OPEN.autoscaler)
    problems = check(made, config)
    assert any(
        problem.field.endswith(field) and message in problem.message for problem in problems
    ), [str(p) for p in problems]


def test_what_a_feature_lets_through_is_refused_without_it_with_the_command_that_helps() -> None:
    problems = {problem.field: problem for problem in check(service())}
    for field, flag in (
        ("spec.template.spec.affinity", "kubernetes.podspec-affinity"),
        ("spec.template.spec.tolerations", "kubernetes.podspec-tolerations"),
        ("spec.template.spec.runtimeClassName", "kubernetes.podspec-runtimeclassname"),
        ("spec.template.spec.volumes[0].hostPath", "kubernetes.podspec-volumes-hostpath"),
    ):
        assert flag in problems[field].message
        assert problems[field].fix.startswith(
            "kubectl patch configmap/config-features -n knative-serving"
        )
    (zero,) = (problem for field, problem in problems.items() if "initial-scale" in field)
    assert "allow-zero-initial-scale" in zero.fix


def test_allowed_is_not_enough_for_a_host_path() -> None:
    allowed = KnativeConfig(
        features=dict.fromkeys(OPEN.features, "allowed"), autoscaler=OPEN.autoscaler
    )
    assert [problem.field for problem in check(service(), allowed)] == [
        "spec.template.spec.volumes[0].hostPath"
    ]


def test_a_cluster_that_allows_longer_requests_gets_them() -> None:
    made = service()
    pod(made)["timeoutSeconds"] = 1200
    config = KnativeConfig(
        features=OPEN.features,
        autoscaler=OPEN.autoscaler,
        defaults={"max-revision-timeout-seconds": "1800"},
    )
    assert check(made, config) == []


def test_a_template_does_not_change_under_its_name() -> None:
    made = service()
    container(made)["image"] = "registry.example/other@sha256:" + "9" * 64
    (problem,) = check(made, OPEN, live=service())
    assert "Saw the following changes without a name change" in problem.message
    assert "containers[0].image" in problem.message
    made["spec"]["template"]["metadata"]["name"] += "x"
    assert check(made, OPEN, live=service()) == []


def test_what_a_cluster_added_is_no_change() -> None:
    live = service()
    container(live)["terminationMessagePath"] = "/dev/termination-log"
    pod(live)["enableServiceLinks"] = False
    assert check(service(), OPEN, live=live) == []
