"""The resources that the API server serves: names, scope, subresources, schema."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from tests.fakes.kubernetes import knative_schema
from tests.fakes.kubernetes.schema import ANY, Schema, builtin

NO_DELETE = ("create", "get", "list", "patch", "update", "watch")
ALL_VERBS = ("create", "delete", "deletecollection", *NO_DELETE[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """One served resource.

    Attributes:
        group, version, kind, plural: as in paths and bodies; group "" is core. schema_name: of
        Kubernetes' own kinds, or None: `custom` is asked. has_status: the status is a subresource,
        and writes to the object do not touch it. counts_generations: `metadata.generation` rises
        with every change outside of metadata and status. scalable: has the subresource `scale`.
        custom: a CustomResourceDefinition brought it. create_only: a review: answered, never
        stored.
    """

    group: str = ""
    version: str = "v1"
    kind: str
    plural: str
    namespaced: bool = True
    schema_name: str | None = None
    has_status: bool = False
    counts_generations: bool = False
    scalable: bool = False
    custom: bool = False
    create_only: bool = False
    short_names: tuple[str, ...] = ()
    own_schema: Schema | None = None

    @property
    def api_version(self) -> str:
        """`apps/v1`, `v1`."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def key(self) -> tuple[str, str]:
        """What the store files it under."""
        return (self.group, self.plural)

    @property
    def qualified(self) -> str:
        """`deployments.apps`, `pods`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def schema(self) -> Schema:
        """Of the whole object."""
        if self.own_schema is not None:
            return self.own_schema
        if self.schema_name is not None:
            return builtin(self.schema_name)
        return (
            knative_schema.SCHEMAS[self.kind]
            if self.custom and self.kind in knative_schema.SCHEMAS
            else ANY
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a request is about: `namespace` "" for cluster-wide kinds, `subresource` "" for the
    object itself."""

    resource: Resource
    namespace: str
    name: str
    subresource: str = ""

    @property
    def place(self) -> tuple[str, str]:
        """Where the store has it."""
        return (self.namespace, self.name)


def _core(kind: str, plural: str, **extra: object) -> Resource:
    return Resource(kind=kind, plural=plural, schema_name=f"io.k8s.api.core.v1.{kind}", **extra)  # type: ignore[arg-type]


def _of(group: str, package: str, kind: str, plural: str, **extra: object) -> Resource:
    return Resource(
        group=group,
        kind=kind,
        plural=plural,
        schema_name=f"io.k8s.api.{package}.v1.{kind}",
        **extra,  # type: ignore[arg-type]
    )


_RBAC = functools.partial(_of, "rbac.authorization.k8s.io", "rbac")
_REVIEW = functools.partial(
    _of, "authorization.k8s.io", "authorization", namespaced=False, create_only=True
)
_POLICY = functools.partial(
    _of, "admissionregistration.k8s.io", "admissionregistration", namespaced=False
)
_APPS = functools.partial(_of, "apps", "apps", has_status=True, counts_generations=True)
_CRD = "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.CustomResourceDefinition"

