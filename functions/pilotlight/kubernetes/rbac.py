"""The rights of each of our processes in the cluster: the single list from which RBAC is rendered
and which doctor checks.

Node agents and function pods have no rights: they have no credentials. Rights are granted by
resource, never by wildcard. `scope` is the range of a right. Resources that are watched in all
namespaces, and kinds without a namespace, are granted cluster-wide; writes to tenants' namespaces
in each of these, by a RoleBinding that the controller creates with the namespace, and those to warm
pods' namespace likewise; rights for the platform itself in its own namespace; an operator's reads
of Knative's settings in Knative's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pilotlight.kubernetes import kinds
from pilotlight.kubernetes.api_request import ApiRequest
from pilotlight.kubernetes.kinds import Kind
from pilotlight.kubernetes.settings import ClusterSettings

Scope = Literal["all", "tenant", "warm", "platform", "knative"]
Role = Literal["controller", "activator", "autoscaler", "operator"]

_READ = ("get", "list", "watch")
_WRITE = ("create", "patch", "delete")
_KEEP = (*_READ, *_WRITE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RbacRule:
    """Verbs on one resource.

    Attributes:
        subresource: "" or `status`, `log`, `exec`, `scale`, `resize`.
        scope: `all` namespaces (and kinds without one), each `tenant`'s namespace, that of `warm`
            pods, the `platform`'s, or `knative`'s.
        why: its purpose, in words.
        names: restricts it to these objects; empty = all.
    """

    kind: Kind
    verbs: tuple[str, ...]
    why: str
    subresource: str = ""
    scope: Scope = "all"
    names: tuple[str, ...] = ()

    @property
    def resource(self) -> str:
        """The resource in RBAC's notation: `deployments`, `pods/log`."""
        return f"{self.kind.plural}/{self.subresource}" if self.subresource else self.kind.plural

    def rule(self) -> dict[str, Any]:
        """The rule of a Role or ClusterRole."""
        rule = {
            "apiGroups": [self.kind.group],
            "resources": [self.resource],
            "verbs": list(self.verbs),
        }
        return {**rule, "resourceNames": list(self.names)} if self.names else rule

    def deeds(
        self, *, platform: str, knative: str, tenant: str | None = None, warm: str | None = None
    ) -> list[ApiRequest]:
        """The requests of an access review, one per verb; none for a tenant's namespace, or that of
        warm pods, if there is none yet (None)."""
        namespace = {
            "all": None,
            "tenant": tenant,
            "warm": warm,
            "platform": platform,
            "knative": knative,
        }[self.scope]
        if self.scope in ("tenant", "warm") and namespace is None:
            return []
        return [
            ApiRequest(
                verb=verb,
                kind=self.kind,
                namespace=namespace,
                name=name,
                subresource=self.subresource,
            )
            for verb in self.verbs
            for name in self.names or (None,)
        ]


def _right(
    kind: Kind, verbs: Sequence[str], why: str, *, subresource: str = "", scope: Scope = "all"
) -> RbacRule:
    return RbacRule(kind=kind, verbs=tuple(verbs), why=why, subresource=subresource, scope=scope)


