"""Fetches the facts about a cluster that the checks evaluate. A refused read is a fact, too."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pilotlight.kubernetes import kinds, names
from pilotlight.kubernetes.api_request import ApiRequest
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.errors import BadCredentials, ClusterError, ClusterUnreachable
from pilotlight.kubernetes.kinds import Kind
from pilotlight.kubernetes.rbac import RbacRule, Role, rules_of_account
from pilotlight.kubernetes.watch_events import Object

T = TypeVar("T")
CONFIGS = (
    "config-features",
    "config-autoscaler",
    "config-defaults",
    "config-deployment",
    "config-gc",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A snapshot of a cluster's state.

    Attributes:
        host: the API server's URL.
        version: its `/version`.
        definitions: CustomResourceDefinitions by name.
        webhooks: names of validating webhook configurations.
        config: Knative's ConfigMaps by name, their data; None = it is absent.
        knative: Deployments of Knative's namespace, by name.
        parts: Deployments and StatefulSets of the platform.
        agents: DaemonSets of the platform's node agents.
        agent_pods: pods of the node agents.
        namespace: the platform's own; None = it does not exist.
        tenants: namespaces of tenants.
        warm_pods: Deployments of warm pods, by name; None = their namespace does not exist.
        lease: the Lease of the leading controller, which names the platform; None = there is none.
        autoscaler_lease: that of the activator that scales functions, unless Knative does.
        lacking: verbs of `role` that the current credentials lack.
        troubles: fields that could not be read, and why.
    """

    host: str
    version: Object = field(default_factory=dict)
    definitions: Mapping[str, Object] = field(default_factory=dict)
    webhooks: frozenset[str] = frozenset()
    config: Mapping[str, Mapping[str, str] | None] = field(default_factory=dict)
    knative: Mapping[str, Object] = field(default_factory=dict)
    nodes: tuple[Object, ...] = ()
    runtime_classes: frozenset[str] = frozenset()
    parts: tuple[Object, ...] = ()
    agents: tuple[Object, ...] = ()
    agent_pods: tuple[Object, ...] = ()
    namespace: Object | None = None
    tenants: tuple[Object, ...] = ()
    warm_pods: Mapping[str, Object] | None = None
    lease: Object | None = None
    autoscaler_lease: Object | None = None
    role: Role = "operator"
    lacking: Mapping[RbacRule, tuple[str, ...]] = field(default_factory=dict)
    troubles: Mapping[str, ClusterError] = field(default_factory=dict)

    def is_known(self, name: str) -> bool:
        """Whether a field could be read."""
        return name not in self.troubles


CONTROLLER_LEASE = "pilotlight-reconciler"
"""Name of the Lease of the leading controller."""
AUTOSCALER_LEASE = "pilotlight-autoscaler"
"""Name of the Lease of the activator that scales functions."""
PART_SELECTOR = "app.kubernetes.io/part-of=pilotlight"
"""Label that the chart sets on the platform's objects."""
AGENT_SELECTOR = f"{PART_SELECTOR},app.kubernetes.io/component=node"
"""Labels of the node agents' DaemonSet and pods."""