BUILTIN = (
    _core("Namespace", "namespaces", namespaced=False, has_status=True, short_names=("ns",)),
    _core("Node", "nodes", namespaced=False, has_status=True, short_names=("no",)),
    _core("Pod", "pods", has_status=True, short_names=("po",)),
    _core("Service", "services", has_status=True, short_names=("svc",)),
    _core("Endpoints", "endpoints", short_names=("ep",)),
    _core("ConfigMap", "configmaps", short_names=("cm",)),
    _core("Secret", "secrets"),
    _core("ServiceAccount", "serviceaccounts", short_names=("sa",)),
    _core("ResourceQuota", "resourcequotas", has_status=True, short_names=("quota",)),
    _core("LimitRange", "limitranges", short_names=("limits",)),
    _core("Event", "events", short_names=("ev",)),
    _core("PersistentVolumeClaim", "persistentvolumeclaims", has_status=True, short_names=("pvc",)),
    _APPS("Deployment", "deployments", scalable=True, short_names=("deploy",)),
    _APPS("ReplicaSet", "replicasets", scalable=True, short_names=("rs",)),
    _APPS("StatefulSet", "statefulsets", scalable=True, short_names=("sts",)),
    _APPS("DaemonSet", "daemonsets", short_names=("ds",)),
    _of("batch", "batch", "Job", "jobs", has_status=True, counts_generations=True),
    _of(
        "policy",
        "policy",
        "PodDisruptionBudget",
        "poddisruptionbudgets",
        has_status=True,
        counts_generations=True,
        short_names=("pdb",),
    ),
    _of(
        "networking.k8s.io",
        "networking",
        "NetworkPolicy",
        "networkpolicies",
        counts_generations=True,
        short_names=("netpol",),
    ),
    _of(
        "networking.k8s.io",
        "networking",
        "Ingress",
        "ingresses",
        has_status=True,
        counts_generations=True,
        short_names=("ing",),
    ),
    _of(
        "discovery.k8s.io", "discovery", "EndpointSlice", "endpointslices", counts_generations=True
    ),
    _of("coordination.k8s.io", "coordination", "Lease", "leases"),
    _RBAC("Role", "roles"),
    _RBAC("RoleBinding", "rolebindings"),
    _RBAC("ClusterRole", "clusterroles", namespaced=False),
    _RBAC("ClusterRoleBinding", "clusterrolebindings", namespaced=False),
    _REVIEW("SelfSubjectAccessReview", "selfsubjectaccessreviews"),
    _REVIEW("SelfSubjectRulesReview", "selfsubjectrulesreviews"),
    _REVIEW("SubjectAccessReview", "subjectaccessreviews"),
    _of("node.k8s.io", "node", "RuntimeClass", "runtimeclasses", namespaced=False),
    _POLICY("ValidatingAdmissionPolicy", "validatingadmissionpolicies"),
    _POLICY("ValidatingAdmissionPolicyBinding", "validatingadmissionpolicybindings"),
    _of(
        "scheduling.k8s.io",
        "scheduling",
        "PriorityClass",
        "priorityclasses",
        namespaced=False,
        short_names=("pc",),
    ),
    Resource(
        group="apiextensions.k8s.io",
        kind="CustomResourceDefinition",
        plural="customresourcedefinitions",
        namespaced=False,
        schema_name=_CRD,
        has_status=True,
        counts_generations=True,
        short_names=("crd",),
    ),
)


def _knative(group: str, version: str, kind: str, plural: str, *short_names: str) -> Resource:
    return Resource(
        group=group,
        version=version,
        kind=kind,
        plural=plural,
        has_status=True,
        counts_generations=True,
        custom=True,
        short_names=short_names,
    )


_SERVING = functools.partial(_knative, "serving.knative.dev", "v1")
KNATIVE = (
    _SERVING("Service", "services", "kservice", "ksvc"),
    _SERVING("Configuration", "configurations", "config", "cfg"),
    _SERVING("Revision", "revisions", "rev"),
    _SERVING("Route", "routes", "rt"),
    _knative(
        "autoscaling.internal.knative.dev",
        "v1alpha1",
        "PodAutoscaler",
        "podautoscalers",
        "kpa",
        "pa",
    ),
    _knative("autoscaling.internal.knative.dev", "v1alpha1", "Metric", "metrics"),
    _knative(
        "networking.internal.knative.dev",
        "v1alpha1",
        "ServerlessService",
        "serverlessservices",
        "sks",
    ),
    _knative(
        "networking.internal.knative.dev", "v1alpha1", "Ingress", "ingresses", "kingress", "king"
    ),
)


def by_path(resources: tuple[Resource, ...]) -> Mapping[tuple[str, str, str], Resource]:
    """(group, version, plural) → resource."""
    return {(r.group, r.version, r.plural): r for r in resources}
