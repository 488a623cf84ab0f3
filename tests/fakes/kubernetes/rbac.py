"""RBAC: what Roles, ClusterRoles and their bindings allow (Kubernetes, "Using RBAC Authorization").

A request is allowed by any rule that a binding gives to its user: a ClusterRoleBinding in the whole
cluster, a RoleBinding in its namespace. There are no rules that deny. Aggregated ClusterRoles and
rules on URLs are left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.fakes.kubernetes.problems import Refused, details_of
from tests.fakes.kubernetes.store import Store

Json = dict[str, Any]
GROUP = "rbac.authorization.k8s.io"
_ACCOUNT = "system:serviceaccount:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attributes:
    """What is asked: `resource` includes the subresource (`pods/log`); `name` "" = all; `namespace`
    "" = the whole cluster."""

    user: str
    verb: str
    group: str
    resource: str
    namespace: str = ""
    name: str = ""


class Rbac:
    """Reads the objects in a store. Owner: the server's event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def is_allowed(self, asked: Attributes) -> bool:
        """Whether any rule allows it."""
        return any(_fits(rule, asked) for rule in self._rules_of(asked.user, asked.namespace))

    def check_binding(self, user: str, binding: Json) -> None:
        """Raise Refused 403 where `user` would grant more than it has: neither `bind` on the role,
        nor each of its rights itself."""
        role, metadata = binding["roleRef"], binding["metadata"]
        namespace = metadata.get("namespace", "")
        resource = "clusterroles" if role["kind"] == "ClusterRole" else "roles"
        bind = Attributes(
            user=user,
            verb="bind",
            group=GROUP,
            resource=resource,
            namespace=namespace,
            name=role["name"],
        )
        if self.is_allowed(bind):
            return
        lacking = [
            one
            for rule in self._rules(role, namespace)
            for one in _each(rule, user, namespace)
            if not self.is_allowed(one)
        ]
        if lacking or not self._rules(role, namespace):
            text = (
                f'rolebindings.{GROUP} "{metadata["name"]}" is forbidden: user "{user}" is '
                f"attempting to grant RBAC permissions not held"
            )
            raise Refused(403, text, details=details_of(GROUP, "rolebindings", metadata["name"]))

    def _rules_of(self, user: str, namespace: str) -> Iterator[Json]:
        for _, stored in self._store.all((GROUP, "clusterrolebindings")):
            if _names(stored.body, user, ""):
                yield from self._rules(stored.body["roleRef"], "")
        if namespace:
            for _, stored in self._store.all((GROUP, "rolebindings"), namespace):
                if _names(stored.body, user, namespace):
                    yield from self._rules(stored.body["roleRef"], namespace)

    def _rules(self, role: Json, namespace: str) -> list[Json]:
        key, place = ("clusterroles", "") if role["kind"] == "ClusterRole" else ("roles", namespace)
        found = self._store.get((GROUP, key), (place, role["name"]))
        return list(found.body.get("rules") or ()) if found is not None else []


def _names(binding: Json, user: str, namespace: str) -> bool:
    """Whether a binding's subjects name this user, or a group that it is in."""
    groups = {"system:authenticated"}
    if user.startswith(_ACCOUNT):
        groups |= {"system:serviceaccounts", f"system:serviceaccounts:{user.split(':')[2]}"}
    for subject in binding.get("subjects") or ():
        account = f"{_ACCOUNT}{subject.get('namespace') or namespace}:{subject['name']}"
        who = {"ServiceAccount": {account}, "User": {subject["name"]}}.get(subject["kind"], set())
        if user in who or (subject["kind"] == "Group" and subject["name"] in groups):
            return True
    return False


def _fits(rule: Mapping[str, Any], asked: Attributes) -> bool:
    resources, names = rule.get("resources") or (), rule.get("resourceNames") or ()
    subresource = asked.resource.partition("/")[2]
    return (
        _has(rule.get("verbs") or (), asked.verb)
        and _has(rule.get("apiGroups") or (), asked.group)
        and (
            _has(resources, asked.resource)
            or (subresource != "" and f"*/{subresource}" in resources)
        )
        and (not names or asked.name in names)
    )


def _has(given: Any, wanted: str) -> bool:
    return "*" in given or wanted in given


def _each(rule: Json, user: str, namespace: str) -> Iterator[Attributes]:
    for group in rule.get("apiGroups") or ():
        for resource in rule.get("resources") or ():
            for verb in rule.get("verbs") or ():
                for name in rule.get("resourceNames") or ("",):
                    yield Attributes(
                        user=user,
                        verb=verb,
                        group=group,
                        resource=resource,
                        namespace=namespace,
                        name=name,
                    )