class _Reading:
    """Reads fields; a failed read is recorded in `troubles` under the field's name."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.troubles: dict[str, ClusterError] = {}

    async def read(self, name: str, work: Awaitable[T], absent: T) -> T:
        """The result of `work`, or `absent` if it fails. Raises ClusterUnreachable,
        BadCredentials."""
        try:
            return await work
        except (ClusterUnreachable, BadCredentials):
            raise
        except ClusterError as error:
            self.troubles[name] = error
            return absent

    async def listed(
        self, name: str, kind: Kind, namespace: str | None = None, selector: str = ""
    ) -> tuple[Object, ...]:
        """All objects of a kind."""

        async def items() -> tuple[Object, ...]:
            return (await self._cluster.list(kind, namespace, selector)).items

        return await self.read(name, items(), ())


async def gather(cluster: Cluster, *, role: Role) -> Facts:
    """Read everything concurrently.

    Args:
        role: the role whose rights the credentials should have.

    Raises:
        ClusterUnreachable, BadCredentials: the cluster cannot be queried.
    """
    version, settings, reading = await cluster.version(), cluster.settings, _Reading(cluster)
    read, listed = reading.read, reading.listed
    platform, knative = settings.namespace, settings.knative_namespace
    ours = f"{names.MANAGED_BY}={names.manager_of(settings)}"
    try:
        async with asyncio.TaskGroup() as tasks:
            definitions = tasks.create_task(listed("definitions", kinds.CUSTOM_RESOURCE_DEFINITION))
            webhooks = tasks.create_task(listed("webhooks", kinds.VALIDATING_WEBHOOK))
            config = tasks.create_task(read("config", _config(cluster, knative), {}))
            deployments = tasks.create_task(listed("knative", kinds.DEPLOYMENT, knative))
            nodes = tasks.create_task(listed("nodes", kinds.NODE))
            runtimes = tasks.create_task(listed("runtime_classes", kinds.RUNTIME_CLASS))
            agents = tasks.create_task(listed("agents", kinds.DAEMON_SET, platform, AGENT_SELECTOR))
            deployed = tasks.create_task(listed("parts", kinds.DEPLOYMENT, platform, PART_SELECTOR))
            stateful = tasks.create_task(
                listed("parts", kinds.STATEFUL_SET, platform, PART_SELECTOR)
            )
            pods = tasks.create_task(listed("agent_pods", kinds.POD, platform, AGENT_SELECTOR))
            namespace = tasks.create_task(
                read("namespace", cluster.get(kinds.NAMESPACE, platform), None)
            )
            tenants = tasks.create_task(listed("tenants", kinds.NAMESPACE, None, ours))
            lease = tasks.create_task(
                read("lease", cluster.get(kinds.LEASE, CONTROLLER_LEASE, platform), None)
            )
            autoscaler_lease = tasks.create_task(
                read("autoscaler_lease", cluster.get(kinds.LEASE, AUTOSCALER_LEASE, platform), None)
            )
    except ExceptionGroup as group:  # they all fail for the same reason
        raise group.exceptions[0] from group
    warm = names.warm_namespace(settings)
    of_tenants = tuple(one for one in tenants.result() if one["metadata"]["name"] != warm)
    has_warm = len(of_tenants) < len(tenants.result()) and bool(settings.warm_pods)
    lacking = await read(
        "lacking", _lacking(cluster, role, of_tenants, warm if has_warm else None), {}
    )
    pool = await listed("warm_pods", kinds.DEPLOYMENT, warm, ours) if has_warm else None
    return Facts(
        host=cluster.host,
        version=version,
        definitions=_by_name(definitions.result()),
        webhooks=frozenset(_by_name(webhooks.result())),
        config=config.result(),
        knative=_by_name(deployments.result()),
        nodes=nodes.result(),
        runtime_classes=frozenset(_by_name(runtimes.result())),
        parts=(*deployed.result(), *stateful.result()),
        agents=agents.result(),
        agent_pods=pods.result(),
        namespace=namespace.result(),
        tenants=of_tenants,
        warm_pods=None if pool is None else _by_name(pool),
        lease=lease.result(),
        autoscaler_lease=autoscaler_lease.result(),
        role=role,
        lacking=lacking,
        troubles=reading.troubles,
    )


async def _config(cluster: Cluster, namespace: str) -> Mapping[str, Mapping[str, str] | None]:
    found = await asyncio.gather(
        *(cluster.get(kinds.CONFIG_MAP, name, namespace) for name in CONFIGS)
    )
    return {
        name: dict(one.get("data") or {}) if one is not None else None
        for name, one in zip(CONFIGS, found, strict=True)
    }


async def _lacking(
    cluster: Cluster, role: Role, tenants: Iterable[Object], warm: str | None
) -> Mapping[RbacRule, tuple[str, ...]]:
    """Missing rights of a role. Rights in tenants' namespaces are checked in the first one that is
    not being deleted; without one they are skipped, as those in that of warm pods."""
    settings = cluster.settings
    staying = sorted(
        str(one["metadata"]["name"])
        for one in tenants
        if not one["metadata"].get("deletionTimestamp")
    )
    tenant = staying[0] if staying else None
    asked: list[tuple[RbacRule, ApiRequest]] = [
        (right, deed)
        for right in rules_of_account(role, settings)
        for deed in right.deeds(
            platform=settings.namespace,
            knative=settings.knative_namespace,
            tenant=tenant,
            warm=warm,
        )
    ]
    allowed = await asyncio.gather(*(cluster.may(deed) for _, deed in asked))
    lacking: dict[RbacRule, tuple[str, ...]] = {}
    for (right, deed), may in zip(asked, allowed, strict=True):
        if not may and deed.verb not in lacking.get(right, ()):
            lacking[right] = (*lacking.get(right, ()), deed.verb)
    return lacking


def _by_name(items: tuple[Object, ...]) -> dict[str, Any]:
    return {str(item["metadata"]["name"]): item for item in items}
