"""What the tests' API server refuses and defaults as Knative's webhook does (reference: knative.md
§2.3)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.fakes.kubernetes.raw import APPLY, MERGE, RawClient
from tests.fakes.kubernetes.server import ApiServer

SERVICES = "/apis/serving.knative.dev/v1/namespaces/default/services"


def _service(name: str = "f") -> dict[str, Any]:
    container = {
        "image": f"registry.example/f@sha256:{'0' * 64}",
        "ports": [{"name": "http1", "containerPort": 8080}],
    }
    template = {
        "metadata": {"name": f"{name}-1", "annotations": {}},
        "spec": {"containers": [container]},
    }
    metadata = {"name": name, "namespace": "default"}
    return {
        "apiVersion": "serving.knative.dev/v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {"template": template},
    }


def _spec(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = body["spec"]["template"]["spec"]
    return found


def _annotate(body: dict[str, Any], name: str, value: str) -> None:
    body["spec"]["template"]["metadata"]["annotations"][f"autoscaling.knative.dev/{name}"] = value


def _volume(body: dict[str, Any], source: dict[str, Any], **mount: Any) -> None:
    _spec(body)["volumes"] = [{"name": "v", **source}]
    _spec(body)["containers"][0]["volumeMounts"] = [{"name": "v", "mountPath": "/v", **mount}]


CASES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "node selector": (
        lambda b: _spec(b).update(nodeSelector={"a": "b"}),
        "must not set the field(s): spec.template.spec.nodeSelector",
    ),
    "runtime class": (
        lambda b: _spec(b).update(runtimeClassName="nvidia"),
        "must not set the field(s): spec.template.spec.runtimeClass",
    ),
    "host path": (
        lambda b: _volume(b, {"hostPath": {"path": "/x"}}, readOnly=True),
        "HostPath volume support is disabled, but found HostPath volume v",
    ),
    "init containers": (
        lambda b: _spec(b).update(initContainers=[{"name": "i", "image": "registry.example/i:1"}]),
        "pod spec support for init-containers is off, but found 1 init containers",
    ),
    "traffic": (
        lambda b: b["spec"].update(traffic=[{"latestRevision": True, "percent": 90}]),
        "Traffic targets sum to 90, want 100",
    ),
    "annotations in the wrong place": (
        lambda b: b["metadata"].update(annotations={"autoscaling.knative.dev/min-scale": "1"}),
        'autoscaling annotations must be put under "spec.template.metadata.annotations" to work',
    ),
    "timeout": (
        lambda b: _spec(b).update(timeoutSeconds=700),
        "expected 0 <= 700 <= 600: spec.template.spec.timeoutSeconds",
    ),
    "initial scale": (
        lambda b: _annotate(b, "initial-scale", "0"),
        "initial-scale=0 not allowed by cluster",
    ),
    "window": (lambda b: _annotate(b, "window", "1s"), "expected 6s <= 1s <= 1h0m0s"),
    "burst": (lambda b: _annotate(b, "target-burst-capacity", "-2"), "invalid value: -2"),
    "revision's name": (
        lambda b: b["spec"]["template"]["metadata"].update(name="other-1"),
        'must have prefix "f-"',
    ),
    "reserved port": (
        lambda b: _spec(b)["containers"][0]["ports"][0].update(containerPort=8012),
        "8012 is a reserved port",
    ),
    "reserved variable": (
        lambda b: _spec(b)["containers"][0].update(env=[{"name": "PORT", "value": "1"}]),
        '"PORT" is a reserved environment variable',
    ),
    "unmounted volume": (
        lambda b: _spec(b).update(volumes=[{"name": "v", "emptyDir": {}}]),
        'volume with name "v" not mounted',
    ),
    "privileged": (
        lambda b: _spec(b)["containers"][0].update(securityContext={"privileged": True}),
        "securityContext.privileged",
    ),
    "token": (
        lambda b: _spec(b).update(automountServiceAccountToken=True),
        "automountServiceAccountToken",
    ),
}


@pytest.fixture
async def plain(api_server: ApiServer) -> ApiServer:
    """Knative with its own defaults: no flag is on."""
    for name in ("config-features", "config-autoscaler", "config-defaults"):
        api_server.put(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": name, "namespace": "knative-serving"},
                "data": {},
            }
        )
    return api_server


@pytest.mark.parametrize("case", CASES)
async def test_refusals(plain: ApiServer, raw: RawClient, case: str) -> None:
    spoil, message = CASES[case]
    body = _service()
    spoil(body)
    refused = await raw.ask("POST", SERVICES, body)
    assert refused.status == 400
    assert refused.body["message"].startswith(
        'admission webhook "validation.webhook.serving.knative.dev" denied the request'
    )
    assert message in refused.body["message"]


async def test_flags_open_what_they_name(plain: ApiServer, raw: RawClient) -> None:
    body = _service()
    _volume(body, {"hostPath": {"path": "/x"}}, readOnly=True)
    flags = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "config-features", "namespace": "knative-serving"},
    }
    plain.put({**flags, "data": {"kubernetes.podspec-volumes-hostpath": "allowed"}})
    assert (await raw.ask("POST", SERVICES, body)).status == 400
    plain.put({**flags, "data": {"kubernetes.podspec-volumes-hostpath": "enabled"}})
    assert (await raw.ask("POST", SERVICES, body)).status == 201


async def test_a_host_path_is_mounted_read_only(raw: RawClient) -> None:
    body = _service()
    _volume(body, {"hostPath": {"path": "/x"}})
    made = await raw.ask("POST", SERVICES, body)
    assert _spec(made.body)["containers"][0]["volumeMounts"][0]["readOnly"] is True
    assert made.body["spec"]["traffic"] == [{"latestRevision": True, "percent": 100}]
    assert _spec(made.body)["enableServiceLinks"] is False


async def test_fields_outside_of_the_schema_never_reach_the_webhook(raw: RawClient) -> None:
    body = _service()
    _spec(body)["terminationGracePeriodSeconds"] = 5
    _spec(body)["containers"][0]["lifecycle"] = {}
    strict = await raw.ask("POST", SERVICES, body, query={"fieldValidation": "Strict"})
    assert strict.status == 400
    assert (
        'unknown field "spec.template.spec.terminationGracePeriodSeconds"' in strict.body["message"]
    )
    pruned = await raw.ask("POST", SERVICES, body)
    assert pruned.status == 201
    assert "terminationGracePeriodSeconds" not in _spec(pruned.body)
    assert len(pruned.warnings) == 2


async def test_a_named_template_changes_its_name_with_its_content(raw: RawClient) -> None:
    path = f"{SERVICES}/f"
    await raw.apply(path, _service())
    changed = copy.deepcopy(_service())
    _spec(changed)["containerConcurrency"] = 4
    refused = await raw.apply(path, changed)
    assert "Saw the following changes without a name change" in refused.body["message"]
    changed["spec"]["template"]["metadata"]["name"] = "f-2"
    done = await raw.ask("PATCH", path, changed, query={"fieldManager": "one"}, media=APPLY)
    assert (done.status, done.body["metadata"]["generation"]) == (200, 2)


async def test_a_revision_is_immutable(raw: RawClient) -> None:
    path = "/apis/serving.knative.dev/v1/namespaces/default/revisions"
    await raw.ask("POST", path, {"metadata": {"name": "f-1"}, "spec": _spec(_service())})
    refused = await raw.ask("PATCH", f"{path}/f-1", {"spec": {"timeoutSeconds": 30}}, media=MERGE)
    assert "Immutable fields changed" in refused.body["message"]


async def test_a_refusing_webhook_of_the_tests(api_server: ApiServer, raw: RawClient) -> None:
    api_server.faults.refusals.append(("services.serving.knative.dev", "not today"))
    assert "not today" in (await raw.ask("POST", SERVICES, _service())).body["message"]
