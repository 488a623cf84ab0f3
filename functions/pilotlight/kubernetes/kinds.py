"""The kinds of objects that the platform uses, and their API paths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind, such as `Kind("apps/v1", "Deployment", "deployments", True)`."""

    api_version: str
    kind: str
    plural: str
    namespaced: bool

    @property
    def group(self) -> str:
        """API group; "" for the core group."""
        return self.api_version.rpartition("/")[0]

    @property
    def resource(self) -> str:
        """The resource in kubectl's notation: `deployments.apps`, `pods`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def path(self) -> str:
        """Path of its API version: `/apis/apps/v1`, `/api/v1`."""
        return f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"

    def __str__(self) -> str:
        return self.resource


NAMESPACE = Kind("v1", "Namespace", "namespaces", False)
NODE = Kind("v1", "Node", "nodes", False)
POD = Kind("v1", "Pod", "pods", True)
CORE_SERVICE = Kind("v1", "Service", "services", True)
CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps", True)
SECRET = Kind("v1", "Secret", "secrets", True)
SERVICE_ACCOUNT = Kind("v1", "ServiceAccount", "serviceaccounts", True)
RESOURCE_QUOTA = Kind("v1", "ResourceQuota", "resourcequotas", True)
LIMIT_RANGE = Kind("v1", "LimitRange", "limitranges", True)
PERSISTENT_VOLUME_CLAIM = Kind("v1", "PersistentVolumeClaim", "persistentvolumeclaims", True)
DEPLOYMENT = Kind("apps/v1", "Deployment", "deployments", True)
STATEFUL_SET = Kind("apps/v1", "StatefulSet", "statefulsets", True)
DAEMON_SET = Kind("apps/v1", "DaemonSet", "daemonsets", True)
JOB = Kind("batch/v1", "Job", "jobs", True)
REPLICA_SET = Kind("apps/v1", "ReplicaSet", "replicasets", True)
ENDPOINT_SLICE = Kind("discovery.k8s.io/v1", "EndpointSlice", "endpointslices", True)
POD_DISRUPTION_BUDGET = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets", True)
NETWORK_POLICY = Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies", True)
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases", True)
RUNTIME_CLASS = Kind("node.k8s.io/v1", "RuntimeClass", "runtimeclasses", False)
ROLE = Kind("rbac.authorization.k8s.io/v1", "Role", "roles", True)
ROLE_BINDING = Kind("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings", True)
CLUSTER_ROLE = Kind("rbac.authorization.k8s.io/v1", "ClusterRole", "clusterroles", False)
CLUSTER_ROLE_BINDING = Kind(
    "rbac.authorization.k8s.io/v1", "ClusterRoleBinding", "clusterrolebindings", False
)
ACCESS_REVIEW = Kind(
    "authorization.k8s.io/v1", "SelfSubjectAccessReview", "selfsubjectaccessreviews", False
)
CUSTOM_RESOURCE_DEFINITION = Kind(
    "apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions", False
)
VALIDATING_WEBHOOK = Kind(
    "admissionregistration.k8s.io/v1",
    "ValidatingWebhookConfiguration",
    "validatingwebhookconfigurations",
    False,
)

SERVICE = Kind("serving.knative.dev/v1", "Service", "services", True)
CONFIGURATION = Kind("serving.knative.dev/v1", "Configuration", "configurations", True)
REVISION = Kind("serving.knative.dev/v1", "Revision", "revisions", True)
ROUTE = Kind("serving.knative.dev/v1", "Route", "routes", True)
POD_AUTOSCALER = Kind(
    "autoscaling.internal.knative.dev/v1alpha1", "PodAutoscaler", "podautoscalers", True
)
METRIC = Kind("autoscaling.internal.knative.dev/v1alpha1", "Metric", "metrics", True)
SERVERLESS_SERVICE = Kind(
    "networking.internal.knative.dev/v1alpha1", "ServerlessService", "serverlessservices", True
)
IMAGE = Kind("caching.internal.knative.dev/v1alpha1", "Image", "images", True)

KINDS: tuple[Kind, ...] = tuple(value for value in globals().values() if isinstance(value, Kind))
_BY_NAME: Mapping[tuple[str, str], Kind] = {(kind.api_version, kind.kind): kind for kind in KINDS}


def kind_of(manifest: Mapping[str, Any]) -> Kind:
    """The kind of a manifest, by its `apiVersion` and `kind`.

    Raises:
        ValueError: the kind is unknown.
    """
    key = (str(manifest.get("apiVersion", "")), str(manifest.get("kind", "")))
    kind = _BY_NAME.get(key)
    if kind is None:
        raise ValueError(
            f"apiVersion {key[0]!r}, kind {key[1]!r}: pilotlight does not know this kind "
            f"(pilotlight/kubernetes/kinds.py)"
        )
    return kind
