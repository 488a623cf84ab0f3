"""What `pilotlight doctor --cluster` finds. A golden text for a whole report;
PILOTLIGHT_GOLDEN=write writes it anew."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from pilotlight.cli.commands.operations.doctor_cluster import format_findings
from pilotlight.cli.main import build
from pilotlight.kubernetes.doctor.checks import examine_cluster, run_checks
from pilotlight.kubernetes.doctor.facts import AGENT_SELECTOR, Facts
from pilotlight.kubernetes.doctor.findings import BROKEN, NOTE, OK, Finding
from pilotlight.kubernetes.errors import Forbidden
from pilotlight.kubernetes.kinds import LEASE, NAMESPACE, Kind
from pilotlight.kubernetes.rbac import ROLES, RbacRule, Role, binding_rule
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.spec.warm_shape import WarmShape
from tests.fakes.kubernetes.server import ApiServer
from tests.fakes.kubernetes.thread import running_api_server
from tests.functions.cluster.healthy import (
    KNATIVE,
    PLATFORM,
    SETTINGS,
    agent_pod,
    config,
    deployment,
    healthy,
    node,
    part,
    tenant_namespace,
)

GOLDEN = Path(__file__).parent / "golden"
DEPLOY = Path(__file__).parents[3] / "deploy/kubernetes"


def trouble(facts: Facts, settings: ClusterSettings = SETTINGS) -> list[Finding]:
    """What is not ok."""
    return [one for one in run_checks(facts, settings) if one.state != OK]


def the_one(facts: Facts, settings: ClusterSettings = SETTINGS) -> Finding:
    (found,) = trouble(facts, settings)
    return found


def test_a_cluster_as_it_should_be_has_nothing_to_say() -> None:
    assert trouble(healthy()) == []


def right_of(role: Role, kind: Kind) -> RbacRule:
    return next(right for right in ROLES[role] if right.kind == kind and not right.subresource)


def assert_golden(name: str, shown: str) -> None:
    if os.environ.get("PILOTLIGHT_GOLDEN") == "write":
        (GOLDEN / name).write_text(shown)
    assert shown == (GOLDEN / name).read_text()


def test_the_report_of_a_healthy_cluster() -> None:
    assert_golden(
        "doctor_healthy.txt", format_findings(run_checks(healthy(), SETTINGS)).plain + "\n"
    )


def test_the_report_of_a_cluster_where_everything_is_missing() -> None:
    facts = Facts(
        host="https://10.0.0.1:6443",
        version={"gitVersion": "v1.26.0"},
        config=dict.fromkeys(config(), None),
        nodes=(node("gpu-1", gpus=1, labels={}),),
        role="controller",
        lacking={
            right_of("controller", NAMESPACE): ("create", "patch"),
            right_of("controller", LEASE): ("get",),
        },
    )
    assert_golden("doctor_bare.txt", format_findings(run_checks(facts, SETTINGS)).plain + "\n")


@pytest.mark.parametrize(
    "version, state, piece",
    [
        ("v1.26.9", BROKEN, "at least 1.27"),
        ("v1.28.0", NOTE, "outside of the known versions"),
        ("v1.99.0-eks", NOTE, "outside"),
        ("x", NOTE, "cannot be parsed"),
    ],
)
def test_versions_of_kubernetes(version: str, state: str, piece: str) -> None:
    found = the_one(healthy(version={"gitVersion": version}))
    assert (found.what, found.state) == ("Kubernetes", state)
    assert piece in found.detail


@pytest.mark.parametrize("version, state", [("1.16.0", BROKEN), ("1.30.0", NOTE)])
def test_versions_of_knative(version: str, state: str) -> None:
    labels = {**KNATIVE, "app.kubernetes.io/version": version}
    parts = {
        name: {**one, "metadata": {"name": name, "labels": labels}}
        for name, one in healthy().knative.items()
    }
    found = the_one(
        healthy(
            knative=parts,
            definitions={name: {"metadata": {"name": name}} for name in healthy().definitions},
        )
    )
    assert (found.what, found.state) == ("Knative Serving", state)


def test_an_upgrade_of_knative_that_stopped_half_way() -> None:
    parts = {
        **healthy().knative,
        "webhook": {
            **deployment("webhook"),
            "metadata": {"labels": {"app.kubernetes.io/version": "1.22.0"}},
        },
    }
    assert "1.22.0, 1.23.0" in the_one(healthy(knative=parts)).detail


def test_a_missing_kind_and_a_missing_webhook() -> None:
    some = {
        name: one
        for name, one in healthy().definitions.items()
        if not name.startswith("serverless")
    }
    found = the_one(healthy(definitions=some))
    assert (
        found.state,
        "serverlessservices" in found.detail,
        "Install Knative" in found.way_out,
    ) == (BROKEN, True, True)
    assert the_one(healthy(webhooks=frozenset())).what == "Knative's webhook"


def test_a_knative_process_that_is_down() -> None:
    found = the_one(
        healthy(knative={**healthy().knative, "webhook": deployment("webhook", available=0)})
    )
    assert found.commands == ("kubectl describe deployment/webhook -n knative-serving",)


@pytest.mark.parametrize(
    "name, key, value, state, command",
    [
        (
            "config-features",
            "kubernetes.podspec-volumes-hostpath",
            "allowed",
            BROKEN,
            '{"kubernetes.podspec-volumes-hostpath":"enabled"}',
        ),
        (
            "config-features",
            "kubernetes.podspec-affinity",
            "disabled",
            BROKEN,
            '{"kubernetes.podspec-affinity":"enabled"}',
        ),
        (
            "config-features",
            "kubernetes.podspec-tolerations",
            "Disabled",
            BROKEN,
            '{"kubernetes.podspec-tolerations":"enabled"}',
        ),
        (
            "config-features",
            "kubernetes.podspec-runtimeclassname",
            "disabled",
            BROKEN,
            "runtimeclassname",
        ),
        (
            "config-autoscaler",
            "allow-zero-initial-scale",
            "false",
            BROKEN,
            '{"allow-zero-initial-scale":"true"}',
        ),
        (
            "config-autoscaler",
            "enable-scale-to-zero",
            "false",
            BROKEN,
            '{"enable-scale-to-zero":"true"}',
        ),
        ("config-autoscaler", "max-scale-limit", "5", NOTE, '{"max-scale-limit":"0"}'),
        (
            "config-defaults",
            "max-revision-timeout-seconds",
            "300",
            BROKEN,
            '{"max-revision-timeout-seconds":"600"}',
        ),
        (
            "config-defaults",
            "container-concurrency-max-limit",
            "100",
            NOTE,
            '{"container-concurrency-max-limit":"1000"}',
        ),
        (
            "config-deployment",
            "pod-is-always-schedulable",
            "false",
            NOTE,
            '{"pod-is-always-schedulable":"true"}',
        ),
        (
            "config-deployment",
            "default-affinity-type",
            "prefer-spread-revision-over-nodes",
            NOTE,
            '{"default-affinity-type":"none"}',
        ),
        ("config-gc", "max-non-active-revisions", "1000", NOTE, "max-non-active-revisions"),
    ],
)
def test_each_setting_of_knative_has_the_command_that_sets_it(
    name: str, key: str, value: str, state: str, command: str
) -> None:
    data = config()
    data[name][key] = value
    found = the_one(healthy(config=data))
    assert found.state == state
    assert (
        f"kubectl patch configmap/{name} -n knative-serving --type merge -p '" in found.commands[0]
    )
    assert command in found.commands[0]


def test_what_gpus_need_is_only_a_note_while_there_are_none() -> None:
    data = config("config-features", **{"kubernetes.podspec_tolerations": "disabled"})
    cpus = {"nodes": (node("cpu-1"),), "agent_pods": (agent_pod("cpu-1"),)}
    found = trouble(healthy(config=data, **cpus))
    assert [(one.what, one.state) for one in found if one.what != "GPUs"] == [
        ("feature tolerations", NOTE)
    ]


def test_flags_of_things_that_the_settings_do_not_ask_for_do_not_matter() -> None:
    data = config("config-features", **{"kubernetes.podspec_runtimeclassname": "disabled"})
    plain = ClusterSettings(runtime_image=SETTINGS.runtime_image, gpu_runtime_class=None)
    assert trouble(healthy(config=data), plain) == []


def test_a_greater_bound_than_ours_is_a_hint_and_asks_for_a_longer_drain() -> None:
    found = trouble(healthy(config=config("config-defaults", max_revision_timeout_seconds="1200")))
    assert [one.what for one in found] == [
        "bound of a request's time",
        "drain of Knative's activator",
    ]
    assert "max_timeout_s: 1200" in found[0].way_out
    assert "deployment/activator" in found[1].commands[0]


def test_a_gpu_node_without_its_driver() -> None:
    silent = node("gpu-2", labels={"nvidia.com/gpu.present": "true"})
    found = the_one(healthy(nodes=(node("cpu-1"), node("gpu-1", gpus=4), silent)))
    assert (found.what, found.state, "gpu-2" in found.detail) == ("GPU drivers", BROKEN, True)


def test_a_gpu_node_without_the_label_that_functions_ask_for() -> None:
    found = the_one(
        healthy(nodes=(node("cpu-1"), node("gpu-1", gpus=4), node("gpu-2", gpus=4, labels={})))
    )
    assert (found.state, found.commands) == (
        BROKEN,
        ("kubectl label node gpu-2 nvidia.com/gpu.product=PRODUCT",),
    )


def test_a_gpu_name_that_no_node_has() -> None:
    settings = ClusterSettings(
        runtime_image=SETTINGS.runtime_image, gpu_products={"L4": "NVIDIA-L4"}
    )
    found = the_one(healthy(), settings)
    assert (
        found.state,
        "L4: NVIDIA-L4" in found.detail,
        "NVIDIA-H100-80GB-HBM3" in found.way_out,
    ) == (NOTE, True, True)


def test_gpu_drivers_that_differ() -> None:
    labels = {
        "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
        "nvidia.com/cuda.driver-version.full": "570.1",
    }
    found = the_one(
        healthy(nodes=(node("cpu-1"), node("gpu-1", gpus=4), node("gpu-2", gpus=1, labels=labels)))
    )
    assert "570.1, 580.82.07" in found.detail


def test_a_taint_that_functions_do_not_tolerate() -> None:
    taints = [
        {"key": "nvidia.com/gpu", "effect": "NoSchedule"},
        {"key": "team", "value": "a", "effect": "NoSchedule"},
    ]
    found = the_one(
        healthy(nodes=(node("cpu-1"), node("gpu-1", gpus=4), node("gpu-2", gpus=4, taints=taints)))
    )
    assert found.commands == ("kubectl taint node gpu-2 team:NoSchedule-",)


@pytest.mark.parametrize("missing", ["nvidia", "gvisor"])
def test_a_runtime_class_that_does_not_exist(missing: str) -> None:
    found = the_one(healthy(runtime_classes=frozenset({"nvidia", "gvisor"} - {missing})))
    assert (found.what, found.state) == (f"runtime class {missing}", BROKEN)
    assert json.loads(found.commands[0].split("'")[1])["handler"] == missing


def test_a_node_without_an_agent() -> None:
    on_cpu, on_gpu = agent_pod("cpu-1"), agent_pod("gpu-1")
    found = the_one(healthy(agent_pods=(on_cpu, on_gpu)))
    assert (found.what, found.state, "gpu-2" in found.detail) == ("node agents", BROKEN, True)
    # a node without GPUs
    assert the_one(healthy(agent_pods=(on_gpu, agent_pod("gpu-2")))).state == NOTE
    starting = {**agent_pod("gpu-2"), "status": {}}
    assert "gpu-2" in the_one(healthy(agent_pods=(on_cpu, on_gpu, starting))).detail
    assert the_one(healthy(agents=())).way_out.startswith("Install the chart")


def test_a_part_of_the_platform_that_is_down() -> None:
    controller = part("Deployment", "controller")
    found = the_one(
        healthy(parts=(controller, part("StatefulSet", "activator", replicas=2, ready=1)))
    )
    assert (found.what, found.state, found.detail) == ("activator", NOTE, "1 of 2 are ready")
    assert found.commands == ("kubectl describe statefulset/pilotlight-activator -n pilotlight",)
    assert (
        the_one(healthy(parts=(controller, part("StatefulSet", "activator", ready=0)))).state
        == BROKEN
    )
    assert the_one(healthy(parts=(controller,))).way_out.startswith("Install the chart")


def test_what_is_looked_for_is_what_the_chart_installs() -> None:
    installed = list(yaml.safe_load_all((DEPLOY / "kustomize/pilotlight.yaml").read_text()))
    wanted = dict(label.split("=") for label in AGENT_SELECTOR.split(","))
    (agents,) = [one for one in installed if one["kind"] == "DaemonSet"]
    assert wanted.items() <= agents["metadata"]["labels"].items()
    assert wanted.items() <= agents["spec"]["template"]["metadata"]["labels"].items()
    assert {SETTINGS.controller_account, SETTINGS.activator_account} <= {
        one["metadata"]["name"] for one in installed if one["kind"] == "ServiceAccount"
    }
    for kind, component in (("Deployment", "controller"), ("StatefulSet", "activator")):
        labels = [one["metadata"]["labels"] for one in installed if one["kind"] == kind]
        assert {
            "app.kubernetes.io/part-of": "pilotlight",
            "app.kubernetes.io/component": component,
        }.items() <= labels[0].items()


def test_control_planes_need_no_agent() -> None:
    closed = node(
        "cp-1", taints=[{"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}]
    )
    assert trouble(healthy(nodes=(*healthy().nodes, closed))) == []


def test_a_missing_right_comes_with_the_commands_that_grant_it() -> None:
    lease = right_of("autoscaler", LEASE)
    pods = next(right for right in ROLES["controller"] if right.subresource == "log")
    found = the_one(healthy(role="controller", lacking={lease: ("update",)}))
    assert found.state == BROKEN
    assert found.commands == (
        (
            "kubectl create role pilotlight-controller-leases-0 -n pilotlight --verb=update "
            "--resource=leases.coordination.k8s.io"
        ),
        (
            "kubectl create rolebinding pilotlight-controller-leases-0 -n pilotlight "
            "--role=pilotlight-controller-leases-0"
            " --serviceaccount=pilotlight:pilotlight-controller"
        ),
    )
    assert (
        "--resource=pods/log"
        in the_one(healthy(role="operator", lacking={pods: ("get",)})).commands[0]
    )


def test_a_missing_right_in_a_tenants_namespace_names_what_should_grant_it() -> None:
    patch = next(right for right in ROLES["activator"] if right.scope == "tenant")
    found = the_one(healthy(role="activator", lacking={patch: ("patch",)}))
    assert "the controller the RoleBinding" in found.way_out
    assert found.commands == (
        "kubectl get clusterrole pilotlight:pilotlight-activator:tenant -o yaml",
        "kubectl get rolebindings -A -l pilotlight.dev/managed-by=pilotlight",
    )


def test_a_right_on_named_objects_is_granted_on_these_only() -> None:
    found = the_one(healthy(role="controller", lacking={binding_rule(SETTINGS): ("bind",)}))
    names = (
        "--resource-name=pilotlight:pilotlight-controller:tenant "
        "--resource-name=pilotlight:pilotlight-activator:tenant"
    )
    assert found.commands[0].endswith(
        f"--verb=bind --resource=clusterroles.rbac.authorization.k8s.io {names}"
    )


def test_which_activator_scales_is_said_where_knative_does_not() -> None:
    ours = replace(SETTINGS, autoscaler="pilotlight")
    assert not [one for one in run_checks(healthy(), SETTINGS) if one.what == "autoscaler"]
    (found,) = (one for one in run_checks(healthy(), ours) if one.what == "autoscaler")
    assert (found.state, found.detail) == (
        OK,
        "pilotlight.dev, led by a-1-x, renewed 2026-11-29T10:00Z",
    )
    for lease in (None, {"spec": {"holderIdentity": ""}}):
        found = the_one(healthy(autoscaler_lease=lease), ours)
        assert (found.state, "no activator holds the Lease" in found.detail) == (BROKEN, True)
    refused = Forbidden("may not get Lease")
    found = the_one(healthy(troubles={"autoscaler_lease": refused}), ours)
    assert (found.state, found.detail) == (NOTE, "not checked: may not get Lease")


def test_warm_pods_are_judged_by_shape() -> None:
    shapes = [WarmShape(name="small"), WarmShape(name="h100", gpu="H100", gpu_count=1)]
    settings = replace(SETTINGS, warm_pods=shapes)
    (found,) = trouble(healthy(), settings)
    assert (found.state, found.detail.partition(":")[0]) == (
        NOTE,
        "namespace pilotlight-warm does not exist yet",
    )

    def pool(ready: int) -> dict[str, Any]:
        one = {"spec": {"replicas": 2}, "status": {"readyReplicas": ready}}
        return {"small": one, "h100": one}

    assert trouble(healthy(warm_pods=pool(2)), settings) == []
    found, _ = trouble(healthy(warm_pods=pool(1)), settings)
    assert (found.state, found.detail) == (NOTE, "small: 1 of 2 are ready")
    assert found.commands == (
        "kubectl describe pods -n pilotlight-warm -l pilotlight.dev/warm-shape=small",
    )
    other = replace(settings, warm_pods=[replace(shapes[1], gpu="B200")])
    found = the_one(healthy(warm_pods=pool(2)), other)
    assert (found.state, "no node has GPUs with nvidia.com/gpu.product=B200" in found.detail) == (
        BROKEN,
        True,
    )
    right = next(right for right in ROLES["controller"] if right.scope == "warm")
    lacking = the_one(healthy(role="controller", lacking={right: ("patch",)}))
    assert lacking.commands[0].startswith(
        "kubectl get clusterrole pilotlight:pilotlight-controller:warm"
    )


async def test_rights_in_tenants_namespaces_are_asked_about_in_one_of_them(
    api_server: ApiServer, tmp_path: Path
) -> None:
    labels = {"pilotlight.dev/managed-by": "pilotlight"}
    api_server.put(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "fn-acme", "labels": labels}}
    )
    api_server.rights.deny("delete", "pods", namespace="fn-acme")
    settings = ClusterSettings(kubeconfig=str(api_server.write_kubeconfig(tmp_path / "kubeconfig")))
    found = next(
        one
        for one in await examine_cluster(settings, role="activator")
        if one.what == "rights of activator"
    )
    assert (found.state, found.detail.startswith("may not delete pods")) == (BROKEN, True)


def test_namespaces_that_are_missing_or_on_their_way_out() -> None:
    assert the_one(healthy(namespace=None)).commands == ("kubectl create namespace pilotlight",)
    going = {"metadata": {"name": "fn-acme"}, "status": {"phase": "Terminating"}}
    assert "fn-acme" in the_one(healthy(tenants=(going,))).detail


def test_namespaces_of_another_platform_are_named_with_the_way_to_adopt_them() -> None:
    found = the_one(
        healthy(
            tenants=(
                tenant_namespace("fn-acme"),
                tenant_namespace("fn-old", ""),
                tenant_namespace("fn-other", "p-1"),
            )
        )
    )
    assert (found.what, found.state) == ("tenants' namespaces", BROKEN)
    assert f"than the controller's ({PLATFORM}): fn-other of p-1; fn-old of unlab" in found.detail
    assert found.commands == (
        "pilotlight cluster adopt p-1",
        "pilotlight cluster adopt unlabelled",
    )
    # whoever leads next may be of that platform
    other = (tenant_namespace("fn-other", "p-1"),)
    assert trouble(healthy(tenants=other, lease=None)) == []
    assert the_one(healthy(tenants=other)).state == BROKEN


def test_who_may_not_look_for_knative_is_not_told_that_it_is_missing() -> None:
    refused = Forbidden("may not list CustomResourceDefinition")
    lacks: dict[str, Any] = {"definitions": {}, "knative": {}}
    found = {
        one.what: one
        for one in run_checks(healthy(**lacks, troubles=dict.fromkeys(lacks, refused)), SETTINGS)
    }
    knative = found["Knative Serving"]
    assert (knative.state, knative.detail) == (NOTE, f"not checked: {refused}")
    missing = {one.what: one for one in run_checks(healthy(**lacks), SETTINGS)}
    assert missing["Knative Serving"].state == BROKEN


def test_what_could_not_be_read_is_said_and_the_rest_is_judged() -> None:
    error = Forbidden("may not list Node")
    found = trouble(
        healthy(
            nodes=(),
            troubles=dict.fromkeys(
                ("nodes", "config", "definitions", "webhooks", "knative"), error
            ),
        )
    )
    assert {one.state for one in found} == {NOTE}
    assert all("may not list Node" in one.detail for one in found)


async def test_a_server_with_things_broken(api_server: ApiServer, tmp_path: Path) -> None:
    api_server.remove_kind("revisions.serving.knative.dev")
    api_server.rights.deny("list", "nodes")
    api_server.rights.deny("list", "pods")
    settings = ClusterSettings(kubeconfig=str(api_server.write_kubeconfig(tmp_path / "kubeconfig")))
    findings = await examine_cluster(settings, role="activator")
    found = {one.what: one for one in findings}
    assert found["API server"].state == OK
    assert "may not list Node" in found["nodes"].detail
    rights = [one.detail for one in findings if one.what == "rights of activator"]
    assert [detail.partition(":")[0] for detail in rights] == [
        "may not list pods",
        "may not list nodes",
    ]
    assert found["namespace"].commands == ("kubectl create namespace pilotlight",)
    assert found["feature hostPath"].state == OK


async def test_activators_that_scale_need_the_autoscalers_rights_too(
    api_server: ApiServer, tmp_path: Path
) -> None:
    api_server.rights.deny("watch", "podautoscalers")
    kubeconfig = str(api_server.write_kubeconfig(tmp_path / "kubeconfig"))

    async def rights(autoscaler: str) -> str:
        found = await examine_cluster(
            ClusterSettings(kubeconfig=kubeconfig, autoscaler=autoscaler), role="activator"
        )
        return next(one.detail for one in found if one.what == "rights of activator")

    assert (
        await rights("kpa")
        == "complete, except that those in tenants' namespaces were not checked: there is none"
    )
    assert "may not watch podautoscalers" in await rights("pilotlight")


@pytest.mark.slow  # asks again where no server answers
async def test_a_server_that_does_not_answer_is_a_finding(
    api_server: ApiServer, tmp_path: Path
) -> None:
    settings = ClusterSettings(kubeconfig=str(api_server.write_kubeconfig(tmp_path / "kubeconfig")))
    await api_server.stop()
    (found,) = await examine_cluster(settings, role="operator")
    assert (found.state, api_server.url in found.detail) == (BROKEN, True)
    (found,) = await examine_cluster(
        ClusterSettings(kubeconfig=str(tmp_path / "absent")), role="operator"
    )
    assert "no kubeconfig" in found.detail


def test_the_command(tmp_path: Path) -> None:
    def doctor(*words: str) -> Any:
        return CliRunner().invoke(
            build(),
            ["doctor", "--cluster", "--config", str(tmp_path / "p.yaml"), *words],
            env={"HOME": str(tmp_path)},
        )

    with running_api_server() as threaded:
        (tmp_path / "p.yaml").write_text(
            f"cluster: {{kubeconfig: "
            f"{threaded.server.write_kubeconfig(tmp_path / 'kubeconfig')}}}\n"
        )
        said = doctor()
        assert said.exit_code == 1  # there is no node
        assert "broken  nodes" in said.stdout
        assert "$ kubectl create namespace pilotlight" in said.stdout
        found = json.loads(doctor("--json").stdout)
        assert found[0] == {
            "what": "API server",
            "state": "ok",
            "detail": threaded.server.url,
            "way_out": "",
            "commands": [],
        }
        assert doctor("--role", "king").exit_code != 0
    (tmp_path / "p.yaml").write_text("cluster: {autoscaler: hpa}\n")
    assert doctor().exit_code == 1
