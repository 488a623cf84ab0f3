"""Manifests of a tenant's namespace in one environment, which are applied before its functions.

Pod Security: the standards `restricted` and `baseline` refuse every hostPath volume, and a
function's pod mounts one: its tenant's directory on the node, read-only, in which the node agent
provides code and weights. The namespace therefore enforces `privileged`, which permits everything,
and warns and audits by `restricted`, to reveal any other violation. Only Knative and this platform
create pods in it; `pod` defines them."""

from __future__ import annotations

from collections.abc import Mapping
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
"""The service account of function pods: it has no rights, and no pod gets its token."""
QUOTA = LIMITS = "pilotlight"
CONTROLLER_BINDING = "pilotlight-controller"
ACTIVATOR_BINDING = "pilotlight-activator"
PODS_PER_INSTANCE = 2
"""A terminating pod counts until it is deleted, and a new revision starts beside the old one; the
activators enforce the exact limit."""
_SECURITY = "pod-security.kubernetes.io"
_WHY = (
    "function pods mount a directory of the node, read-only, which Pod Security's baseline "
    "refuses; all else is as restricted wants it"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenancy:
    """A tenant in one environment, on a cluster.

    Attributes:
        uid: user id of its pods.
        platform: id of the platform.
        given: name of the namespace; None = made of prefix, tenant and environment.
        grants: signs its launch documents; None = unsigned, for display only, since nodes reject
            unsigned ones.
    """

    id: str
    name: str
    uid: int
    environment: str
    settings: ClusterSettings
    platform: str
    plan: Plan = field(default=UNLIMITED)
    given: str | None = None
    grants: LaunchSigner | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls, tenant: TenantRecord, *, environment: str, settings: ClusterSettings, platform: str
    ) -> Tenancy:
        """Create from the tenant's record. Raises InvalidInput for a tenant without its own uid."""
        if tenant.uid is None:
            raise InvalidInput(
                f"tenant {tenant.name!r} has no uid of its own, which pods require",
                hint="A platform with fleet: local and without root created it; create the tenant "
                "again on this platform.",
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
            platform=platform,
            plan=plan,
        )

    @property
    def namespace(self) -> str:
        """Name of the namespace of its functions."""
        return self.given or names.tenant_namespace(self.settings, self.name, self.environment)

    @property
    def labels(self) -> dict[str, str]:
        """Labels of every object in the namespace."""
        return {
            **ownership_labels(self.settings, self.platform),
            names.TENANT: self.id,
            names.ENVIRONMENT: self.environment,
        }

    @property
    def path(self) -> str:
        """The value of `names.PATH`: `<tenant id>/<environment>`."""
        return f"{self.id}/{self.environment}"


def namespace_manifests(tenancy: Tenancy) -> list[Manifest]:
    """The namespace and its objects other than functions, in the order of application."""
    return [
        namespace_manifest(
            tenancy.namespace,
            labels=tenancy.labels,
            annotations={names.PATH: tenancy.path, names.MADE_FOR: _WHY},
        ),
        *_role_bindings(tenancy),
        service_account(
            RUNNER, tenancy.namespace, labels=tenancy.labels, settings=tenancy.settings
        ),
        *network_policies.network_policies(
            tenancy.namespace, labels=tenancy.labels, settings=tenancy.settings
        ),
        _limits(tenancy),
        *_quota(tenancy),
    ]


def namespace_manifest(
    name: str, *, labels: Mapping[str, str], annotations: Mapping[str, str]
) -> Manifest:
    """A namespace whose pods mount a directory of the node."""
    standards = {
        f"{_SECURITY}/enforce": "privileged",
        f"{_SECURITY}/warn": "restricted",
        f"{_SECURITY}/audit": "restricted",
    }
    return object_manifest(
        kinds.NAMESPACE, name, labels={**labels, **standards}, annotations=annotations
    )


def _role_bindings(tenancy: Tenancy) -> list[Manifest]:
    """Bindings of the rights of controller and activators in this namespace; the controller's own
    first, which it needs to write the rest."""
    settings = tenancy.settings
    bound = (
        (CONTROLLER_BINDING, settings.controller_account),
        (ACTIVATOR_BINDING, settings.activator_account),
    )
    return [
        role_binding(
            name,
            tenancy.namespace,
            labels=tenancy.labels,
            role=tenant_role(settings, account),
            account=account,
            settings=settings,
        )
        for name, account in bound
    ]


def role_binding(
    name: str,
    namespace: str,
    *,
    labels: Mapping[str, str],
    role: str,
    account: str,
    settings: ClusterSettings,
) -> Manifest:
    """The binding of a ClusterRole, in a namespace, to an account of the platform."""
    return object_manifest(
        kinds.ROLE_BINDING,
        name,
        namespace=namespace,
        labels=labels,
        roleRef={
            "apiGroup": kinds.CLUSTER_ROLE.group,
            "kind": kinds.CLUSTER_ROLE.kind,
            "name": role,
        },
        subjects=[
            {
                "kind": kinds.SERVICE_ACCOUNT.kind,
                "name": account,
                "namespace": settings.namespace,
            }
        ],
    )


def service_account(
    name: str, namespace: str, *, labels: Mapping[str, str], settings: ClusterSettings
) -> Manifest:
    """The account of pods with tenants' code: it has no rights, and its token is not mounted."""
    body: dict[str, Any] = {"automountServiceAccountToken": False}
    if settings.image_pull_secrets:
        body["imagePullSecrets"] = [{"name": secret} for secret in settings.image_pull_secrets]
    return object_manifest(kinds.SERVICE_ACCOUNT, name, namespace=namespace, labels=labels, **body)


def _limits(tenancy: Tenancy) -> Manifest:
    """Default requests for containers without any (Knative's queue-proxy, unless its settings have
    them), so that the scheduler counts them.

    There are no default limits: they would also apply to the queue-proxy.
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
    """The quota: the plan's limits, which apply to all environments together, as an upper limit of
    each."""
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
