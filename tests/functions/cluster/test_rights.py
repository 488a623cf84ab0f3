"""Rights of each process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pilotlight.kubernetes import kinds
from pilotlight.kubernetes.api_request import ApiRequest
from pilotlight.kubernetes.rbac import (
    ROLES,
    Role,
    binding_rule,
    rules,
    rules_of_account,
    warm_role,
)
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.spec.warm_shape import WarmShape


@pytest.mark.parametrize("role", list(ROLES))
def test_no_wildcards_no_duplicates_and_a_reason_for_each(role: Role) -> None:
    seen: set[tuple[str, str, str]] = set()
    for right in ROLES[role]:
        assert right.why
        assert "*" not in (*right.verbs, right.resource, right.kind.group)
        key = (right.kind.group, right.resource, right.scope)
        assert key not in seen, key
        seen.add(key)


def test_secrets_are_read_by_the_controller_alone_and_in_tenants_namespaces_only() -> None:
    reading = [
        (role, right.scope)
        for role, rights in ROLES.items()
        for right in rights
        if right.kind == kinds.SECRET
    ]
    assert reading == [("controller", "tenant")]


def test_pods_are_changed_in_tenants_namespaces_and_by_the_controller_in_that_of_warm_pods() -> (
    None
):
    for role, rights in ROLES.items():
        for right in rights:
            may = right.scope == "tenant" or (right.scope == "warm" and role == "controller")
            if right.kind == kinds.POD and not may:
                assert set(right.verbs) <= {"get", "list", "watch"}


def test_rights_to_warm_pods_are_needed_where_there_are_shapes() -> None:
    image = "registry.example/runtime@sha256:" + "0" * 64
    without = ClusterSettings(runtime_image=image)
    having = replace(without, warm_pods=[WarmShape(name="small")])
    for role in ROLES:
        assert not any(one.scope == "warm" for one in rules_of_account(role, without))
    assert {one.scope for one in rules_of_account("controller", having)} >= {"warm"}
    assert warm_role(having) in binding_rule(having).names
    assert warm_role(having) not in binding_rule(without).names
    (right, *_) = [one for one in rules_of_account("controller", having) if one.scope == "warm"]
    assert right.deeds(platform="p", knative="k") == []
    assert {one.namespace for one in right.deeds(platform="p", knative="k", warm="w")} == {"w"}


def test_roles_are_changed_by_nobody_and_bound_by_the_controller() -> None:
    fixed = (kinds.ROLE, kinds.CLUSTER_ROLE, kinds.CLUSTER_ROLE_BINDING)
    for role, rights in ROLES.items():
        assert not any(right.kind in fixed for right in rights)
        assert role == "controller" or not any(right.kind == kinds.ROLE_BINDING for right in rights)
    bind = binding_rule(
        ClusterSettings(namespace="p", controller_account="c", activator_account="a")
    )
    assert bind.rule()["resourceNames"] == ["p:c:tenant", "p:a:tenant"]
    assert [(deed.verb, deed.name) for deed in bind.deeds(platform="p", knative="k")] == [
        ("bind", "p:c:tenant"),
        ("bind", "p:a:tenant"),
    ]


def test_rules_are_what_rbac_wants() -> None:
    assert {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]} in rules(
        "controller", "tenant"
    )
    assert {
        "apiGroups": ["coordination.k8s.io"],
        "resources": ["leases"],
        "verbs": ["get", "create", "update"],
    } in rules("controller", "platform")


def test_a_right_knows_what_to_ask_an_access_review() -> None:
    lease = next(right for right in ROLES["autoscaler"] if right.kind == kinds.LEASE)
    assert lease.deeds(platform="pilotlight", knative="knative-serving")[0] == ApiRequest(
        verb="get", kind=kinds.LEASE, namespace="pilotlight"
    )


def test_nothing_is_asked_of_a_tenants_namespace_where_there_is_none() -> None:
    patch = next(right for right in ROLES["activator"] if right.scope == "tenant")
    assert patch.deeds(platform="pilotlight", knative="knative-serving") == []
    assert (
        patch.deeds(platform="pilotlight", knative="knative-serving", tenant="fn-acme")[0].namespace
        == "fn-acme"
    )
