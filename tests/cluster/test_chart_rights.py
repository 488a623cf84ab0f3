"""The chart's Roles and admission policies: the rights that our code needs, and no others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pilotlight.core.settings import load_section
from pilotlight.kubernetes import rbac
from pilotlight.kubernetes.names import cache_domain, manager_of, warm_directory, warm_namespace
from pilotlight.kubernetes.settings import ClusterSettings
from tests.cluster.test_chart import SETS
from tests.fakes.chart import Object, Rendering, faults, render
from tests.fakes.kubernetes.policies import compiled

POLICIES = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")


@pytest.fixture(name="chart", scope="module", params=SETS)
def _chart(request: pytest.FixtureRequest) -> Rendering:
    values, release, namespace = SETS[request.param]
    return render(values, release=release, namespace=namespace)


def _settings(chart: Rendering, directory: Path) -> ClusterSettings:
    file = directory / "platform.yaml"
    file.write_text(chart.platform_yaml)
    return load_section(ClusterSettings, "cluster", file)


def _roles(chart: Rendering) -> Mapping[tuple[str, str | None, str], Object]:
    return {
        (each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]): each
        for each in chart.of("Role", "ClusterRole")
    }


def _granted(chart: Rendering, account: str, settings: ClusterSettings) -> dict[str, list[Any]]:
    """Rules by scope, through the bindings, as the cluster would find them; of a tenant's namespace
    those that the controller binds."""
    found: dict[str, list[Any]] = {"all": [], "platform": [], "knative": []}
    roles = _roles(chart)
    for binding in chart.of("RoleBinding", "ClusterRoleBinding"):
        (subject,) = binding["subjects"]
        assert subject["namespace"] == chart.namespace
        if subject["name"] != account:
            continue
        namespace = binding["metadata"].get("namespace")
        scope = {
            None: "all",
            settings.namespace: "platform",
            settings.knative_namespace: "knative",
        }[namespace]
        assert (binding["kind"] == "ClusterRoleBinding") == (namespace is None)
        found[scope] += roles[binding["roleRef"]["kind"], namespace, binding["roleRef"]["name"]][
            "rules"
        ]
    warm = account == settings.controller_account and settings.warm_pods
    return {
        **found,
        "tenant": roles["ClusterRole", None, rbac.tenant_role(settings, account)]["rules"],
        "warm": roles["ClusterRole", None, rbac.warm_role(settings)]["rules"] if warm else [],
    }


def test_rights_are_those_that_our_code_needs_and_no_others(
    chart: Rendering, tmp_path: Path
) -> None:
    settings = _settings(chart, tmp_path)
    accounts: tuple[tuple[rbac.Role, str], ...] = (
        ("controller", settings.controller_account),
        ("activator", settings.activator_account),
    )
    for role, account in accounts:
        needed = rbac.rules_of_account(role, settings)
        for scope, rules in _granted(chart, account, settings).items():
            assert rules == [right.rule() for right in needed if right.scope == scope]
    assert "*" not in json.dumps([each["rules"] for each in chart.of("Role", "ClusterRole")])


@pytest.mark.parametrize("autoscaler", [None, "kpa", "pilotlight"])
def test_activators_may_scale_where_the_settings_have_them_do_so(
    autoscaler: str | None, tmp_path: Path
) -> None:
    for shapes in ([], [{"name": "small"}]):
        cluster = {
            "autoscaler": autoscaler,
            "warm_pods": shapes,
            "runtime_image": "registry.example/r@sha256:" + "5" * 64,
        }
        chart = render({"config": {"cluster": cluster}})
        settings = _settings(chart, tmp_path)
        assert settings.uses_kpa == (autoscaler == "kpa" or (autoscaler is None and not shapes))
        rules = _granted(chart, settings.activator_account, settings)["tenant"]
        assert any("deployments/scale" in rule["resources"] for rule in rules) != settings.uses_kpa


def test_no_role_is_bound_by_the_chart_that_changes_pods_or_reads_secrets_everywhere(
    chart: Rendering,
) -> None:
    bound = {each["roleRef"]["name"] for each in chart.of("ClusterRoleBinding")}
    rules = [
        rule
        for each in chart.of("ClusterRole")
        if each["metadata"]["name"] in bound
        for rule in each["rules"]
    ]
    for rule in rules:
        assert "secrets" not in rule["resources"]
        assert not {"pods", "pods/exec", "pods/log"} & set(rule["resources"]) or set(
            rule["verbs"]
        ) <= {"get", "list", "watch"}


def test_policies_are_valid_bound_and_expressions_of_cel(chart: Rendering) -> None:
    policies = chart.of("ValidatingAdmissionPolicy")
    assert len(policies) == 7
    assert not [fault for each in chart.of(*POLICIES) for fault in faults(each)]
    bound = [
        (each["spec"]["policyName"], each["spec"]["validationActions"])
        for each in chart.of("ValidatingAdmissionPolicyBinding")
    ]
    assert sorted(bound) == sorted((each["metadata"]["name"], ["Deny"]) for each in policies)
    for each in policies:
        assert each["spec"]["failurePolicy"] == "Fail"
        for part in ("matchConditions", "variables", "validations"):
            for one in each["spec"].get(part, ()):
                compiled(one["expression"])


def test_policies_name_the_accounts_and_labels_of_this_installation(
    chart: Rendering, tmp_path: Path
) -> None:
    settings = _settings(chart, tmp_path)
    said = json.dumps([each["spec"] for each in chart.of("ValidatingAdmissionPolicy")])
    for account in (settings.controller_account, settings.activator_account):
        assert f"'system:serviceaccount:{chart.namespace}:{account}'" in said
    accounts = {each["metadata"]["name"] for each in chart.of("ServiceAccount")}
    assert {settings.controller_account, settings.activator_account} <= accounts
    assert f"'{settings.node_path}/'" in said


def test_policies_can_be_left_out() -> None:
    assert not render({"admissionPolicies.enabled": False}).of(*POLICIES)
    assert not render(
        {"admissionPolicies.enabled": False, "config.cluster.field_manager": "A b"}
    ).of(*POLICIES)


def test_policies_follow_the_label_and_the_directory_that_were_chosen() -> None:
    chart = render(
        {"config.cluster.field_manager": "other", "config.cluster.node_path": "/data/node/"}
    )
    said = json.dumps([each["spec"] for each in chart.of("ValidatingAdmissionPolicy")])
    assert "['pilotlight.dev/managed-by'] == 'other'" in said
    assert "'/data/node/'" in said
    elsewhere = render({}, namespace="team-b")
    settings = ClusterSettings(namespace="team-b")
    said = json.dumps([each["spec"] for each in elsewhere.of("ValidatingAdmissionPolicy")])
    assert f"['pilotlight.dev/managed-by'] == '{manager_of(settings)}'" in said
    assert f"startsWith('{cache_domain(settings)}/')" in said
    assert f"'{warm_namespace(settings)}'" in said
    assert warm_directory(settings).endswith("/node/warm")
    assert f"'{warm_directory(settings)}'" in said