_CONTROLLER = (
    _right(kinds.NAMESPACE, _KEEP, "a tenant's namespace"),
    _right(
        kinds.ROLE_BINDING, _KEEP, "rights of controller and activators in a tenant's namespace"
    ),
    _right(kinds.RESOURCE_QUOTA, _READ, "a tenant's plan as a quota"),
    _right(kinds.LIMIT_RANGE, _READ, "limits of a tenant's pods"),
    _right(kinds.NETWORK_POLICY, _READ, "network access to a tenant's pods"),
    _right(kinds.SERVICE_ACCOUNT, _READ, "pods run as an account without a token"),
    _right(kinds.CONFIG_MAP, _READ, "launch documents of revisions"),
    _right(kinds.POD_DISRUPTION_BUDGET, _READ, "node drains keep instances"),
    _right(kinds.SERVICE, _READ, "functions"),
    _right(kinds.REVISION, _READ, "whether a revision is ready, and why not"),
    _right(kinds.POD, _READ, "instances"),
    _right(kinds.NODE, (*_READ, "patch"), "labels of cached weights and snapshots"),
    _right(kinds.RESOURCE_QUOTA, _WRITE, "a tenant's plan as a quota", scope="tenant"),
    _right(kinds.LIMIT_RANGE, _WRITE, "limits of a tenant's pods", scope="tenant"),
    _right(kinds.NETWORK_POLICY, _WRITE, "network access to a tenant's pods", scope="tenant"),
    _right(kinds.SERVICE_ACCOUNT, _WRITE, "pods run as an account without a token", scope="tenant"),
    _right(kinds.CONFIG_MAP, _WRITE, "launch documents of revisions", scope="tenant"),
    _right(kinds.SECRET, _KEEP, "a tenant's secrets, for its pods", scope="tenant"),
    _right(kinds.POD_DISRUPTION_BUDGET, _WRITE, "node drains keep instances", scope="tenant"),
    _right(kinds.SERVICE, _WRITE, "functions", scope="tenant"),
    _right(
        kinds.REVISION,
        ("patch",),
        "floors of pods that change; the autoscaler's class when the settings name another",
        scope="tenant",
    ),
    _right(kinds.POD, ("delete",), "stopping an instance", scope="tenant"),
    _right(kinds.POD, ("get",), "logs of instances", subresource="log", scope="tenant"),
    _right(
        kinds.POD, ("get", "create"), "a command in an instance", subresource="exec", scope="tenant"
    ),
    _right(kinds.NETWORK_POLICY, _WRITE, "network access to promoted pods", scope="warm"),
    _right(kinds.SERVICE_ACCOUNT, _WRITE, "pods run as an account without a token", scope="warm"),
    _right(kinds.DEPLOYMENT, _KEEP, "warm pods", scope="warm"),
    _right(
        kinds.POD, ("patch", "delete"), "promoting warm pods, ending promoted ones", scope="warm"
    ),
    _right(
        kinds.POD,
        ("patch",),
        "promoted pods get the size of their functions",
        subresource="resize",
        scope="warm",
    ),
    _right(kinds.POD, ("get",), "logs of promoted pods", subresource="log", scope="warm"),
    _right(
        kinds.POD,
        ("get", "create"),
        "a command in a promoted pod",
        subresource="exec",
        scope="warm",
    ),
    _right(
        kinds.LEASE,
        ("get", "create", "update"),
        "leader election of the reconciler",
        scope="platform",
    ),
    _right(kinds.STATEFUL_SET, ("get", "list"), "the number of activators", scope="platform"),
    _right(
        kinds.PERSISTENT_VOLUME_CLAIM,
        ("get", "list", "patch"),
        "journals of removed activators",
        scope="platform",
    ),
    _right(kinds.JOB, ("get", "create", "delete"), "draining such a journal", scope="platform"),
)
_ACTIVATOR = (
    _right(kinds.POD, _READ, "instances"),
    _right(kinds.ENDPOINT_SLICE, _READ, "addresses of instances"),
    _right(kinds.DEPLOYMENT, _READ, "why a revision's pods cannot be created"),
    _right(kinds.NODE, ("list", "watch"), "the kind of GPU that a pod was granted"),
    _right(
        kinds.POD,
        ("patch", "delete"),
        "deletion order (pod-deletion-cost); deletion of pods whose calls do not end",
        scope="tenant",
    ),
)
_AUTOSCALER = (
    _right(kinds.POD_AUTOSCALER, _READ, "revisions of class pilotlight.dev"),
    _right(kinds.SERVERLESS_SERVICE, _READ, "routing to a revision"),
    _right(kinds.DEPLOYMENT, _READ, "the number of pods"),
    _right(
        kinds.POD_AUTOSCALER,
        ("get", "patch", "update"),
        "their conditions and scale",
        subresource="status",
        scope="tenant",
    ),
    _right(
        kinds.SERVERLESS_SERVICE,
        ("create", "patch", "update"),
        "routing to a revision",
        scope="tenant",
    ),
    _right(
        kinds.DEPLOYMENT,
        ("patch",),
        "the desired number of pods",
        subresource="scale",
        scope="tenant",
    ),
    _right(
        kinds.LEASE,
        ("get", "create", "update"),
        "leader election of the autoscaler",
        scope="platform",
    ),
)
_OPERATOR = (
    _right(kinds.CUSTOM_RESOURCE_DEFINITION, ("get", "list"), "Knative's kinds"),
    _right(kinds.VALIDATING_WEBHOOK, ("get", "list"), "Knative's webhook"),
    _right(kinds.NODE, ("get", "list"), "GPUs and labels"),
    _right(kinds.RUNTIME_CLASS, ("get", "list"), "runtime classes of functions"),
    _right(kinds.NAMESPACE, ("get", "list"), "tenants' namespaces"),
    _right(kinds.CONFIG_MAP, ("get", "list"), "Knative's settings", scope="knative"),
    _right(kinds.DEPLOYMENT, ("get", "list"), "Knative's controllers and webhook", scope="knative"),
    _right(kinds.DEPLOYMENT, ("get", "list"), "the controller", scope="platform"),
    _right(kinds.DEPLOYMENT, ("get", "list"), "warm pods", scope="warm"),
    _right(kinds.LEASE, ("get",), "the leading controller, and its platform", scope="platform"),
    _right(kinds.STATEFUL_SET, ("get", "list"), "the activators", scope="platform"),
    _right(kinds.POD, ("get", "list"), "node agents", scope="platform"),
    _right(kinds.DAEMON_SET, ("get", "list"), "node agents", scope="platform"),
)

