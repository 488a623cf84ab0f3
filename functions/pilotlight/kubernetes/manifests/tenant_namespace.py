"""A tenant's namespace in one environment: what stands there before any function does.

Pod Security: the standards `restricted` and `baseline` refuse every hostPath volume, and a
function's pod mounts one: the directory of its own tenant on the node, read-only, where the node's
agent shows it code and weights. So the namespace enforces `privileged`, which is to say nothing,
and warns and audits by `restricted`, so that anything else that is not as it should be is seen.
Nobody but Knative and this platform creates pods here; what they may be is in `pod`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pilotlight.errors import InvalidInput
from pilotlight.kubernetes import kinds, names
from pilotlight.kubernetes.manifests import network_policies
from pilotlight.kubernetes.manifests.labels import Manifest, object_manifest, ownership_labels
from pilotlight.kubernetes.rbac import tenant_role
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.protocol import TenantRecord
from pilotlight.spec.quotas import UNLIMITED, Plan
from snapshotter.agent.launch_signature import LaunchSigner

RUNNER = "pilotlight-runner"
"""The service account of function pods: it may do nothing, and no pod gets its token."""
QUOTA = LIMITS = "pilotlight"
CONTROLLER_BINDING = "pilotlight-controller"
ACTIVATOR_BINDING = "pilotlight-activator"
PODS_PER_INSTANCE = 2
"""A pod that ends counts until it is gone, and a new revision comes up beside the old one: the
exact bound is the activators'."""
_SECURITY = "pod-security.kubernetes.io"
_WHY = (
    "function pods mount a directory of the node, read-only, which Pod Security's baseline "
    "refuses; all else is as restricted wants it"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenancy:
    """A tenant in one environment, on a cluster.

    Attributes:
        uid: as which its pods run. given: name of the namespace, in place of the one made of
        prefix, tenant and environment; None = that. grants: what its launch documents are sealed
        with; None: they are only looked at, as nodes take none without a seal.
    """

    id: str
    name: str
    uid: int
    environment: str
    settings: ClusterSettings
    plan: Plan = field(default=UNLIMITED)
    given: str | None = None
    grants: LaunchSigner | None = field(default=None, repr=False)

    @classmethod
    def of(cls, tenant: TenantRecord, *, environment: str, settings: ClusterSettings) -> Tenancy:
        """From what the platform knows. Raises InvalidInput for a tenant without a uid of its
        own."""
        if tenant.uid is None:
            raise InvalidInput(
                f"tenant {tenant.name!r} has no uid of its own, and pods need one",
                hint="It was made by a platform with fleet: local and without root; create the "
                "tenant anew on this platform.",
            )
        plan = UNLIMITED.with_overrides(
            {key: value for key, value in tenant.plan.items() if key != "name"}
        )
        return cls(
            id=tenant.id,
            name=tenant.name,
            uid=tenant.uid,
            environment=environment,
            settings=settings,
            plan=plan,
        )

    @property
    def namespace(self) -> str:
        """Where its functions are."""
        return self.given or names.tenant_namespace(self.settings, self.name, self.environment)

    @property
    def labels(self) -> dict[str, str]:
        """Of every object in it."""
        return {
            **ownership_labels(self.settings),
            names.TENANT: self.id,
            names.ENVIRONMENT: self.environment,
        }

    @property
    def path(self) -> str:
        """`<tenant id>/<environment>`, exactly: by which a name that two share is noticed."""
        return f"{self.id}/{self.environment}"


def namespace_manifests(tenancy: Tenancy) -> list[Manifest]:
    """The namespace and what is in it besides functions, in the order in which it is applied."""
    return [
        _namespace(tenancy),
        *_role_bindings(tenancy),
        _service_account(tenancy),
        *network_policies.network_policies(
            tenancy.namespace, labels=tenancy.labels, settings=tenancy.settings
        ),
        _limits(tenancy),
        *_quota(tenancy),
    ]


def _namespace(tenancy: Tenancy) -> Manifest:
    standards = {
        f"{_SECURITY}/enforce": "privileged",
        f"{_SECURITY}/warn": "restricted",
        f"{_SECURITY}/audit": "restricted",
    }
    return object_manifest(
        kinds.NAMESPACE,
        tenancy.namespace,
        labels={**tenancy.labels, **standards},
        annotations={names.PATH: tenancy.path, names.MADE_FOR: _WHY},
    )


def _role_bindings(tenancy: Tenancy) -> list[Manifest]:
    """What controller and activators may write in this namespace; the controller's own first, as it
    writes what follows."""
    settings = tenancy.settings
    bound = (
        (CONTROLLER_BINDING, settings.controller_account),
        (ACTIVATOR_BINDING, settings.activator_account),
    )
    return [
        object_manifest(
            kinds.ROLE_BINDING,
            name,
            namespace=tenancy.namespace,
            labels=tenancy.labels,
            roleRef={
                "apiGroup": kinds.CLUSTER_ROLE.group,
                "kind": kinds.CLUSTER_ROLE.kind,
                "name": tenant_role(settings, account),
            },
            subjects=[
                {
                    "kind": kinds.SERVICE_ACCOUNT.kind,
                    "name": account,
                    "namespace": settings.namespace,
                }
            ],
        )
        for name, account in bound
    ]


def _service_account(tenancy: Tenancy) -> Manifest:
    body: dict[str, Any] = {"automountServiceAccountToken": False}
    if tenancy.settings.image_pull_secrets:
        body["imagePullSecrets"] = [{"name": name} for name in tenancy.settings.image_pull_secrets]
    return object_manifest(
        kinds.SERVICE_ACCOUNT, RUNNER, namespace=tenancy.namespace, labels=tenancy.labels, **body
    )


def _limits(tenancy: Tenancy) -> Manifest:
    """Requests for containers that name none (Knative's queue-proxy, where its own settings do
    not), so that the scheduler counts them.

    No default limits: they would cut the queue-proxy off, too.
    """
    limit = {
        "type": "Container",
        "defaultRequest": {"cpu": "25m", "memory": "64Mi", "ephemeral-storage": "64Mi"},
    }
    return object_manifest(
        kinds.LIMIT_RANGE,
        LIMITS,
        namespace=tenancy.namespace,
        labels=tenancy.labels,
        spec={"limits": [limit]},
    )


def _quota(tenancy: Tenancy) -> list[Manifest]:
    """What the plan bounds, of all environments together, is an outer bound of each."""
    settings, plan = tenancy.settings, tenancy.plan
    hard = {"persistentvolumeclaims": "0", "services.loadbalancers": "0", "services.nodeports": "0"}
    if plan.instances is not None:
        hard["pods"] = str(plan.instances * PODS_PER_INSTANCE)
    if plan.gpus is not None:
        hard[f"requests.{settings.gpu_resource}"] = str(plan.gpus)
    spec = {"hard": dict(sorted(hard.items()))}
    return [
        object_manifest(
            kinds.RESOURCE_QUOTA,
            QUOTA,
            namespace=tenancy.namespace,
            labels=tenancy.labels,
            spec=spec,
        )
    ]
