"""Section `cluster` of platform.yaml."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from pilotlight.core.oci.image_reference import MAX_REPOSITORY_CHARACTERS, parse_repository
from pilotlight.spec.warm_shape import WarmShape, warm_shapes

DEFAULT_NAMESPACE = "pilotlight"
UNLABELLED = "unlabelled"
"""Stands for the platform's id that objects of earlier versions lack."""
PLATFORM_ID = re.compile(r"p-[0-9a-f]{16}\Z")
WARM_SUFFIX = "-warm"
"""Of the name of the platform's namespace, for that of warm pods."""
_MAX_NAMESPACE_CHARACTERS = 63
_WARM_UIDS = (1000, 65533)
"""Below are uids of Debian's and images' own users; above is `nobody`."""
_MAX_HANDOVER_S = 3600.0
_MAX_IDLE_TEMPLATES = 100
_MAX_IDLE_TEMPLATE_S = 86_400.0
MAX_REGISTRY_CHARACTERS = MAX_REPOSITORY_CHARACTERS - 64
"""Leaves room for `/` and the name of a tenant."""
_PREFIX = re.compile(r"[a-z]([a-z0-9-]{0,19})?\Z")
_ACCOUNT = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?\Z")
_LABEL_KEY = re.compile(
    r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?\Z"
)
_DIGEST = re.compile(r".+@sha256:[0-9a-f]{64}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """Settings for running functions as Knative Services.

    Attributes:
        kubeconfig: file; None = the pod's own credentials, else $KUBECONFIG, else ~/.kube/config.
        context: of the kubeconfig; None = its current one.
        namespace: the platform's own namespace.
        controller_account, activator_account: service accounts of controller and activators in that
            namespace, to which RoleBindings in tenants' namespaces grant rights.
        adopt: ids of platforms whose objects in the cluster this one takes over, or `unlabelled`
            (see `pilotlight cluster`).
        namespace_prefix: of tenants' namespaces: `<prefix><tenant>[-<environment>]`.
        field_manager: field manager of our server-side applies.
        autoscaler: `kpa`, Knative's own class, or `pilotlight`, ours; None = `pilotlight` where
            there are `warm_pods`, else `kpa` (see `uses_kpa`).
        runtime_image: image, by digest, of functions without their own; None = such functions
            cannot be deployed.
        images: images, by digest, of language models; the key is the name of the engine's
            environment (`vllm`).
        registry: `host/name` below which `pilotlight deploy` pushes the images of functions with an
            Image of their own, one repository per tenant; None = such functions cannot be deployed.
        image_pull_secrets: names of secrets in tenants' namespaces.
        egress_cidrs: private addresses that functions may reach besides the public internet.
        node_path: directory on each node in which the agent provides files to function pods, with
            one subdirectory per tenant id.
        restore_into_pods: whether a waiting pod may receive a restored worker.
        warm_pods: shapes of pods that wait, without a tenant's code, to be promoted to instances of
            functions (docs/how-to/warm-pods.md); [] = none.
        warm_uid: uid and gid of all warm pods, and so of the promoted ones of all tenants; no
            tenant's own (`snapshotter.uid_base`).
        handover_s: with warm pods, how long the load of a function must last until pods of its own
            replace its promoted ones.
        snapshot_copies_bytes: limit of all copies of snapshots in the object store together; the
            least recently used are removed beyond it.
        idle_templates: how many promoted pods without an instance each activator keeps for one
            tenant, because further instances can be forked in them; the platform pays for them.
        idle_template_s: how long it keeps one; pods that are kept go first when no warm pod is
            left.
        wake_url: URL at which a request with a revision's name starts it from zero (with
            Knative's autoscaler).
        unschedulable_grace_s: how long a call waits for a node, or for room in a quota, before it
            is answered 503 with the reason.
        knative_namespace: namespace of Knative Serving.
        max_timeout_s: Knative's limit of `timeoutSeconds` (config-defaults,
            max-revision-timeout-seconds).
        tolerated_warnings: texts; warnings of the API server that contain one do not fail a write.
        gpu_resource: extended resource of a GPU.
        gpu_label: node label with a GPU's product.
        gpu_products: users' name (`H100`) → value of `gpu_label`; other names are used unchanged.
        gpu_memory_label: node label with the memory of one GPU in MiB; language models prefer
            nodes whose GPUs they fit on. None = no preference.
        gpu_runtime_class: of pods with a GPU; None = the cluster's default.
        runtime_class: of other pods; None = the cluster's default.
        dedicated_key: key of a node label and taint whose value is the name of the tenant that the
            node is dedicated to (plan's isolation `dedicated`); None = this cluster has no such
            nodes, and deploys of such tenants are refused.
        reserved_priority_class: PriorityClass of pods of tenants whose plan's isolation is
            `reserved`; None = deploys of such tenants are refused.
    """

    kubeconfig: str | None = None
    context: str | None = None
    namespace: str = DEFAULT_NAMESPACE
    controller_account: str = "pilotlight-controller"
    activator_account: str = "pilotlight-activator"
    adopt: list[str] = field(default_factory=list)
    namespace_prefix: str = "fn-"
    field_manager: str = "pilotlight"
    autoscaler: str | None = None
    runtime_image: str | None = None
    images: Mapping[str, str] = field(default_factory=dict)
    registry: str | None = None
    image_pull_secrets: list[str] = field(default_factory=list)
    egress_cidrs: list[str] = field(default_factory=list)
    node_path: str = "/var/lib/pilotlight/node"
    restore_into_pods: bool = False
    warm_pods: list[WarmShape] = field(default_factory=list)
    warm_uid: int = 64000
    handover_s: float = 5.0
    snapshot_copies_bytes: int = 500 * 1024**3
    idle_templates: int = 1
    idle_template_s: float = 120.0
    wake_url: str = "http://activator-service.knative-serving.svc.cluster.local"
    unschedulable_grace_s: float = 10.0
    knative_namespace: str = "knative-serving"
    max_timeout_s: int = 600
    tolerated_warnings: list[str] = field(default_factory=list)
    gpu_resource: str = "nvidia.com/gpu"
    gpu_label: str = "nvidia.com/gpu.product"
    gpu_memory_label: str | None = "nvidia.com/gpu.memory"
    gpu_products: Mapping[str, str] = field(default_factory=dict)
    gpu_runtime_class: str | None = "nvidia"
    runtime_class: str | None = None
    dedicated_key: str | None = "pilotlight.dev/dedicated-to"
    reserved_priority_class: str | None = None

    def __post_init__(self) -> None:
        if self.autoscaler not in (None, "kpa", "pilotlight"):
            raise ValueError(
                f"autoscaler = {self.autoscaler!r}: must be 'kpa', 'pilotlight', or null "
                f"(pilotlight where there are warm_pods, else kpa)"
            )
        _check_account("controller_account", self.controller_account)
        _check_account("activator_account", self.activator_account)
        _check_platforms(self.adopt)
        if not _PREFIX.match(self.namespace_prefix):
            raise ValueError(
                f"namespace_prefix = {self.namespace_prefix!r}: must have at most 20 of a-z, 0-9 "
                f"and -, starting with a letter"
            )
        if self.runtime_image is not None and not _DIGEST.match(self.runtime_image):
            raise ValueError(
                f"runtime_image = {self.runtime_image!r}: must be referenced by digest: "
                f"image@sha256:<64 hex digits>"
            )
        for name, image in self.images.items():
            if not _DIGEST.match(str(image)):
                raise ValueError(
                    f"images.{name} = {image!r}: must be referenced by digest: "
                    f"image@sha256:<64 hex digits>"
                )
        object.__setattr__(self, "warm_pods", warm_shapes(self.warm_pods))
        self._check_warm_pods()
        _check_isolation(self.dedicated_key, self.reserved_priority_class)
        _check_registry(self.registry)
        _check_networks(self.egress_cidrs)
        if not self.node_path.startswith("/"):
            raise ValueError(f"node_path = {self.node_path!r}: must be an absolute path")
        if not self.wake_url.startswith(("http://", "https://")):
            raise ValueError(f"wake_url = {self.wake_url!r}: must begin with http:// or https://")
        if not self.field_manager or len(self.field_manager) > 128:
            raise ValueError(
                f"field_manager = {self.field_manager!r}: must have 1 to 128 characters"
            )
        if self.unschedulable_grace_s < 0:
            raise ValueError(
                f"unschedulable_grace_s = {self.unschedulable_grace_s}: must not be negative"
            )
        if self.snapshot_copies_bytes < 0:
            raise ValueError(
                f"snapshot_copies_bytes = {self.snapshot_copies_bytes}: must not be negative"
            )
        if self.max_timeout_s < 1:
            raise ValueError(f"max_timeout_s = {self.max_timeout_s}: must be at least 1")

    @property
    def uses_kpa(self) -> bool:
        """Whether Knative's autoscaler scales functions, otherwise ours does."""
        return not self.warm_pods if self.autoscaler is None else self.autoscaler == "kpa"

    def _check_warm_pods(self) -> None:
        if not _WARM_UIDS[0] <= self.warm_uid <= _WARM_UIDS[1]:
            raise ValueError(
                f"warm_uid = {self.warm_uid}: must be {_WARM_UIDS[0]} to {_WARM_UIDS[1]}"
            )
        if not 0 <= self.handover_s <= _MAX_HANDOVER_S:
            raise ValueError(
                f"handover_s = {self.handover_s}: must be 0 (at once) to {_MAX_HANDOVER_S:g}"
            )
        if not 0 <= self.idle_templates <= _MAX_IDLE_TEMPLATES:
            raise ValueError(
                f"idle_templates = {self.idle_templates}: must be 0 to {_MAX_IDLE_TEMPLATES}"
            )
        if not 0 <= self.idle_template_s <= _MAX_IDLE_TEMPLATE_S:
            raise ValueError(
                f"idle_template_s = {self.idle_template_s}: must be 0 to {_MAX_IDLE_TEMPLATE_S:g}"
            )
        if self.warm_pods and self.runtime_image is None:
            raise ValueError(
                "warm_pods: warm pods consist of the runtime image: set cluster.runtime_image"
            )
        if self.warm_pods and (self.namespace + WARM_SUFFIX).startswith(self.namespace_prefix):
            raise ValueError(
                f"warm_pods: namespace {self.namespace}{WARM_SUFFIX} could be a tenant's, as these "
                f"begin with {self.namespace_prefix!r}: set another namespace_prefix"
            )
        if self.warm_pods and len(self.namespace + WARM_SUFFIX) > _MAX_NAMESPACE_CHARACTERS:
            raise ValueError(
                f"warm_pods: namespace {self.namespace}{WARM_SUFFIX} would have more than "
                f"{_MAX_NAMESPACE_CHARACTERS} characters: install the platform in a namespace with "
                f"a shorter name"
            )


def _check_isolation(dedicated_key: str | None, reserved_priority_class: str | None) -> None:
    if dedicated_key is not None and not _LABEL_KEY.match(dedicated_key):
        raise ValueError(
            f"dedicated_key = {dedicated_key!r}: must be the key of a node label, such as "
            f"example.com/dedicated-to, or null"
        )
    if reserved_priority_class is not None and not _ACCOUNT.match(reserved_priority_class):
        raise ValueError(
            f"reserved_priority_class = {reserved_priority_class!r}: must be the name of a "
            f"PriorityClass, or null"
        )


def _check_account(name: str, account: str) -> None:
    if not _ACCOUNT.match(account):
        raise ValueError(
            f"{name} = {account!r}: the name of a service account has a-z, 0-9, - and ., and at "
            f"most 253 characters"
        )


def _check_platforms(adopt: list[str]) -> None:
    for platform in adopt:
        if platform != UNLABELLED and not PLATFORM_ID.match(str(platform)):
            raise ValueError(
                f"adopt: {platform!r}: must be a platform's id, `p-` and 16 hex digits, or "
                f"{UNLABELLED!r}"
            )


def _check_registry(registry: str | None) -> None:
    try:
        found = parse_repository(registry) if registry is not None else None
    except ValueError as e:
        raise ValueError(f"registry: {e}") from e
    if found is not None and len(str(found)) > MAX_REGISTRY_CHARACTERS:
        raise ValueError(
            f"registry = {registry!r}: must have at most {MAX_REGISTRY_CHARACTERS} characters"
        )


def _check_networks(cidrs: list[str]) -> None:
    for cidr in cidrs:
        try:
            ipaddress.ip_network(cidr)
        except ValueError as e:
            raise ValueError(
                f"egress_cidrs: {cidr!r}: must be a network such as 10.20.0.0/16"
            ) from e