ROLES: Mapping[Role, tuple[RbacRule, ...]] = {
    "controller": _CONTROLLER,
    "activator": _ACTIVATOR,
    "autoscaler": _AUTOSCALER,  # of activators, unless Knative's autoscaler scales functions
    "operator": _OPERATOR,  # users of `pilotlight doctor --cluster`, without a service account
}


def rules(role: Role, scope: Scope) -> list[dict[str, Any]]:
    """RBAC rules of a role in a scope, in a stable order."""
    return [right.rule() for right in ROLES[role] if right.scope == scope]


def tenant_role(settings: ClusterSettings, account: str) -> str:
    """Name of the ClusterRole, created by the chart, that one of our service accounts is bound to
    in each tenant's namespace."""
    return f"{settings.namespace}:{account}:tenant"


def warm_role(settings: ClusterSettings) -> str:
    """Name of the ClusterRole, created by the chart, that the controller's account is bound to in
    the namespace of warm pods."""
    return f"{settings.namespace}:{settings.controller_account}:warm"


def binding_rule(settings: ClusterSettings) -> RbacRule:
    """The right to grant only those ClusterRoles (Kubernetes, "Privilege escalation prevention":
    verb `bind`)."""
    accounts = (settings.controller_account, settings.activator_account)
    roles = tuple(tenant_role(settings, account) for account in accounts)
    if settings.warm_pods:
        roles += (warm_role(settings),)
    return RbacRule(
        kind=kinds.CLUSTER_ROLE,
        verbs=("bind",),
        why="granting these in a tenant's namespace, and in that of warm pods",
        names=roles,
    )


def rules_of_account(role: Role, settings: ClusterSettings) -> tuple[RbacRule, ...]:
    """The rights that a role's credentials need with these settings."""
    own = tuple(right for right in ROLES[role] if settings.warm_pods or right.scope != "warm")
    if role == "controller":
        return (*own, binding_rule(settings))
    if role == "activator" and not settings.uses_kpa:  # one of them is the autoscaler
        return (*own, *ROLES["autoscaler"])
    return own
