"""Rights of each process."""

from __future__ import annotations

import pytest

from pilotlight.cluster import kinds
from pilotlight.cluster.deeds import Deed
from pilotlight.cluster.rights import ROLES, Role, rules


@pytest.mark.parametrize("role", list(ROLES))
def test_no_wildcards_no_duplicates_and_a_reason_for_each(role: Role) -> None:
    seen: set[tuple[str, str, str]] = set()
    for right in ROLES[role]:
        assert right.why
        assert "*" not in (*right.verbs, right.resource, right.kind.group)
        key = (right.kind.group, right.resource, right.scope)
        assert key not in seen
        seen.add(key)


def test_processes_do_not_read_secrets_or_change_roles() -> None:
    others: tuple[Role, ...] = ("activator", "autoscaler", "operator")
    for role in others:
        assert not any(right.kind == kinds.SECRET for right in ROLES[role])
    for rights in ROLES.values():
        assert not any(right.kind in (kinds.ROLE, kinds.ROLE_BINDING, kinds.CLUSTER_ROLE, kinds.CLUSTER_ROLE_BINDING) for right in rights)


def test_rules_are_what_rbac_wants() -> None:
    assert {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]} in rules("controller", "all")
    assert {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "create", "update"]} in rules(
        "controller", "platform"
    )


def test_a_right_knows_what_to_ask_an_access_review() -> None:
    lease = next(right for right in ROLES["autoscaler"] if right.kind == kinds.LEASE)
    assert lease.deeds(platform="pilotlight", knative="knative-serving")[0] == Deed(verb="get", kind=kinds.LEASE, namespace="pilotlight")
