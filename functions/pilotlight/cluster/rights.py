"""What each of our processes may do in the cluster, and no more: the one list from which RBAC is rendered and with which doctor compares.

Node agents and function pods have no rights at all: they hold no credentials. Everything is by resource, nothing by wildcard. `scope` says
how far a right reaches: tenants' namespaces come and go, so what concerns functions is granted in all namespaces (a ClusterRole); what
concerns the platform itself, in its own namespace; what is read from Knative, in Knative's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pilotlight.cluster import kinds
from pilotlight.cluster.deeds import Deed
from pilotlight.cluster.kinds import Kind

Scope = Literal["all", "platform", "knative"]
Role = Literal["controller", "activator", "autoscaler", "operator"]

_READ = ("get", "list", "watch")
_KEEP = ("get", "list", "watch", "create", "patch", "delete")


@dataclass(frozen=True, slots=True, kw_only=True)
class Right:
    """Verbs on one resource.

    Attributes:
        subresource: "" or `status`, `log`, `exec`, `scale`.
        scope: `all` namespaces (and kinds without one), the `platform`'s namespace, or `knative`'s.
        why: what for, in words.
    """

    kind: Kind
    verbs: tuple[str, ...]
    why: str
    subresource: str = ""
    scope: Scope = "all"

    @property
    def resource(self) -> str:
        """As RBAC names it: `deployments`, `pods/log`."""
        return f"{self.kind.plural}/{self.subresource}" if self.subresource else self.kind.plural

    def rule(self) -> dict[str, Any]:
        """The rule of a Role or ClusterRole."""
        return {"apiGroups": [self.kind.group], "resources": [self.resource], "verbs": list(self.verbs)}

    def deeds(self, *, platform: str, knative: str) -> list[Deed]:
        """What an access review asks, verb by verb."""
        namespace = {"all": None, "platform": platform, "knative": knative}[self.scope]
        return [Deed(verb=verb, kind=self.kind, namespace=namespace, subresource=self.subresource) for verb in self.verbs]


def _right(kind: Kind, verbs: Sequence[str], why: str, *, subresource: str = "", scope: Scope = "all") -> Right:
    return Right(kind=kind, verbs=tuple(verbs), why=why, subresource=subresource, scope=scope)


_CONTROLLER = (
    _right(kinds.NAMESPACE, _KEEP, "a tenant's namespace"),
    _right(kinds.RESOURCE_QUOTA, _KEEP, "a tenant's plan as a quota"),
    _right(kinds.LIMIT_RANGE, _KEEP, "bounds of a tenant's pods"),
    _right(kinds.NETWORK_POLICY, _KEEP, "who reaches a tenant's pods"),
    _right(kinds.SERVICE_ACCOUNT, _KEEP, "pods run as an account without a token"),
    _right(kinds.CONFIG_MAP, _KEEP, "launch documents of revisions"),
    _right(kinds.SECRET, _KEEP, "a tenant's secrets, for its pods"),
    _right(kinds.POD_DISRUPTION_BUDGET, _KEEP, "drains of nodes leave instances"),
    _right(kinds.SERVICE, _KEEP, "functions"),
    _right(kinds.REVISION, _READ, "whether a revision is ready, and why not"),
    _right(kinds.CONFIGURATION, _READ, "why a Service is not ready"),
    _right(kinds.ROUTE, _READ, "why a Service is not ready"),
    _right(kinds.POD, (*_READ, "delete"), "instances; stopping one"),
    _right(kinds.POD, ("get",), "what instances print", subresource="log"),
    _right(kinds.POD, ("get", "create"), "a command in an instance", subresource="exec"),
    _right(kinds.EVENT, _READ, "why a pod does not start"),
    _right(kinds.NODE, (*_READ, "patch"), "labels that say which weights and snapshots are hot"),
    _right(kinds.LEASE, ("get", "create", "update"), "one controller reconciles", scope="platform"),
    _right(kinds.STATEFUL_SET, ("get", "list"), "how many activators there are", scope="platform"),
    _right(kinds.PERSISTENT_VOLUME_CLAIM, ("get", "list", "patch"), "journals of activators that are gone", scope="platform"),
    _right(kinds.JOB, ("get", "create", "delete"), "draining such a journal", scope="platform"),
    _right(kinds.CONFIG_MAP, ("get", "list", "watch"), "which features the cluster allows", scope="knative"),
)
_ACTIVATOR = (
    _right(
        kinds.POD, (*_READ, "patch", "delete"), "instances; which goes first (pod-deletion-cost); one whose calls do not end is deleted"
    ),
    _right(kinds.ENDPOINT_SLICE, _READ, "addresses of instances"),
    _right(kinds.DEPLOYMENT, _READ, "why no pod of a revision can be made"),
)
_AUTOSCALER = (
    _right(kinds.POD_AUTOSCALER, _READ, "revisions of class pilotlight.dev"),
    _right(kinds.POD_AUTOSCALER, ("get", "patch", "update"), "their conditions and scale", subresource="status"),
    _right(kinds.SERVERLESS_SERVICE, (*_READ, "create", "patch", "update"), "how a revision is reached"),
    _right(kinds.DEPLOYMENT, _READ, "how many pods there are"),
    _right(kinds.DEPLOYMENT, ("patch",), "how many pods there are to be", subresource="scale"),
    _right(kinds.LEASE, ("get", "create", "update"), "one autoscaler decides", scope="platform"),
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
    _right(kinds.STATEFUL_SET, ("get", "list"), "the activators", scope="platform"),
    _right(kinds.POD, ("get", "list"), "node agents", scope="platform"),
    _right(kinds.DAEMON_SET, ("get", "list"), "node agents", scope="platform"),
)

ROLES: Mapping[Role, tuple[Right, ...]] = {
    "controller": _CONTROLLER,
    "activator": _ACTIVATOR,
    "autoscaler": _AUTOSCALER,  # of activators, with cluster.autoscaler = pilotlight only
    "operator": _OPERATOR,  # who runs `pilotlight doctor --cluster`: no service account of ours
}


def rules(role: Role, scope: Scope) -> list[dict[str, Any]]:
    """RBAC rules of a role in a scope, in a stable order."""
    return [right.rule() for right in ROLES[role] if right.scope == scope]
